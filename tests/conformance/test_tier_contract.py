"""The contract of a tier, the same for all of them (tiers/base.py)."""

import asyncio

import pytest

from conformance.tier_kit import CHUNK, BytesSource, blob, collect
from forebay_gateway.core.errors import AlreadyExists, Corrupt, InvalidArgument, NotFound, Unavailable
from forebay_gateway.tiers.base import PutOptions, Tier

SIZES = (0, 1, 4095, 4096, 4097, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 17)


@pytest.mark.parametrize("size", SIZES)
async def test_put_then_everything_agrees(tier: Tier, size: int) -> None:
    data = blob(size)
    source = BytesSource(data)
    sent: list[int] = []
    info = await tier.put("run/step/shard.bin", source, PutOptions(on_progress=sent.append))
    assert (info.key, info.size, sum(sent)) == ("run/step/shard.bin", size, size)
    assert (await tier.verify("run/step/shard.bin", source)).tag == info.tag
    assert await tier.head("run/step/shard.bin") == await tier.verify("run/step/shard.bin", source)
    assert await collect(tier.read("run/step/shard.bin", 0, size)) == data
    document, again = await tier.get_small("run/step/shard.bin")
    assert (document, again.tag) == (data, info.tag)


async def test_put_replaces(tier: Tier) -> None:
    old, new = blob(3 * CHUNK, 1), blob(2 * CHUNK + 5, 2)
    first = await tier.put("a/b", BytesSource(old))
    second = await tier.put("a/b", BytesSource(new))
    assert first.tag != second.tag
    assert await collect(tier.read("a/b", 0, len(new))) == new
    with pytest.raises(Corrupt):
        await tier.verify("a/b", BytesSource(old))


@pytest.mark.parametrize(
    ("offset", "length"), [(0, 1), (1, CHUNK), (CHUNK - 3, 7), (2 * CHUNK, CHUNK + 9), (3 * CHUNK + 8, 1), (5, 0)]
)
async def test_read_gives_exactly_the_range(tier: Tier, offset: int, length: int) -> None:
    data = blob(3 * CHUNK + 9)
    await tier.put("x", BytesSource(data))
    assert await collect(tier.read("x", offset, length)) == data[offset : offset + length]


@pytest.mark.parametrize(("offset", "length"), [(0, 101), (100, 1), (50, 51), (1000, 5)])
async def test_read_beyond_the_end_is_an_error(tier: Tier, offset: int, length: int) -> None:
    await tier.put("x", BytesSource(blob(100)))
    with pytest.raises(Corrupt):
        await collect(tier.read("x", offset, length))


async def test_absent_is_not_found(tier: Tier) -> None:
    await tier.put_small("there/a", b"1")
    for key in ("absent", "no/such/dir/absent", "there", "there/a/below"):
        with pytest.raises(NotFound):
            await tier.head(key)
        with pytest.raises(NotFound):
            await tier.get_small(key)
        with pytest.raises(NotFound):
            await tier.verify(key, BytesSource(b"x"))
        with pytest.raises(NotFound):
            await collect(tier.read(key, 0, 1))


async def test_verify_tells_other_bytes_of_the_same_size(tier: Tier) -> None:
    data = bytearray(blob(3 * CHUNK + 1))
    await tier.put("x", BytesSource(bytes(data)))
    data[2 * CHUNK + 7] ^= 1
    with pytest.raises(Corrupt):
        await tier.verify("x", BytesSource(bytes(data)))
    with pytest.raises(Corrupt):
        await tier.verify("x", BytesSource(bytes(data[:-1])))


async def test_a_source_that_fails_leaves_what_was_there(tier: Tier) -> None:
    await tier.put("d/x", BytesSource(b"old"))
    source = BytesSource(blob(6 * CHUNK))

    def fail(index: int) -> None:
        if index == 4:
            raise Corrupt("the cache's bytes are bad")

    source.on_read = fail
    with pytest.raises(Corrupt, match="bad"):
        await tier.put("d/x", source)
    assert (await tier.get_small("d/x"))[0] == b"old"
    assert [info.key for info in (await tier.list("d")).objects] == ["d/x"]


