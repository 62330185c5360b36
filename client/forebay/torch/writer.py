"""ForebayStorageWriter: what DCP calls to save. Each rank is one writer of one Forebay checkpoint.

Owns which items go into which file (DCP's own layout), who commits when, and the check that all that was planned has landed.
Does not own the files' bytes (items.py).

    all ranks      write_data   put __<rank>_<n>.distcp; all but the coordinator commit their part
    coordinator    finish       planned = landed; put .metadata; commit, and with that the checkpoint is complete
"""

import dataclasses
import itertools
import os
import pickle
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed
from torch.distributed.checkpoint import filesystem as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future
from ulid import ULID

from forebay.api import STREAMS_MAX, Client
from forebay.checkpoint_id import LATEST, CheckpointId, of_arguments, parse
from forebay.directories import in_parallel
from forebay.errors import Incomplete, InvalidArgument, NotFound
from forebay.session import default_session, launch_session
from forebay.torch.items import ItemsFile
from forebay.torch.named import Named
from forebay.types import Missing
from forebay.waiting import check_level
from forebay.writer import CheckpointWriter

METADATA_NAME = ".metadata"
FILES_TOGETHER = 256  # of one thread, where each item is a file: small ones travel, and are packed, together

# The session that this process, as coordinator, gave its ranks last. Planners that cache plans hand out the one they cached.
_given: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedPart:
    """What the coordinator tells a rank with its plan."""

    prefix: str
    writer: int
    writers: int
    session: str


