"""The tail of a cache file: what goes in comes out, and nothing else is ever taken for one."""

import os
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.disk import CHUNK, SIZES, PlainFile, file_of, footer_of, pieces_of, some_bytes
from forebay_gateway.cache.footer import BLOCK, Footer, align, decode, disk_size, encode, find_footer
from forebay_gateway.core.errors import Corrupt, Unsupported
from forebay_wire.checksums import crc32c, crc32c_of_chunks
from forebay_wire.manifest import pack_chunk_crcs

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)


def text(limit_bytes: int) -> st.SearchStrategy[str]:
    return st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=limit_bytes // 4)


@given(
    run=text(1024),
    step=U64,
    session=text(255),
    writer=U32,
    writers=U32,
    name=text(1024),
    crcs=st.lists(U32, max_size=1100),
    short=st.integers(0, CHUNK - 1),
)
def test_round_trip(
    run: str, step: int, session: str, writer: int, writers: int, name: str, crcs: list[int], short: int
) -> None:
    size = max(0, len(crcs) * CHUNK - short)
    crc = crc32c_of_chunks(crcs, CHUNK, size)
    footer = Footer(run, step, session, writer, writers, name, size, CHUNK, crc)
    tail = encode(footer, pack_chunk_crcs(crcs))
    assert len(tail) % BLOCK == 0
    assert align(size) + len(tail) == footer.disk_size
    assert decode(tail[:BLOCK]) == footer
    assert tail[BLOCK:].rstrip(b"\0") == pack_chunk_crcs(crcs).rstrip(b"\0")


@given(head=st.binary(max_size=120), right_crc=st.booleans())
def test_noise_is_no_footer(head: bytes, right_crc: bool) -> None:
    """Also with the right checksum over it: then the fields contradict each other, or are those of a footer."""
    body = (b"FBshard\0\1\0\0\0" + head).ljust(BLOCK - 4, b"\0")
    block = body + (crc32c(body) ^ (not right_crc)).to_bytes(4, "little")
    try:
        footer = decode(block)
    except Corrupt:
        return
    assert right_crc
    assert footer.disk_size > 0


def test_the_longest_names_fit() -> None:
    footer = Footer("r" * 1024, 2**64 - 1, "s" * 255, 2**32 - 1, 2**32 - 1, "n" * 1024, 0, CHUNK, 0)
    assert decode(encode(footer, b"")) == footer


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="chunk CRCs"):
        encode(footer_of(b"x"), b"")
    with pytest.raises(ValueError, match="bytes"):
        encode(Footer("r" * 4096, 0, "s", 0, 1, "n", 0, CHUNK, 0), b"")


@pytest.mark.parametrize("size", SIZES)
def test_found_at_every_boundary(plain_file: PlainFile, size: int) -> None:
    data = some_bytes(size)
    length = plain_file.set(file_of(data))
    assert length == disk_size(size, CHUNK)
    footer, chunks = find_footer(plain_file.descriptor, length)
    assert footer == footer_of(data)
    assert chunks == pack_chunk_crcs(crc32c(piece) for piece in pieces_of(data))


@pytest.mark.parametrize("count", [1023, 1024, 1025, 2048, 2049, 5000])
def test_found_behind_tables_of_several_blocks(plain_file: PlainFile, count: int) -> None:
    size = count * CHUNK - 77
    crcs = [random.Random(index).getrandbits(32) for index in range(count)]
    expected = Footer("r", 1, "s", 0, 1, "n", size, CHUNK, crc32c_of_chunks(crcs, CHUNK, size))
    length = plain_file.set(encode(expected, pack_chunk_crcs(crcs)), at=align(size))  # the data is a hole
    assert find_footer(plain_file.descriptor, length) == (expected, pack_chunk_crcs(crcs))