async def test_cancelled_put_leaves_nothing(tier: Tier) -> None:
    source = BytesSource(blob(6 * CHUNK))
    task: asyncio.Task[object] | None = None

    def cancel(index: int) -> None:
        if index == 3:
            assert task is not None
            task.cancel()

    source.on_read = cancel
    task = asyncio.create_task(tier.put("d/x", source))
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(NotFound):
        await tier.head("d/x")
    assert (await tier.list("d")).objects == ()


async def test_conditional_create(tier: Tier) -> None:
    info = await tier.put_small("d/doc", b"first", if_absent=True)
    with pytest.raises(AlreadyExists):
        await tier.put_small("d/doc", b"second", if_absent=True)
    assert await tier.get_small("d/doc") == (b"first", await tier.head("d/doc"))
    assert (await tier.head("d/doc")).tag == info.tag


async def test_conditional_replace(tier: Tier) -> None:
    first = await tier.put_small("d/doc", b"first")
    second = await tier.put_small("d/doc", b"other", if_match=first.tag)
    assert second.tag != first.tag
    with pytest.raises(AlreadyExists):
        await tier.put_small("d/doc", b"third", if_match=first.tag)
    assert (await tier.get_small("d/doc"))[0] == b"other"
    await tier.delete("d/doc")
    for key in ("d/doc", "e/never"):
        with pytest.raises(AlreadyExists):
            await tier.put_small(key, b"third", if_match=second.tag)
        with pytest.raises(NotFound):
            await tier.head(key)


async def _race(tier: Tier, key: str, tag: str | None) -> list[str]:
    async def one(number: int) -> str:
        data = f"writer {number}".encode()
        try:
            if tag is None:
                await tier.put_small(key, data, if_absent=True)
            else:
                await tier.put_small(key, data, if_match=tag)
        except AlreadyExists:
            return ""
        return data.decode()

    return [won for won in await asyncio.gather(*(one(number) for number in range(8))) if won]


async def test_race_to_create_has_one_winner(tier: Tier) -> None:
    for turn in range(3):
        winners = await _race(tier, f"race/{turn}", None)
        assert [(await tier.get_small(f"race/{turn}"))[0].decode()] == winners


async def test_race_to_replace_has_one_winner(tier: Tier) -> None:
    info = await tier.put_small("race/doc", b"start")
    winners = await _race(tier, "race/doc", info.tag)
    assert [(await tier.get_small("race/doc"))[0].decode()] == winners


async def test_documents_have_a_limit(tier: Tier) -> None:
    await tier.put_small("doc", b"x" * 100)
    assert len((await tier.get_small("doc", limit_bytes=100))[0]) == 100
    with pytest.raises(InvalidArgument):
        await tier.get_small("doc", limit_bytes=99)


async def test_list_shows_one_level(tier: Tier) -> None:
    for key in ("r/one", "r/two", "r/.hidden", "r/sub/three", "r/sub/deep/four", "rr/five"):
        await tier.put_small(key, key.encode())
    for prefix in ("r", "r/"):
        listing = await tier.list(prefix)
        assert [info.key for info in listing.objects] == ["r/.hidden", "r/one", "r/two"]
        assert [info.size for info in listing.objects] == [9, 5, 5]
        assert listing.directories == ("sub",)
    assert {"r", "rr"} <= set((await tier.list("")).directories)
    assert (await tier.list("r/one")).objects == ()
    absent = await tier.list("nowhere/at/all")
    assert (absent.objects, absent.directories) == ((), ())


