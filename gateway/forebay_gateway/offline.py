"""Care without a running gateway: fsck and rebuild on a cache that nobody else has open.

Owns opening the node's parts for one command, under the cache's lock, and closing them. What is checked is paths/care's.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from forebay_gateway.base.clock import SystemClock
from forebay_gateway.base.logs import setup_logging
from forebay_gateway.build import Gateway, open_node
from forebay_gateway.cache.layout import CATALOG, CacheDir, FoundFile
from forebay_gateway.catalog import CatalogDamaged
from forebay_gateway.catalog.trial import trial
from forebay_gateway.core.config_sections import Config
from forebay_gateway.core.errors import InvalidArgument, StartupError
from forebay_gateway.paths.care.finding import Finding
from forebay_gateway.paths.care.fsck import Checker
from forebay_gateway.paths.care.gc import Collector
from forebay_gateway.paths.care.rebuild import (
    CUT_OFF,
    adopt_from_tiers,
    damage_note,
    last_aside,
    rebuild_ended,
    refuse_newer,
    set_aside,
    whole_look,
)
from forebay_gateway.paths.commit import CommitPath
from forebay_gateway.paths.evict import Evictor
from forebay_gateway.paths.find import Finder
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.recover import recover
from forebay_gateway.paths.retain import Retention
from forebay_gateway.paths.write import WritePath
from forebay_gateway.serve import read_config


class CutOff(Exception):
    """Ctrl-C once a rebuild had begun to change something; what it left, for people."""


@dataclass(frozen=True, slots=True)
class Rebuild:
    """What a rebuild finds, and did. Of the cache's files: counts."""

    damage: str  # empty for a catalog that can be used
    sealed_files: int
    part_files: int
    applied: bool = False
    aside: str = ""
    checkpoints: int = 0  # known after it
    from_tiers: int = 0  # of those, on tiers that could be reached
    unreachable: tuple[str, ...] = ()
    marks_lost: str = ""  # what of pins and deletions is lost, or waits for its checkpoint


def fsck(config_path: str | None, deep: bool) -> list[dict[str, Any]]:
    """All findings, as plain values. Raises ForebayError: a gateway has the cache open, another format, no such cache."""
    return asyncio.run(_fsck(*_setup(config_path), deep))


def rebuild(config_path: str | None, apply: bool, force: bool) -> dict[str, Any]:
    """What there is to rebuild from, and with `apply` the rebuild. Raises ForebayError; CutOff, KeyboardInterrupt."""
    begun: list[str] = []
    try:
        return asdict(asyncio.run(_rebuild(*_setup(config_path), apply, force, begun)))
    except KeyboardInterrupt:
        if not begun:
            raise
        kept = f", the old one is kept as {begun[0]}" if begun[0] else ""
        what = f"the new catalog is not finished{kept}; run it again, or start the gateway, which goes on with it"
        raise CutOff(what) from None


def _setup(config_path: str | None) -> tuple[Config, str]:
    config, source = read_config(config_path)
    setup_logging("error" if config.log.level != "debug" else "debug", config.log.format)
    if not (Path(config.cache.path) / "FORMAT").is_file():
        raise InvalidArgument(f"there is no forebay cache at {config.cache.path}")
    return config, source


@asynccontextmanager
async def _opened(config: Config, source: str) -> AsyncIterator[Node]:
    catalog_failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    node = await open_node(config, source, SystemClock(), catalog_failed)
    gateway = Gateway(node, source, catalog_failed)
    try:
        for tier in node.tiers.values():
            await tier.step()
        yield node
    finally:
        await gateway.stop(0.0)


async def _fsck(config: Config, source: str, deep: bool) -> list[dict[str, Any]]:
    try:
        if why := await trial(Path(config.cache.path) / CATALOG):  # by a process of its own: opening it could end this one
            return [_plain(_damaged(why))]
        async with _opened(_with_rebuild(config, "ask"), source) as node:
            evictor = Evictor(node)
            checker = Checker(node, evictor, Collector(node, Retention(node, Finder(node))), serving=False)
            return [_plain(finding) async for finding in checker.check(deep)]
    except CatalogDamaged as error:
        return [_plain(_damaged(str(error)))]  # a row in it, met on the way
    except StartupError as error:
        if not isinstance(error.__cause__, CatalogDamaged) and not await _is_lost(config):
            raise
        return [_plain(_damaged(str(error)))]


async def _is_lost(config: Config) -> bool:
    return bool(await asyncio.to_thread(damage_note, Path(config.cache.path)))


def _damaged(why: str) -> Finding:
    remedy = "`forebay rebuild --apply`, or the next start where cache.rebuild is 'auto'"
    return Finding("catalog_damaged", "catalog", why, remedy=remedy)


def _plain(finding: Finding) -> dict[str, Any]:
    values = asdict(finding)
    return {name: str(value) if name == "severity" else value for name, value in values.items() if name in SHOWN}


SHOWN = ("kind", "severity", "where", "run", "step", "session", "name", "path", "what", "remedy", "outcome")


def _with_rebuild(config: Config, mode: str) -> Config:
    return replace(config, cache=replace(config.cache, rebuild=mode))


async def _rebuild(config: Config, source: str, apply: bool, force: bool, begun: list[str]) -> Rebuild:
    path = Path(config.cache.path)
    cache = CacheDir.open(path, config.node.id)
    try:
        names = [tier.name for tier in config.tiers]
        found = Rebuild(await whole_look(path, names, config.node.id), *_count(list(cache.scan())))
        if not apply:
            return found
        if not found.damage and not force:
            raise InvalidArgument("the catalog can be used, so there is nothing to rebuild; --force rebuilds it all the same")
        await asyncio.to_thread(refuse_newer, cache)
        if found.damage == CUT_OFF:
            aside = await asyncio.to_thread(last_aside, path)
        else:
            aside = await asyncio.to_thread(set_aside, path, found.damage or "asked for")
        begun.append(aside)
    finally:
        cache.release()
    async with _opened(_with_rebuild(config, "auto"), source) as node:
        await recover(node)
        commits = CommitPath(node, WritePath(node, Evictor(node)))
        on_tiers = await adopt_from_tiers(node, Finder(node, commits.drop_open))
        marks = await node.marks.restore()  # once more, for what only the tiers know
        with node.catalog.read() as txn:
            checkpoints = sum(1 for run in txn.runs() for _ in txn.checkpoints(run))
        away = tuple(tier.name for tier in node.unreachable_tiers())
        await asyncio.to_thread(rebuild_ended, path)
    return Rebuild(found.damage, found.sealed_files, found.part_files, True, aside, checkpoints, on_tiers, away, marks.sentence)


def _count(files: list[FoundFile]) -> tuple[int, int]:
    return sum(file.kind == "shard" for file in files), sum(file.kind == "part" for file in files)
