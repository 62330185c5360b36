"""The marks that neither footers nor part files carry, as one small durable document beside them: `marks.json`.

Owns the document: what an operator asked for (pins, held queues), deletions under way, the marks of the tiers' roots. A rebuild
of the catalog reads them here. Does not own when a mark is set (paths/marks).
"""

from pathlib import Path

import msgspec

from forebay_gateway.base import durable
from forebay_gateway.cache.io import disk_errors
from forebay_gateway.core.errors import Corrupt
from forebay_wire.checksums import crc32c

MARKS = "marks.json"
FORMAT = 1


class Pin(msgspec.Struct, frozen=True, order=True):
    """A checkpoint that is to stay."""

    run: str
    step: int


class Going(msgspec.Struct, frozen=True, order=True):
    """A deletion under way, of these sessions (their numbers here, which are never given again) and no others."""

    run: str
    step: int
    session_ids: tuple[int, ...]


class Marks(msgspec.Struct, frozen=True):
    """All of them."""

    pins: tuple[Pin, ...] = ()
    going: tuple[Going, ...] = ()
    settings: dict[str, bytes] = {}
    waiting: tuple[Pin, ...] = ()  # pins of checkpoints that a rebuild of the catalog did not find


class _Document(msgspec.Struct, frozen=True):
    format: int
    crc32c: str
    marks: msgspec.Raw


def read_marks(cache: Path) -> Marks | None:
    """What stands there; None where nothing does. Raises Corrupt, Unavailable. Blocking."""
    path = cache / MARKS
    with disk_errors("read the marks", path):
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
    try:
        document = msgspec.json.decode(data, type=_Document)
        body = bytes(document.marks)
        if document.format != FORMAT or document.crc32c != f"{crc32c(body):08x}":
            raise Corrupt("the document of pins, holds and deletions is damaged", path=path)
        return msgspec.json.decode(body, type=Marks)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Corrupt(f"the document of pins, holds and deletions is damaged: {error}", path=path) from error


def write_marks(cache: Path, marks: Marks) -> None:
    """Whole and durable when this returns. Raises DiskFull, Unavailable. Blocking."""
    body = msgspec.json.encode(marks)
    document = msgspec.json.encode(_Document(FORMAT, f"{crc32c(body):08x}", msgspec.Raw(body)))
    path = cache / MARKS
    with disk_errors("write the marks", path):
        durable.replace_file(path, document, MARKS)
