"""Care commands that Ctrl-C ends in the middle, or whose gateway is killed then: one clear line and exit 130, a state no worse
than before, and the same command again does the rest."""

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay.demo.gateways import FOREBAY, GatewayProcess
from forebay_gateway.tiers.posix.lock import lock_path
from integration.conftest import MakeGateway
from integration.kit import SMALL_CHUNKS, Job, assert_refused, cache_file_of, cache_files, eventually, flip_byte
from soak.figures import died, failpoints, reported
from soak.form import every, some

NAME = "rank0/model.bin"
ASK = f'{SMALL_CHUNKS}\nrepair = "ask"'
GC = ["gc", "--apply", "--older-than", "0s"]


@contextmanager
def failing(gateway: GatewayProcess, failpoints: str) -> Iterator[None]:
    """Commands that run inside the block, without a gateway, pass these failpoints."""
    gateway.environment["FOREBAY_FAILPOINTS"] = failpoints
    try:
        yield
    finally:
        del gateway.environment["FOREBAY_FAILPOINTS"]


def interrupted(gateway: GatewayProcess, arguments: list[str], when: Callable[[], object]) -> subprocess.CompletedProcess[str]:
    """The command, sent SIGINT as soon as `when` gives something true."""
    with gateway.begun(*arguments) as command:
        deadline_s = time.monotonic() + 30
        while not when():
            assert command.process.poll() is None, command.finish(0)
            assert time.monotonic() < deadline_s, "it does not come so far"
            time.sleep(0.01)
        command.process.send_signal(2)
        return command.finish(30)


class Patient:
    """A gateway with something to do for each command: a session that was superseded, and bad copies."""

    def __init__(self, gateway: GatewayProcess) -> None:
        self.gateway = gateway
        self.jobs = [Job(run=f"team/{name}", writers=1) for name in ("replaced", "bad", "worse")]
        replaced, bad, worse = self.jobs
        gateway.start()
        older = Job(run=replaced.run, session="launch-0", writers=1)
        older.save(gateway, 0)
        older.wait(gateway)
        for job in self.jobs:
            job.save(gateway, 0)
            job.wait(gateway)
        self.older = cache_file_of(gateway, older.shards(0)[NAME])
        self.bad, self.worse = (cache_file_of(gateway, job.shards(0)[NAME]) for job in (bad, worse))
        for job, path in ((bad, self.bad), (worse, self.worse)):
            flip_byte(path, 7)
            assert gateway.cli("verify", job.run, "7", check=False).returncode == 4
        gateway.terminate()

    def start(self, failpoints: str) -> None:
        self.gateway.start(failpoints=failpoints)

    @property
    def quarantine(self) -> list[str]:
        return [entry["id"] for entry in json.loads(self.gateway.cli("quarantine", "ls", "--json").stdout)]

    @property
    def worse_id(self) -> str:
        (id_,) = [id_ for id_ in self.quarantine if int(id_.split("-")[1]) == int(self.worse.stem, 16)]
        return id_

    def fetching(self) -> bool:
        return any((self.gateway.cache / "incoming").iterdir())

    def check_well(self, target: Path) -> None:
        """Whole again: everything restores from the cache or a tier, and nothing is wrong."""
        done = self.gateway.cli("fsck", "--deep", "--json", check=False)
        wrong = [
            entry for entry in json.loads(done.stdout) if entry["severity"] == "error" or entry["kind"] == "superseded_session"
        ]
        assert (done.returncode, wrong) == (0, [])
        for job in self.jobs:
            job.assert_restores(self.gateway, target / job.run)
        assert not self.older.exists()
        with forebay.Client(self.gateway.address) as client:
            used = client.status().cache.used_bytes
        assert used == sum(path.stat().st_size for path in cache_files(self.gateway))


@pytest.fixture
def patient(make: MakeGateway) -> Patient:
    return Patient(make(cache_keys=ASK))


SLEEPS = "evict.before_catalog=sleep:1.5;delete.files_gone=sleep:1.5;seal.before_rename=sleep:1.5"


