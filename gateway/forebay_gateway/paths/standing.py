"""What this node's catalog knows of checkpoints on a tier, that retention there must respect.

Owns these facts, and the words for them. Does not own the rules (core/retention.py), nor what is done by them (expire.py).
"""

from forebay_gateway.catalog import ReadTxn
from forebay_gateway.core.records import PublishState, SessionRow
from forebay_gateway.core.retention import Groups
from forebay_gateway.core.run_documents import Name
from forebay_gateway.paths.node import Node
from forebay_wire.names import session8

READ_LATELY_S = 900.0  # a restore asks for one shard after the other


def known(node: Node, tier: str, run: str, groups: Groups) -> tuple[dict[Name, str], dict[Name, str]]:
    """Those that stay, and why; those for whose sake, moreover, no other may go, as they are soon gone themselves, or some copy
    of theirs is known to be bad."""
    protected: dict[Name, str] = {}
    doubtful: dict[Name, str] = {}
    now_s = node.clock.monotonic()
    with node.catalog.read() as txn:
        for entry in (entry for group in groups for entry in group):
            row = txn.checkpoint(run, entry.step)
            if row is not None and row.deleting:
                doubtful[entry.name] = "it is being deleted"
            for session in [] if row is None else txn.sessions_of(row):
                waits = [name for name, state in session.publish.items() if state is PublishState.PENDING]
                if waits:
                    protected[entry.name] = f"it is on its way to {', '.join(sorted(waits))}"
                if now_s - node.read_s.get(session.id, float("-inf")) < READ_LATELY_S:
                    protected[entry.name] = "it is being read here"
                if session8(session.session) == entry.session and _has_bad_copies(txn, session, tier):
                    doubtful[entry.name] = "copies of it here are damaged or gone"
    return protected, doubtful


def _has_bad_copies(txn: ReadTxn, session: SessionRow, tier: str) -> bool:
    if session.publish.get(tier) is not PublishState.COMPLETE:
        return False
    verified, copies, _, _ = txn.session_progress(session.id, tier)
    return verified < copies