async def test_listed_tags_are_those_of_head(tier: Tier) -> None:
    await tier.put_small("d/a", b"1")
    (listed,) = (await tier.list("d")).objects
    assert listed.tag == (await tier.head("d/a")).tag


async def test_delete(tier: Tier) -> None:
    await tier.put_small("d/e/f", b"1")
    await tier.put_small("d/g", b"1")
    for _ in range(2):
        await tier.delete("d/e/f")
        with pytest.raises(NotFound):
            await tier.head("d/e/f")
    await tier.delete("never/there")
    assert [info.key for info in (await tier.list("d")).objects] == ["d/g"]


async def test_delete_many(tier: Tier) -> None:
    keys = [f"d/{number:03d} é&<>'\"" for number in range(40)]
    for key in keys:
        await tier.put_small(key, b"1")
    for _ in range(2):
        await tier.delete_many([*keys[:35], "never/there"])
        assert [info.key for info in (await tier.list("d")).objects] == keys[35:]
    await tier.delete_many([])
    await tier.delete_many(keys[35:])
    assert (await tier.list("d")).objects == ()


async def test_deletes_and_puts_of_neighbours_do_not_meet(tier: Tier) -> None:
    async def turn(number: int) -> None:
        for _ in range(5):
            await tier.put_small(f"n/dir/{number}", b"1")
            await tier.delete(f"n/dir/{number}")

    await asyncio.gather(*(turn(number) for number in range(4)))
    assert (await tier.list("n/dir")).objects == ()


@pytest.mark.parametrize("key", ["", "/abs", "a//b", "a/../b", "..", "a/.", "a/"])
async def test_keys_stay_below_the_root(tier: Tier, key: str) -> None:
    with pytest.raises(InvalidArgument):
        await tier.put_small(key, b"1")
    with pytest.raises(InvalidArgument):
        await tier.head(key)


@pytest.mark.parametrize("name", ["ä ö/ü", "a+b&c=d", "per%20cent", "käse\u0301", "x" * 200, "sp ace", "q?x#y", "~*'()!"])
async def test_names_of_all_kinds(tier: Tier, name: str) -> None:
    await tier.put(f"names/{name}", BytesSource(b"data"))
    assert (await tier.get_small(f"names/{name}"))[0] == b"data"
    found = await tier.list(f"names/{name}".rpartition("/")[0])
    assert [info.key for info in found.objects] == [f"names/{name}"]


async def test_point_is_a_link_or_nothing(tier: Tier) -> None:
    await tier.put_small("p/one/doc", b"1")
    await tier.put_small("p/two/doc", b"2")
    for target in ("one", "two"):
        await tier.point("p/current", target)
    assert set((await tier.list("p")).directories) == {"one", "two"}
    assert (await tier.list("p")).objects == ()


async def test_probe_leaves_nothing_and_is_repeatable(tier: Tier) -> None:
    first = await tier.probe()
    assert await tier.probe() == first or first.clock_skew_s is not None
    assert first.conditional_create
    assert first.conditional_replace
    assert first.list_after_put
    for name in (await tier.list(".forebay/probe")).directories:  # some object stores keep an empty directory for a while
        assert (await tier.list(f".forebay/probe/{name}")).objects == ()


async def test_stopping_a_read_early_lets_go(tier: Tier) -> None:
    data = blob(40 * CHUNK)
    await tier.put("x", BytesSource(data))
    for _ in range(30):
        pieces = tier.read("x", 0, len(data))
        async for piece in pieces:
            assert piece == data[: len(piece)]
            break
        await pieces.aclose()  # type: ignore[attr-defined]
    assert (await tier.head("x")).size == len(data)


async def test_wrong_checksums_never_become_an_object(tier: Tier) -> None:
    """The tier may refuse at put or show it at verify; it never verifies."""
    source = BytesSource(blob(2 * CHUNK), wrong=True)
    with pytest.raises((Corrupt, Unavailable)):
        await tier.put("x", source)
        await tier.verify("x", source)
