"""Is a session whole: who has committed, who is missing, in this node's cache or anywhere.

Owns these questions, asked of the catalog alone. Does not own what is done about the answers.
"""

from forebay_gateway.catalog import ReadTxn
from forebay_gateway.core.errors import MissingPart
from forebay_gateway.core.policy import is_whole
from forebay_gateway.core.records import PartState, PublishState, SessionRow

NEVER_WHOLE = "the parts do not make one checkpoint"  # begins SessionRow.reason where no retry can mend that
MISSING_NAMED_MAX = 1000  # a session says itself how many writers it has; who waits for a million need not hear each name


def complete_at_cache(txn: ReadTxn, session: SessionRow) -> bool:
    """Whether every writer's part is durable in some node's cache, as far as this node knows."""
    committed = txn.session_sums(session.id).committed
    if committed >= session.writers or committed + len(session.known_parts) < session.writers:
        return committed >= session.writers
    here = {part.writer for part in txn.parts(session.id) if part.state is PartState.COMMITTED}
    return len(here | set(session.known_parts)) >= session.writers


def is_complete(txn: ReadTxn, session: SessionRow) -> bool:
    """Whether every shard of every writer has landed and verified somewhere: in this node's cache, or on a tier."""
    return is_whole(session, txn.session_sums(session.id).committed)


def has_all_parts(txn: ReadTxn, session: SessionRow) -> bool:
    """Whether this catalog has the rows of every writer's shards, wherever their bytes are."""
    return txn.session_sums(session.id).committed >= session.writers


def describe_spread(txn: ReadTxn, session: SessionRow) -> str:
    """Where all parts are committed, but some through other nodes, and no tier has it yet or is to get it: one clause for
    people, else empty. It is complete for nobody then: no node can read another one's cache."""
    if is_complete(txn, session) or not session.commit_seq or missing_parts(txn, session):
        return ""
    if PublishState.PENDING in session.publish.values():
        return "all parts are committed; they meet on a tier once drained"
    if not session.is_cache_only:
        return ""
    nodes = len(set(session.known_parts.values())) + 1
    here = txn.session_sums(session.id).committed
    why = "by policy it goes to no tier" if session.is_transient else "it was left out on every tier"
    return (
        f"{why}: its parts are in the caches of {nodes} nodes, {here} of {session.writers} in this one's, and cannot be "
        "restored as a whole"
    )


def is_cached(txn: ReadTxn, session: SessionRow) -> bool:
    """Whether every shard of every writer is in this node's cache."""
    sums = txn.session_sums(session.id)
    return sums.committed >= session.writers and sums.cached == sums.shards


def past_the_cache(txn: ReadTxn, session: SessionRow) -> str:
    """What of a session that has not yet been complete on any tier is not in this node's cache, in one clause; else empty."""
    sums = txn.session_sums(session.id)
    was_complete = set(session.publish.values()) - {PublishState.PENDING, PublishState.SKIPPED}
    if session.reason or sums.cached == sums.shards or was_complete:
        return ""
    went = f"{sums.shards - sums.cached} of {sums.shards} files went through to a tier"
    return f"{went} while the cache's disk failed, and are not in the cache"


def published_on(session: SessionRow) -> tuple[str, ...]:
    """The tiers whose manifest alone makes a session complete that is not whole in this node's cache; empty where something of
    it is still on its way."""
    if PublishState.PENDING in session.publish.values():
        return ()
    return tuple(name for name, state in session.publish.items() if state is PublishState.COMPLETE)


def describe_gone(session: SessionRow) -> str:
    """One clause for people, where none of these tiers has the manifest any more."""
    return (
        f"its manifest is gone from {' and '.join(published_on(session))}, and it is not whole in this node's cache: another "
        "node may have deleted it. `forebay rm` ends it here too; `forebay fsck` says what is left of it"
    )


def knows_copies(txn: ReadTxn, session: SessionRow, tier: str) -> bool:
    """Whether every shard of every writer has a row for its copy on the tier."""
    parts = txn.parts(session.id)
    return len(parts) >= session.writers and all(
        txn.part_progress(session.id, part.writer, tier)[1] >= part.shard_count for part in parts
    )


def missing_parts(txn: ReadTxn, session: SessionRow) -> tuple[MissingPart, ...]:
    """The writers that this node has not heard a commit of; of very many, the first."""
    if txn.session_sums(session.id).committed >= session.writers:
        return ()
    states = {part.writer: part.state for part in txn.parts(session.id)}
    missing = []
    for writer in range(session.writers):
        state = states.get(writer)
        if state is PartState.COMMITTED or (state is None and writer in session.known_parts):
            continue
        missing.append(MissingPart(writer, (), "absent" if state is None else "open"))
        if len(missing) == MISSING_NAMED_MAX:
            break
    return tuple(missing)


def describe_missing(missing: tuple[MissingPart, ...]) -> str:
    """One clause for people."""
    shown = ", ".join(f"{part.writer} ({part.state})" for part in missing[:16])
    more = f" and {len(missing) - 16} {'or ' * (len(missing) == MISSING_NAMED_MAX)}more" if len(missing) > 16 else ""
    return f"incomplete: no commit from writer{'s' if len(missing) > 1 else ''} {shown}{more}"
