"""The hot-path codec against the protobuf runtime: the same bytes out, the same answer to any bytes in."""

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from forebay_wire import frames
from forebay_wire.frames import ChunkFrame, FrameError, decode_put_request, decode_read_response
from forebay_wire.v1 import gateway_pb2 as pb

offsets = st.integers(0, 2**64 - 1) | st.integers(0, 300) | st.sampled_from([2**7, 2**14, 2**32, 2**63, 4 << 20])
crcs = st.integers(0, 2**32 - 1) | st.just(0)
payloads = st.binary(max_size=300) | st.sampled_from([126, 127, 128, 16382, 16383, 16384, 70000]).map(bytes)


@given(offsets, crcs, payloads)
@example(0, 0, b"")
def test_our_bytes_are_protobufs_bytes(offset: int, crc: int, data: bytes) -> None:
    chunk = pb.Chunk(offset=offset, crc32c=crc, data=data)
    for buffer in (data, bytearray(data), memoryview(data)):
        assert frames.encode_put_chunk(offset, crc, buffer) == pb.PutShardRequest(chunk=chunk).SerializeToString()
        assert frames.encode_read_chunk(offset, crc, buffer) == pb.ReadShardResponse(chunk=chunk).SerializeToString()


@given(offsets, crcs, payloads)
def test_each_side_reads_the_other(offset: int, crc: int, data: bytes) -> None:
    put = pb.PutShardRequest.FromString(frames.encode_put_chunk(offset, crc, data))
    assert (put.chunk.offset, put.chunk.crc32c, put.chunk.data) == (offset, crc, data)
    for frame in (
        decode_put_request(put.SerializeToString()),
        decode_read_response(pb.ReadShardResponse(chunk=put.chunk).SerializeToString()),
    ):
        assert isinstance(frame, ChunkFrame)
        assert (frame.offset, frame.crc32c, bytes(frame.data)) == (offset, crc, data)


def test_the_payload_of_our_own_frame_is_a_view_of_the_message() -> None:
    message = frames.encode_put_chunk(5, 6, b"payload")
    frame = decode_put_request(message)
    assert isinstance(frame, ChunkFrame)
    assert frame.data.obj is message


@given(st.builds(pb.PutHeader, name=st.text(), size=st.none() | st.integers(0, 2**64 - 1)))
def test_header(header: pb.PutHeader) -> None:
    assert decode_put_request(frames.encode_put_header(header)) == header


@given(st.integers(0, 2**64 - 1), crcs)
def test_trailer(size: int, crc: int) -> None:
    assert decode_put_request(frames.encode_put_trailer(size, crc)) == pb.PutTrailer(size=size, crc32c=crc)


def by_protobuf(message: bytes, cls: type[pb.PutShardRequest] | type[pb.ReadShardResponse]) -> object:
    """What the runtime alone makes of these bytes; None where it refuses or finds no frame."""
    try:
        parsed = cls.FromString(message)
    except DecodeError:
        return None
    if isinstance(parsed, pb.ReadShardResponse):
        return parsed.chunk.offset, parsed.chunk.crc32c, parsed.chunk.data
    kind = parsed.WhichOneof("frame")
    if kind == "chunk":
        return parsed.chunk.offset, parsed.chunk.crc32c, parsed.chunk.data
    return getattr(parsed, kind) if kind else None


def by_us(message: bytes, cls: type[pb.PutShardRequest] | type[pb.ReadShardResponse]) -> object:
    try:
        frame = decode_put_request(message) if cls is pb.PutShardRequest else decode_read_response(message)
    except FrameError:
        return None
    return (frame.offset, frame.crc32c, bytes(frame.data)) if isinstance(frame, ChunkFrame) else frame


def assert_same(message: bytes) -> None:
    for cls in (pb.PutShardRequest, pb.ReadShardResponse):
        assert by_us(message, cls) == by_protobuf(message, cls)


def varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out += bytes((value & 0x7F | 0x80,))
        value >>= 7
    return out + bytes((value,))


varints = st.integers(0, 2**70).map(varint) | st.integers(0, 300).map(lambda value: varint(value)[:-1] + b"\x80" * 3 + b"\x00")
lengths = st.binary(max_size=20).map(lambda data: varint(len(data)) + data)
fields = st.one_of(
    varints.map(lambda value: b"\x08" + value),  # offset
    st.binary(min_size=4, max_size=4).map(lambda value: b"\x15" + value),  # crc32c
    lengths.map(lambda value: b"\x1a" + value),  # data
    varints.map(lambda value: b"\x15" + value),  # a wrong shape for crc32c
    st.tuples(st.integers(4, 40), varints).map(lambda pair: varint(pair[0] << 3) + pair[1]),  # unknown varint
    st.tuples(st.integers(4, 40), lengths).map(lambda pair: varint(pair[0] << 3 | 2) + pair[1]),  # unknown bytes
)


@st.composite
def odd_messages(draw: st.DrawFn) -> bytes:
    """Chunks with fields reordered, repeated, missing, unknown or of the wrong shape; outer lengths mostly right."""
    inner = b"".join(draw(st.lists(fields, max_size=5)))
    length = len(inner) + draw(st.sampled_from([0, 0, 0, 0, -1, 1]))
    tag = draw(st.sampled_from([b"\x12", b"\x0a", b"\x1a"]))
    return tag + varint(max(0, length)) + inner + draw(st.just(b"") | fields)


@given(odd_messages())
@example(b"\x12\x0b\x08" + b"\xff" * 9 + b"\x7f")  # an offset of more than 64 bits, and no data
@example(b"\x12\x0d\x08" + b"\xff" * 9 + b"\x7f\x1a\x00")
@example(b"\x12\x02\x1a\x00")  # a default written out
@example(b"\x12\x00\x12\x03\x1a\x01a")  # two chunks, which merge
def test_odd_messages_mean_what_protobuf_says(message: bytes) -> None:
    assert_same(message)


@given(st.binary(max_size=60))
def test_garbage_means_what_protobuf_says(message: bytes) -> None:
    assert_same(message)


@given(st.data(), st.integers(0, 2**40), crcs, st.binary(max_size=40))
def test_damaged_frames_mean_what_protobuf_says(data: st.DataObject, offset: int, crc: int, payload: bytes) -> None:
    message = bytearray(frames.encode_put_chunk(offset, crc, payload))
    position = data.draw(st.integers(0, len(message) - 1))
    message[position] ^= data.draw(st.integers(1, 255))
    assert_same(bytes(message))
    assert_same(bytes(message[:position]))


@pytest.mark.parametrize("message", [b"", b"\xff", b"\x12\x05\x08", b"\x2a\x00"])
def test_no_frame_is_an_error(message: bytes) -> None:
    with pytest.raises(FrameError):
        decode_put_request(message)


def test_the_largest_chunk_fits_the_message_limit() -> None:
    data = bytes(frames.MAX_CHUNK_BYTES)
    assert len(frames.encode_put_chunk(2**64 - 1, 2**32 - 1, data)) < frames.MAX_MESSAGE_BYTES
