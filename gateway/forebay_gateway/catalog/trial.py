"""All of the catalog is read by a process that may die of it: LMDB has no defence against a damaged page but a crash.

    the look at every page (structure) -> every entry of every database, by LMDB itself

Owns that process and what its end means. What entries say against each other is indexes.py's, and is safe to ask afterwards.
A gateway may be at work meanwhile: the child reads a snapshot.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from pathlib import Path

import lmdb

from forebay_gateway.catalog import pages
from forebay_gateway.catalog.schema import CatalogDamaged
from forebay_gateway.catalog.storage import DATA_NAME, MAIN_DATABASES_MAX, READERS_MAX, is_damage
from forebay_gateway.catalog.structure import check_trees
from forebay_gateway.core.errors import StartupError

log = logging.getLogger("forebay.catalog")

_DAMAGED = 3
_FATAL = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT, signal.SIGILL)
_START_S_MAX = 60.0
_BYTES_PER_S_MIN = 2 << 20  # a tenth of what it reads on a slow machine; a read that goes round in circles must end
_LOOKS_MAX = 20


async def trial(path: Path) -> str:
    """What is wrong with the catalog in the directory `path`; empty where all can be read, or where there is none.

    Whatever else keeps the child from its work is logged, and proves nothing.
    """
    data = path / DATA_NAME
    if not data.exists():
        return ""
    command = [sys.executable, "-m", __name__, str(path)]
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL)
    limit_s = _START_S_MAX + data.stat().st_size / _BYTES_PER_S_MIN
    try:
        out, _ = await asyncio.wait_for(child.communicate(), limit_s)
    except TimeoutError:
        return f"it cannot be read to its end within {limit_s:.0f} s"
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
    code = child.returncode or 0
    if code == _DAMAGED:
        return out.decode(errors="replace").strip()
    if -code in _FATAL:
        return f"a process that reads it dies of {signal.Signals(-code).name}"
    if code:
        log.warning("the catalog could not be read on trial exit=%s said=%s", code, out.decode(errors="replace").strip())
    return ""


def read_all(path: Path) -> None:
    """Read every page and every entry. Raises CatalogDamaged and LMDB's errors, or ends the process. Blocking."""
    pages.check_file(path / DATA_NAME)
    with lmdb.open(str(path), readonly=True, create=False, max_dbs=MAIN_DATABASES_MAX, max_readers=READERS_MAX) as env:
        _check_pages(env, path / DATA_NAME)
        with env.begin() as txn:
            for name, _ in txn.cursor():
                for _ in txn.cursor(env.open_db(name, txn=txn, create=False)):
                    pass


def _check_pages(env: lmdb.Environment, data: Path) -> None:
    """Of a snapshot, whose pages nobody writes over while its transaction lives; tried again where a writer was faster than the
    look at its meta page."""
    descriptor = os.open(data, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for _ in range(_LOOKS_MAX):
            with env.begin() as txn:
                meta = pages.meta_of(descriptor, txn.id())
                if meta is not None:
                    check_trees(descriptor, meta)
                    return
        raise StartupError("the catalog is written faster than it can be looked at")
    finally:
        os.close(descriptor)


def _main() -> int:
    try:
        read_all(Path(sys.argv[1]))
    except Exception as error:
        if not is_damage(error):
            raise
        sys.stdout.write(error.what if isinstance(error, CatalogDamaged) else str(error))
        return _DAMAGED
    return 0


if __name__ == "__main__":
    sys.exit(_main())
