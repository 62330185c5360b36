"""Log lines: one a record, fields behind, no forged lines, and JSON that parses."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from forebay_gateway.base.logs import JsonFormatter, TextFormatter, setup_logging


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    noisy = {name: logging.getLogger(name).level for name in ("botocore", "aiobotocore", "urllib3", "aiohttp", "asyncio")}
    yield root
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, before in noisy.items():
        logging.getLogger(name).setLevel(before)


def written(form: str, root: logging.Logger, level: str = "info") -> tuple[logging.Logger, io.StringIO]:
    stream = io.StringIO()
    setup_logging(level, form, stream)
    return logging.getLogger("test.logs"), stream


def test_text(root: logging.Logger) -> None:
    log, stream = written("text", root)
    log.info("tier is back", extra={"tier": "pfs", "reason": "a b", "wait_s": 1.5, "empty": ""})
    log.debug("not shown")
    time, rest = stream.getvalue().split(" ", 1)
    assert len(time) == len("2026-01-01T00:00:00.000Z")
    assert time.endswith("Z")
    assert rest == 'info test.logs tier is back tier=pfs reason="a b" wait_s=1.5 empty=""\n'


def test_a_name_from_a_client_cannot_forge_a_line(root: logging.Logger) -> None:
    log, stream = written("text", root)
    log.info("shard %s", "a\n2026 critical forged", extra={"name_of": 'x\r\n"y'})
    assert stream.getvalue().count("\n") == 1
    assert "\r" not in stream.getvalue()


def test_no_control_sequence_reaches_a_terminal(root: logging.Logger) -> None:
    log, stream = written("text", root)
    log.info("server said %s and naïve 名前", "\x1b[2J\x07\u2028\u202e")
    assert stream.getvalue().endswith("server said \\x1b[2J\\x07\\u2028\\u202e and naïve 名前\n")


def test_text_traceback(root: logging.Logger) -> None:
    log, stream = written("text", root)
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("failed", extra={"task": "drain"})
    lines = stream.getvalue().splitlines()
    assert lines[0].endswith("error test.logs failed task=drain")
    assert lines[-1] == "ValueError: why"


def test_json(root: logging.Logger) -> None:
    log, stream = written("json", root)
    log.warning("line\nbreak", extra={"size": 5, "error": ValueError("x"), "message_id": "m"})
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("failed")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (first["level"], first["logger"], first["message"], first["size"]) == ("warning", "test.logs", "line\nbreak", 5)
    assert first["error"] == "x"
    assert "ValueError: why" in second["traceback"]


def test_set_up_twice_writes_once(root: logging.Logger) -> None:
    written("text", root)
    log, stream = written("text", root, "error")
    log.error("once")
    log.warning("below the level")
    assert stream.getvalue().count("\n") == 1
    assert len(root.handlers) == 1
    assert isinstance(root.handlers[0].formatter, TextFormatter)


def test_libraries_stay_quiet_but_their_warnings_show(root: logging.Logger) -> None:
    _, stream = written("json", root, "debug")
    logging.getLogger("botocore.endpoint").info("request")
    assert stream.getvalue() == ""
    logging.getLogger("botocore.endpoint").warning("trouble")
    assert json.loads(stream.getvalue())["message"] == "trouble"
    assert isinstance(root.handlers[0].formatter, JsonFormatter)
