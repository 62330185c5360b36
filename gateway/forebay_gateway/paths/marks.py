"""Pins, holds, deletions under way and roots of tiers: in the catalog, and in a document that outlives it.

    document durable -> catalog        at every change, so that the document never knows less than the catalog
    each start -> what the catalog lacks of the document is set again, for the checkpoints that are there; a pin of one that is
    not (only a tier has it after a rebuild; or the catalog is damaged) waits in the document, until that is found again

Owns this order and what comes back after a rebuild. Never sets a mark for sessions that it was not given for.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from msgspec import structs

from forebay_gateway.base import failpoints
from forebay_gateway.base.tasks import uncut
from forebay_gateway.cache.layout import CacheDir
from forebay_gateway.cache.marks import Going, Marks, Pin, read_marks, write_marks
from forebay_gateway.catalog import Catalog, ReadTxn, WriteTxn
from forebay_gateway.core.errors import Corrupt, DiskFull, ForebayError
from forebay_gateway.core.records import CheckpointRow

log = logging.getLogger("forebay.marks")

T = TypeVar("T")

KEPT_SETTINGS = ("held:", "root:")  # what begins with these; the others (a scrub's cursor) are no loss
SHOWN_MAX = 5


@dataclass(frozen=True, slots=True)
class Restored:
    """What did not come back: pins that found no checkpoint here, `lost` those that had found one before; `problem` where the
    document itself is damaged."""

    waiting: tuple[Pin, ...] = ()
    lost: tuple[Pin, ...] = ()
    problem: str = ""

    @property
    def sentence(self) -> str:
        """For people; empty where nothing is lost."""
        if self.problem:
            return f"pins and deletions under way may be lost: {self.problem}"
        more = f" and {len(self.waiting) - SHOWN_MAX} more" if len(self.waiting) > SHOWN_MAX else ""
        shown = ", ".join(f"{pin.run}/{pin.step}" for pin in self.waiting[:SHOWN_MAX])
        return (
            f"pinned checkpoints are no longer here; the pins come back with them, from a tier: {shown}{more}" if shown else ""
        )


class MarkKeeper:
    """One a node; changes come one after the other. All marks are set through it, so that it knows them without a scan."""

    def __init__(self, cache: CacheDir, catalog: Catalog) -> None:
        self._cache, self._catalog = cache, catalog
        self._lock = asyncio.Lock()
        self._marks: Marks | None = None
        self._document: Marks | None = None  # as far as is known: what the last write made
        self._is_behind = False  # a mark stands in the catalog only
        self._waiting: frozenset[Pin] = frozenset()  # in the document alone: see Marks

    async def change(self, change: Callable[[Marks], Marks], act: Callable[[WriteTxn], T], *, spare: bool = False) -> T:
        """The document as `change` makes it, durable; then `act` in the catalog. Raises as both do.

        `spare` says that a full disk must not be in the way: then the catalog alone remembers it.
        """
        return await uncut(self._change(change, act, spare))

    async def _change(self, change: Callable[[Marks], Marks], act: Callable[[WriteTxn], T], spare: bool) -> T:
        async with self._lock:
            before, waited = self._known(), self._waiting
            after = change(before)
            self._waiting = waited.intersection(change(Marks(tuple(waited))).pins).difference(after.pins)
            try:
                # What changes nothing must not write the document: before restore() it may know more than the catalog does.
                if after != before or self._waiting != waited or self._is_behind:
                    await self._write(after)
                    self._is_behind = False
                    failpoints.hit("marks.before_catalog")
            except DiskFull as error:
                if not spare:
                    self._waiting = waited
                    raise
                self._is_behind = True
                log.warning("a mark stands in the catalog only, until there is space again error=%s", error)
            try:
                done = await self._catalog.write(act, frees=spare)
            except ForebayError:
                self._waiting = waited
                if not self._catalog.is_failed:
                    await self._try_write(before)
                raise
            self._marks = after
            return done

    async def found_again(self, run: str, step: int, act: Callable[[WriteTxn], T]) -> T:
        """`act`, which takes in a checkpoint from a tier; with its pin, where one has waited for it. Raises as it does."""
        pin = Pin(run, step)
        if pin not in self._waiting:
            return await self._catalog.write(act)
        return await uncut(self._found_again(pin, act))

    async def _found_again(self, pin: Pin, act: Callable[[WriteTxn], T]) -> T:
        def both(txn: WriteTxn) -> T:
            done = act(txn)
            txn.set_pinned(pin.run, pin.step, True)
            return done

        async with self._lock:
            done = await self._catalog.write(both)
            self._waiting -= {pin}
            self._marks = None
        return done

    async def ended(self, run: str, step: int) -> None:
        """The checkpoint is gone, and every mark on it."""
        async with self._lock:
            self._waiting -= {Pin(run, step)}
            known = self._known()
            self._marks = without(known, run, step)
            if self._marks != known:
                await self._try_write(self._marks)

    async def aborted(self, run: str, step: int) -> None:
        """Of a part; a pin goes with the checkpoint's last one, and does not wait for it."""
        async with self._lock:
            if Pin(run, step) in self._known().pins:
                self._marks = None
                await self._try_write(self._known())

    def waiting_steps(self, run: str) -> set[int]:
        """Steps of the run whose pins wait for their checkpoints."""
        return {pin.step for pin in self._waiting if pin.run == run}

    async def restore(self) -> Restored:
        """Set the marks again that the catalog does not have, for checkpoints that are there; the document then follows it.

        Pins of others wait: what is pinned is not deleted, so the catalog has lost them.
        """
        try:
            document = await asyncio.to_thread(read_marks, self._cache.path)
        except Corrupt as error:
            document, problem = Marks(), str(error)
        else:
            problem = ""
        async with self._lock:
            self._document = None if problem else document
            restored = Restored(problem=problem)
            if document is not None and self._known() != document:
                restored = replace(await self._catalog.write(partial(_apply, document), frees=True), problem=problem)
            self._marks = None
            self._waiting = frozenset(restored.waiting)
            if document is not None or self._known() != Marks():  # a first start leaves no document
                await self._try_write(self._known())
        return restored

    async def _try_write(self, marks: Marks) -> None:
        """Where that fails, the document knows too much: which harms nothing, and the next change writes all of it."""
        try:
            await self._write(marks)
        except ForebayError as error:
            log.info("the document of marks could not be written error=%s", error)

    async def _write(self, marks: Marks) -> None:
        marks = structs.replace(marks, waiting=tuple(sorted(self._waiting)))
        if marks != self._document:
            self._document = None
            await asyncio.to_thread(write_marks, self._cache.path, marks)
            self._document = marks

    def _known(self) -> Marks:
        if self._marks is None:
            with self._catalog.read() as txn:
                self._marks = marks_of(txn)
        return self._marks


