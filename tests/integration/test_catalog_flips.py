"""One flipped bit anywhere in the catalog's file, silently, while the gateway is down: no wrong byte is ever handed out,
nothing acknowledged is lost without a word, and damage that kills the process does not kill it at every start."""

import contextlib
import os
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import forebay
from catalog.places import Spans, draw, flip_bit, kinds_in_turn, places
from forebay.demo.gateways import GatewayProcess, posix_tier
from forebay_gateway.cache.layout import CLEAN
from forebay_gateway.catalog.schema import DATABASE_NAMES
from forebay_gateway.paths.handover import leave_mark
from integration.kit import SMALL_CHUNKS, some_bytes
from soak.figures import reported
from soak.form import SOAK, given

ROUNDS = int(given("FOREBAY_FLIPS", "300")) if SOAK else 0
SEED = int(given("FOREBAY_SEED", "20261202"))
STARTS_MAX = 3  # what a supervisor would try before it gives up
# For the sweep in the short form: kind of place, which of them, byte in it. The last is the number of a root page, then behind
# the file's end.
STANDING = [
    ("value of copies", 0, 3),
    ("value of databases", 0, 3),
    ("key of checkpoints", 0, 8),  # a pinned one's
    ("value of databases", sorted(DATABASE_NAMES).index("copies"), 41),
]
RUNS = {"team/drained": "s1", "team/waiting": "s2", "team/packs": "s3"}
STEP = 7


def shards_of(run: str) -> dict[str, bytes]:
    if run == "team/packs":
        return {f"layer/{number:03}.w": some_bytes(900 + number, (run, number)) for number in range(150)}
    return {f"rank0/{name}": some_bytes(size, (run, name)) for name, size in (("model.bin", 1_200_345), ("rng", 77))}


@dataclass
class Stored:
    """A gateway that is down after an orderly stop, and a copy of all it has, to be put back before each flip."""

    directory: Path
    gateway: GatewayProcess
    facts: dict[str, Any] = field(default_factory=dict)
    spans: Spans = field(default_factory=dict)
    token: str = ""

    @property
    def data(self) -> Path:
        return self.gateway.cache / "catalog" / "data.mdb"

    def keep(self) -> None:
        self.token = (self.gateway.cache / CLEAN).read_text().partition(" ")[0]
        self.spans = places(self.data)
        for name in (self.gateway.cache.name, "pfs"):
            shutil.copytree(self.directory / name, self.directory / "kept" / name, symlinks=True)

    def put_back(self) -> None:
        """Files of shards are never written to, so links to them do; the mark of the orderly stop is of the new file."""
        for name in (self.gateway.cache.name, "pfs"):
            shutil.rmtree(self.directory / name, ignore_errors=True)
            shutil.copytree(self.directory / "kept" / name, self.directory / name, symlinks=True, copy_function=_copy)
        leave_mark(self.gateway.cache, self.token)


def _copy(source: str, target: str) -> None:
    if source.endswith((".shard", ".bin", ".w")):
        os.link(source, target)
    else:
        shutil.copy2(source, target)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stored]:
    directory = tmp_path_factory.mktemp("flips")
    (directory / "pfs").mkdir()
    keys = f'{SMALL_CHUNKS}\ncatalog_reserve = "1MiB"\nrepair = "ask"'
    made = Stored(directory, GatewayProcess(directory, "a", [posix_tier(directory / "pfs")], cache_keys=keys))
    made.gateway.start()
    try:
        with forebay.Client(made.gateway.address, progress=False) as client:
            for run, session in RUNS.items():
                if run == "team/waiting":
                    made.gateway.cli("queue", "hold")
                with client.checkpoint(run, STEP, session=session) as part:
                    part.put_many(shards_of(run))
                    part.commit({"run": run})
                if run == "team/drained":
                    client.wait(run, STEP, "all", timeout=30)
            client.pin("team/drained", STEP)
            open_part = client.checkpoint("team/open", STEP, writers=2, session="s4")
            open_part.put("rank0/model.bin", some_bytes(200_000, "open"))
        made.facts = facts(made.gateway)
        assert made.gateway.terminate() == 0
        made.keep()
        yield made
    finally:
        made.gateway.close()


def facts(gateway: GatewayProcess) -> dict[str, Any]:
    """What clients and operators see."""
    found: dict[str, Any] = {}
    with forebay.Client(gateway.address, progress=False, retry_timeout=3.0) as client:
        try:
            runs = sorted(each.run for each in client.runs())
        except forebay.ForebayError as error:
            return {"runs": said_by(error)}
        for run in runs:
            try:
                for checkpoint in client.checkpoints(run):
                    told = client.describe(run, checkpoint.step)
                    found[f"{run} {checkpoint.step}"] = (
                        (told.session, told.writers, told.complete, told.pinned, dict(told.metadata)),
                        sorted((shard.name, shard.size, shard.crc32c) for shard in told.shards),
                    )
            except forebay.ForebayError as error:
                found[run] = said_by(error)
    return found


def said_by(error: forebay.ForebayError) -> str:
    """What it says, unless it only says that the gateway has gone."""
    if isinstance(error, forebay.Unavailable | forebay.DeadlineExceeded):
        raise error
    return str(error)


@dataclass
class Outcome:
    """What one flip came to."""

    deaths: int = 0
    rebuilt: bool = False
    told: list[str] = field(default_factory=list)
    same: bool = False

    @property
    def found(self) -> bool:
        return bool(self.deaths or self.rebuilt or self.told)


