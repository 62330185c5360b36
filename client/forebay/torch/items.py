"""Files of DCP's layout as sources: the plan's items one after another, each as torch's FileSystemWriter writes it.

Owns their size beforehand, their bytes, and where each item came to lie. Does not own what goes into which file (writer.py) nor
sending. No file is ever in memory as a whole: a tensor on the CPU that fills its storage is read where it lies; any other is
copied, and two copies are held at most (from a GPU: `copy_ahead` bytes of them besides, as DCP does).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem as dcp
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.serialization import skip_data

from forebay.sources import CountingFile, IterableSource, Piece, Source, view_of
from forebay.torch.versions import let_go
from forebay_wire.memory import address_of

_IN_PLACE_BYTES_MIN = 64 << 10  # smaller records are copied: joined to their neighbours they are one piece less
_LARGE_BYTES_MIN = 1 << 20  # what is worth some care to free at once


class ItemsFile(Source):
    """One file. Replayable: an item is serialised anew each time it is read, but for those that are pickled, which are held.

    The size is None, and such a file goes by the stream lane, where a tensor's saved form is not known without saving it.
    """

    replayable = True

    def __init__(self, name: str, items: list[WriteItem], planner: SavePlanner, copy_ahead: int) -> None:
        """`copy_ahead`: bytes to copy from the GPU ahead of sending them; 0: none. Raises what pickling raises."""
        self.name = name
        self._planner = planner
        self._copy_ahead = copy_ahead
        self._pickled = {item.index: planner.resolve_data(item) for item in items if item.type == WriteItemType.BYTE_IO}
        self._items = sorted(items, key=lambda item: item.type != WriteItemType.BYTE_IO)  # stable: pickled ones come first
        self._results: list[WriteResult] = []
        sizes = [self._size_of(item) for item in self._items]
        self.size = None if None in sizes else sum(size for size in sizes if size is not None)

    def chunks(self, chunk_size: int) -> Iterator[Piece]:
        """See Source."""
        return IterableSource(self._pieces(), f"shard {self.name!r}").chunks(chunk_size)

    @property
    def results(self) -> list[WriteResult]:
        """Where each item lies, for DCP; known once the file was read to its end."""
        assert len(self._results) == len(self._items), f"{self.name} was not read to its end"
        return self._results

    def _size_of(self, item: WriteItem) -> int | None:
        if item.type == WriteItemType.BYTE_IO:
            return int(self._pickled[item.index].getbuffer().nbytes)
        return saved_size(self._planner.resolve_data(item).detach())

    def _pieces(self) -> Iterator[memoryview]:
        self._results = []
        offset = 0
        for item, pieces in self._serialised():
            length = sum(piece.nbytes for piece in pieces)
            yield from pieces
            info = dcp._StorageInfo(self.name, offset, length)
            self._results.append(WriteResult(index=item.index, size_in_bytes=length, storage_data=info))
            offset += length

    def _serialised(self) -> Iterator[tuple[WriteItem, list[memoryview]]]:
        tensors = [item for item in self._items if item.type != WriteItemType.BYTE_IO]
        for item in self._items[: len(self._items) - len(tensors)]:
            yield item, [self._pickled[item.index].getbuffer()]
        loader = _loader(self._planner, self._copy_ahead)
        for item in tensors:
            loader.add(dcp._item_size(item), item)
        loader.start_loading()
        for tensor, item in loader.values():
            yield item, saved(tensor)


def _loader(planner: SavePlanner, copy_ahead: int) -> Any:
    """DCP's own, by its own rule: from a GPU through a stream, copies ahead of what is sent."""
    other = getattr(torch, torch._C._get_privateuse1_backend_name(), None)
    if copy_ahead > 0 and (torch.cuda.is_available() or (other is not None and other.is_available())):
        return dcp._OverlappingCpuLoader(planner.resolve_data, inflight_threshhold=copy_ahead)
    return dcp._SerialCpuLoader(planner.resolve_data)


def saved_size(tensor: torch.Tensor) -> int | None:
    """How many bytes torch.save makes of a detached tensor once it is on the CPU, without reading it; None: not known."""
    plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided
    if not plain or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return None
    if not _in_place(tensor):
        tensor = torch.empty_like(tensor, device="cpu")  # shaped as the copy will be; its memory is never touched
    counter = CountingFile()
    with skip_data():
        torch.save(tensor, counter)
    return counter.size


def saved(tensor: torch.Tensor) -> list[memoryview]:
    """What torch.save makes of a CPU tensor. Its own data is not copied, but looked at where it lies."""
    storage = torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage())
    recorder = _Recorder(view_of(storage, "a tensor's storage"))
    torch.save(tensor, recorder)
    if storage.nbytes >= _LARGE_BYTES_MIN:
        let_go()
    return recorder.pieces()


def _in_place(tensor: torch.Tensor) -> bool:
    """Whether DCP's loaders hand this tensor out as it is, and make no copy of it."""
    return bool(tensor.is_cpu and tensor.untyped_storage().size() == tensor.nbytes)


class _Recorder:
    """A file for torch.save that keeps references to `memory` and copies of all else: a record's header and its padding are on
    torch's stack, and gone when write() returns."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._address = address_of(memory) if memory.nbytes >= _IN_PLACE_BYTES_MIN else None
        self._pieces: list[memoryview] = []
        self._small = bytearray()

    def write(self, data: Any) -> int:
        """Keep it."""
        view = memoryview(data)
        if view.nbytes == self._memory.nbytes and self._address is not None and address_of(view) == self._address:
            self._pieces += [memoryview(self._small), self._memory]
            self._small = bytearray()
        else:
            self._small += view
        return view.nbytes

    def flush(self) -> None:
        """Nothing to do."""

    def pieces(self) -> list[memoryview]:
        """All of it."""
        return [*self._pieces, memoryview(self._small)]
