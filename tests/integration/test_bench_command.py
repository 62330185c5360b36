"""`forebay bench` on a real gateway: figures that are measured, and nothing left of it whatever happens."""

import json
import signal
import subprocess
from itertools import product
from pathlib import Path

import pytest

import forebay
from forebay.demo.gateways import FOREBAY, GatewayProcess
from integration.conftest import MakeGateway
from integration.kit import eventually, files_below
from soak.form import some

SMALL_RUN = ("--size", "6MiB", "--rounds", "2", "--small", "20", "--json")


def figures_of(text: str) -> dict[str, dict[str, object]]:
    return {figure["name"]: figure for figure in json.loads(text)["figures"]}


def assert_nothing_left(gateway: GatewayProcess, root: Path) -> None:
    """No checkpoint, no shard in the cache, no file on the tier but what a fresh one has."""
    with forebay.Client(gateway.address) as client:
        assert client.runs() == []
        status = eventually(client.status, lambda status: status.cache.used_bytes == 0 and not status.tiers[0].pending_copies)
        assert status.checkpoints_incomplete == 0
    assert not files_below(gateway.cache / "data") and not files_below(gateway.cache / "incoming")
    # A run keeps its name in the tier's list of runs: another node may be about to save under it.
    assert not [path for path in root.rglob("*") if "forebay-bench" in str(path) and path.parent.name != "runs"]


def test_figures_are_measured_and_nothing_stays(make: MakeGateway, root: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with make() as gateway:
        text = gateway.cli("bench", *SMALL_RUN, "--disk", str(disk)).stdout
        assert_nothing_left(gateway, root)
    assert set(json.loads(text)) == {"node", "run", "size", "rounds", "figures"} and json.loads(text)["size"] == 6 << 20
    figures = figures_of(text)
    lanes = {f"{verb}_{lane}" for verb in ("save", "restore") for lane in ("fd", "stream")}
    assert set(figures) == lanes | {"drain_pfs", "disk_write", "ack_p50", "ack_p99"}
    for name in ("save_stream", "restore_stream", "drain_pfs", "disk_write"):
        values = figures[name]["values"]
        assert not figures[name]["reason"] and len(values) >= 2 and min(values) > 0, figures[name]
        assert min(values) <= figures[name]["value"] <= max(values)
    assert 0 < figures["ack_p50"]["value"] <= figures["ack_p99"]["value"]
    for name, figure in figures.items():  # a figure, or why there is none
        assert (figure["value"] is None) == bool(figure["reason"]), name
    assert list(disk.iterdir()) == []


def test_the_table_names_what_could_not_be_measured(make: MakeGateway, root: Path) -> None:
    with make() as gateway:
        gateway.cli("queue", "hold")
        lines = gateway.cli("bench", *SMALL_RUN[:-1]).stdout.splitlines()
        assert_nothing_left(gateway, root)
    shown = {line.split()[0]: line for line in lines[2:]}
    assert "not measured: the tier is held" in shown["drain_pfs"]
    assert "GB/s" in shown["save_stream"] and "give a directory" in shown["disk_write"]


def test_no_room_is_refused_before_a_byte_is_sent(make: MakeGateway, root: Path) -> None:
    with make(capacity="64MiB") as gateway:
        with forebay.Client(gateway.address) as client, client.checkpoint("own", 1) as part:
            part.put("shard", bytes(8 << 20))
            part.commit(wait="pfs")
        refused = gateway.cli("bench", "--size", "54MiB", check=False)  # would fit into an empty one
        assert refused.returncode == 6 and "has not the room" in refused.stderr and refused.stdout == ""
        with forebay.Client(gateway.address) as client:
            assert [run.run for run in client.runs()] == ["own"]


@pytest.mark.parametrize("size", ["", "12 parsecs", "-5MiB", "1KiB"])
def test_a_bad_size_is_a_usage_error(make: MakeGateway, size: str) -> None:
    with make() as gateway:
        assert gateway.cli("bench", "--size", size, check=False).returncode == 2


@pytest.mark.parametrize(
    ("number", "moment"),
    some(
        list(product((signal.SIGINT, signal.SIGTERM), ("saving", "saved"))),
        (signal.SIGINT, "saving"),
        (signal.SIGTERM, "saved"),
    ),
)
def test_an_interrupt_leaves_nothing(make: MakeGateway, root: Path, number: signal.Signals, moment: str) -> None:
    size = "200MiB" if moment == "saving" else "6MiB"
    command = [str(FOREBAY), "--address", "", "bench", "--size", size, "--rounds", "500"]
    with make() as gateway, forebay.Client(gateway.address) as client:
        command[2] = gateway.address
        # A shell's background job ignores SIGINT, and its children with it: Python then installs no handler.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        finally:
            signal.signal(signal.SIGINT, before)
        try:
            if moment == "saving":
                eventually(client.status, lambda status: status.cache.open_streams > 0)
            else:
                eventually(lambda: [step for run in client.runs() for step in client.checkpoints(run.run) if step.complete])
            process.send_signal(number)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
            process.wait()
        assert process.returncode == 130 and b"Traceback" not in said, said
        assert_nothing_left(gateway, root)
