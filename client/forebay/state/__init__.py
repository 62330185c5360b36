"""What a training state is made of, on its way to a checkpoint and back: a JSON document and files of tensors, no pickles.

Owns the two formats (document.py, tensors.py) and the random number generators (rng.py). Does not own which objects a state has
(train_state.py). Needs torch, which `import forebay` does not.
"""
