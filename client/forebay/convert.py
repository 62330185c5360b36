"""From messages to records: each record's fields have the names of the message's, and are read by them.

Owns the direction from the wire only; requests are built where they are sent.
"""

import dataclasses
import json
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
    gateway_pb2.ShardInfo: types.Shard,
    gateway_pb2.Run: types.Run,
    gateway_pb2.Pressure: types.Pressure,
    gateway_pb2.TierBacklog: types.TierBacklog,
    gateway_pb2.WaitResponse: types.WaitProgress,
    gateway_pb2.DeleteResponse: types.Deletion,
    admin_pb2.Status: types.Status,
    admin_pb2.CacheStatus: types.CacheStatus,
    admin_pb2.TierStatus: types.TierStatus,
    admin_pb2.MoverStatus: types.MoverStatus,
    admin_pb2.Alarm: types.Alarm,
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
    cls = _RECORDS[type(message)]
    known = message.DESCRIPTOR.fields_by_name
    values = {field.name: _value(message, field.name) for field in dataclasses.fields(cls) if field.name in known}
    if cls is types.Checkpoint:
        values["metadata"] = _metadata(values["run"], cast(gateway_pb2.Checkpoint, message).metadata_json)
    return cls(**values)


def _value(message: Message, name: str) -> Any:
    field = message.DESCRIPTOR.fields_by_name[name]
    value = getattr(message, name)
    if field.is_repeated:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            return dict(value)
        return tuple(_convert(item) if isinstance(item, Message) else item for item in value)
    if isinstance(value, Message):
        return _convert(value)
    return None if field.has_presence and not message.HasField(name) else value


def _metadata(run: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text) if text else {}
    except ValueError:
        value = None
    # Written by another client, perhaps: shown as it is rather than hiding the checkpoint behind an error.
    return value if isinstance(value, dict) else {"unparsed": text}