class Sweep:
    """All flips: made, found, and those that hit what nothing reads."""

    made = found = idle = deaths = rebuilds = 0

    @classmethod
    def figures(cls) -> dict[str, Any]:
        return {
            "flips_made": cls.made,
            "flips_found": cls.found,
            "flips_idle": cls.idle,
            "deaths": cls.deaths,
            "rebuilds": cls.rebuilds,
        }

    @classmethod
    def count(cls, outcome: Outcome) -> None:
        cls.deaths += outcome.deaths
        cls.rebuilds += outcome.rebuilt
        cls.idle += not outcome.found
        cls.made += outcome.found or not outcome.same
        cls.found += outcome.found


@pytest.fixture(scope="module", autouse=True)
def figures() -> Iterator[None]:
    with reported("catalog-flips", Sweep.figures, seed=SEED):
        yield


def start(gateway: GatewayProcess, outcome: Outcome) -> None:
    """As a supervisor does; a death is no loop as long as one of the next starts serves."""
    for _ in range(STARTS_MAX):
        gateway.start(ready=False)
        with contextlib.suppress(RuntimeError):
            gateway.wait_ready()
            return
        assert gateway.process is not None
        assert gateway.wait_exit(1.0) != 0
        outcome.deaths += 1
    raise AssertionError(f"it dies at every start: {gateway.tail(1500)}")


def look(stored: Stored, outcome: Outcome) -> None:
    """Read everything and ask for everything; again where the process dies of it."""
    gateway = stored.gateway
    for _ in range(STARTS_MAX):
        if gateway.process is None:
            start(gateway, outcome)
        try:
            _look(stored, outcome)
            return
        except (forebay.Unavailable, forebay.DeadlineExceeded) as error:
            time.sleep(0.5)
            assert gateway.process is not None
            if gateway.process.poll() is None:
                outcome.told.append(str(error))
                return
            code = gateway.wait_exit(1.0)
            assert code != 0
            outcome.deaths += 1
    raise AssertionError(f"it dies at every look: {gateway.tail(1500)}")


def _look(stored: Stored, outcome: Outcome) -> None:
    gateway = stored.gateway
    with forebay.Client(gateway.address, progress=False, retry_timeout=3.0) as client:
        outcome.rebuilt = outcome.rebuilt or any("rebuilt" in alarm.what for alarm in client.status().alarms)
        outcome.told += [finding.what for finding in client.care.fsck() if finding.severity == "error"]
    for run in RUNS:
        outcome.told += read_back(gateway, run)
    outcome.same = facts(gateway) == stored.facts


def read_back(gateway: GatewayProcess, run: str) -> list[str]:
    """Every shard is equal, or an error says that it is not there; the errors."""
    said = []
    with forebay.Client(gateway.address, progress=False, retry_timeout=3.0) as client:
        try:
            reader = client.open(run, STEP)
        except forebay.ForebayError as error:
            return [said_by(error)]
        for name, data in shards_of(run).items():
            try:
                assert reader.read(name) == data, f"wrong bytes of {run} {name}"
            except forebay.ForebayError as error:
                said.append(said_by(error))
    return said


def mend(stored: Stored) -> None:
    """As an operator does who was told; then all that was acknowledged is there, bit by bit."""
    gateway = stored.gateway
    if gateway.process is None:
        gateway.start()
    gateway.terminate()
    if (gateway.cache / "catalog" / "suspect").exists():  # the next start rebuilds by itself
        gateway.start()
    else:
        done = gateway.cli("rebuild", "--config", str(gateway.config), "--apply", "--force", check=False)
        assert done.returncode == 0, done.stderr
        gateway.start()
    for run in RUNS:
        assert read_back(gateway, run) == [], run
    assert facts(gateway) == stored.facts
    with forebay.Client(gateway.address, progress=False) as client:
        assert [finding for finding in client.care.fsck() if finding.severity == "error"] == []


def try_flip(stored: Stored, offset: int, bit: int) -> Outcome:
    outcome = Outcome()
    stored.put_back()
    flip_bit(stored.data, offset, bit)
    try:
        look(stored, outcome)
        assert outcome.found or outcome.same, "something is other, and nobody said so"
        if outcome.found and not (outcome.rebuilt and outcome.same):
            mend(stored)
        Sweep.count(outcome)
        return outcome
    finally:
        stored.gateway.close()


@pytest.mark.parametrize(("kind", "which", "byte"), [] if SOAK else STANDING)
def test_a_bit_in_the_catalog(stored: Stored, kind: str, which: int, byte: int) -> None:
    offset, _ = stored.spans[kind][which]
    outcome = try_flip(stored, offset + byte, 4)
    assert outcome.found


@pytest.mark.timeout(4 * 3600)
def test_a_sweep(stored: Stored) -> None:
    """Seeded: every kind of place in turn. All that went wrong is told at the end."""
    chance, wrong, seen = random.Random(SEED), [], []
    kinds = kinds_in_turn(stored.spans, chance)
    for _ in range(ROUNDS):
        kind = next(kinds)
        offset, bit = draw(stored.spans, kind, chance)
        try:
            outcome = try_flip(stored, offset, bit)
            seen.append((kind, outcome))
            print(f"{kind} at {offset}.{bit}: {outcome}", flush=True)
        except Exception as error:  # one of hundreds
            Sweep.made += 1
            wrong.append(f"{kind} at {offset}.{bit}: {type(error).__name__} {error}")
            print(wrong[-1], flush=True)
            if given("FOREBAY_KEEP"):  # what there was before the flip, and what the gateway said since
                kept = Path(given("FOREBAY_KEEP")) / f"{offset}.{bit}"
                shutil.copytree(stored.directory / "kept", kept, symlinks=True)
                shutil.copy2(stored.gateway.log, kept)
    assert wrong == []
