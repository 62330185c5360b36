"""What goes next, as an operator and a job see it: a gateway's process, its command line, its files on a tier."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import forebay
from forebay.demo.gateways import GatewayProcess, posix_tier
from forebay.errors import Incomplete, InvalidArgument
from integration.kit import SMALL_CHUNKS, eventually

POLICIES = """
[[policy]]
run = "scratch/**"
transient = true
[[policy]]
run = "near-only"
tiers = ["near"]
[[policy]]
run = "often"
every = 2
"""


def started(directory: Path) -> GatewayProcess:
    """Two POSIX tiers, and the policies above."""
    tiers = [posix_tier(directory / name, name) for name in ("near", "far")]
    for name in ("near", "far"):
        (directory / name).mkdir()
    return GatewayProcess(directory, "order", [*tiers, POLICIES], cache_keys=SMALL_CHUNKS)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """One for all tests that do not end it; each has runs of its own."""
    with started(tmp_path_factory.mktemp("order")) as process:
        save(process, "warm-up", 1)
        with forebay.Client(process.address) as client:
            client.wait("warm-up", 1, "all", timeout=60)  # the movers have been started, and belong to no single test
        yield process


def save(gateway: GatewayProcess, run: str, step: int, *, final: bool = False) -> forebay.CommitReceipt:
    """A small checkpoint, durable in the cache."""
    with forebay.Client(gateway.address) as client, client.checkpoint(run, step, session=f"s{step}") as part:
        part.put("w", f"{run}-{step}".encode() * 1000)
        return part.commit(final=final)


def ids(client: forebay.Client, tier: str = "near") -> list[str]:
    """What waits for the tier, the first first."""
    return [entry.id for entry in client.queue().entries if entry.tier == tier]


def order_on_tier(gateway: GatewayProcess, run: str, tier: str = "near") -> list[int]:
    """The steps whose shards lie on the tier, by when they came."""
    found = {path.resolve() for path in (gateway.directory / tier / run).glob("step-*/*/w")}
    return [int(path.parts[-3].removeprefix("step-")) for path in sorted(found, key=lambda path: path.stat().st_mtime_ns)]


def all_drained(client: forebay.Client) -> None:
    """Until nothing waits."""
    eventually(lambda: [tier.pending_copies for tier in client.status().tiers], lambda pending: not any(pending))


def test_final_before_periodic_and_single_holds_and_priorities_over_a_restart(tmp_path: Path) -> None:
    with started(tmp_path) as gateway, forebay.Client(gateway.address) as client:
        client.hold()
        for step in (1, 2, 3, 4):
            save(gateway, "order", step)
        save(gateway, "order", 5, final=True)
        gateway.cli("queue", "hold", "order@1")
        assert client.change_queue("prio", "order@4") == ["order@4"]
        gateway.kill()
        gateway.start()
        final_before_periodic(gateway, client)


def final_before_periodic(gateway: GatewayProcess, client: forebay.Client) -> None:
    """What the test above says, after the restart."""
    assert eventually(lambda: ids(client), lambda found: len(found) == 5)[:2] == ["order@4", "order@5"]
    shown = json.loads(gateway.cli("queue", "--json").stdout)
    entries = {entry["id"]: entry for entry in shown["entries"] if entry["tier"] == "near"}
    assert (entries["order@1"]["held"], entries["order@1"]["state"]) == (True, "held")
    assert (entries["order@4"]["prio"], entries["order@5"]["kind"]) == (1, "final")
    assert "the tier is held" in entries["order@2"]["why"]
    assert shown["skipped"] == {"near": 0, "far": 0}
    client.release("near")
    client.release("far")
    client.wait("order", 3, "all", timeout=30)
    assert order_on_tier(gateway, "order") == [4, 5, 2, 3]
    assert client.describe("order", 5).kind == "final"
    assert ids(client) == ["order@1"]
    assert "held by an operator" in gateway.cli("queue").stdout
    client.release()  # all, whatever held it
    all_drained(client)
    assert order_on_tier(gateway, "order")[-1] == 1
    missing = gateway.cli("queue", "hold", "order@77", check=False)
    assert missing.returncode == 3
    assert "order@77" in missing.stderr


def test_each_second_one_goes_and_the_others_say_why_not(gateway: GatewayProcess) -> None:
    with forebay.Client(gateway.address) as client:
        for step in (1, 2, 3):
            save(gateway, "often", step)
            if step != 2:
                client.wait("often", step, "all", timeout=30)
        found = client.describe("often", 2)
        level = next(level for level in found.levels if level.level == "near")
        assert (level.state, "step 3 is newer" in level.reason) == ("skipped", True)
        with pytest.raises(Incomplete, match=r"left out on 'near'.*cadence"):
            client.wait("often", 2, "near", timeout=10)
        before = client.queue().skipped["near"]
        assert before >= 1
        assert [tier.skipped for tier in client.status().tiers] == [before, client.queue().skipped["far"]]
        client.pin("often", 2)
        client.wait("often", 2, "near", timeout=30)  # it is still here, so it goes after all
    assert "near:skipped" not in gateway.cli("ls", "often").stdout


def test_a_transient_run_says_so_everywhere_and_is_on_no_tier(gateway: GatewayProcess, tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(b"x" * 100_000)
    said = gateway.cli("save", str(tmp_path), "--run", "scratch/a", "--step", "1")
    assert "transient" in said.stdout
    with forebay.Client(gateway.address) as client:
        with client.checkpoint("scratch/a", 2, session="s") as part:
            assert part.put("w", b"x" * 10).transient
            assert part.put("large", b"x" * (2 << 20)).transient
            assert part.commit().transient
        assert client.describe("scratch/a", 1).transient
        with pytest.raises(InvalidArgument, match="transient"):
            client.wait("scratch/a", 1, "near", timeout=10)
        with pytest.raises(InvalidArgument, match="nothing was sent"):
            client.save_dir(tmp_path, "scratch/a", 3, wait="all")
    assert "transient" in gateway.cli("ls", "scratch/a").stdout
    assert "near:excluded" in gateway.cli("ls", "scratch/a").stdout
    gateway.cli("restore", "scratch/a", "1", str(tmp_path / "back"))
    assert (tmp_path / "back" / "w").read_bytes() == b"x" * 100_000
    assert not (gateway.directory / "near" / "scratch").exists()


def test_a_run_that_goes_to_one_tier_alone(gateway: GatewayProcess) -> None:
    save(gateway, "near-only", 1)
    with forebay.Client(gateway.address) as client:
        client.wait("near-only", 1, "all", timeout=30)
        with pytest.raises(InvalidArgument, match="do not go to 'far'"):
            client.wait("near-only", 1, "far", timeout=10)
    assert json.loads(gateway.cli("evict", "near-only", "1", "--json").stdout)["shards"] == 1
    assert not (gateway.directory / "far" / "near-only").exists()


def test_the_configuration_is_read_again_by_command_and_by_signal(gateway: GatewayProcess) -> None:
    text = gateway.config.read_text()
    try:
        gateway.config.write_text(text.replace('run = "near-only"', 'run = "renamed"') + '[log]\nlevel = "warning"\n')
        done = json.loads(gateway.cli("config", "reload", "--json").stdout)
        assert done == {"changed": ["log.level", "policy"], "needs_restart": []}
        save(gateway, "near-only", 2)
        with forebay.Client(gateway.address) as client:
            client.wait("near-only", 2, "far", timeout=30)
        gateway.config.write_text(text.replace('capacity = "2GiB"', 'capacity = "1GiB"'))
        assert gateway.process is not None
        gateway.process.send_signal(signal.SIGHUP)
        with forebay.Client(gateway.address) as client:
            eventually(client.config, lambda shown: 'run = "near-only"' in shown)
            assert 'capacity = "2 GiB"' in client.config() or 'capacity = "2GiB"' in client.config()
            assert client.reload_config().needs_restart == ("cache.capacity",)
        for wrong in (text + "[nonsense]\n", text.replace('tiers = ["near"]', 'tiers = ["new"]')):
            gateway.config.write_text(wrong)
            refused = gateway.cli("config", "reload", check=False)
            assert refused.returncode == 1
            assert "the configuration stays as it is" in refused.stderr
    finally:
        gateway.config.write_text(text)
    assert json.loads(gateway.cli("config", "reload", "--json").stdout)["changed"] == []
