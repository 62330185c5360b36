"""From one process to the next: an orderly stop leaves a mark, so that the next start need not compare files and rows.

    stop: all work has ended -> a token in the catalog, synced, the catalog closed -> the same token in a file beside it, with
    size and time of the catalog's own file
    start: nobody has touched the catalog since, and the tokens agree -> both are removed, before anything else -> it is clean

The file alone says that nothing ran since, the token that this is the very catalog that was closed then, and no older one that
was put back. Owns the mark; what a start leaves out for it is recover.py's.
"""

import logging
import secrets
from pathlib import Path

from forebay_gateway.base import durable, failpoints
from forebay_gateway.cache.layout import CATALOG, CLEAN
from forebay_gateway.core.errors import ForebayError
from forebay_gateway.paths.node import Node

log = logging.getLogger("forebay.handover")

SETTING = "clean-stop"
CATALOG_FILE = Path(CATALOG, "data.mdb")


async def leave_token(node: Node) -> str:
    """The last change of an orderly stop: all work has ended, and none has failed. Empty where it could not be made."""
    token = secrets.token_hex(16)
    try:
        await node.catalog.write(lambda txn: txn.set_setting(SETTING, token.encode()))
    except ForebayError as error:  # the next start looks at all files, no more than that
        log.warning("cannot leave the mark of an orderly stop error=%s", error)
        return ""
    failpoints.hit("handover.token_left")
    return token


def leave_mark(cache: Path, token: str) -> None:
    """Once the catalog is closed. Blocking."""
    try:
        durable.replace_file(cache / CLEAN, _mark(cache, token), CLEAN)
    except OSError as error:
        log.warning("cannot leave the mark of an orderly stop error=%s", error)


def found_mark(cache: Path) -> str:
    """Before the catalog is opened: the token, empty where there is none or the catalog was touched since. Blocking."""
    try:
        mark = (cache / CLEAN).read_bytes()
        token = mark.partition(b" ")[0].decode("ascii", errors="replace")
        return token if mark == _mark(cache, token) else ""
    except OSError:
        return ""


def _mark(cache: Path, token: str) -> bytes:
    found = (cache / CATALOG_FILE).stat()
    return f"{token} {found.st_size} {found.st_mtime_ns} {found.st_ino}\n".encode()


async def take_clean(node: Node) -> bool:
    """Whether the process before this one stopped in order. The mark is gone when this returns, whatever follows."""
    await node.io.run(node.cache.unlink, node.cache.path / CLEAN)
    failpoints.hit("handover.mark_taken")
    with node.catalog.read() as txn:
        expected = txn.setting(SETTING)
    if expected is not None:
        await node.catalog.write(lambda txn: txn.set_setting(SETTING, None), frees=True)
    return node.clean_mark != "" and node.clean_mark.encode() == expected and not node.rebuilt
