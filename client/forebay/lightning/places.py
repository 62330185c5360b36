"""Which checkpoint a path of Lightning's is, and which it is to become.

    DIR/epoch=1-step=20.ckpt     ->  forebay://RUN/20/epoch=1-step=20.ckpt         the step is the checkpoint's global_step
    DIR/last.ckpt                ->  forebay://RUN/last/20/last.ckpt               beside it: a run has one checkpoint a step
    another file of that step    ->  forebay://RUN/2/20/...                        of a second ModelCheckpoint, say

Owns these rules, finding a file again by what its checkpoint says of itself, and the small files that stand for checkpoints in
a local directory. Does not own saving (checkpoint_io.py).
"""

import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.api import Client
from forebay.checkpoint_id import LATEST, SCHEME, checked
from forebay.errors import InvalidArgument, NotFound
from forebay.types import Checkpoint

KEY = "lightning"  # in a checkpoint's metadata
_LAST = re.compile(r"last(-v?\d+)?")  # ModelCheckpoint.CHECKPOINT_NAME_LAST, and its versions
_STEP_IN_NAME = re.compile(r"step=?(\d+)")
_STEPS = ("global_step", "step", "iteration")  # the first is Trainer's; Fabric's users have their own
_REFERENCE_BYTES_MAX = 16 << 10


@dataclass(frozen=True, slots=True)
class Place:
    """A file in a checkpoint."""

    run: str
    step: int
    name: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.run}/{self.step}/{self.name}"


def is_remote(path: str) -> bool:
    """Whether it is a forebay:// path, and no local one."""
    return path.startswith(SCHEME)


def explicit(path: str) -> Place | tuple[str, str] | None:
    """Of a forebay:// path: the place where it says RUN/STEP/NAME, else (RUN, NAME). None of a local one."""
    if not is_remote(path):
        return None
    head, _, name = path.removeprefix(SCHEME).rpartition("/")
    run, _, step = head.rpartition("/")
    if run and step.isascii() and step.isdigit():
        return Place(checked(run, int(step)).run, int(step), name)
    if not head or not name:
        raise InvalidArgument(f"{path!r} is not of the form {SCHEME}RUN/NAME or {SCHEME}RUN/STEP/NAME")
    return checked(head, LATEST).run, name


def home_of(path: str, run: str | None) -> tuple[str, str]:
    """The run that a file belongs to, and its name. Raises InvalidArgument for a local path where there is no run."""
    found = explicit(path)
    if isinstance(found, Place):
        return found.run, found.name
    if found is not None:
        return found
    if run is None:
        raise InvalidArgument(f"{path!r} is no {SCHEME} path: say which run it belongs to, ForebayCheckpointIO(run=...)")
    return run, Path(path).name


def new_place(client: Client, path: str, run: str | None, checkpoint: Mapping[str, Any], taken: Mapping[Any, str]) -> Place:
    """Where a file is to go; `taken` is what this process has given away: (run, step) -> path. Raises InvalidArgument."""
    found = explicit(path)
    if isinstance(found, Place):
        return found
    home, name = home_of(path, run)
    step = _step_of(checkpoint, name)
    home = f"{home}/last" if _LAST.fullmatch(Path(name).stem) else home
    number = 1
    while True:
        at = home if number == 1 else f"{home}/{number}"
        there = taken[at, step] if (at, step) in taken else _path_at(client, at, step)
        if there in (None, path):  # nobody's file is replaced but an older one of this path
            return Place(checked(at, step).run, step, name)
        number += 1


def _path_at(client: Client, run: str, step: int) -> str | None:
    try:
        found = client.describe(run, step)
    except NotFound:
        return None
    return str(said(found).get("path", "")) if found.complete else None


def _step_of(checkpoint: Mapping[str, Any], name: str) -> int:
    for key in _STEPS:
        step = checkpoint.get(key)
        if isinstance(step, int) and not isinstance(step, bool) and step >= 0:
            return step
    if (found := _STEP_IN_NAME.search(name)) is not None:
        return int(found[1])
    raise InvalidArgument(
        f"{name!r}: neither what is saved ({', '.join(_STEPS)}) nor the file's name (step=20) says its step; or give "
        f"{SCHEME}RUN/STEP/NAME"
    )


def said(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """What the plugin has noted in a checkpoint; nothing, in one of somebody else."""
    noted = checkpoint.metadata.get(KEY)
    return noted if isinstance(noted, Mapping) else {}


def family(client: Client, run: str) -> Iterator[Checkpoint]:
    """The complete checkpoints of a run and of those beside it that were saved by this plugin, the newest first."""
    beside = re.compile(re.escape(run) + r"(/last)?(/\d+)?")
    names = [each.run for each in client.runs() if beside.fullmatch(each.run)]
    found = [checkpoint for name in names for checkpoint in client.checkpoints(name)]
    for checkpoint in sorted(found, key=lambda each: (-each.step, each.run)):
        if checkpoint.complete and "name" in said(checkpoint):
            yield checkpoint


def find(client: Client, path: str, run: str | None) -> Place:
    """Where the newest file of that path lies; of another directory, where there is none of this. Raises NotFound."""
    found = explicit(path)
    if isinstance(found, Place):
        return found
    home, name = home_of(path, run)
    candidates = list(family(client, home))
    if name == LATEST:
        candidates = [each for each in candidates if not said(each).get("weights_only")]
        return _newest(candidates, path)
    same = [each for each in candidates if said(each)["path"] == path]
    if same:
        return _newest(same, path)
    if not is_remote(path) and (pointed := read_reference(path)) is not None:
        return pointed
    return _newest([each for each in candidates if said(each)["name"] == name], path)


def _newest(candidates: list[Checkpoint], path: str) -> Place:
    if not candidates:
        raise NotFound(f"no complete checkpoint is {path!r}")
    return Place(candidates[0].run, candidates[0].step, str(said(candidates[0])["name"]))


# What stands for a checkpoint in a local directory: Lightning asks which files are there, and finds "last" among them.


def write_reference(path: str, place: Place) -> None:
    """Whole or not at all. Raises OSError."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    new = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    text = {"forebay": str(place), "run": place.run, "step": place.step, "name": place.name}
    new.write_text(json.dumps(text) + "\n")
    os.replace(new, target)


def read_reference(path: str) -> Place | None:
    """None where no file is there, or another."""
    try:
        with Path(path).open("rb") as file:
            found = json.loads(file.read(_REFERENCE_BYTES_MAX))
        return Place(str(found["run"]), int(found["step"]), str(found["name"])) if "forebay" in found else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_reference(path: str) -> bool:
    """Whether such a file is there."""
    return read_reference(path) is not None
