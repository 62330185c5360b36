"""The hot-path codec: Chunk messages framed by hand, byte-identical to what protobuf writes.

Owns the encoding of chunks inside PutShardRequest and ReadShardResponse. Everything else, and every message that does
not have exactly the expected shape, goes through the protobuf runtime, so any client that speaks the .proto is served.
The stock runtime copies a chunk's bytes several times; here one join on the way out, none on the way in.
"""

from dataclasses import dataclass
from struct import Struct
from struct import error as struct_error

from google.protobuf.message import DecodeError

from forebay_wire.v1 import gateway_pb2 as pb

__all__ = [
    "MAX_MESSAGE_BYTES",
    "ChunkFrame",
    "FrameError",
    "decode_put_request",
    "decode_read_response",
    "encode_put_chunk",
    "encode_put_header",
    "encode_put_trailer",
    "encode_read_chunk",
]

MAX_CHUNK_BYTES = 64 << 20
# Chunk of the largest size, its framing, and room for headers: a larger message is a clear error on either side.
MAX_MESSAGE_BYTES = MAX_CHUNK_BYTES + (1 << 20)

_PUT_CHUNK_TAG = 0x12  # PutShardRequest.chunk = 2, length-delimited
_READ_CHUNK_TAG = 0x0A  # ReadShardResponse.chunk = 1, length-delimited
_OFFSET_TAG = 0x08  # Chunk.offset = 1, varint
_CRC_TAG = 0x15  # Chunk.crc32c = 2, fixed32
_DATA_TAG = 0x1A  # Chunk.data = 3, length-delimited
_CRC = Struct("<BI")
_U32 = Struct("<I")


class FrameError(ValueError):
    """Bytes that are no valid message of this stream."""


@dataclass(frozen=True, slots=True)
class ChunkFrame:
    """A chunk as it lies in a received message: `data` is a view, not a copy."""

    offset: int
    crc32c: int
    data: memoryview


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _encode_chunk(outer_tag: int, offset: int, crc32c: int, data: bytes | bytearray | memoryview) -> bytes:
    # proto3 leaves out fields that hold their default; so do we, to stay byte-identical.
    length = data.nbytes if isinstance(data, memoryview) else len(data)
    head = bytearray()
    if offset:
        head.append(_OFFSET_TAG)
        head += _varint(offset)
    if crc32c:
        head += _CRC.pack(_CRC_TAG, crc32c)
    if length:
        head.append(_DATA_TAG)
        head += _varint(length)
    return b"".join((bytes((outer_tag,)), _varint(len(head) + length), head, data))


def encode_put_chunk(offset: int, crc32c: int, data: bytes | bytearray | memoryview) -> bytes:
    """A serialized PutShardRequest with a chunk. `data` is any contiguous byte buffer (format B)."""
    return _encode_chunk(_PUT_CHUNK_TAG, offset, crc32c, data)


def encode_read_chunk(offset: int, crc32c: int, data: bytes | bytearray | memoryview) -> bytes:
    """A serialized ReadShardResponse with a chunk. `data` is any contiguous byte buffer (format B)."""
    return _encode_chunk(_READ_CHUNK_TAG, offset, crc32c, data)


def encode_put_header(header: pb.PutHeader) -> bytes:
    """A serialized PutShardRequest with a header."""
    return pb.PutShardRequest(header=header).SerializeToString()


def encode_put_trailer(size: int, crc32c: int) -> bytes:
    """A serialized PutShardRequest with a trailer."""
    return pb.PutShardRequest(trailer=pb.PutTrailer(size=size, crc32c=crc32c)).SerializeToString()


def _read_varint(view: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = view[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError


def _decode_chunk(outer_tag: int, message: bytes) -> ChunkFrame | None:
    """The chunk, or None where the message is not exactly what our encoder writes."""
    view = memoryview(message)
    end = len(view)
    try:
        if view[0] != outer_tag:
            return None
        length, at = _read_varint(view, 1)
        if at + length != end:
            return None
        offset = crc32c = 0
        if at < end and view[at] == _OFFSET_TAG:
            offset, at = _read_varint(view, at + 1)
            if offset >= 1 << 64:  # ten bytes hold 70 bits; what the runtime makes of those is its business
                return None
        if at < end and view[at] == _CRC_TAG:
            (crc32c,) = _U32.unpack_from(view, at + 1)
            at += 5
        if at == end:
            return ChunkFrame(offset, crc32c, view[end:])
        if view[at] != _DATA_TAG:
            return None
        length, at = _read_varint(view, at + 1)
        if at + length != end:
            return None
        return ChunkFrame(offset, crc32c, view[at:])
    except (IndexError, struct_error):
        return None


def _from_protobuf(chunk: pb.Chunk) -> ChunkFrame:
    return ChunkFrame(chunk.offset, chunk.crc32c, memoryview(chunk.data))


def decode_put_request(message: bytes) -> ChunkFrame | pb.PutHeader | pb.PutTrailer:
    """One message of a PutShard stream. Raises FrameError for bytes that are none, or that hold no frame."""
    chunk = _decode_chunk(_PUT_CHUNK_TAG, message)
    if chunk is not None:
        return chunk
    try:
        request = pb.PutShardRequest.FromString(message)
    except DecodeError as error:
        raise FrameError(f"not a PutShardRequest: {error}") from error
    match request.WhichOneof("frame"):
        case "header":
            return request.header
        case "chunk":
            return _from_protobuf(request.chunk)
        case "trailer":
            return request.trailer
    raise FrameError("a PutShardRequest without header, chunk or trailer")


def decode_read_response(message: bytes) -> ChunkFrame:
    """One message of a ReadShard stream. Raises FrameError for bytes that are none."""
    chunk = _decode_chunk(_READ_CHUNK_TAG, message)
    if chunk is not None:
        return chunk
    try:
        return _from_protobuf(pb.ReadShardResponse.FromString(message).chunk)
    except DecodeError as error:
        raise FrameError(f"not a ReadShardResponse: {error}") from error
