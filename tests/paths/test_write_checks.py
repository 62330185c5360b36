"""What a client sends again, or sends in one message, is compared byte for byte by its checksums before it is acknowledged."""

from pathlib import Path

import pytest

from forebay_gateway.core.errors import AlreadyExists, Corrupt, InvalidArgument
from forebay_gateway.paths.small import SmallPath, SmallShard
from forebay_gateway.paths.write import Existing, PartRef, Receipt
from forebay_wire.checksums import crc32c
from paths.kit import serving, tier

DATA = b"some bytes of a shard"
THERE = Receipt("x", len(DATA), crc32c(DATA))


async def test_an_equal_shard_is_acknowledged_again_and_no_other() -> None:
    assert await Existing(THERE).finish(THERE.size, THERE.crc32c) == THERE
    again = Existing(THERE)
    await again.chunk(0, crc32c(DATA), memoryview(DATA))
    assert await again.finish(THERE.size, THERE.crc32c) == THERE
    for size, crc in ((THERE.size, THERE.crc32c ^ 1), (THERE.size + 1, THERE.crc32c)):
        with pytest.raises(AlreadyExists, match="other content"):
            await Existing(THERE).finish(size, crc)


async def test_chunks_that_come_again_are_checked() -> None:
    with pytest.raises(Corrupt, match="damaged"):
        await Existing(THERE).chunk(0, crc32c(DATA) ^ 1, memoryview(DATA))
    other = b"other" + DATA[5:]
    again = Existing(THERE)
    await again.chunk(0, crc32c(other), memoryview(other))
    with pytest.raises(InvalidArgument, match="does not fit"):
        await again.finish(THERE.size, THERE.crc32c)  # the trailer lies about what came


async def test_a_small_shard_that_arrives_damaged_is_refused_with_its_group(tmp_path: Path) -> None:
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway:
        writes = gateway._writes
        assert writes is not None
        group = [SmallShard("a", crc32c(DATA), memoryview(DATA)), SmallShard("b", crc32c(DATA) ^ 1, memoryview(DATA))]
        with pytest.raises(Corrupt, match="'b' arrived damaged"):
            await SmallPath(gateway.node, writes).put(PartRef("run", 1, "s", 0, 1), group)
        with gateway.node.catalog.read() as txn:
            assert list(txn.all_shards()) == []
        assert not list((tmp_path / "cache-a" / "data").rglob("*.shard"))
