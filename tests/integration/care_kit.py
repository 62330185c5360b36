"""What tests of damage share: bits that flip and are counted, and what each care command says of one job."""

import json
from pathlib import Path
from typing import Any

import forebay
from forebay.types import Finding
from integration.conftest import Bucket
from integration.kit import Cluster, Job, eventually, flip_byte

Pair = Cluster[Bucket]


class FlipCount:
    """Bits that were flipped, and those that somebody told of. A subclass for each file of tests."""

    made = found = 0

    @classmethod
    def figures(cls) -> dict[str, Any]:
        return {"flips_made": cls.made, "flips_found": cls.found}

    @classmethod
    def flip(cls, path: Path, offset: int) -> None:
        flip_byte(path, offset)
        cls.made += 1

    @classmethod
    def on_pfs(cls, pair: Pair, key: str, offset: int) -> None:
        cls.flip(pair.root / key, offset)

    @classmethod
    def on_object(cls, pair: Pair, key: str, offset: int) -> None:
        data = bytearray(pair.bucket.get(key))
        data[offset] ^= 1
        pair.bucket.put(key, bytes(data))
        cls.made += 1


def fsck(pair: Pair, job: Job, *, deep: bool = False) -> list[Finding]:
    """What fsck says of this job's run, errors alone."""
    with forebay.Client(pair.a.address) as client:
        return [found for found in client.care.fsck(deep=deep) if found.run == job.run and found.severity == "error"]


def repair(pair: Pair, job: Job, *, deep: bool = False) -> list[Finding]:
    """Repaired, of this job's run."""
    with forebay.Client(pair.a.address) as client:
        return [found for found in client.care.repair(apply=True, deep=deep) if found.run == job.run]


def verdicts(pair: Pair, job: Job, source: str = "all") -> dict[tuple[str, str], str]:
    """What verify says of each copy that is not good."""
    with forebay.Client(pair.a.address) as client:
        reports = list(client.care.verify(job.run, job.step, source))
    assert reports
    return {(report.name, report.where): report.state for report in reports if report.state != "good"}


def scrub(pair: Pair) -> Any:
    """A whole pass; its figures."""
    with forebay.Client(pair.a.address) as client:
        before = eventually(lambda: client.care.scrub(), lambda now: now.state != "running")
        client.care.scrub("start")
        return eventually(lambda: client.care.scrub(), lambda now: now.passes > before.passes)


def read_back(pair: Pair, tier: str) -> Any:
    """A whole reading back of one tier; its figures."""

    def now(client: forebay.Client) -> Any:
        return next(each for each in client.care.scrub().tiers if each.tier == tier)

    with forebay.Client(pair.a.address) as client:
        before = eventually(lambda: now(client), lambda each: each.state != "running")
        client.care.scrub("start", tier)
        return eventually(lambda: now(client), lambda each: each.passes > before.passes)


def quarantine_ids(pair: Pair, job: Job) -> dict[str, str]:
    """Where: id."""
    found = json.loads(pair.a.cli("quarantine", "ls", "--json").stdout)
    return {entry["where"]: entry["id"] for entry in found if entry["run"] == job.run}
