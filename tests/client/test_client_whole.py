"""Chunks that are each good and together are not what was saved: the whole shard's checksum decides."""

import dataclasses

import pytest

from forebay import Corrupt
from forebay.lanes.stream import check_receipt
from forebay.reader import _whole
from forebay.types import Shard
from forebay_wire.checksums import crc32c
from forebay_wire.frames import ChunkFrame
from forebay_wire.v1 import gateway_pb2 as pb

CHUNK = 1 << 16
PIECES = [bytes([number]) * CHUNK for number in range(3)] + [b"the rest"]
DATA = b"".join(PIECES)


def shard() -> Shard:
    known = {"name": "x", "size": len(DATA), "crc32c": crc32c(DATA)}
    fields = {field.name: known.get(field.name) for field in dataclasses.fields(Shard)}
    return Shard(**fields)  # type: ignore[arg-type]


def frames(pieces: list[bytes]) -> list[ChunkFrame]:
    return [ChunkFrame(at * CHUNK, crc32c(piece), memoryview(piece)) for at, piece in enumerate(pieces)]


def test_all_in_order_is_the_shard() -> None:
    assert b"".join(_whole(iter(frames(PIECES)), shard())) == DATA


@pytest.mark.parametrize("order", [[1, 0, 2, 3], [0, 1, 1, 3], [0, 1, 2], [0, 1, 2, 3, 3]])
def test_good_chunks_of_another_whole_are_refused_at_the_end(order: list[int]) -> None:
    with pytest.raises(Corrupt, match="do not match its checksum"):
        list(_whole(iter(frames([PIECES[number] for number in order])), shard()))


@pytest.mark.parametrize("wrong", [{"name": "y"}, {"size": 4}, {"crc32c": 8}])
def test_a_receipt_for_something_else_is_no_receipt(wrong: dict[str, object]) -> None:
    sent = {"name": "x", "size": 3, "crc32c": 7}
    check_receipt(pb.Receipt(**sent), "x", 3, 7)  # type: ignore[arg-type]
    with pytest.raises(Corrupt, match="not for what was sent"):
        check_receipt(pb.Receipt(**{**sent, **wrong}), "x", 3, 7)  # type: ignore[arg-type]
