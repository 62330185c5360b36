"""Many small shards in one stream, out of the packs in which the gateway keeps them.

Owns one attempt: which shards a request names, and the checks on each that comes. Does not own repeating, nor what becomes of
those that do not come (reader.py asks for them one by one).
"""

from collections.abc import Iterable, Iterator, Mapping

import grpc

from forebay import cancel
from forebay.connection import Connection
from forebay.errors import ForebayError
from forebay.types import Shard
from forebay_wire.checksums import crc32c
from forebay_wire.v1 import gateway_pb2 as pb

SIZE_MAX = 1 << 20  # a shard of this size or more is in no pack
SHARDS_MIN = 8  # fewer are as well read one by one
NAMES_MAX = 5000  # in one request
NAMES_BYTES_MAX = 1 << 20

Group = list[tuple[Shard, bytes]]


def read_many(connection: Connection, request: pb.ReadManyRequest, wanted: Mapping[str, Shard]) -> Iterator[Group]:
    """Those of the request's shards that come, in groups of some 1 MiB, each shard once, checked against `wanted`; one that
    arrives damaged is left out. Raises what the gateway answers: Unsupported where it knows no such call."""
    doing = f"read {len(request.names)} small shards"
    left = set(request.names)
    call = connection.start(lambda stubs: stubs.gateway.ReadMany, request, doing)
    with cancel.watching(call):
        try:
            for message in connection.messages(call, doing):
                group = []
                for sent in message.shards:
                    if sent.name not in left:
                        raise ForebayError(f"{doing}: {sent.name!r} came, which was not asked for")
                    left.remove(sent.name)
                    shard, data = wanted[sent.name], sent.data
                    if len(data) == shard.size and crc32c(data) == shard.crc32c:  # else it is asked for again, alone
                        group.append((shard, data))
                yield group
        except grpc.RpcError as error:
            raise connection.translate(error, doing) from error


def batches(names: Iterable[str]) -> Iterator[list[str]]:
    """Names for one request each."""
    batch: list[str] = []
    size = 0
    for name in names:
        if len(batch) >= NAMES_MAX or size >= NAMES_BYTES_MAX:
            yield batch
            batch, size = [], 0
        batch.append(name)
        size += len(name.encode())
    if batch:
        yield batch
