"""The story, in the order in which bytes travel: write, commit, drain, complete, evict; find, read, wait; recover, retain."""
