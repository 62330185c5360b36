"""A gateway whose cache's disk fails for its own process, by what its cache raises, as a test has it.

Owns no assertions but check_settled's.
"""

import contextlib
import errno
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import forebay
from forebay_gateway.build import Gateway
from forebay_gateway.cache.incoming import IncomingFile
from forebay_gateway.cache.layout import CacheDir
from forebay_gateway.core.errors import DiskFailed
from paths.kit import client_of, serving, until

MIB = 1 << 20
RUN = "team/run"


class Disk:
    """The cache's disk, as a test has it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fails = True
        create, write_part, try_writing = IncomingFile.create, CacheDir.write_part, CacheDir.try_writing
        monkeypatch.setattr(IncomingFile, "create", lambda *given: (self.check("create a file"), create(*given))[1])
        monkeypatch.setattr(CacheDir, "write_part", lambda *given: (self.check("write the part's file"), write_part(*given))[1])
        monkeypatch.setattr(CacheDir, "try_writing", lambda cache: (self.check("write"), try_writing(cache))[1])

    def check(self, act: str) -> None:
        if self.fails:
            raise DiskFailed(f"the cache's disk failed: cannot {act}", errno=errno.errorcode[errno.EIO])


@contextlib.asynccontextmanager
async def failing(
    tmp_path: Path, *tiers: str, retry_timeout: float = 5.0, **options: str
) -> AsyncIterator[tuple[Gateway, forebay.AsyncClient]]:
    """A gateway that knows that its disk fails, and that its tiers are there."""
    async with serving(tmp_path, *tiers, **options) as gateway, client_of(gateway, retry_timeout=retry_timeout) as client:
        await until(lambda: all(each.usable for each in gateway.node.tiers.values()))
        for _ in range(3):
            gateway.node.budget.disk.failed("cannot write")
        yield gateway, client


def on(root: Path) -> dict[str, bytes]:
    """What lies on a tier below the run, temporary files too."""
    found = (path for path in (root / RUN).rglob("*") if path.is_file() and "current" not in path.parts)
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in found}


def data(seed: int, size: int) -> bytes:
    once = bytes((seed + at) % 251 for at in range(251))
    return (once * (size // 251 + 1))[:size]


def notes(gateway: Gateway) -> list[str]:
    with gateway.node.catalog.read() as txn:
        return [name for name, _ in txn.settings() if name.startswith(("passing:", "leaving:", "unfiled:"))]


def check_settled(gateway: Gateway) -> None:
    """Nothing is on its way, and the catalog's sums hold."""
    assert gateway.node.budget.reserved == 0 and not gateway.node.passing and not notes(gateway)
    with gateway.node.catalog.read() as txn:
        assert txn.totals() == txn.recount()


SHARDS = {"large": data(1, 3 * MIB + 17), "one": data(2, 64 << 10), "empty": b""}
SMALL = {f"s/{n}": data(n, 40 * n) for n in range(70)}
