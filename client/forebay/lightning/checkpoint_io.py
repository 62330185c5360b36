"""ForebayCheckpointIO: what Lightning's strategies call to save, load and remove a checkpoint.

Owns these calls, saves in the background and what becomes of their errors. Does not own which checkpoint a path is (places.py)
nor when one may be removed (removals.py).
"""

import importlib
import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from forebay.api import Client
from forebay.background_checkpoint import PendingCommit
from forebay.checkpoint_id import LATEST, SCHEME, checked
from forebay.errors import DeadlineExceeded, ForebayError, NotFound
from forebay.lightning import places
from forebay.lightning.places import KEY, Place
from forebay.lightning.removals import Removals
from forebay.session import save_session
from forebay.state.saved import SavedFile, opened

_FABRICS = ("lightning.fabric", "lightning_fabric")

_log = logging.getLogger("forebay")


class ForebayCheckpointIO:
    """A CheckpointIO: `Trainer(plugins=[ForebayCheckpointIO(run)])`, with any ModelCheckpoint, and `Fabric(plugins=...)`.

    Files are what Lightning's own plugin writes. `run` is where paths of a local `dirpath` go; what is saved as
    forebay://RUN/... says its run itself. In a local `dirpath` a small text file stands for each checkpoint once it is durable,
    so that "last", save_top_k and file versions work; nothing else depends on it. `ckpt_path=io.newest()` resumes on any node.

    With `background` a save returns once everything is copied: what training does to its tensors next changes nothing of it.
    The next save waits for it. A save that fails is raised, in the background by the next save or at the trainer's end
    (teardown()), and says which one it was; without `strict` it is logged as a warning, and training goes on.

    `wait` and `timeout` are as in CheckpointWriter.commit(), `address`, `background_bytes` and `retry_timeout` as in Client. A
    checkpoint that ModelCheckpoint drops is removed once its successor has reached every level that it has itself; what is left
    when the trainer ends stays, for the gateway's retention. `remove=False` leaves all to that.
    """

    def __init__(
        self,
        run: str | None = None,
        address: str | None = None,
        *,
        background: bool = False,
        strict: bool = True,
        wait: str = "cache",
        timeout: float | None = None,
        remove: bool = True,
        background_bytes: int | None = None,
        retry_timeout: float = 60.0,
    ) -> None:
        _register(type(self))
        self.run = None if run is None else checked(run, LATEST).run
        self.background = background
        self.strict = strict
        self._wait = wait
        self._timeout_s = timeout
        self._remove = remove
        self._make_client = _Making(address, retry_timeout, background_bytes)
        self._begin()

    def _begin(self) -> None:
        self._client: Client | None = None
        self._lock = threading.Lock()
        self._count = 0
        self._taken: dict[tuple[str, int], str] = {}
        self._saved: dict[str, Place] = {}
        self._pending: PendingCommit | None = None
        self._removals = Removals()

    def __getstate__(self) -> dict[str, Any]:
        own = ("_client", "_lock", "_count", "_taken", "_saved", "_pending", "_removals")
        return {key: value for key, value in self.__dict__.items() if key not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _register(type(self))
        self._begin()

    @property
    def client(self) -> Client:
        """This process's, opened when it is first needed."""
        if self._client is None:
            self._client = self._make_client()
        return self._client

    def newest(self) -> str | None:
        """The newest complete checkpoint that training can go on from, as a path for `ckpt_path`; None where there is none.

        Raises Unavailable.
        """
        run = self.run or ""
        try:
            return str(places.find(self.client, f"{SCHEME}{run}/{LATEST}", run))
        except NotFound:
            return None

    # What Lightning calls

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None) -> None:
        """Save a checkpoint as `path`; it is durable when this returns, or, in the background, copied.

        Raises InvalidArgument for what cannot be saved, and as CheckpointWriter.put() and commit(); in the background what
        became of the save before. TypeError for `storage_options`.
        """
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} takes no storage_options: give them to itself")
        try:
            self._settle()
            self._carry_out_removals()
            self._save(checkpoint, os.fspath(path))
        except ForebayError as error:
            if self.strict:
                raise
            _log.warning("the save of %s failed, and training goes on: %s", os.fspath(path), error)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint, from the nearest good copy; a local file that stands for none is loaded as it is.

        `map_location` (by default the CPU) and `weights_only` are as in torch.load(). Raises FileNotFoundError where there is
        no such checkpoint, and as Client.open() and Reader.read().
        """
        text = os.fspath(path)
        where = map_location if map_location is not None else _to_cpu
        if not places.is_remote(text) and Path(text).is_file() and not places.is_reference(text):
            return torch.load(text, map_location=where, weights_only=weights_only)  # type: ignore[no-any-return]
        self._settle_quietly()
        try:
            place = places.find(self.client, text, self.run)
            with opened(self.client.open(place.run, place.step), place.name) as file:
                return torch.load(file, map_location=where, weights_only=weights_only)  # type: ignore[no-any-return]
        except NotFound as error:
            raise FileNotFoundError(f"checkpoint not found: {text}: {error}") from error

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint, once its successor is as safe as it is. One that is not there is no error."""
        text = os.fspath(path)
        if not places.is_remote(text):
            if Path(text).is_file() and not places.is_reference(text):
                Path(text).unlink()
                return
            Path(text).unlink(missing_ok=True)
        if not self._remove:
            return
        try:
            place = self._saved.pop(text, None) or places.find(self.client, text, self.run)
        except NotFound:
            return
        except ForebayError as error:
            _log.warning("%s stays: %s", text, error)
            return
        with self._lock:
            self._removals.add(place, self._count)
        self._carry_out_removals()

    def teardown(self) -> None:
        """Finish what is under way; the next call begins anew. Raises what became of the last save, where nobody was told."""
        try:
            self._settle()
        except ForebayError as error:
            if self.strict:
                raise
            _log.warning("training has ended, and its last save failed: %s", error)
        finally:
            if self._client is not None:
                self._carry_out_removals()
                client, self._client = self._client, None
                client.close()

    # Saving

    def _save(self, checkpoint: Mapping[str, Any], path: str) -> None:
        client = self.client
        place = places.new_place(client, path, self.run, checkpoint, self._taken)
        file = SavedFile(place.name, checkpoint)
        weights_only = "loops" in checkpoint and "optimizer_states" not in checkpoint
        metadata = {KEY: {"path": path, "name": place.name, "weights_only": weights_only}}
        number = self._give_away(path, place)
        if not places.is_remote(path):
            Path(path).parent.mkdir(parents=True, exist_ok=True)  # Lightning links to what is not there yet
        if self.background:
            with client.async_checkpoint(place.run, place.step, session=save_session()) as part:
                part.put(place.name, file)
                pending = part.commit(metadata, self._wait, self._timeout_s)
            self._pending = pending
            pending.add_done_callback(self._when_done(number, path, place, weights_only))
            return
        with client.checkpoint(place.run, place.step, session=save_session()) as part:
            part.put(place.name, file)
            part.commit(metadata, self._wait, self._timeout_s)
        self._landed(number, path, place, weights_only)

    def _give_away(self, path: str, place: Place) -> int:
        """Note where a path goes; the save's number. What was saved under that path before is replaced by it."""
        with self._lock:
            self._count += 1
            self._removals.keep(place)
            older = self._saved.get(path) or (None if places.is_remote(path) else places.read_reference(path))
            if older is not None and (older.run, older.step) != (place.run, place.step) and self._remove:
                self._removals.add(older, self._count)
            self._saved[path] = place
            self._taken = {key: other for key, other in self._taken.items() if key[1] == place.step}
            self._taken[place.run, place.step] = path
            return self._count

    def _when_done(self, number: int, path: str, place: Place, weights_only: bool) -> Callable[[PendingCommit], None]:
        def act(pending: PendingCommit) -> None:
            if pending.failed() is None:
                self._landed(number, path, place, weights_only)

        return act

    def _landed(self, number: int, path: str, place: Place, weights_only: bool) -> None:
        with self._lock:
            self._removals.landed(number, place, weights_only)
        if places.is_remote(path):
            return
        try:
            places.write_reference(path, place)
        except OSError as error:
            _log.warning("%s is saved as %s; the file that says so could not be written: %s", path, place, error)

    def _settle(self) -> None:
        """Wait for the save before. Raises what became of it, saying whose it is; DeadlineExceeded."""
        pending = self._pending
        if pending is None:
            return
        error = pending.exception(self._timeout_s)
        self._pending = None
        if error is not None:
            raise pending.tell()

    def _settle_quietly(self) -> None:
        """Wait for the save before, since it may be the one to load; its error is for the next save."""
        if self._pending is not None:
            try:
                self._pending.wait(self._timeout_s)
            except DeadlineExceeded as error:
                _log.warning("loading while a save is still under way: %s", error)

    def _carry_out_removals(self) -> None:
        with self._lock:
            left = self._removals.carry_out(self.client)
        if left:
            _log.info("%d checkpoints that were dropped stay until their successors are as safe: %s", len(left), left[0])


class _Making:
    """How to make the client. Picklable."""

    def __init__(self, address: str | None, retry_timeout_s: float, background_bytes: int | None) -> None:
        self._address = address
        self._retry_timeout_s = retry_timeout_s
        self._background_bytes = background_bytes

    def __call__(self) -> Client:
        return Client(
            self._address, retry_timeout=self._retry_timeout_s, progress=False, background_bytes=self._background_bytes
        )


def _to_cpu(storage: Any, location: str) -> Any:
    return storage


def _register(plugin: type) -> None:
    """Be a CheckpointIO for whichever of Lightning's two names the program uses; they share no classes."""
    loaded = [name for name in _FABRICS if name in sys.modules]
    for name in loaded or _importable():
        importlib.import_module(f"{name}.plugins.io.checkpoint_io").CheckpointIO.register(plugin)


def _importable() -> list[str]:
    return [name for name in _FABRICS if importlib.util.find_spec(name.partition(".")[0]) is not None][:1]
