"""Log records on standard error: lines for people, or JSON for collectors.

Owns the two forms and the set-up of the root logger. Does not own what is logged, nor where standard error goes.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

__all__ = ["JsonFormatter", "TextFormatter", "setup_logging"]

# What every record has; whatever else stands in it came in through `extra=` and is printed as key=value.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _value(value: Any) -> str:
    text = str(value)
    return text if text.isprintable() and text and not set(text) & set(' ="') else json.dumps(text)


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)


class TextFormatter(logging.Formatter):
    """`time level logger message key=value`, one line a record; a traceback follows on lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        # A name that a client chose, or a server's words, stand in messages: no line break may begin a forged record, no
        # control sequence reach a terminal.
        message = _printable(record.getMessage())
        fields = [f"{key}={_value(value)}" for key, value in _fields(record).items()]
        line = " ".join([_time(record), record.levelname.lower(), record.name, message, *fields])
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, the record's fields, and traceback where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        body = _fields(record) | {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            body["traceback"] = self.formatException(record.exc_info)
        return json.dumps(body, default=str)


def setup_logging(level: str, form: str, stream: TextIO | None = None) -> None:
    """Send records of at least `level` ("debug" to "error") to standard error (or `stream`), as "text" or "json"."""
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root = logging.getLogger()
    for old in root.handlers[:]:  # also of an earlier call: a record must not appear twice
        root.removeHandler(old)
    root.addHandler(handler)
    set_level(level)


def set_level(level: str) -> None:
    """Show records of at least this level from now on."""
    root = logging.getLogger()
    root.setLevel(level.upper())
    # At their own info level these say something for each request.
    for noisy in ("botocore", "aiobotocore", "urllib3", "aiohttp", "asyncio"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))
