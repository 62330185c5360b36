"""CRC32C: the published vectors, and combination without reading again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay_wire.checksums import combine, crc32c, crc32c_of_chunks, crc32c_of_pieces


@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),  # RFC 3720 appendix B.4, this and the next three
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(reversed(range(32))), 0x113FDB5C),
    ],
)
def test_known_vectors(data: bytes, crc: int) -> None:
    assert crc32c(data) == crc
    assert crc32c(memoryview(data)) == crc
    assert crc32c(bytearray(data)) == crc


@given(st.binary(), st.binary())
def test_combine(first: bytes, second: bytes) -> None:
    assert combine(crc32c(first), crc32c(second), len(second)) == crc32c(first + second)
    assert crc32c(second, crc32c(first)) == crc32c(first + second)


@given(st.binary(max_size=200), st.integers(1, 64))
def test_of_chunks(data: bytes, chunk_size: int) -> None:
    crcs = [crc32c(data[at : at + chunk_size]) for at in range(0, len(data), chunk_size)]
    assert crc32c_of_chunks(crcs, chunk_size, len(data)) == crc32c(data)


@pytest.mark.parametrize("length", [64 << 10, (4 << 20) - 1, 64 << 20])
def test_combine_over_long_pieces(length: int) -> None:
    piece = bytes(length)
    assert combine(crc32c(b"head"), crc32c(piece), length) == crc32c(piece, crc32c(b"head"))


def test_order_matters() -> None:
    crcs = [crc32c(b"abcd"), crc32c(b"efgh")]
    assert crc32c_of_chunks(crcs[::-1], 4, 8) != crc32c(b"abcdefgh")


@given(st.lists(st.binary(max_size=300)))
def test_of_pieces(pieces: list[bytes]) -> None:
    assert crc32c_of_pieces((crc32c(piece), len(piece)) for piece in pieces) == crc32c(b"".join(pieces))
