"""Hugging Face on Forebay: transformers' Trainer, save_pretrained() and from_pretrained(), and Accelerate's states.

    trainer = Trainer(..., callbacks=[ForebayCallback("team-a/bert")])
    trainer.train(resume_from_checkpoint=resume_from_checkpoint("team-a/bert", trainer.args))

Owns which rank hands which file of a checkpoint directory to Forebay, and bringing one back for all ranks of a node. Does not
own what lies in these directories, nor which of them the Trainer keeps on the local disk. Needs transformers, which
`import forebay` does not.
"""

import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.errors import ForebayError, InvalidArgument, how_to_install

try:
    import transformers
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "transformers":
        raise
    raise ImportError(
        f"forebay.huggingface needs transformers, which is not installed: {how_to_install('huggingface')}"
    ) from error

from forebay.api import Client
from forebay.background_checkpoint import PendingCommit
from forebay.checkpoint_id import LATEST, checked, parse
from forebay.directories import STREAMS, put_files, walk
from forebay.session import save_session
from forebay.state import ranks
from forebay.types import CommitReceipt

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = [
    "ForebayCallback",
    "from_pretrained",
    "load_state",
    "resume_from_checkpoint",
    "save_pretrained",
    "save_state",
]

# Names that carry their rank: Trainer's and Accelerate's generators, DCP's files, DeepSpeed's optimizer partitions (these by
# their layout alone: nothing here is tested with DeepSpeed itself).
_RANKED = re.compile(r"(?:rng_state_|random_states_|zero_pp_rank_|__)(\d+)[._]")

_log = logging.getLogger("forebay")