def test_ctrl_c(patient: Patient, tmp_path: Path) -> None:
    """Where the command is in the middle of an act, the gateway brings that to its end; the lock is free afterwards."""
    gateway = patient.gateway
    patient.start(SLEEPS)
    told = interrupted(gateway, GC, lambda: not patient.older.exists())
    assert_refused(told, 130, "interrupted: ", "what was deleted so far is gone")
    id_ = patient.worse_id
    told = interrupted(gateway, ["quarantine", "release", id_, "--yes"], lambda: not patient.worse.exists())
    assert_refused(told, 130, "interrupted: ", "goes on to its end")
    eventually(lambda: gateway.cli("repair", check=False).returncode, lambda code: code != 5)  # it has come to its end
    told = interrupted(gateway, ["repair", "--apply"], patient.fetching)
    assert_refused(told, 130, "interrupted: ", "so far")
    for command in (["fsck"], ["gc"], ["repair"]):  # each waits for the act under way, not for the command that is gone
        eventually(lambda command=command: gateway.cli(*command, check=False).returncode, lambda code: code != 5)
    assert_refused(gateway.cli("quarantine", "release", id_, "--yes", check=False), 3, "nothing in quarantine")
    assert gateway.cli(*GC, check=False).returncode == 0
    assert gateway.cli("repair", "--apply", check=False).returncode == 0
    patient.check_well(tmp_path)


@pytest.mark.parametrize("command", [["fsck", "--deep"], ["repair", "--deep"], ["verify", "team/gone", "7"]])
def test_ctrl_c_where_nothing_is_changed(make: MakeGateway, command: list[str]) -> None:
    gateway = make(cache_keys=ASK).start(failpoints="read.before_chunk=all*sleep:0.2")
    Job(run="team/gone", writers=1, size=8 << 20).save(gateway, 0)

    def reads() -> bool:
        """Looked at from outside: a command that asks would hold the lock for that moment, and could be first."""
        assert gateway.process is not None
        with contextlib.suppress(FileNotFoundError):
            return any(
                os.readlink(open_file).endswith(".shard") for open_file in Path(f"/proc/{gateway.process.pid}/fd").iterdir()
            )
        return False

    told = interrupted(gateway, command, reads)
    assert_refused(told, 130, "interrupted: ", "was not read" if command[0] == "verify" else "nothing was changed")
    eventually(lambda: gateway.cli("gc", check=False).returncode, lambda code: code == 0)
    gateway.kill()  # an orderly stop would wait for the drain, which has slow reads too


KILLS = {
    "gc, before anything goes": ("delete.superseded_marked=kill", lambda patient: GC),
    "gc": ("delete.files_gone=kill", lambda patient: GC),
    "quarantine release": ("evict.before_catalog=kill", lambda patient: ["quarantine", "release", patient.worse_id, "--yes"]),
}


def test_a_killed_gateway(patient: Patient, tmp_path: Path) -> None:
    gateway = patient.gateway
    with reported("failpoints-care-killed", crash_rounds=0, failpoints_passed=[], failpoints_known=failpoints()) as counted:
        for failpoint, arguments in KILLS.values():
            patient.start(failpoint)
            told = gateway.cli(*arguments(patient), check=False)
            assert told.returncode == 5, told
            assert gateway.wait_exit() == -9
            counted["failpoints_passed"].append(failpoint.partition("=")[0])
            gateway.start()
            errors = [each for each in findings(gateway) if each["severity"] == "error"]
            assert {each["kind"] for each in errors} == {"quarantined"}, errors  # as before
            gateway.terminate()
            counted["crash_rounds"] += 1
    patient.start("seal.before_rename=sleep:5")
    with gateway.begun("repair", "--apply") as repairing:
        eventually(patient.fetching)
        gateway.kill()
        told = repairing.finish(30)
        assert told.returncode == 5 and len(told.stderr.strip().splitlines()) == 1, told
    gateway.start()
    assert len(patient.quarantine) == 1  # as before
    assert gateway.cli(*GC, check=False).returncode == 0
    assert gateway.cli("repair", "--apply", check=False).returncode == 0
    patient.check_well(tmp_path)


def repair_command(gateway: GatewayProcess, job: Job) -> list[str]:
    return ["repair", "--apply", "--deep"]


def release_command(gateway: GatewayProcess, job: Job) -> list[str]:
    """Of what a verify puts into quarantine."""
    assert gateway.cli("verify", job.run, "7", check=False).returncode == 4
    (found,) = json.loads(gateway.cli("quarantine", "ls", "--json").stdout)
    return ["quarantine", "release", found["id"], "--yes"]