def test_every_flipped_bit_is_found(plain_file: PlainFile) -> None:
    data = some_bytes(2 * CHUNK + 5)
    length = plain_file.set(file_of(data))
    choose = random.Random(1)
    for at in range(align(len(data)), length):
        bit = choose.randrange(8)
        plain_file.flip(at, bit)
        with pytest.raises(Corrupt):
            find_footer(plain_file.descriptor, length)
        plain_file.flip(at, bit)
    assert find_footer(plain_file.descriptor, length)[0] == footer_of(data)


def test_only_a_whole_footer_is_a_newer_release_s(plain_file: PlainFile) -> None:
    """It is not to be taken for a file that nobody was promised; a version that a flipped bit makes is damage."""
    data = some_bytes(CHUNK + 9)
    length, at = plain_file.set(file_of(data)), align(len(data))
    plain_file.flip(at + 8, 1)
    with pytest.raises(Corrupt):
        find_footer(plain_file.descriptor, length)
    body = os.pread(plain_file.descriptor, BLOCK - 4, at)
    os.pwrite(plain_file.descriptor, crc32c(body).to_bytes(4, "little"), at + BLOCK - 4)
    with pytest.raises(Unsupported, match="newer release"):
        find_footer(plain_file.descriptor, length)


def test_truncated_or_grown_files_are_not_sealed(plain_file: PlainFile) -> None:
    whole = file_of(some_bytes(3 * CHUNK + 1))
    for content in (
        whole[:-BLOCK],
        whole[:-1],
        whole[BLOCK:],
        whole + bytes(BLOCK),
        whole + b"x",
        b"",
        whole[:100],
        bytes(BLOCK),
    ):
        length = plain_file.set(content)
        with pytest.raises(Corrupt):
            find_footer(plain_file.descriptor, length)


def test_a_file_that_shrinks_meanwhile(plain_file: PlainFile) -> None:
    length = plain_file.set(file_of(some_bytes(CHUNK)))
    os.ftruncate(plain_file.descriptor, length - BLOCK)
    with pytest.raises(Corrupt, match="shorter"):
        find_footer(plain_file.descriptor, length)


@pytest.mark.parametrize("tail", [0, 1, BLOCK, 2 * BLOCK])
def test_a_shard_that_is_itself_a_cache_file(plain_file: PlainFile, tail: int) -> None:
    inner = file_of(some_bytes(CHUNK + 9)) + bytes(tail)
    length = plain_file.set(file_of(inner))
    assert find_footer(plain_file.descriptor, length)[0] == footer_of(inner)
    plain_file.flip(align(len(inner)) + 20, 3)  # the real footer is damaged: the inner one must not stand in
    with pytest.raises(Corrupt):
        find_footer(plain_file.descriptor, length)


def test_an_imitation_that_implies_the_right_length(plain_file: PlainFile) -> None:
    """A footer in the data, one block before the real one, whose own table would be as much longer."""
    chunk, fake_count = 2 * CHUNK, 1030
    length = disk_size(fake_count * CHUNK, CHUNK)
    size = length - 2 * BLOCK  # one table block for the real one
    real_crcs = [0] * (-(-size // chunk))
    real = Footer("real", 1, "s", 0, 1, "n", size, chunk, crc32c_of_chunks(real_crcs, chunk, size))
    fake = Footer("fake", 1, "s", 0, 1, "n", fake_count * CHUNK, CHUNK, 0x1234)
    fake_block = encode(fake, bytes(4 * fake_count))[:BLOCK]
    assert plain_file.set(fake_block + encode(real, pack_chunk_crcs(real_crcs)), at=size - BLOCK) == length == fake.disk_size
    assert find_footer(plain_file.descriptor, length)[0] == real
    plain_file.flip(size + 9, 0)
    with pytest.raises(Corrupt, match=r"combine|wrong length"):
        find_footer(plain_file.descriptor, length)


def test_works_on_a_direct_descriptor(tmp_path: Path) -> None:
    data = some_bytes(CHUNK + 1)
    path = tmp_path / "direct"
    path.write_bytes(file_of(data))
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        pytest.skip("this disk refuses O_DIRECT")
    try:
        assert find_footer(descriptor, path.stat().st_size)[0] == footer_of(data)
    finally:
        os.close(descriptor)