def marks_of(txn: ReadTxn) -> Marks:
    """As the catalog has them."""
    pins = sorted(Pin(row.run, row.step) for run in txn.runs() for row in txn.checkpoints(run) if row.pinned)
    going = sorted(Going(row.run, row.step, row.session_ids) for row in txn.deleting())
    settings = {name: value for name, value in txn.settings() if name.startswith(KEPT_SETTINGS)}
    return Marks(tuple(pins), tuple(going), settings)


def pinned(run: str, step: int, wanted: bool) -> Callable[[Marks], Marks]:
    """A change: the pin stands, or no longer."""

    def change(marks: Marks) -> Marks:
        others = {pin for pin in marks.pins if pin != Pin(run, step)}
        return structs.replace(marks, pins=tuple(sorted(others | ({Pin(run, step)} if wanted else set()))))

    return change


def going(row: CheckpointRow) -> Callable[[Marks], Marks]:
    """A change: the checkpoint, as it is now, is being deleted."""

    def change(marks: Marks) -> Marks:
        others = {each for each in marks.going if (each.run, each.step) != (row.run, row.step)}
        return structs.replace(marks, going=tuple(sorted({*others, Going(row.run, row.step, row.session_ids)})))

    return change


def setting(name: str, value: bytes | None) -> Callable[[Marks], Marks]:
    """A change: a setting's value, None for none."""

    def change(marks: Marks) -> Marks:
        others = {each: kept for each, kept in marks.settings.items() if each != name}
        return structs.replace(marks, settings=others if value is None else {**others, name: value})

    return change


def without(marks: Marks, run: str, step: int) -> Marks:
    """Nothing of that checkpoint."""
    return structs.replace(
        marks,
        pins=tuple(pin for pin in marks.pins if (pin.run, pin.step) != (run, step)),
        going=tuple(each for each in marks.going if (each.run, each.step) != (run, step)),
    )


async def restore_settings(cache: CacheDir, catalog: Catalog) -> None:
    """Holds and roots that the catalog, made anew, does not know; and no number that a deletion names is given again."""
    try:
        marks = await asyncio.to_thread(read_marks, cache.path) or Marks()
    except Corrupt:
        return  # MarkKeeper.restore tells of it
    catalog.raise_ids(max((number for going in marks.going for number in going.session_ids), default=0))
    with catalog.read() as txn:
        lacking = {name: value for name, value in marks.settings.items() if txn.setting(name) is None}

    def act(txn: WriteTxn) -> None:
        for name, value in lacking.items():
            txn.set_setting(name, value)

    if lacking:
        await catalog.write(act, frees=True)


def _apply(marks: Marks, txn: WriteTxn) -> Restored:
    waiting = []
    for pin in {*marks.pins, *marks.waiting}:
        row = txn.checkpoint(pin.run, pin.step)
        if row is None:
            waiting.append(pin)
        elif not row.pinned:
            txn.set_pinned(pin.run, pin.step, True)
    for going in marks.going:
        row = txn.checkpoint(going.run, going.step)
        # Else it has ended, or was begun anew by a session that nobody asked to delete.
        if row is not None and not row.deleting and set(row.session_ids) <= set(going.session_ids):
            txn.mark_deleting(going.run, going.step)
    return Restored(tuple(sorted(waiting)), tuple(sorted({*waiting}.difference(marks.waiting))))
