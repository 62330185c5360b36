"""A catalog that is lost or damaged: set aside, and made anew from the cache's own files and the tiers' manifests.

    is it lost or damaged? -> its directory renamed to catalog.damaged-<n> -> a new one -> recover.py: every sealed file by its
    footer, every commit by its part file -> copies are asked for on the tiers before anything is put again

Owns when and how the old one goes aside; never deletes it. Pins, held queues and deletions under way
come from the marks beside it; the scrub's cursor is lost.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from forebay_gateway.base import durable
from forebay_gateway.cache.layout import ASIDE_PREFIX, DATA, CacheDir
from forebay_gateway.catalog import Catalog, CatalogDamaged
from forebay_gateway.core.errors import ForebayError, StartupError
from forebay_gateway.paths.find import Finder
from forebay_gateway.paths.node import Node

log = logging.getLogger("forebay.rebuild")

CATALOG = "catalog"
SUSPECT = "suspect"  # in the catalog's directory: a running gateway met damage that opening the file did not show
LOST = "the catalog is gone, and the cache is not empty"


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What was wrong, and where the old catalog lies; empty where nothing was."""

    why: str = ""
    aside: str = ""


def damage_note(path: Path) -> str:
    """Why the catalog below the cache directory `path` cannot be used, as far as its files' names tell. Blocking."""
    catalog = path / CATALOG
    if not catalog.is_dir() or not any(catalog.iterdir()):
        return LOST if any((path / DATA).glob("*/*.shard")) or any((path / DATA).glob("*/part-*.json")) else ""
    try:
        return (catalog / SUSPECT).read_text(errors="replace").strip()
    except FileNotFoundError:
        return ""


def note_damage(path: Path, error: BaseException) -> None:
    """Have the next start look at the catalog as damaged. Blocking."""
    durable.replace_file(path / CATALOG / SUSPECT, f"{error}\n".encode(), SUSPECT)


def set_aside(path: Path) -> str:
    """Rename the catalog's directory, durably; its new name, empty where there was none. Blocking."""
    catalog = path / CATALOG
    if not catalog.is_dir():
        return ""
    taken = [int(found.name[len(ASIDE_PREFIX) :]) for found in path.glob(f"{ASIDE_PREFIX}*") if _is_number(found.name)]
    aside = path / f"{ASIDE_PREFIX}{max(taken, default=0) + 1}"
    catalog.rename(aside)
    durable.sync_dir(path)
    return aside.name


def _is_number(name: str) -> bool:
    return name[len(ASIDE_PREFIX) :].isdecimal()


async def open_catalog(
    cache: CacheDir,
    tiers: Sequence[str],
    node: str,
    mode: str,
    source: str,
    failed: Callable[[BaseException], None] | None,
) -> tuple[Catalog, Rebuilt]:
    """The catalog, made anew where it has to be and `mode` is "auto"; recovery then fills it. Raises StartupError."""

    async def open_it() -> Catalog:
        return await Catalog.open(cache.path / CATALOG, tiers=tiers, node=node, on_failure=failed)

    cause: CatalogDamaged | None = None
    why = await asyncio.to_thread(damage_note, cache.path)
    if not why:
        try:
            return await open_it(), Rebuilt()
        except CatalogDamaged as error:
            why, cause = str(error), error
    if mode != "auto":
        raise StartupError(
            f"the catalog cannot be used ({why}), and cache.rebuild is 'ask'; see what would be done with "
            f"`forebay rebuild{config_option(source)}`, and do it with `forebay rebuild{config_option(source)} --apply`"
        ) from cause
    aside = await asyncio.to_thread(set_aside, cache.path)
    log.warning("the catalog is rebuilt from the cache's files reason=%s aside=%s", why, aside or "nothing was left")
    return await open_it(), Rebuilt(why, aside)


def config_option(source: str) -> str:
    """How a command is told of the configuration that is in force."""
    return "" if source == "embedded default" else f" --config {source}"


def tell(node: Node, rebuilt: Rebuilt) -> None:
    """An operator has to hear of it until the next start."""
    if rebuilt.why:
        kept = f"; the old one is kept as {rebuilt.aside}" if rebuilt.aside else ""
        node.alarms["catalog-rebuilt"] = (
            f"the catalog was rebuilt from the cache's files: {rebuilt.why}{kept}",
            "`forebay fsck` compares all there is",
        )


async def adopt_from_tiers(node: Node, finder: Finder) -> int:
    """Take in every complete checkpoint that a tier's manifest names; how many are known then."""
    known = 0
    for run in await finder.runs():
        for step in await finder.steps(run):
            try:
                await finder.complete(run, step)
                known += 1
            except ForebayError as error:
                log.info("not taken in run=%s step=%s reason=%s", run, step, error)
    return known
