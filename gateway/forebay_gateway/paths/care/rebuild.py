"""A catalog that is lost or damaged: set aside, and made anew from the cache's own files and the tiers' manifests.

    is it lost or damaged? -> its directory renamed to catalog.damaged-<n> -> a new one, with a note in it until all is done
    -> recover.py: every sealed file by its footer, every commit by its part file -> copies are asked for on the tiers before
    anything is put again

Owns when and how the old one goes aside; never deletes it. Pins, held queues and deletions under way
come from the marks beside it; the scrub's cursor is lost.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from forebay_gateway.base import durable, failpoints, fatal
from forebay_gateway.base.tasks import detached
from forebay_gateway.cache.layout import ASIDE_PREFIX, CATALOG, DATA, FATAL, CacheDir
from forebay_gateway.catalog import Catalog, CatalogDamaged, index_problems, is_damage
from forebay_gateway.catalog.trial import trial
from forebay_gateway.core.errors import ForebayError, StartupError, Unsupported
from forebay_gateway.paths.find import Finder
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.recover import read_footer
from forebay_wire.manifest import ManifestError, NewerVersion, PartRecord

log = logging.getLogger("forebay.rebuild")

SUSPECT = "suspect"  # in the catalog's directory: a running gateway met damage that opening the file did not show
UNFINISHED = "rebuilding"  # likewise: it was made anew, and does not yet know all that the files say
CUT_OFF = "a rebuild of it was cut off"
_noting = threading.Lock()
LOST = "the catalog is gone, and the cache is not empty"


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What was wrong, and where the old catalog lies; empty where nothing was."""

    why: str = ""
    aside: str = ""


def damage_note(path: Path) -> str:
    """Why the catalog below the cache directory `path` cannot be used, as far as its files' names tell. Blocking."""
    catalog = path / CATALOG
    if _is_bare(catalog):
        return LOST if any((path / DATA).glob("*/*.shard")) or any((path / DATA).glob("*/part-*.json")) else ""
    try:
        return (catalog / SUSPECT).read_text(errors="replace").strip()
    except FileNotFoundError:
        return ""


def note_damage(path: Path, error: BaseException) -> None:
    """Have the next start look at the catalog as damaged. Blocking."""
    with _noting:  # a call and a worker may stumble at once
        durable.replace_file(path / CATALOG / SUSPECT, f"{error}\n".encode(), SUSPECT)


def refuse_newer(cache: CacheDir) -> None:
    """Before a catalog goes: by files that a newer release wrote none can be made here. Blocking. Raises StartupError."""
    for file in cache.scan():
        try:
            if file.kind == "shard":
                read_footer(file.path)
            elif file.kind == "part":
                PartRecord.from_json(file.path.read_bytes())
        except (NewerVersion, Unsupported) as error:
            raise StartupError(
                f"the catalog cannot be made anew by this release: a file of the cache was written by a newer one, which can "
                f"({error})",
                path=file.path,
            ) from error
        except (ManifestError, ForebayError, OSError):
            continue  # what is damaged is judged file by file, once there is a catalog to judge by


def set_aside(path: Path, why: str) -> str:
    """Rename the catalog's directory, durably, and note `why` in the one that takes its place; the old one's new name, empty
    where there was none. Blocking."""
    catalog, aside = path / CATALOG, ""
    if not _is_bare(catalog):
        aside = f"{ASIDE_PREFIX}{max(_asides(path), default=0) + 1}"
        catalog.rename(path / aside)
        failpoints.hit("rebuild.set_aside")
    catalog.mkdir(exist_ok=True)
    durable.sync_dir(path)
    durable.replace_file(catalog / UNFINISHED, f"{why}\n".encode(), UNFINISHED)
    return aside


def _is_bare(catalog: Path) -> bool:
    """Whether there is none, or no more of it than a rebuild leaves that is killed at once."""
    return not catalog.is_dir() or all(entry.name.startswith(durable.TEMP_PREFIX) for entry in catalog.iterdir())


def last_aside(path: Path) -> str:
    """The name of the catalog that was set aside last; empty where there is none. Blocking."""
    return f"{ASIDE_PREFIX}{max(found)}" if (found := _asides(path)) else ""


def _asides(path: Path) -> list[int]:
    numbers = [found.name[len(ASIDE_PREFIX) :] for found in path.glob(f"{ASIDE_PREFIX}*")]
    return [int(number) for number in numbers if number.isdecimal()]


def is_being_rebuilt(path: Path) -> bool:
    """Whether a rebuild was begun and has not ended. Blocking."""
    return (path / CATALOG / UNFINISHED).exists()


