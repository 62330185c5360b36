"""A gateway in this process, on a real disk with real movers, whose parts a test can reach."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import forebay
from forebay_gateway.build import Gateway
from forebay_gateway.core.config import load_config


def tier(path: Path, name: str = "pfs") -> str:
    """A [[tier]] of a directory."""
    return f'[[tier]]\nname = "{name}"\nkind = "posix"\npath = {json.dumps(str(path))}\n'


@contextlib.asynccontextmanager
async def serving(
    directory: Path, *tiers: str, node: str = "a", node_keys: str = "", cache_keys: str = "", capacity: str = "256MiB"
) -> AsyncIterator[Gateway]:
    """Started, running, and ended in order; what its workers raise is raised here."""
    text = (
        f'[node]\nid = "{node}"\nlisten = ["unix://{directory}/{node}.sock"]\n{node_keys}\n'
        f'[cache]\npath = "{directory}/cache-{node}"\ncapacity = "{capacity}"\nchunk_size = "64KiB"\n'
        f'catalog_reserve = "64MiB"\n{cache_keys}\n' + "".join(tiers)
    )
    gateway = await Gateway.start(load_config(text, {}, "test", uid=0, hostname="test"), "test")
    running = asyncio.create_task(gateway.run())
    try:
        yield gateway
    finally:
        await gateway.stop(1.0)
        await running


@contextlib.asynccontextmanager
async def client_of(
    gateway: Gateway, admit_timeout: float = 60.0, retry_timeout: float = 5.0
) -> AsyncIterator[forebay.AsyncClient]:
    """A client of it."""
    address = gateway.node.config.node.listen[0]
    async with forebay.AsyncClient(address, admit_timeout=admit_timeout, retry_timeout=retry_timeout, progress=False) as client:
        yield client


async def until(look: Callable[[], object], within_s: float = 30.0) -> None:
    """Until `look` gives something true."""
    async with asyncio.timeout(within_s):
        while not look():
            await asyncio.sleep(0.02)
