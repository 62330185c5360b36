"""Space on a tier for the documents that a removal needs first: retention has to work where everything is full.

    while there is space: a document that holds some -> the ledger cannot be written: that document goes, the ledger comes
    -> what the ledger lets go of makes space -> the document is there again

Owns one document a tier, of all nodes, below `.forebay/retain`; who used it puts it back. Not on object stores, which tell no
end of their space.
"""

import contextlib
import secrets

from forebay_gateway.core.errors import AlreadyExists, NotFound
from forebay_gateway.core.retention import RESERVE_KEY
from forebay_gateway.tiers.base import ObjectInfo, StorageFull
from forebay_gateway.tiers.monitor import MonitoredTier

RESERVE_BYTES = 1 << 20  # a ledger of a few thousand checkpoints, and a manifest that is kept aside


class Reserve:
    """On one tier."""

    def __init__(self, tier: MonitoredTier) -> None:
        self._tier = tier
        self._may_fill = tier.tier.kind != "s3"
        self._is_there = False  # as far as this process knows

    async def keep(self) -> None:
        """Set it aside where it is not. Raises as the tier does."""
        if not self._may_fill or self._is_there or not self._tier.usable:
            return
        with contextlib.suppress(AlreadyExists):  # bytes that no file system makes smaller
            await self._tier.tier.put_small(RESERVE_KEY, secrets.token_bytes(RESERVE_BYTES), if_absent=True)
        self._is_there = True

    async def put(self, key: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None) -> ObjectInfo:
        """As the tier's put_small; where that finds no space, what is set aside makes some. Raises StorageFull where that is
        not enough."""
        try:
            return await self._tier.tier.put_small(key, data, if_absent=if_absent, if_match=if_match)
        except StorageFull:
            if not self._may_fill:
                raise
            self._is_there = False
            with contextlib.suppress(NotFound):
                await self._tier.tier.delete(RESERVE_KEY)
            return await self._tier.tier.put_small(key, data, if_absent=if_absent, if_match=if_match)
