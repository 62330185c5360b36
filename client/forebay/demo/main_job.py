"""The main job: four writers on two gateways save a training state; one node is lost; the other restores every byte.

Owns the story and its table. Every number is measured in this run; every byte is compared.
"""

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import forebay
from forebay.demo.gateways import GatewayProcess, posix_tier, s3_tier
from forebay.demo.seaweedfs import SeaweedFS
from forebay.demo.training_state import WriterState, model_file, split

WRITERS = 4
RUN, STEP = "demo/all-minilm-l6-v2", 1200
TIERS = ("pfs", "object")

Tell = Callable[[str], None]


@dataclass
class Row:
    """One line of the table."""

    what: str
    size: int
    seconds: float
    verified: str = ""


@dataclass
class Outcome:
    """What the demo found."""

    rows: list[Row] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every byte came back."""
        return not self.differing


def run(tell: Tell) -> Outcome:
    """Run it in a temporary directory, which is removed; raises forebay errors and NoModel."""
    states = split(model_file(), WRITERS, STEP)
    total = sum(state.size for state in states)
    tell(f"training state: {total / 1e6:.0f} MB in {sum(len(state.shards) for state in states)} shards of {WRITERS} writers")
    outcome = Outcome()
    with tempfile.TemporaryDirectory(prefix="forebay-demo-") as name:
        directory = Path(name)
        with SeaweedFS(directory / "s3") as server, _gateways(directory, server) as (a, b):
            tell("two gateways, a POSIX tier and a SeaweedFS S3 server are up")
            _save(states, a, b, outcome)
            tell("saved and acknowledged from both caches")
            _drain(a, total, outcome)
            tell("complete on both tiers; now gateway A dies (SIGKILL) and its cache is deleted")
            a.kill()
            a.wipe()
            _restore(states, b, total, directory, outcome)
    return outcome


@contextlib.contextmanager
def _gateways(directory: Path, server: SeaweedFS) -> Iterator[tuple[GatewayProcess, GatewayProcess]]:
    tiers = [posix_tier(directory / "pfs"), s3_tier(server.endpoint, server.bucket)]
    (directory / "pfs").mkdir()
    with contextlib.ExitStack() as stack:
        made = []
        for node in ("a", "b"):
            gateway = GatewayProcess(directory, node, tiers, environment=server.environment)
            made.append(stack.enter_context(gateway))
        yield made[0], made[1]


def _save(states: list[WriterState], a: GatewayProcess, b: GatewayProcess, outcome: Outcome) -> None:
    """All writers at once, two on each gateway."""

    def write(rank: int) -> float:
        began_s = time.perf_counter()
        client = forebay.Client((a, b)[rank % 2].address)
        with client.checkpoint(RUN, STEP, writers=WRITERS, writer=rank, session="demo") as checkpoint:
            small = {name: data for name, data in states[rank].shards.items() if len(data) < 1 << 20}
            for name, data in states[rank].shards.items():
                if name not in small:
                    checkpoint.put(name, data)
            checkpoint.put_many(small)
            checkpoint.commit(metadata={"model": "all-MiniLM-L6-v2"} if rank == 0 else {}, wait="cache")
        return time.perf_counter() - began_s

    with ThreadPoolExecutor(WRITERS) as pool:
        seconds = max(pool.map(write, range(WRITERS)))
    outcome.rows.append(Row("acknowledged, cache (fsynced)", sum(state.size for state in states), seconds))


def _drain(a: GatewayProcess, total: int, outcome: Outcome) -> None:
    began_s = time.perf_counter()
    client = forebay.Client(a.address)
    for tier in TIERS:
        client.wait(RUN, STEP, tier, timeout=120)
        outcome.rows.append(Row(f"complete on {tier}", total, time.perf_counter() - began_s, "by tier"))


def _restore(states: list[WriterState], b: GatewayProcess, total: int, directory: Path, outcome: Outcome) -> None:
    """From each source alone, and from wherever is nearest; every byte compared."""
    client = forebay.Client(b.address)
    for source in (*TIERS, "auto", "cache"):
        target = directory / f"restored-{source}"
        began_s = time.perf_counter()
        client.restore_dir(RUN, "latest", str(target), source=source)
        seconds = time.perf_counter() - began_s
        differing = _compare(states, target)
        outcome.differing += differing
        label = {"auto": "restored, nearest first", "cache": "restored again, from B's cache"}.get(
            source, f"restored from {source}"
        )
        outcome.rows.append(Row(label, total, seconds, "no" if differing else "yes"))


def _compare(states: list[WriterState], target: Path) -> list[str]:
    expected = {name: data for state in states for name, data in state.shards.items()}
    found = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    differing = list(expected.keys() ^ found)
    differing += [name for name, data in expected.items() if name in found and (target / name).read_bytes() != bytes(data)]
    return sorted(differing)
