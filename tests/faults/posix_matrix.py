"""Every file call of the POSIX tier against every fault: what must come of it. Tables, and `main`, which tries them under the
shim: `python -m faults.posix_matrix ROOT CONTROL`, one JSON line a cell.
"""

import asyncio
import json
import sys
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from conformance.tier_kit import BytesSource, blob
from faults.results import SOAK
from faults.shim import FOREVER, Shim
from forebay_gateway.base.clock import SystemClock
from forebay_gateway.core.errors import AlreadyExists, ForebayError, NotFound
from forebay_gateway.tiers.base import Tier
from forebay_gateway.tiers.chunks import verified_chunks
from forebay_gateway.tiers.posix.tier import PosixTier
from forebay_gateway.tiers.retrying import RetryingTier, RetryPolicy

TIMEOUT_S = 0.4
DATA = blob(3 * (64 << 10) + 4097)
DOCUMENT = blob(9001, 2)
CALLS_OF = {
    "put": ("open", "pwrite", "fsync", "pread", "rename", "dirfsync"),
    "put-buffered": ("open", "pwrite", "fsync", "pread", "rename", "dirfsync"),
    "document": ("open", "pwrite", "fsync", "pread", "rename", "unlink", "dirfsync"),
    "create": ("open", "pwrite", "fsync", "pread", "link", "unlink", "dirfsync"),
    "replace": ("open", "pwrite", "fsync", "pread", "rename", "link", "unlink", "dirfsync"),
    "verify": ("open", "pread"),
    "get": ("open", "pread"),
    "read": ("open", "pread"),
    "delete": ("unlink", "dirfsync"),
}
FULL = ("ENOSPC", "EDQUOT")
AWAY = ("EIO", "ESTALE")


@dataclass(frozen=True)
class PosixCell:
    act: str
    call: str
    action: str
    lasts: bool

    def __str__(self) -> str:
        return f"{self.act}.{self.call} x {self.action} {'lasting' if self.lasts else 'once'}"

    @property
    def error(self) -> str:
        """The class that must be raised, "" where the act succeeds."""
        if self.action == "short":
            return ""
        if self.action == "flip":
            # A chunk that is read for a reader is asked for twice before it is called bad; a proof is strict.
            return "" if self.act == "read" and not self.lasts else "Corrupt"
        if self.action in FULL:
            return "StorageFull"
        # The link was made: found so when looked at, and only its temporary name is left.
        done = self.act == "create" and self.call == "unlink"
        return "Unavailable" if self.lasts and not done else ""


def _fits(act: str, call: str, action: str) -> bool:
    if action in FULL:
        return call not in ("pread", "unlink") and act not in ("verify", "get", "read", "delete")
    if action == "flip":
        return call == "pread" and act not in ("get", "replace")  # documents carry a checksum of their own
    return action != "short" or call in ("pwrite", "pread")


def cells() -> list[PosixCell]:
    """All; without FOREBAY_SOAK=1 every eighth, another one in each round."""
    actions = (*AWAY, *FULL, "hang", "short", "flip")
    found = [
        PosixCell(act, call, action, lasts)
        for act, calls in CALLS_OF.items()
        for call in calls
        for action in actions
        for lasts in (True, False)
        if _fits(act, call, action)
    ]
    return found if SOAK else [each for number, each in enumerate(found) if number % 8 == (number // 8) % 8]


class _Trial:
    def __init__(self, tier: Tier, root: Path, act: str, number: int) -> None:
        self.tier, self.root, self.act = tier, root, act
        self.key = f"{number}/object"

    async def prepare(self) -> None:
        if self.act in ("verify", "read", "delete"):
            await self.tier.put(self.key, BytesSource(DATA))
        elif self.act in ("get", "replace"):
            await self.tier.put_small(self.key, DOCUMENT if self.act == "get" else b"old")

    async def do(self) -> None:
        tier, key = self.tier, self.key
        match self.act:
            case "put" | "put-buffered":
                await tier.put(key, BytesSource(DATA))
            case "document":
                await tier.put_small(key, DOCUMENT)
            case "create":
                await tier.put_small(key, DOCUMENT, if_absent=True)
            case "replace":
                await tier.put_small(key, DOCUMENT, if_match=(await tier.head(key)).tag)
            case "verify":
                await tier.verify(key, BytesSource(DATA))
            case "get":
                assert (await tier.get_small(key))[0] == DOCUMENT
            case "read":
                assert await self._read() == DATA
            case "delete":
                await tier.delete(key)

    async def _read(self) -> bytes:
        source = BytesSource(DATA)
        chunks = verified_chunks(self.tier, self.key, source.size, source.chunk_size, source.chunk_crcs, 0, 4)
        async with aclosing(chunks):
            return b"".join([bytes(chunk) async for chunk in chunks])

    def there(self) -> bytes | None:
        path = self.root / self.key
        return path.read_bytes() if path.exists() else None

    def check_done(self) -> None:
        if self.act != "delete":
            wanted = DATA if self.act.startswith(("put", "verify", "read")) else DOCUMENT
            assert self.there() == wanted, "called done, and the bytes are others"
        else:
            assert self.there() is None, "called deleted, and it is there"

    def check_whole(self) -> None:
        assert self.there() in (None, DATA, DOCUMENT, b"old"), "half a file bears the name"

    def temps(self) -> list[str]:
        return [path.name for path in (self.root / self.key).parent.glob(".forebay-tmp-*")]


async def _try(each: PosixCell, tier: Tier, root: Path, shim: Shim, number: int) -> None:
    trial = _Trial(tier, root, each.act, number)
    await trial.prepare()
    # Below the key's own directory: the tier's marker is not meant.
    shim.strike(each.call, each.action, FOREVER if each.lasts else 1, match=f"/{number}")
    failure = ""
    try:
        await trial.do()
    except ForebayError as error:
        failure = type(error).__name__
        assert "tier=pfs" in str(error), str(error)
    finally:
        hits = shim.hits
        shim.clear()  # before this test's own look at the files
    if not failure:
        trial.check_done()
    assert hits, "the fault has not struck"
    assert failure == each.error, f"{failure or 'success'} instead of {each.error or 'success'}"
    trial.check_whole()
    if each.action != "hang" and each.call != "unlink":
        assert trial.temps() == [], "a temporary file was left behind"
    if failure:
        if each.act == "create" and trial.there() is not None:
            (root / trial.key).unlink()
        try:
            await trial.do()  # and when it is over, everything works
            trial.check_done()
        except AlreadyExists:  # the act that hung went on when the hang was over
            assert each.action == "hang"
            assert trial.there() == DOCUMENT
        except NotFound:
            assert each.act == "delete"


async def main(root: Path, control: Path) -> None:
    """All cells, each in a directory of its own."""
    shim = Shim(control, root)
    policy = RetryPolicy(attempts=2, first_s=0.01, cap_s=0.02, total_s=30.0)
    tiers: dict[bool, Tier] = {}
    for direct in (True, False):
        bare = PosixTier("pfs", root, direct=direct, metadata_timeout_s=TIMEOUT_S, data_timeout_s=TIMEOUT_S, lock_ttl_s=1.0)
        await bare.probe()
        tiers[direct] = RetryingTier(bare, SystemClock(), policy)
    for number, each in enumerate(cells(), start=1000):
        problem = ""
        try:
            await _try(each, tiers[each.act != "put-buffered"], root, shim, number)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        sys.stdout.write(json.dumps({"cell": str(each), "problem": problem}) + "\n")
    for tier in tiers.values():
        await tier.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
