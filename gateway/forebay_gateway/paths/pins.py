"""Pins on the tiers where retention works: a node that works on a run must know what other nodes have pinned.

    pinned in the catalog -> said on each tier -> the run's ledger is looked at: a removal that was noted before is told to the
    client; one that is noted later sees the pin

Owns the documents below `.forebay/pins`. The catalog's own pins and what outlives it are marks.py's.
"""

from forebay_gateway.core.errors import ForebayError, NotFound, Unavailable, Unsupported
from forebay_gateway.core.retention import ledger_key, parse_pin_key, pin_key, pins_dir, read_ledger, rule_of
from forebay_gateway.paths.node import Node
from forebay_gateway.tiers.monitor import MonitoredTier


async def tell_pin(node: Node, run: str, step: int, pinned: bool) -> None:
    """Say that this node has pinned a checkpoint, or no longer. A tier that is away is told at its next look at the run.

    Raises Unavailable where the checkpoint is just going.
    """
    for tier in node.usable_tiers():
        if rule_of(run, tier.name, node.config.retain) is None:
            continue
        try:
            is_going = await _tell(node, tier, run, step, pinned)
        except ForebayError as error:
            tier.failed(error)
            continue
        if is_going:
            raise Unavailable(
                "retention is just removing this checkpoint from a tier; ask again", retry_after_s=1.0, tier=tier.name
            )


async def lift_pins(node: Node, run: str, step: int) -> None:
    """Every node's pin of a checkpoint goes from every tier where retention works: one that is gone cannot lift its own.

    A node that lives and has pinned it still says so anew at its next look. Raises Unavailable for a tier that is away.
    """
    for tier in node.tiers.values():
        if rule_of(run, tier.name, node.config.retain) is None:
            continue
        if not tier.usable:
            raise Unavailable("a tier that may know of pins cannot be asked now", tier=tier.name, retry_after_s=5.0)
        listing = await tier.tier.list(pins_dir(run))
        for info in listing.objects:
            if parse_pin_key(info.key) == step:
                await tier.tier.delete(info.key)


async def _tell(node: Node, tier: MonitoredTier, run: str, step: int, pinned: bool) -> bool:
    """Whether it is going there."""
    key = pin_key(run, step, node.id)
    if not pinned:
        await tier.tier.delete(key)
        return False
    await tier.tier.put_small(key, node.id.encode())
    return await is_going(tier, run, step)


async def is_going(tier: MonitoredTier, run: str, step: int) -> bool:
    """Whether the run's ledger says that something under this step is just being removed. Raises as the tier does."""
    try:
        document, _ = await tier.tier.get_small(ledger_key(run))
        ledger = read_ledger(document, run)
    except (NotFound, Unsupported):  # what a newer release does, it does by its own rules
        return False
    return ledger is not None and any(entry.step == step for entry in ledger.going)


async def pinned_steps(node: Node, tier: MonitoredTier, run: str) -> set[int]:
    """Steps that this node or another has pinned. The tier is told of this node's own, where it was away when they were pinned:
    another node must know before it acts. Raises as the tier does."""
    with node.catalog.read() as txn:
        known = {row.step: row for row in txn.checkpoints(run)}
    mine = {step for step, row in known.items() if row.pinned} | node.marks.waiting_steps(run)
    listing = await tier.tier.list(pins_dir(run))
    keys = {info.key for info in listing.objects}
    told = {step for key in keys if (step := parse_pin_key(key)) is not None and key == pin_key(run, step, node.id)}
    for step in mine - told:
        await tier.tier.put_small(pin_key(run, step, node.id), node.id.encode())
    for step in (told - mine) & known.keys():
        await tier.tier.delete(pin_key(run, step, node.id))
        keys.discard(pin_key(run, step, node.id))
    return mine | {step for key in keys if (step := parse_pin_key(key)) is not None}