class ForebayCallback(transformers.TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Hands each `checkpoint-N` that the Trainer writes to Forebay, as step N of `run`: `Trainer(callbacks=[...])`.

    Rank 0 saves the files that all ranks share, every rank those that carry its number, from where it sees them: output_dir
    need not be shared between nodes. When the callback returns the checkpoint is durable in the cache; with `wait`, complete at
    a tier or "all" (up to `timeout` seconds). With `background` it returns once the files are read and copied: the Trainer's
    save_total_limit may remove them then. That limit concerns the local disk alone: what Forebay keeps is the gateway's
    retention. The step at which training ends is saved as final.

    A save that fails ends the training, in the background at the next save or at the end; without `strict` it is logged, and
    training goes on. `last` is what the newest save came to: a CommitReceipt, or the handle of one in the background.

    `client` is yours, or None for one of the callback's own with `address`.
    """

    def __init__(
        self,
        run: str,
        address: str | None = None,
        *,
        client: Client | None = None,
        wait: str = "cache",
        timeout: float | None = None,
        background: bool = False,
        strict: bool = True,
    ) -> None:
        self.run = checked(run, LATEST).run
        self.background = background
        self.strict = strict
        self.last: CommitReceipt | PendingCommit | None = None
        self._address = address
        self._given = client
        self._own: Client | None = None
        self._wait = wait
        self._timeout_s = timeout
        self._pending: PendingCommit | None = None

    @property
    def _client(self) -> Client:
        if self._given is not None:
            return self._given
        if self._own is None:
            self._own = Client(self._address, progress=False)
        return self._own

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """All ranks: the Trainer has written a checkpoint. Raises as CheckpointWriter.put() and commit(), and OSError."""
        trial = state.trial_name or ""  # a search for hyperparameters has a directory, and a run, for each trial (`hp_name`)
        directory = Path(args.output_dir) / trial / f"checkpoint-{state.global_step}"
        run = f"{self.run}/{trial}" if trial else self.run
        final = control.should_training_stop or state.global_step >= state.max_steps
        self._guarded(f"the save of {directory}", lambda: self._save(args, state, directory, run, final))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait for the last save. Raises what became of it."""
        self._guarded("the last save", self._settle)
        if self._own is not None:
            client, self._own = self._own, None
            client.close()

    def _guarded(self, what: str, act: Callable[[], None]) -> None:
        try:
            act()
        except (ForebayError, OSError) as error:
            if self.strict:
                raise
            _log.warning("%s failed, and training goes on: %s", what, error)

    def _save(self, args: Any, state: Any, directory: Path, run: str, final: bool) -> None:
        failed: ForebayError | None = None
        try:
            self._settle()
        except ForebayError as error:  # all ranks agree on a session all the same
            failed = error
        session = ranks.agreed(save_session)
        if failed is not None and self.strict:
            raise failed
        if failed is not None:
            _log.warning("a save in the background failed, and training goes on: %s", failed)
        metadata = {"transformers": {"step": state.global_step, "epoch": state.epoch}}
        place = (run, state.global_step, args.world_size, args.process_index, session)
        files = _own_files(directory, args.process_index, args.world_size)
        if self.background:
            with self._client.async_checkpoint(*place) as part:
                part.put_many({name: path for name, (path, _) in files.items()})
                self.last = self._pending = part.commit(metadata, self._wait, self._timeout_s, final=final)
            return
        with self._client.checkpoint(*place) as part:
            put_files(part, files, STREAMS, lambda _: None)
            self.last = part.commit(metadata, self._wait, self._timeout_s, final=final)

    def _settle(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None and pending.exception(self._timeout_s) is not None:
            raise pending.tell()


def resume_from_checkpoint(
    run: str,
    output_dir: Any,
    address: str | None = None,
    *,
    step: int | str = LATEST,
    client: Client | None = None,
    source: str = "auto",
) -> str | None:
    """Bring a checkpoint back to OUTPUT_DIR/checkpoint-N, for `trainer.train(resume_from_checkpoint=...)`; its path.

    None where "latest" is asked for and the run has no complete checkpoint: the Trainer begins anew then. `output_dir` is a
    path or the TrainingArguments; make these first where there are several ranks: with them all ranks take the same step,
    and one of each node brings it. Raises as Client.restore_dir(), on every rank.
    """
    directory = Path(getattr(output_dir, "output_dir", output_dir))
    with _client(address, client) as opened:
        found = _agreed_step(opened, run, step)
        if found is None:
            return None
        target = directory / f"checkpoint-{found}"
        _once_a_node(lambda: opened.restore_dir(run, found, target, source=source))
    return str(target)


def save_pretrained(
    what: Any, where: str, address: str | None = None, *, client: Client | None = None, wait: str = "cache", **options: Any
) -> None:
    """`what.save_pretrained(...)` as the checkpoint forebay://RUN/STEP; `what` is a model, a tokenizer, ..., or a list of them.

    `options` are those of save_pretrained(). One rank calls it. Raises InvalidArgument for another form of `where`, and as
    Client.save_dir().
    """
    name = parse(where)
    if not isinstance(name.step, int):
        raise InvalidArgument(f"{where}: a step is a number where something is saved")
    with _client(address, client) as opened, tempfile.TemporaryDirectory(prefix="forebay-") as directory:
        for each in what if isinstance(what, Sequence) else [what]:
            each.save_pretrained(directory, **options)
        opened.save_dir(directory, name.run, name.step, session=save_session(), wait=wait)


def from_pretrained(
    kind: Any, where: str, address: str | None = None, *, client: Client | None = None, source: str = "auto", **options: Any
) -> Any:
    """`kind.from_pretrained(...)` of the checkpoint forebay://RUN/STEP, where STEP may be "latest".

    `options` are those of from_pretrained(). Nothing else is asked for: what is not in the checkpoint is an error, as of any
    local directory. Raises as Client.restore_dir().
    """
    name = parse(where)
    with _client(address, client) as opened, tempfile.TemporaryDirectory(prefix="forebay-") as directory:
        opened.restore_dir(name.run, name.step, directory, source=source)
        return kind.from_pretrained(directory, **{"local_files_only": True, **options})


def save_state(
    accelerator: "Accelerator",
    run: str,
    step: int,
    address: str | None = None,
    *,
    client: Client | None = None,
    wait: str = "cache",
    timeout: float | None = None,
    final: bool = False,
    **options: Any,
) -> CommitReceipt:
    """Accelerate's save_state() as a checkpoint; every rank calls it. `options` are those of save_state().

    Each rank writes to a directory of its own that is gone afterwards (or to the project's, with automatic_checkpoint_naming).
    It waits for no other rank: the checkpoint is complete once all have returned. Raises as Client.checkpoint().
    """
    session = ranks.agreed(save_session)
    rank, count = accelerator.process_index, accelerator.num_processes
    with _client(address, client) as opened, tempfile.TemporaryDirectory(prefix="forebay-") as directory:
        written = accelerator.save_state(directory, **options)
        with opened.checkpoint(run, step, count, rank, session) as part:
            put_files(part, _own_files(Path(written or directory), rank, count), STREAMS, lambda _: None)
            return part.commit(None, wait, timeout, final=final)


def load_state(
    accelerator: "Accelerator",
    run: str,
    directory: str | os.PathLike[str],
    address: str | None = None,
    *,
    step: int | str = LATEST,
    client: Client | None = None,
    source: str = "auto",
    **options: Any,
) -> int | None:
    """Accelerate's load_state() of a checkpoint, the step of which it returns; None where "latest" is asked for and there is
    none. Every rank calls it.

    One rank of each node brings the files to DIRECTORY/checkpoint-N, where they stay. `options` are those of load_state().
    Raises as Client.restore_dir(), on every rank, and what Accelerate raises for what does not fit.
    """
    with _client(address, client) as opened:
        found = _agreed_step(opened, run, step)
        if found is None:
            return None
        target = Path(directory) / f"checkpoint-{found}"
        _once_a_node(lambda: opened.restore_dir(run, found, target, source=source))
    accelerator.load_state(str(target), **options)
    return found


@contextmanager
def _client(address: str | None, client: Client | None) -> Iterator[Client]:
    if client is not None:
        yield client
        return
    with Client(address, progress=False) as opened:
        yield opened


def _own_files(directory: Path, rank: int, count: int) -> dict[str, tuple[Path, int]]:
    """Those that this rank saves: rank 0 whatever carries no other's number. Raises InvalidArgument, OSError."""
    if rank == 0:
        return {name: file for name, file in walk(directory).items() if _owner(name, count) == 0}
    # What the others write meanwhile is not looked at; another node may have written nothing.
    named = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*")}
    return {name: (path, path.stat().st_size) for name, path in named.items() if _owner(name, count) == rank and path.is_file()}


def _owner(name: str, count: int) -> int:
    found = _RANKED.match(name.rpartition("/")[2])
    number = int(found[1]) if found else 0
    return number if number < count else 0


def _agreed_step(client: Client, run: str, step: int | str) -> int | None:
    found = ranks.agreed(lambda: client.latest(run)) if step == LATEST else step
    if found is not None and (isinstance(found, bool) or not isinstance(found, int)):
        raise InvalidArgument(f"a step is a number or 'latest', not {found!r}")
    return found


def _once_a_node(act: Callable[[], object]) -> None:
    """On the first rank of each node; the others wait, and fail where it has failed."""
    count = ranks.place()[1]
    error: Exception | None = None
    if count == 1 or int(os.environ.get("LOCAL_RANK", "0")) == 0:
        try:
            act()
        except Exception as failure:  # noqa: BLE001 - the others wait to hear of it
            error = failure
    said = ranks.everybodys(None if error is None else str(error))
    if error is not None:
        raise error
    if failures := [each for each in said if each is not None]:
        raise ForebayError(f"another rank could not bring the checkpoint: {failures[0]}")
