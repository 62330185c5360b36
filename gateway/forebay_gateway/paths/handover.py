"""From one process to the next: an orderly stop leaves a mark, so that the next start need not compare files and rows.

    stop: all work has ended -> a token in the catalog, synced -> the same token in a file beside it
    start: the two agree -> both are removed, before anything else -> the start is a clean one

The file alone says that nothing ran since, the token that this is the very catalog that was closed then, and no older one that
was put back. Owns the mark; what a start leaves out for it is recover.py's.
"""

import logging
import secrets

from forebay_gateway.base import durable
from forebay_gateway.cache.io import disk_errors
from forebay_gateway.cache.layout import CLEAN
from forebay_gateway.core.errors import ForebayError
from forebay_gateway.paths.node import Node

log = logging.getLogger("forebay.handover")

SETTING = "clean-stop"


async def leave_clean(node: Node) -> None:
    """The last act of an orderly stop: all work has ended, and none has failed."""
    token = secrets.token_hex(16).encode()
    try:
        await node.catalog.write(lambda txn: txn.set_setting(SETTING, token))
        await node.io.run(durable.replace_file, node.cache.path / CLEAN, token, CLEAN)
    except (ForebayError, OSError) as error:  # the next start looks at all files, no more than that
        log.warning("cannot leave the mark of an orderly stop error=%s", error)


async def take_clean(node: Node) -> bool:
    """Whether the process before this one stopped in order. The mark is gone when this returns, whatever follows."""
    path = node.cache.path / CLEAN

    def take() -> bytes:
        with disk_errors("read the mark of an orderly stop", path):
            try:
                token = path.read_bytes()
            except FileNotFoundError:
                return b""
        node.cache.unlink(path)
        return token

    token = await node.io.run(take)
    with node.catalog.read() as txn:
        expected = txn.setting(SETTING)
    if expected is not None:
        await node.catalog.write(lambda txn: txn.set_setting(SETTING, None), frees=True)
    return bool(token) and token == expected and not node.rebuilt
