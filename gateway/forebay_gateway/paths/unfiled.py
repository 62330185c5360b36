"""Commits whose part file could not be written since the cache's disk failed: written once it works again.

Owns the end of these notes, settings of the catalog that the commits made in their own transactions. Until then the catalog
alone knows the commit (and each tier that has the part's record): a rebuild would not.
"""

import logging
from functools import partial

from forebay_gateway.catalog import ReadTxn, WriteTxn
from forebay_gateway.core.errors import DiskFailed, NotFound
from forebay_gateway.core.records import PartState
from forebay_gateway.paths.commit import UNFILED, part_document
from forebay_gateway.paths.node import FILES, Node
from forebay_gateway.paths.pages import all_shards
from forebay_gateway.paths.write import PartRef

log = logging.getLogger("forebay.commit")

AGAIN_S = 5.0


class Filer:
    """Writes what is missing. One a gateway."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def step(self) -> float | None:
        """Background: all that is noted, where the disk works; the pause in seconds until the next look."""
        with self._node.catalog.read() as txn:
            names = [name for name, _ in txn.settings() if name.startswith(UNFILED)]
        for name in names:
            if self._node.budget.disk.reason:
                return AGAIN_S
            session_id, writer = (int(number, 16) for number in name.removeprefix(UNFILED).split("-"))
            try:
                with self._node.disk_refusals_shown():
                    await self._file(session_id, writer)
            except DiskFailed as error:
                log.info("a part's file cannot be written yet session_id=%s writer=%s error=%s", session_id, writer, error)
                return AGAIN_S
            except NotFound:
                pass  # it went meanwhile
            await self._node.catalog.write(partial(_forget, name))
        return None

    async def _file(self, session_id: int, writer: int) -> None:
        # A file that comes behind a deletion would prove a commit to the next start.
        with self._node.publishes(FILES, session_id):
            await self._write(session_id, writer)

    async def _write(self, session_id: int, writer: int) -> None:
        with self._node.catalog.read() as txn:
            part, session = txn.part(session_id, writer), txn.session(session_id)
            if not _is_wanted(txn, session_id, writer):
                return
        assert part is not None
        assert session is not None
        ref = PartRef(session.run, session.step, session.session, writer, session.writers)
        rows = await all_shards(self._node, session_id, writer)
        document = await part_document(self._node, ref, rows, part.metadata_json, part.kind, session.tiers)
        await self._node.io.run(self._node.cache.write_part, session_id, writer, part.commit_seq, document)
        with self._node.catalog.read() as txn:
            is_wanted = _is_wanted(txn, session_id, writer)
        if not is_wanted:  # it left the cache meanwhile, which asks no tier
            await self._node.io.run(self._node.cache.remove_part_files, session_id, writer)
            await self._node.io.run(self._node.cache.drop_session_dir, session_id)


def _is_wanted(txn: ReadTxn, session_id: int, writer: int) -> bool:
    """Whether the part is committed and stays."""
    part, session = txn.part(session_id, writer), txn.session(session_id)
    checkpoint = None if session is None else txn.checkpoint(session.run, session.step)
    if part is None or checkpoint is None:
        return False
    return part.state is PartState.COMMITTED and not checkpoint.deleting


def _forget(name: str, txn: WriteTxn) -> None:
    txn.set_setting(name, None)