# Point between two acts of a command: what is damaged before it (last, where the cache's file goes), and the command.
BETWEEN = {
    "repair.file_marked": ("cache", repair_command),
    "mend.fetched": ("cache", repair_command),
    "repair.copy_marked": ("copy", repair_command),
    "release.object_gone": ("copy", release_command),
    "posix.document_replaced": ("manifest", repair_command),
    "repair.document_written": ("manifest", repair_command),
    "posix.lock_taken_over": ("manifest", repair_command),
    "release.before_unlink": ("cache", release_command),
}


def test_a_kill_between_two_acts_of_a_command(make: MakeGateway, root: Path, tmp_path: Path) -> None:
    """The gateway dies at each point; the next start serves the checkpoint bit-exact, and the same repair does the rest."""
    gateway, job = make(cache_keys=ASK), Job(run="team/between", writers=1)
    gateway.start()
    job.save(gateway, 0)
    job.wait(gateway)
    gateway.terminate()
    figures = reported("failpoints-care", crash_rounds=0, failpoints_passed=[], failpoints_known=failpoints())
    with figures as counted:
        for name, (where, command) in every([*BETWEEN.items()], 3):
            damaged = {
                "cache": cache_file_of(gateway, job.shards(0)[NAME]),
                "copy": root / job.key(NAME),
                "manifest": root / job.directory / "manifest.json",
            }
            flip_byte(damaged[where], 9)
            if name == "posix.lock_taken_over":
                leave_lock(root / job.directory / "manifest.json")
            second = "2*" if name == "posix.document_replaced" else ""  # the tier's trial at the start is the first
            gateway.start(failpoints=f"{name}={second}kill")
            told = gateway.cli(*command(gateway, job), check=False)
            assert (told.returncode, gateway.wait_exit()) == (5, -9), (name, told)
            counted["failpoints_passed"].append(name)
            gateway.start()
            job.assert_restores(gateway, tmp_path / name)
            done = gateway.cli("repair", "--apply", "--deep", check=False)
            assert done.returncode == 0, (name, done, gateway.tail(2500))
            eventually(lambda: job.copies(gateway)[NAME]["pfs"], lambda state: state == "verified")
            assert gateway.cli("verify", job.run, "7").returncode == 0, name
            if name == "posix.document_replaced":
                check_lock_goes(gateway, root / job.directory)
            gateway.terminate()
            counted["crash_rounds"] += 1


def leave_lock(document: Path) -> None:
    """Of a node that died with it an hour ago."""
    path = lock_path(document)
    path.write_text(json.dumps({"owner": "gone:1", "token": "0123456789abcdef", "ttl_s": 2.0, "expires": 0}))
    os.utime(path, (time.time() - 3600,) * 2)


def check_lock_goes(gateway: GatewayProcess, step: Path) -> None:
    """The gateway died with the manifest's lock in its hand: told of, too young to go unless told otherwise, then gone."""
    (lock,) = step.glob(".forebay-lock-*")
    (told,) = [each for each in findings(gateway) if each["kind"] == "orphan_lock"]
    assert told["severity"] == "note" and "gc --apply" in told["remedy"]
    (found,) = [each for each in json.loads(gateway.cli("gc", "--json").stdout) if each["kind"] == "lock"]
    assert found["path"].endswith(f"/{step.name}/{lock.name}") and not found["deletable"]
    gateway.cli("gc", "--apply")
    assert lock.exists()
    gateway.cli(*GC)
    assert not lock.exists()


def findings(gateway: GatewayProcess) -> Any:
    return json.loads(gateway.cli("fsck", "--json", check=False).stdout)


# -- rebuild -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def lost(make: MakeGateway) -> tuple[GatewayProcess, Job]:
    """Down; one checkpoint in cache and tier, one that only the tier has, and that is pinned."""
    gateway = make().start()
    job, tier_only = Job(run="team/here", writers=1), Job(run="team/tier-only", writers=1)
    for each in (job, tier_only):
        each.save(gateway, 0)
        each.wait(gateway)
    gateway.cli("evict", tier_only.run, "7", "--yes")
    gateway.cli("pin", tier_only.run, "7")
    for path in gateway.cache.glob("data/*/part-*.json"):
        if tier_only.run in path.read_text():
            path.unlink()
    gateway.terminate()
    return gateway, job


