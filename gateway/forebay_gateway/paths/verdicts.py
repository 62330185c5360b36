"""One word for all nodes on whether a checkpoint goes to a tier: a document of each run there, read and added to.

    whoever decides adds a verdict, the document being as it was read -> the others read it before they begin
    two at once: one of them is refused, reads again, and finds what the other has said: that counts

Owns the document (core/verdicts.py), as it was read last, and how it is replaced. Who decides, and when it is looked at, is
joint.py's.
"""

import logging
from dataclasses import dataclass
from typing import ClassVar

from forebay_gateway.base import failpoints
from forebay_gateway.core.errors import AlreadyExists, ForebayError, NotFound, PermissionDenied, Unavailable
from forebay_gateway.core.layout import verdicts_key
from forebay_gateway.core.records import SessionRow
from forebay_gateway.core.run_documents import Name
from forebay_gateway.core.verdicts import RunVerdicts, Verdict, read_verdicts
from forebay_gateway.paths.node import Node
from forebay_gateway.tiers.monitor import MonitoredTier
from forebay_wire.names import session8

log = logging.getLogger("forebay.verdicts")

TRIES_MAX = 16


class Unsaid(Unavailable):
    """A verdict could not be said on the tier, so nothing is done by it yet. `cause` is the tier's word."""

    kind: ClassVar[str] = "unavailable"

    def __init__(self, cause: ForebayError) -> None:
        self.cause = cause
        super().__init__(f"what was decided for all nodes could not be said on the tier: {cause.sentence}", retry_after_s=1.0)


@dataclass(frozen=True, slots=True)
class Book:
    """A run's verdicts and the document's version, "" where there is none."""

    verdicts: RunVerdicts
    tag: str
    is_damaged: bool = False

    def has_lost(self, name: Name) -> bool:
        """Whether nothing stands of this session where something may have stood: nobody can read it, or later ones alone are
        named."""
        if self.verdicts.of(name) is not None:
            return False
        return self.is_damaged or any(each.step > name[0] for each in self.verdicts.verdicts)


def name_of(session: SessionRow) -> Name:
    """As a verdict names it."""
    return session.step, session8(session.session)


async def read_book(tier: MonitoredTier, run: str) -> Book:
    """As it stands on the tier: one request. Raises as the tier does, and Unsupported for a newer release's."""
    try:
        document, info = await tier.tier.get_small(verdicts_key(run))
    except NotFound:
        return Book(RunVerdicts(run=run), "")
    verdicts = read_verdicts(document, run)
    if verdicts is None:
        log.warning("a document of verdicts is damaged and made anew tier=%s run=%s", tier.name, run)
        return Book(RunVerdicts(run=run), info.tag, is_damaged=True)
    return Book(verdicts, info.tag)


async def write_book(tier: MonitoredTier, book: Book, verdicts: RunVerdicts) -> Book | None:
    """In place of what was read; None where another node was faster. Raises as the tier does."""
    key, document = verdicts_key(verdicts.run), verdicts.to_json()
    failpoints.hit("verdict.before_write")
    try:
        if book.tag:
            info = await tier.tier.put_small(key, document, if_match=book.tag)
        else:
            info = await tier.tier.put_small(key, document, if_absent=True)
    except AlreadyExists:
        return None
    failpoints.hit("verdict.written")
    return Book(verdicts, info.tag)


class Verdicts:
    """What is known of them on one tier. At most one entry for each run that is watched."""

    def __init__(self, node: Node, tier: str) -> None:
        self._node, self._tier = node, tier
        self._books: dict[str, Book] = {}
        self._heeded: dict[str, str] = {}  # versions of the document that made their difference

    def of(self, session: SessionRow) -> Verdict | None:
        """As it was read last."""
        book = self._books.get(session.run)
        return None if book is None else book.verdicts.of(name_of(session))

    def has_lost(self, session: SessionRow) -> bool:
        """Whether nothing stands of it where something may have stood, as was read last."""
        book = self._books.get(session.run)
        return book is not None and book.has_lost(name_of(session))

    def of_run(self, run: str) -> tuple[Verdict, ...]:
        """All, oldest first, as they were read last."""
        book = self._books.get(run)
        return () if book is None else book.verdicts.verdicts

    def exists(self, run: str) -> bool:
        """Whether a document was there."""
        book = self._books.get(run)
        return book is not None and bool(book.tag)

    async def read(self, run: str) -> None:
        """Look at the tier. Raises as the tier does, and Unsupported."""
        self._books[run] = await read_book(self._node.tiers[self._tier], run)

    def is_news(self, run: str) -> bool:
        """Whether something may have been said since this was asked last, whatever has read it meanwhile."""
        tag = self._books[run].tag
        is_news = self._heeded.get(run) != tag
        self._heeded[run] = tag
        return is_news

    def forget(self, run: str) -> None:
        """Nobody waits for anything of it."""
        self._books.pop(run, None)
        self._heeded.pop(run, None)

    async def say(self, session: SessionRow, goes: bool, reason: str = "", *, over: bool = False) -> Verdict:
        """The verdict that counts: this one, or what was said before; `over` takes a skip back. Raises Unsaid, Unsupported
        where a newer release decides, and what a tier says of one object alone."""
        wanted = Verdict(*name_of(session), goes, reason, self._node.id)
        tier = self._node.tiers[self._tier]
        try:
            if session.run not in self._books:
                await self.read(session.run)
            for _ in range(TRIES_MAX):
                book = self._books[session.run]
                found = book.verdicts.of(wanted.name)
                if found is not None and not (over and found.yields_to(wanted)):
                    return found
                written = await write_book(tier, book, book.verdicts.plus(wanted))
                if written is not None:
                    self._books[session.run] = written
                    return wanted
                await self.read(session.run)
        except (Unavailable, PermissionDenied) as error:
            raise Unsaid(error) from error
        raise Unsaid(Unavailable("other nodes are faster again and again", run=session.run))


async def drop_verdicts(tier: MonitoredTier, run: str, names: list[Name]) -> None:
    """Sessions that are deleted: whoever saves them again under the same name begins anew. Raises as the tier does."""
    for _ in range(TRIES_MAX):
        book = await read_book(tier, run)
        left = book.verdicts.without(names)
        if left == book.verdicts or await write_book(tier, book, left) is not None:
            return
    raise Unavailable("other nodes replace the document again and again", tier=tier.name, run=run)
