"""What a file system can do, found out by doing it below `.forebay/probe/`.

Owns the trial. Does not own the acts: it goes through the tier's own verbs.
"""

import contextlib
import secrets
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from forebay_gateway.core.errors import AlreadyExists, Corrupt, ForebayError, Unavailable
from forebay_gateway.core.layout import CONTROL_DIR
from forebay_gateway.tiers.base import Capabilities

if TYPE_CHECKING:
    from forebay_gateway.tiers.posix.tier import PosixTier


async def probe(tier: "PosixTier") -> Capabilities:
    """Raises what the first failing round trip raised; a missing extra only clears its flag."""
    directory = f"{CONTROL_DIR}/probe/{tier.temp_tag.rstrip('@') or secrets.token_hex(8)}"
    key, link = f"{directory}/document", f"{directory}/link"
    notes = {"marker": tier.marker.id or ""}
    data = secrets.token_bytes(5000)
    if tier.temp_tag:  # what an earlier process of this node left when it was killed in the middle of its probe
        await tier.sweep(f"{CONTROL_DIR}/tier.json")
        await tier.sweep(key)
        await tier.drop_lock(key)  # nobody else uses this directory, and its time to live would be waited for
        await tier.delete(f"{directory}/created")
    try:
        await tier.put_small(key, data)
        if (await tier.get_small(key))[0] != data:
            raise Corrupt("a document read back differs from what was written", tier=tier.name)
        return Capabilities(
            conditional_create=await _tried(_conditional_create(tier, directory), "conditional_create", notes),
            conditional_replace=await _tried(_conditional_replace(tier, key), "conditional_replace", notes),
            server_checksum=False,
            multipart=False,
            list_after_put=any(info.key == key for info in (await tier.list(directory)).objects),
            links=await _tried(_links(tier, link), "links", notes),
            direct_io=await tier.try_direct(key),
            notes=notes,
        )
    finally:
        for each in (link, f"{directory}/created", key):
            with contextlib.suppress(Unavailable):
                await tier.delete(each)


async def _conditional_create(tier: "PosixTier", directory: str) -> bool:
    key = f"{directory}/created"
    await tier.put_small(key, b"first", if_absent=True)
    return await _refused(tier, key, b"first", if_absent=True)


async def _conditional_replace(tier: "PosixTier", key: str) -> bool:
    old = await tier.head(key)
    await tier.put_small(key, b"second", if_match=old.tag)
    return await _refused(tier, key, b"second", if_match=old.tag)


async def _refused(tier: "PosixTier", key: str, was: bytes, *, if_absent: bool = False, if_match: str | None = None) -> bool:
    try:
        await tier.put_small(key, b"must not land", if_absent=if_absent, if_match=if_match)
    except AlreadyExists:
        return (await tier.get_small(key))[0] == was
    return False


async def _links(tier: "PosixTier", key: str) -> bool:
    await tier.point(key, "document")
    return (tier.root / key).readlink().name == "document"


async def _tried(trial: Coroutine[Any, Any, bool], what: str, notes: dict[str, str]) -> bool:
    try:
        return await trial
    except Unavailable:  # it may pass, so it proves no lack
        raise
    except ForebayError as error:
        notes[what] = str(error)
        return False
