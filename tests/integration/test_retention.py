"""Retention by whole gateways on one directory: what goes by itself, whatever is killed in the middle; dry runs; pins."""

import json
from pathlib import Path
from typing import Any

import forebay
from forebay.demo.gateways import GatewayProcess, posix_tier
from integration.conftest import MakeGateway
from integration.kit import eventually, files_below
from soak.figures import died
from soak.form import some

RUN = "team/model"
KEEP_2 = '[[retain]]\nrun = "team/*"\nkeep_last = 2\n'
# Between any two of its durable acts.
KILLS = some(
    [
        "expire.noted",
        "expire.kept_aside",
        "expire.manifest_gone",
        "expire.shards_gone",
        "expire.tombstone_gone",
        "expire.before_gone",
        "expire.gone",
    ],
    "expire.kept_aside",
    "expire.shards_gone",
)


def save(gateway: GatewayProcess, *steps: int, wait: str | None = "pfs") -> None:
    with forebay.Client(gateway.address, retry_timeout=60.0) as client:
        for step in steps:
            with client.checkpoint(RUN, step) as part:
                part.put("a.bin", bytes([step]) * 100_000)
                part.put(".metadata", b"m")
                part.commit(wait=wait or "cache", timeout=60)


def on_tier(root: Path) -> dict[int, int]:
    """Step: files."""
    found: dict[int, int] = {}
    for path in files_below(root / RUN):
        step = int(path.partition("/")[0].removeprefix("step-"))
        found[step] = found.get(step, 0) + 1
    return found


def listed(gateway: GatewayProcess) -> list[int]:
    with forebay.Client(gateway.address) as client:
        return [item.step for item in client.checkpoints(RUN)]


def fates(gateway: GatewayProcess, *flags: str) -> dict[int, dict[str, Any]]:
    return {each["step"]: each for each in json.loads(gateway.cli("retain", *flags, "--json").stdout)}


def test_it_goes_by_itself_on_every_node_and_pins_stay(make: MakeGateway, root: Path, tmp_path: Path) -> None:
    a, b = (make(node, [posix_tier(root), KEEP_2]) for node in ("a", "b"))
    a.start()
    b.start()
    save(a, 1, 2)
    with forebay.Client(b.address) as client:
        client.pin(RUN, 1)
    save(a, 3, 4)
    eventually(lambda: on_tier(root), lambda there: sorted(there) == [1, 3, 4])
    assert len(set(on_tier(root).values())) == 1
    eventually(lambda: listed(a), lambda steps: steps == [1, 3, 4])
    assert fates(b)[1]["reason"] == "it is pinned"
    assert listed(b) == [1, 3, 4]
    with forebay.Client(b.address) as client:
        client.unpin(RUN, 1)
    told = fates(b, RUN)
    assert [step for step, fate in told.items() if fate["goes"]] == [1]
    assert sorted(on_tier(root)) == [1, 3, 4]
    assert fates(b, "--yes")[1]["outcome"] == "removed"
    assert sorted(on_tier(root)) == [3, 4]
    for gateway in (a, b):
        with forebay.Client(gateway.address) as client:
            assert client.latest(RUN) == 4
            client.restore_dir(RUN, 4, tmp_path / gateway.node)
            retention = client.status().tiers[0].retention
        assert retention.state == "on"
        assert retention.looked_s is not None
    assert "retention looked" in a.cli("status").stdout


def test_a_kill_at_any_point_leaves_nothing_half(make: MakeGateway, root: Path) -> None:
    """The same gateway goes on once its own note has aged; here another one does, told that it may at once."""
    gateway = make("a", [posix_tier(root), KEEP_2])
    gateway.start()
    save(gateway, 1, 2)
    step = 2
    for point in KILLS:
        assert gateway.terminate() == 0  # in order, so that nobody holds the run's ledger
        gateway.start(failpoints=f"{point}=kill")
        step += 1
        save(gateway, step, wait=None)
        assert gateway.wait_exit() == -9, point
        ledger = next((root / ".forebay" / "retain").glob("*.json"))
        left = json.loads(ledger.read_bytes())
        ledger.write_text(json.dumps(left | {"ttl_s": 1}))  # else it is left alone for two minutes
        gateway.start()
        eventually(lambda: sorted(on_tier(root)), lambda there, step=step: there == [step - 1, step])  # type: ignore[misc]
        assert len(set(on_tier(root).values())) == 1
        eventually(lambda: listed(gateway), lambda steps, step=step: steps == [step - 1, step])  # type: ignore[misc]
    # One ledger, and what is set aside for its next change; nothing half written.
    kept = [name for name in files_below(root / ".forebay" / "retain") if not name.rpartition("/")[2].startswith(".")]
    assert sorted(name.rpartition(".")[2] for name in kept) == ["json", "reserve"]
    died("retention", *KILLS)


def test_nodes_share_a_tier_s_bandwidth(make: MakeGateway, root: Path) -> None:
    tier = posix_tier(root, fleet_bandwidth="8MiB")
    a, b = (make(node, [tier]) for node in ("a", "b"))
    a.start()

    def told(gateway: GatewayProcess) -> tuple[Any, Any]:
        with forebay.Client(gateway.address) as client:
            found = client.status().tiers[0]
        return found.live_nodes, found.bandwidth_bytes_per_s

    eventually(lambda: told(a), lambda now: now == (1, 8 << 20))
    b.start()
    eventually(lambda: told(b), lambda now: now == (2, 4 << 20))
    assert "one of 2 nodes" in b.cli("status").stdout
    assert {path.name for path in (root / ".forebay" / "nodes").iterdir()} == {"a.json", "b.json"}