def rebuild_ended(path: Path) -> None:
    """Files and rows agree. Not synced: a note that comes back costs the next start an alarm, no more. Blocking."""
    (path / CATALOG / UNFINISHED).unlink(missing_ok=True)


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
    why = await asyncio.to_thread(damage_note, cache.path) or await _after_a_crash(cache.path)
    await asyncio.to_thread(fatal.arm, cache.path / FATAL)
    if not why:
        try:
            catalog = await open_it()
            if not await asyncio.to_thread(is_being_rebuilt, cache.path):
                return catalog, Rebuilt()
            return catalog, Rebuilt(CUT_OFF, await asyncio.to_thread(last_aside, cache.path))
        except CatalogDamaged as error:
            why, cause = str(error), error
    if mode != "auto":
        raise StartupError(
            f"the catalog cannot be used ({why}), and cache.rebuild is 'ask'; see what would be done with "
            f"`forebay rebuild{config_option(source)}`, and do it with `forebay rebuild{config_option(source)} --apply`"
        ) from cause
    await asyncio.to_thread(refuse_newer, cache)
    aside = await asyncio.to_thread(set_aside, cache.path, why)
    log.warning("the catalog is rebuilt from the cache's files reason=%s aside=%s", why, aside or "nothing was left")
    return await open_it(), Rebuilt(why, aside)


async def _after_a_crash(path: Path) -> str:
    """Why the catalog cannot be used, where the process before this one died of a fatal signal, as damaged pages make it.

    Noted, so that it is known until the catalog was made anew.
    """
    last_word = await asyncio.to_thread(fatal.left, path / FATAL)
    if not last_word:
        return ""
    log.warning("the process before this one died of a fatal signal; the catalog is read on trial last_word=%r", last_word)
    why = await trial(path / CATALOG)
    if why:
        why = f"the process before this one died of a fatal signal, and {why}"
        await asyncio.to_thread(note_damage, path, CatalogDamaged(why))
        return why
    log.warning("the catalog can be read: the signal had another cause")
    return ""


async def whole_look(path: Path, tiers: Sequence[str], node: str) -> str:
    """Why the catalog below the cache directory `path` cannot be used; empty where it can. Every row is read, and compared with
    what hangs on it. Nobody may have it open. Raises StartupError where it cannot be looked at."""
    if why := await asyncio.to_thread(damage_note, path) or await trial(path / CATALOG):
        return why
    try:
        catalog = await Catalog.open(path / CATALOG, tiers=tiers, node=node)
    except CatalogDamaged as error:
        return str(error)
    try:
        with catalog.read() as txn:
            for row in txn.all_shards():
                txn.copies(row.key)
                list(txn.inside(row))
            list(txn.sessions())
        async with aclosing(index_problems(catalog)) as problems:
            async for problem in problems:
                return f"it contradicts itself: {problem}"
    except ForebayError as error:
        return str(error)
    finally:
        await catalog.close()
    return CUT_OFF if await asyncio.to_thread(is_being_rebuilt, path) else ""


async def is_of_the_catalog(error: BaseException, path: Path, tiers: Sequence[str], node: str) -> bool:
    """Whether a start ended with `error` because the catalog is damaged: then that is noted, and the next does not trust it.

    What says of itself what it is (a refusal, the disk) is believed; anything else is no reason to end, and all is looked at.
    """
    if is_damage(error):
        await asyncio.to_thread(note_damage, path, error)
        return True
    if isinstance(error, ForebayError | OSError):
        return False
    log.warning("the start failed in a way that a sound catalog does not explain; all of it is read error=%r", error)
    try:
        why = await whole_look(path, tiers, node)
    except (ForebayError, OSError) as other:
        log.warning("the catalog could not be looked at error=%s", other)
        return False
    except Exception as other:  # noqa: BLE001 - the look stumbles as the start did, over what no check has thought of
        why = f"a look at all of it fails ({other!r})"
    if why == CUT_OFF:  # what a rebuild has begun goes on
        return False
    if why:
        await asyncio.to_thread(note_damage, path, CatalogDamaged(why))
    return bool(why)


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


def damage_met(node: Node, error: CatalogDamaged) -> None:
    """A running gateway stumbled over it, and goes on with what can be read: told, and noted for the next start."""
    detached(asyncio.to_thread(_note_once, node.cache.path, error))
    if "catalog-damaged" in node.alarms:
        return
    log.error("%s", error)
    node.alarms["catalog-damaged"] = (
        f"the catalog is damaged: {error.what}",
        "restart the gateway: with cache.rebuild = 'auto' the start makes the catalog anew, else it says what to do",
    )


def _note_once(path: Path, error: CatalogDamaged) -> None:
    """Tried again whenever it is met, until it is noted: the disk may have been full."""
    if not (path / CATALOG / SUSPECT).exists():
        note_damage(path, error)


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
