"""ForebayStorageReader: what DCP calls to load, over whatever world size.

Owns which byte ranges a plan needs and how many of them are in memory at a time. Does not own where the bytes come from (the
gateway's nearest good copy) nor what goes where in the state dict (DCP's planner).
"""

import dataclasses
import itertools
import os
import pickle
import uuid
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future as ThreadFuture
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from forebay.api import STREAMS_MAX, Client
from forebay.checkpoint_id import LATEST, CheckpointId, of_arguments, parse
from forebay.errors import ForebayError, Incomplete, InvalidArgument, NotFound
from forebay.reader import Reader
from forebay.torch.named import Named
from forebay.torch.values import Placed, Range, values_of
from forebay.torch.writer import METADATA_NAME

THREADS = 4
RANGE_BYTES_MAX = 4 << 20  # neighbours are read together up to this; a larger item is a range by itself
GAP_BYTES_MAX = 64 << 10  # read and thrown away, where that is cheaper than a request more
AHEAD_BYTES_MAX = 64 << 20  # of what is being read or waits to be copied where it belongs; one larger item is alone


class ForebayStorageReader(Named, StorageReader):
    """Loads with `dcp.load` through this node's gateway, from the nearest good copy; any layout that torch's FileSystemReader
    reads, whoever saved it. Picklable; nothing is opened before the first read.

    What to load is `run` and `step` (a number or "latest"), or `checkpoint_id="forebay://RUN/STEP"`, here (in place of `run`)
    or in dcp.load. `address` is the gateway's, by default FOREBAY_ADDRESS, else the default socket. `source` and `lane` are as
    in Client.open(). Only items that the plan names are read, `thread_count` ranges at a time, at most 64 MiB ahead (or one
    item, where it is larger).

    .metadata is a pickle, as DCP has it: load only what you trust. DCP turns what read_metadata() raises into text; where a
    program has to know, ask `forebay.Client.open(run, step)` first.
    """

    def __init__(
        self,
        run: str | None = None,
        step: int | str | None = None,
        address: str | None = None,
        *,
        source: str = "auto",
        lane: str = "auto",
        thread_count: int = THREADS,
        retry_timeout: float = 60.0,
    ) -> None:
        super().__init__()
        if isinstance(thread_count, bool) or not isinstance(thread_count, int) or not 1 <= thread_count <= STREAMS_MAX:
            raise InvalidArgument(f"thread_count must be 1 to {STREAMS_MAX}, not {thread_count!r}")
        self._id = of_arguments(run, step)
        self._client = Client(address, retry_timeout=retry_timeout, progress=False)
        self._source = source
        self._lane = lane
        self.thread_count = thread_count
        self.storage_data: dict[MetadataIndex, Any] = {}
        self.load_id = str(uuid.uuid4())
        self.rank: int | None = None
        self.use_collectives = True
        self._reader: Reader | None = None
        self._failure: ForebayError | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is of the form forebay://RUN/STEP, where STEP may be "latest"."""
        try:
            parse(checkpoint_id)
        except InvalidArgument:
            return False
        return True

    # What DCP calls, in this order

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new load begins, of `checkpoint_id` where one is given. Raises InvalidArgument."""
        if checkpoint_id:
            self._id = parse(checkpoint_id)
        self.storage_data = {}
        self.load_id = str(uuid.uuid4())
        self._reader = self._failure = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """All ranks: what the checkpoint holds; with `rank`, as that rank saved it by itself, which DCP asks for where there is
        no common one. Raises NotFound, Incomplete(missing), Corrupt, Unavailable."""
        rank = kwargs.get("rank")
        if rank is None:
            self._reader = self._failure = None  # a reader that is used again looks again
        name = METADATA_NAME if rank is None else f"__{rank}{METADATA_NAME}"
        metadata: Metadata = pickle.loads(self._opened().read(name))
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """All ranks. torch says `rank` and `use_collectives` from 2.9 on."""
        self.storage_data = metadata.storage_data
        self.rank = kwargs.get("rank")
        self.use_collectives = kwargs.get("use_collectives", True)
        if self.storage_data is None:
            raise AssertionError("storage_data must not be None in metadata")

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """All ranks: say which save this rank's gateway has."""
        return dataclasses.replace(plan, storage_data=self._save())

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The coordinator. Raises Incomplete where ranks would load different saves: a newer one has just been completed."""
        saves = {plan.storage_data for plan in plans}
        if len(saves) > 1:
            said = ", ".join(f"{run}/{step} of session {session}" for run, step, session in sorted(saves))
            raise Incomplete(f"the ranks' gateways have different saves ({said}): load again, of one step by its number")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """All ranks: fill what the plan names. Raises as Reader.read(), and AssertionError for a size that does not fit."""
        for item, found in self._read(self._ranges(plan.items)):
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, found)
            else:
                _load_tensor(planner, item, found)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _opened(self) -> Reader:
        if self._failure is not None:
            raise self._failure  # DCP asks twice, and the gateway has been waited for already
        if self._reader is None:
            try:
                self._reader = self._open()
            except ForebayError as error:
                self._failure = error
                raise
        return self._reader

    def _open(self) -> Reader:
        if self._id is None:
            raise InvalidArgument("name what to load: run= and step= in ForebayStorageReader, or checkpoint_id= in dcp.load")
        run, step = self._id.run, self._id.step
        if step == LATEST:
            step = self._latest(self._id)
        assert isinstance(step, int)
        return self._client.open(run, step, source=self._source, lane=self._lane)

    def _latest(self, wanted: CheckpointId) -> int:
        latest = self._client.latest(wanted.run)
        if latest is None:
            raise NotFound(f"run {wanted.run!r} has no complete checkpoint")
        return latest

    def _save(self) -> tuple[str, int, str]:
        checkpoint = self._opened().checkpoint
        return checkpoint.run, checkpoint.step, checkpoint.session

    def _ranges(self, items: Iterable[ReadItem]) -> Iterator[Range]:
        """By file and offset; neighbours together."""
        placed = sorted(map(self._placed, items), key=lambda each: (each[0], each[1].offset))
        for name, of_file in itertools.groupby(placed, key=lambda each: each[0]):
            together: list[Placed] = []
            start = end = 0
            for _, each in of_file:
                high = max(end, each.offset + each.length)
                if together and (each.offset - end > GAP_BYTES_MAX or high - start > max(end - start, RANGE_BYTES_MAX)):
                    yield Range(name, start, end - start, tuple(together))
                    together = []
                if not together:
                    start, high = each.offset, each.offset + each.length
                together.append(each)
                end = high
            yield Range(name, start, end - start, tuple(together))

    def _placed(self, item: ReadItem) -> tuple[str, Placed]:
        info = self.storage_data[item.storage_index]
        transforms = getattr(info, "transform_descriptors", None) or ()  # older versions of torch have none
        return info.relative_path, Placed(item, info.offset, info.length, transforms)

    def _read(self, ranges: Iterator[Range]) -> Iterator[tuple[ReadItem, Any]]:
        """All items in order; reading and unpickling is done ahead, on threads, as far as the bytes of it allow."""
        ahead: deque[tuple[int, ThreadFuture[list[tuple[ReadItem, Any]]]]] = deque()
        ahead_bytes = 0
        reader = self._opened()

        def next_values() -> list[tuple[ReadItem, Any]]:
            nonlocal ahead_bytes
            length, future = ahead.popleft()
            values = future.result()
            ahead_bytes -= length
            return values

        with ThreadPoolExecutor(self.thread_count, thread_name_prefix="forebay-dcp") as pool:
            try:
                for each in ranges:
                    while ahead and ahead_bytes + each.length > AHEAD_BYTES_MAX:
                        yield from next_values()
                    ahead.append((each.length, pool.submit(values_of, reader, each)))
                    ahead_bytes += each.length
                while ahead:
                    yield from next_values()
            finally:
                for _, future in ahead:
                    future.cancel()


def _load_tensor(planner: LoadPlanner, item: ReadItem, tensor: torch.Tensor) -> None:
    target = planner.resolve_tensor(item).detach()
    if target.size() != tensor.size():
        raise AssertionError(f"req {item.storage_index} mismatch sizes {target.size()} vs {tensor.size()}")
    target.copy_(tensor)
    planner.commit_tensor(item, target)
