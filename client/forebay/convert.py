"""From messages to records: each record's fields have the names of the message's, and are read by them.

Owns the direction from the wire only; requests are built where they are sent.
"""

import dataclasses
import functools
import json
import operator
from collections.abc import Callable
from typing import Any, TypeVar, cast

from google.protobuf.message import Message

from forebay import types
from forebay_wire.v1 import admin_pb2, gateway_pb2

_Record = TypeVar("_Record")

_RECORDS: dict[type[Message], type[Any]] = {
    gateway_pb2.Receipt: types.Receipt,
    gateway_pb2.Missing: types.Missing,
    gateway_pb2.Level: types.Level,
    gateway_pb2.Checkpoint: types.Checkpoint,
    gateway_pb2.Policy: types.Policy,
    gateway_pb2.ShardInfo: types.Shard,
    gateway_pb2.Run: types.Run,
    gateway_pb2.Pressure: types.Pressure,
    gateway_pb2.TierBacklog: types.TierBacklog,
    gateway_pb2.Preempted: types.Preempted,
    gateway_pb2.NotReached: types.NotReached,
    gateway_pb2.WaitResponse: types.WaitProgress,
    gateway_pb2.DeleteResponse: types.Deletion,
    admin_pb2.Status: types.Status,
    admin_pb2.CacheStatus: types.CacheStatus,
    admin_pb2.TierStatus: types.TierStatus,
    admin_pb2.RetentionStatus: types.RetentionStatus,
    admin_pb2.Fate: types.Fate,
    admin_pb2.MoverStatus: types.MoverStatus,
    admin_pb2.Alarm: types.Alarm,
    admin_pb2.QueueEntry: types.QueueEntry,
    admin_pb2.ReloadConfigResponse: types.Reloaded,
    admin_pb2.CopyReport: types.CopyReport,
    admin_pb2.ScrubStatus: types.ScrubStatus,
    admin_pb2.TierScrub: types.TierScrub,
    admin_pb2.Finding: types.Finding,
    admin_pb2.Quarantined: types.Quarantined,
    admin_pb2.Garbage: types.Garbage,
    admin_pb2.Moved: types.Moved,
}


def record(message: Message, cls: type[_Record]) -> _Record:
    """The record of a message; `cls` is the record's type."""
    return cast(_Record, _convert(message))


def _convert(message: Message) -> Any:
    kind: Any = type(message)  # protobuf's stubs make it no key of a cache
    cls = _RECORDS[kind]
    values = {name: read(message) for name, read in _readers(kind)}
    if cls is types.Checkpoint:
        values["metadata"] = _metadata(values["run"], cast(gateway_pb2.Checkpoint, message).metadata_json)
    return cls(**values)


@functools.cache  # a listing has thousands of messages of one type
def _readers(message_type: type[Any]) -> tuple[tuple[str, Callable[[Message], Any]], ...]:
    """How each of a record's fields is read from messages of this type."""
    known = message_type.DESCRIPTOR.fields_by_name
    names = [field.name for field in dataclasses.fields(_RECORDS[message_type]) if field.name in known]
    return tuple((name, _reader(known[name])) for name in names)


def _reader(field: Any) -> Callable[[Message], Any]:
    get: Callable[[Any], Any] = operator.attrgetter(field.name)
    inner = field.message_type
    if field.is_repeated:
        if inner is None:
            return lambda message: tuple(get(message))
        if inner.GetOptions().map_entry:
            return lambda message: dict(get(message))
        return lambda message: tuple(map(_convert, get(message)))
    if inner is not None:
        return lambda message: _convert(get(message))
    if field.has_presence:
        return lambda message: get(message) if message.HasField(field.name) else None
    return get


def _metadata(run: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text) if text else {}
    except ValueError:
        value = None
    # Written by another client, perhaps: shown as it is rather than hiding the checkpoint behind an error.
    return value if isinstance(value, dict) else {"unparsed": text}