def rebuild(gateway: GatewayProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    return gateway.cli("rebuild", "--config", str(gateway.config), "--apply", *arguments, check=False)


def check_rebuilt(gateway: GatewayProcess, job: Job, target: Path) -> None:
    """The old catalog is kept once, all checkpoints and the pin are there."""
    assert [path.name for path in gateway.cache.glob("catalog.damaged-*")] == ["catalog.damaged-1"]
    assert_refused(rebuild(gateway), 2, "can be used")
    gateway.start()
    job.assert_restores(gateway, target, source="cache")
    assert_refused(gateway.cli("evict", "team/tier-only", "7", "--yes", check=False), 2, "pinned")
    assert gateway.cli("fsck", "--deep", check=False).returncode == 0


def test_a_rebuild_that_ctrl_c_ends_goes_on(lost: tuple[GatewayProcess, Job], tmp_path: Path) -> None:
    gateway, job = lost
    command = ["rebuild", "--config", str(gateway.config), "--apply", "--force"]
    aside, made = gateway.cache / "catalog.damaged-1", gateway.cache / "catalog" / "data.mdb"
    with failing(gateway, "catalog.before_commit=2*sleep:1.5"):
        told = interrupted(gateway, command, lambda: aside.exists() and made.exists())
    assert_refused(told, 130, "interrupted: the new catalog is not finished", "catalog.damaged-1", "run it again")
    dry = json.loads(gateway.cli("rebuild", "--config", str(gateway.config), "--json").stdout)
    assert (dry["damage"], dry["applied"]) == ("a rebuild of it was cut off", False)
    assert rebuild(gateway).returncode == 0  # without --force
    check_rebuilt(gateway, job, tmp_path / "restored")


def test_a_rebuild_that_is_interrupted_before_it_began_changed_nothing(lost: tuple[GatewayProcess, Job]) -> None:
    gateway, _ = lost
    with failing(gateway, "catalog.before_commit=all*sleep:0.0"):
        code = "import forebay_gateway.offline as offline, signal, forebay.cli as cli, sys; "
        code += "offline.set_aside = lambda *_: signal.raise_signal(2); cli.main()"
        arguments = [
            str(FOREBAY.with_name("python")),
            "-c",
            code,
            "rebuild",
            "--config",
            str(gateway.config),
            "--apply",
            "--force",
        ]
        told = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    assert_refused(told, 130, "interrupted: nothing was changed")
    assert not list(gateway.cache.glob("catalog.damaged-*"))


MOMENTS = (
    "rebuild.set_aside=kill",
    "durable.before_rename=kill",
    "catalog.before_commit=1*kill",
    "catalog.after_commit=2*kill",
    "catalog.after_commit=4*kill",
)


@pytest.mark.parametrize(
    ("failpoint", "by"),
    some(
        list(product(MOMENTS, ("the command", "a start"))),
        ("durable.before_rename=kill", "a start"),
    ),
)
def test_a_rebuild_that_is_killed_goes_on(lost: tuple[GatewayProcess, Job], tmp_path: Path, failpoint: str, by: str) -> None:
    gateway, job = lost
    with failing(gateway, failpoint):
        assert rebuild(gateway, "--force").returncode == -9
    name = failpoint.partition("=")[0]
    if by == "a start":
        gateway.start()
        assert [alarm for alarm in gateway.status()["alarms"] if "rebuilt" in alarm["what"]]
        with forebay.Client(gateway.address) as client:
            assert client.latest("team/tier-only") == 7
        gateway.terminate()
    else:
        assert rebuild(gateway).returncode == 0
        check_rebuilt(gateway, job, tmp_path / "restored")
        died(f"rebuild-{MOMENTS.index(failpoint)}-{by}", name)
        return
    assert_refused(rebuild(gateway), 2, "can be used")
    gateway.start()
    job.assert_restores(gateway, tmp_path / "restored", source="cache")
    assert gateway.cli("fsck", "--deep", check=False).returncode == 0
    died(f"rebuild-{MOMENTS.index(failpoint)}-{by}", name)


def test_two_rebuilds_at_once(lost: tuple[GatewayProcess, Job], tmp_path: Path) -> None:
    """The second finds the cache's lock taken, or comes so late that there is nothing left to rebuild."""
    gateway, job = lost
    with ExitStack() as running:
        with failing(gateway, "catalog.before_commit=2*sleep:2"):
            slow = running.enter_context(gateway.begun("rebuild", "--config", str(gateway.config), "--apply", "--force"))
        eventually((gateway.cache / "catalog.damaged-1" / "data.mdb").exists)
        eventually((gateway.cache / "catalog" / "data.mdb").exists)
        assert_refused(rebuild(gateway, "--force"), 5, f"pid={slow.process.pid}")
        assert slow.finish(30).returncode == 0
    check_rebuilt(gateway, job, tmp_path / "restored")
