"""What of a run is complete on a tier, by the manifests that stand there, and in which order it was committed.

Owns reading and remembering those manifests. Does not own who may act on what is found (expire.py).
"""

import logging

from forebay_gateway.base.recent import Recent
from forebay_gateway.core.errors import NotFound
from forebay_gateway.core.layout import manifest_key, parse_step_dir
from forebay_gateway.core.retention import Entry, Groups, Ledger, manifest_is_final, place
from forebay_gateway.core.run_documents import Name
from forebay_gateway.paths.node import Node
from forebay_gateway.tiers.monitor import MonitoredTier
from forebay_wire.manifest import Manifest, ManifestError
from forebay_wire.names import session8

log = logging.getLogger("forebay.retain")

WHOLE_REMEMBERED_MAX = 10_000


class OnTier:
    """The checkpoints of one tier."""

    def __init__(self, node: Node, tier: MonitoredTier) -> None:
        self._node, self._tier = node, tier
        self._whole: Recent[tuple[str, Name], str] = Recent(WHOLE_REMEMBERED_MAX)  # manifests that were read, their versions

    async def steps(self, run: str) -> set[int]:
        """Those that have a directory there."""
        listing = await self._tier.tier.list(f"{run}/")
        return {step for name in listing.directories if (step := parse_step_dir(name)) is not None}

    async def with_news(self, run: str, ledger: Ledger, there: set[int], completed: set[int]) -> Groups:
        """The ledger's groups without what is no longer there, and with what has come."""
        known = {entry.step: entry for entry in ledger.entries if entry.step in there}
        going = {entry.step for entry in ledger.going}
        arrivals = []
        for step in sorted(there - going):
            if step in known and step not in completed:
                continue
            entry = await self.entry(run, step)
            if entry is None or (step in known and entry.name == known[step].name):
                continue
            arrivals.append(entry)
            known.pop(step, None)  # a newer session of the step stands there: its place is another
        groups = only(ledger.groups, {entry.name for entry in known.values()})
        return place(groups, arrivals, self._commits(run))

    async def entry(self, run: str, step: int) -> Entry | None:
        """What the manifest there says; None where there is none, or none that can be read."""
        found = await self.manifest(manifest_key(run, step), run, step)
        if found is None:
            return None
        manifest, committed_s, tag, _ = found
        size = sum(file.size for _, file, _ in manifest.files())
        entry = Entry(step, session8(manifest.session), committed_s, manifest_is_final(manifest), size)
        self._whole[run, entry.name] = tag
        return entry

    async def manifest(self, key: str, run: str, step: int) -> tuple[Manifest, float | None, str, bytes] | None:
        """(manifest, when it was written by the tier's clock, version, document). None also for one of another checkpoint:
        somebody has copied a directory, and what it names lies elsewhere and is not ours to delete."""
        try:
            document, info = await self._tier.tier.get_small(key)
            manifest = await self._node.aside(len(document), lambda: Manifest.from_json(document))
            if (manifest.run, manifest.step) != (run, step):
                raise ManifestError(f"it is of run {manifest.run!r}, step {manifest.step}")
        except NotFound:
            return None
        except ManifestError as error:
            log.warning(
                "retention passes over a manifest that is damaged, or not this one tier=%s key=%s error=%s",
                self._tier.name,
                key,
                error,
            )
            return None
        return manifest, info.modified_s, info.tag, document

    def _commits(self, run: str) -> dict[Name, int]:
        """The order of the commits that this node saw."""
        with self._node.catalog.read() as txn:
            sessions = [session for row in txn.checkpoints(run) for session in txn.sessions_of(row)]
        return {(each.step, session8(each.session)): each.commit_seq for each in sessions if each.commit_seq}

    async def stands(self, run: str, entry: Entry) -> bool | None:
        """Whether its manifest is there, whole and its own; None where there is none. Read only where it is not as it was."""
        try:
            info = await self._tier.tier.head(manifest_key(run, entry.step))
        except NotFound:
            return None
        if self._whole.get((run, entry.name)) == info.tag:
            return True
        found = await self.entry(run, entry.step)
        return found is not None and found.name == entry.name


def only(groups: Groups, names: set[Name]) -> Groups:
    """Without all others, and without groups that are empty then."""
    kept = (tuple(entry for entry in group if entry.name in names) for group in groups)
    return tuple(group for group in kept if group)