class ForebayStorageWriter(Named, StorageWriter):
    """Saves with `dcp.save` and `dcp.async_save` through this node's gateway. Picklable; nothing is opened before it is used.

    What to save is `run` and `step`, or `checkpoint_id="forebay://RUN/STEP"`, here (in place of `run`) or in dcp.save, so that
    one writer serves all steps. `address` is the gateway's, by default FOREBAY_ADDRESS, else the default socket; each rank may
    have another.

    `session` is what tells one try to save a step from another. By default the coordinator gives all ranks a new one for each
    save, which begins with the launch's name (FOREBAY_SESSION, torchelastic, Slurm); without collectives, where nobody can, it
    is the launch's. One given here is used as it is: of the same step it saves the same bytes, and no others.

    `wait` is what the coordinator waits for: "cache" (every rank's part is durable in its gateway's cache), a tier's name or
    "all", up to `timeout` seconds; a load through another gateway needs a tier. `final` marks the run's last save, `metadata`
    stands in the manifest: these four are as in CheckpointWriter.commit(). `lane`, `admit_timeout` and `retry_timeout` are as
    in Client.

    `single_file_per_rank`, `thread_count`, `per_thread_copy_ahead` and `overwrite` are as in torch's FileSystemWriter: files
    written at a time, bytes copied from a GPU ahead of sending, and whether a step that is complete may be saved again.
    Beyond these a thread holds two copied tensors at most, and a few chunks, never a file.

    Raises InvalidArgument. DCP wraps what a rank raises into its CheckpointException.
    """

    def __init__(
        self,
        run: str | None = None,
        step: int | None = None,
        address: str | None = None,
        *,
        session: str | None = None,
        lane: str = "auto",
        wait: str = "cache",
        timeout: float | None = None,
        final: bool = False,
        metadata: Mapping[str, Any] | None = None,
        single_file_per_rank: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        overwrite: bool = True,
        admit_timeout: float = 60.0,
        retry_timeout: float = 60.0,
    ) -> None:
        super().__init__()
        if isinstance(thread_count, bool) or not isinstance(thread_count, int) or not 1 <= thread_count <= STREAMS_MAX:
            raise InvalidArgument(f"thread_count must be 1 to {STREAMS_MAX}, not {thread_count!r}")
        self._id = _writable(of_arguments(run, step))
        self._client = Client(address, admit_timeout, retry_timeout=retry_timeout, progress=False)
        self._session = session
        self._lane = lane
        self._wait = wait
        self._timeout_s = timeout
        self._final = final
        self._manifest_metadata = metadata
        self.single_file_per_rank = single_file_per_rank
        self.thread_count = thread_count
        self.per_thread_copy_ahead = per_thread_copy_ahead
        self.overwrite = overwrite
        self.save_id = str(uuid.uuid4())
        self.rank: int | None = None
        self.use_collectives = True
        self.is_coordinator = False
        self._part: CheckpointWriter | None = None
        self._planned: dict[MetadataIndex, int | None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_part": None, "_planned": None}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is of the form forebay://RUN/STEP."""
        try:
            return _writable(parse(checkpoint_id)) is not None
        except InvalidArgument:
            return False

    def storage_meta(self) -> StorageMeta | None:
        """As DCP keeps it in .metadata."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def lacking(self) -> Incomplete | None:
        """Why the last save is no checkpoint: which writers it lacks, as far as this rank's gateway knows; None if it is one.

        For a save that ended in an error of the collectives, which names no rank. Raises NotFound, Unavailable.
        """
        name = self._named()
        assert isinstance(name.step, int)
        found = self._client.describe(name.run, name.step)
        if found.complete:
            return None
        lacks = "; ".join(map(str, found.missing[:5])) or found.reason or "nothing known"
        return Incomplete(f"checkpoint {found.run}/{found.step} is not complete; missing: {lacks}", missing=found.missing)

    # What DCP calls, in this order

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new save begins, of `checkpoint_id` where one is given. Raises InvalidArgument."""
        if checkpoint_id:
            self._id = _writable(parse(checkpoint_id))
        self.save_id = str(uuid.uuid4())

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """All ranks. torch says `rank` and `use_collectives` from 2.9 on."""
        self._named()
        self.is_coordinator = is_coordinator
        self.rank = kwargs.get("rank")
        self.use_collectives = kwargs.get("use_collectives", True)
        self._part = self._planned = None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """All ranks. Without collectives each finds out for itself what else the coordinator would say."""
        if self.use_collectives or self.rank is None:
            return plan
        writers = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        session = default_session(writers) if self._session is None else self._session
        return dataclasses.replace(plan, storage_data=PlannedPart(f"__{self.rank}_", self.rank, writers, session))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The coordinator. Raises RuntimeError for a checkpoint that may not be overwritten, before anything is sent."""
        name = self._named()
        assert isinstance(name.step, int)
        check_level(self._client._connection, name.run, name.step, self._wait)
        if not self.overwrite and self._exists(name.run, name.step):
            raise RuntimeError(f"Checkpoint already exists and {self.overwrite=}.")
        session = self._session or _new_session(plans)
        told = [
            dataclasses.replace(plan, storage_data=PlannedPart(f"__{rank}_", rank, len(plans), session))
            if plan.storage_data is None
            else plan
            for rank, plan in enumerate(plans)
        ]
        self._planned = _planned(told)
        return told

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """All ranks: everything is durable in the gateway's cache when this returns. Raises as CheckpointWriter.put()."""
        name, planned = self._named(), plan.storage_data
        assert isinstance(name.step, int)
        part = self._client.checkpoint(name.run, name.step, planned.writers, planned.writer, planned.session, self._lane)
        try:
            results = self._put_files(part, plan.items, planner, planned.prefix)
            if self.is_coordinator or not self.use_collectives:
                self._part = part
            else:
                part.commit(final=self._final)
        except BaseException:
            part.give_up()
            raise
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The coordinator: the checkpoint is complete when this returns. Raises Incomplete naming what did not land."""
        part, self._part = self._part, None
        assert part is not None, "finish() comes after write_data()"
        landed = {result.index: result.storage_data for of_rank in results for result in of_rank}
        metadata.version = getattr(dcp, "CURRENT_DCP_VERSION", None)  # older versions of torch have none
        metadata.storage_data = landed
        metadata.storage_meta = self.storage_meta()
        try:
            _check_landed(f"{part.run}/{part.step}", metadata, self._planned, landed)
            part.put(f"__{self.rank}{METADATA_NAME}" if not self.use_collectives else METADATA_NAME, pickle.dumps(metadata))
            part.commit(self._manifest_metadata, self._wait, self._timeout_s, final=self._final)
        except BaseException:
            part.give_up()
            raise

    def _named(self) -> CheckpointId:
        if self._id is None:
            raise InvalidArgument("name what to save: run= and step= in ForebayStorageWriter, or checkpoint_id= in dcp.save")
        return self._id

    def _exists(self, run: str, step: int) -> bool:
        try:
            return self._client.describe(run, step).complete
        except NotFound:
            return False

    def _put_files(
        self, part: CheckpointWriter, items: list[WriteItem], planner: SavePlanner, prefix: str
    ) -> list[WriteResult]:
        results: list[WriteResult] = []
        copy_ahead = (
            self.per_thread_copy_ahead if self.thread_count == 1 else 0
        )  # DCP: streams of several threads disturb each other

        def put(named: Sequence[tuple[str, list[WriteItem]]]) -> None:
            files = {name: ItemsFile(name, inside, planner, copy_ahead) for name, inside in named}
            part.put_many(files)
            for file in files.values():
                results.extend(file.results)

        files = ((f"{prefix}{number}{dcp.DEFAULT_SUFFIX}", inside) for number, inside in enumerate(self._layout(items)))
        in_parallel(put, _batches(files, 1 if self.single_file_per_rank else FILES_TOGETHER), self.thread_count)
        return results

    def _layout(self, items: list[WriteItem]) -> list[list[WriteItem]]:
        if self.single_file_per_rank:
            return list(dcp._split_by_size_and_type(self.thread_count, items))
        return [[item] for item in items]


def _writable(checkpoint_id: CheckpointId | None) -> CheckpointId | None:
    if checkpoint_id is not None and checkpoint_id.step == LATEST:
        raise InvalidArgument(f"{checkpoint_id}: a step is a number where something is saved")
    return checkpoint_id


def _new_session(plans: Sequence[SavePlan]) -> str:
    """For all ranks of this save. A try that failed may have left parts, and what the next try saves may differ from it."""
    global _given
    if _given is None or all(map(_usable, plans)):
        launch = launch_session()
        _given = f"{launch}-{ULID()}" if launch else str(ULID())
    return _given


def _usable(plan: SavePlan) -> bool:
    """Whether a plan says what is in it: one that a planner has cached does not. Older versions of torch cache none."""
    return getattr(plan, "usable", True)


def _batches(files: Iterable[tuple[str, list[WriteItem]]], size: int) -> Iterator[list[tuple[str, list[WriteItem]]]]:
    files = iter(files)
    while batch := list(itertools.islice(files, size)):
        yield batch


def _planned(plans: Sequence[SavePlan]) -> dict[MetadataIndex, int | None] | None:
    """Item: its writer. None where a planner that caches plans does not say what is in them."""
    if not all(map(_usable, plans)):
        return None
    return {item.index: plan.storage_data.writer for plan in plans for item in plan.items}


def _check_landed(
    what: str, metadata: Metadata, planned: Mapping[MetadataIndex, int | None] | None, landed: Mapping[MetadataIndex, Any]
) -> None:
    expected = _named_by(metadata) if planned is None else planned
    lost = [(index, writer) for index, writer in expected.items() if index not in landed]
    if not lost:
        return
    by_writer: dict[int, list[str]] = {}
    for index, writer in lost:
        if writer is not None:
            by_writer.setdefault(writer, []).append(_shown(index))
    missing = [Missing(writer, tuple(items), "open") for writer, items in sorted(by_writer.items())]
    said = "; ".join(map(str, missing[:5])) or ", ".join(_shown(index) for index, _ in lost[:5])
    raise Incomplete(f"save {what}: {len(lost)} of {len(expected)} planned items did not land: {said}", missing=missing)


def _named_by(metadata: Metadata) -> dict[MetadataIndex, int | None]:
    expected: dict[MetadataIndex, int | None] = {}
    for name, entry in metadata.state_dict_metadata.items():
        offsets = [chunk.offsets for chunk in entry.chunks] if isinstance(entry, TensorStorageMetadata) else [None]
        expected.update((MetadataIndex(name, offset), None) for offset in offsets)
    return expected


def _shown(index: MetadataIndex) -> str:
    return index.fqn if index.offset is None else f"{index.fqn}{list(index.offset)}"
