"""`forebay plan`: the arithmetic against numbers worked out by hand, its refusals, and what it prints and draws."""

import dataclasses
import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from forebay import address as addresses
from forebay.cli.app import run
from forebay.cli.plan import plan as plan_command
from forebay.plan import needs, plot, ssd, state
from forebay.plan.inputs import BadInput, Disk, Inputs, Prices, Tier
from forebay.plan.needs import make
from forebay.plan.quantities import parse_count, parse_duration, parse_rate, parse_size

GB, TB = 10**9, 10**12
# 8 nodes save 800 GB every 1,000 s: 0.8 GB/s of the fleet, 0.1 of a node.
INPUTS = Inputs(
    size_bytes=800 * GB,
    nodes=8,
    interval_s=1000,
    tiers=(Tier("pfs", 4 * GB), Tier("object", 1 * GB, "s3", every=4)),
    mtbf_s=8 * 40_000,
    nvme_bytes_per_s=1 * GB,
    network_bytes_per_s=1 * GB,
    headroom=0.5,
)


def changed(**changes: object) -> needs.Plan:
    return make(dataclasses.replace(INPUTS, **changes))


@pytest.fixture(autouse=True)
def no_gateway(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """None that happens to run on this machine is asked."""
    monkeypatch.delenv(addresses.ENVIRONMENT, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(addresses, "SYSTEM_SOCKET", str(tmp_path / "none.sock"))


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]):
    def call(*arguments: str, code: int = 0) -> str:
        capsys.readouterr()
        assert run(["plan", *arguments]) == code, capsys.readouterr().err
        said = capsys.readouterr()
        if code:
            assert said.out == "" and said.err.count("\n") == 1, said
            return said.err
        assert said.err == ""
        return said.out

    return call


# -- the arithmetic ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "optimizer", "weights"),
    [
        ("fp32", "adamw", 3.0),  # weights and two moments of the same width
        ("bf16", "adamw", 7.0),  # 2 + 4 + 8 bytes of 2
        ("fp32", "sgd-momentum", 2.0),
        ("bf16", "none", 1.0),
        ("fp16", "lion", 5.0),
        ("fp8", "adam8bit", 1 + 4 + 2 + 8 / 256),
    ],
)
def test_a_state_is_so_many_times_its_weights(dtype: str, optimizer: str, weights: float) -> None:
    items = state.breakdown(10**9, dtype, optimizer, ranks=16)
    by_name = {item.name: item.bytes for item in items}
    assert by_name["gradients"] == 0 and by_name["RNG"] == 16 * state.RNG_BYTES and by_name["loader"] == 16 * 65536
    large = sum(by_name[name] for name in ("weights", "moments", "master weights"))
    assert large / by_name["weights"] == pytest.approx(weights)
    assert set(by_name) == {"weights", "gradients", "moments", "master weights", "scheduler", "RNG", "loader"}


def test_master_weights_can_be_left_out() -> None:
    assert sum(item.bytes for item in state.breakdown(1000, "bf16", "adam", 0, master=False)) == 10_000 + state.SCHEDULER_BYTES


def test_what_an_interval_needs_and_what_saturates_first() -> None:
    plan = changed()
    by_name = {need.name: need for need in plan.needs}
    assert by_name["save"].needs == pytest.approx(0.1)  # 100 GB at 1 GB/s, every 1,000 s
    # Written once, read for pfs each time and for object each fourth.
    assert by_name["nvme"].needs == pytest.approx(0.225 * GB) and by_name["nvme"].scope == "node"
    assert by_name["network"].needs == pytest.approx(0.125 * GB)
    assert (by_name["pfs"].needs, by_name["pfs"].share) == (pytest.approx(0.8 * GB), pytest.approx(0.2))
    assert by_name["object"].share == pytest.approx(0.2)
    assert by_name["pfs metadata"].needs == pytest.approx(6 * (64 + 65) / 1000)
    assert plan.saturates_first == "nvme" and plan.holds and plan.warnings == ()
    assert plan.interval_safe_s == pytest.approx(450)  # busy 22.5 % now, and may be 50 %
    assert by_name["pfs"].interval_min_s == pytest.approx(400)


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({"nvme_bytes_per_s": 0.3 * GB, "save_cost_s": 1.0}, "nvme"),
        ({"network_bytes_per_s": 0.13 * GB}, "network"),
        ({"metadata_ops_per_s": 1.0}, "pfs metadata"),
        ({"object_puts_per_s": 1.0}, "object requests"),
        ({"tiers": (Tier("pfs", 0.81 * GB),)}, "pfs"),
        ({"save_cost_s": 900.0}, "save"),
    ],
)
def test_each_resource_can_be_the_first(changes: dict[str, object], first: str) -> None:
    plan = changed(**changes)
    assert plan.saturates_first == first
    assert plan.interval_safe_s > INPUTS.interval_s and plan.warnings[0].what.startswith(first)


def test_the_best_interval_is_dalys_where_storage_carries_it() -> None:
    plan = changed()
    assert plan.interval_young_s == pytest.approx((2 * 100 * 40_000) ** 0.5)
    assert (plan.interval_best_s, plan.limited_by) == (plan.interval_daly_s, "failures")
    assert plan.lost_share > plan.lost_share_best
    slow = changed(tiers=(Tier("pfs", 0.1 * GB),))
    assert (slow.interval_best_s, slow.limited_by) == (pytest.approx(16_000), "pfs")


def test_how_long_a_drain_takes_and_how_large_a_cache_has_to_be() -> None:
    plan = changed(outage_s=3000)
    assert [drain.drain_s for drain in plan.drains] == [pytest.approx(200), pytest.approx(800)]
    # One being written, one kept, and those of 3,800 s.
    assert plan.cache.saves == 6 and plan.cache.needed_bytes == pytest.approx(6 * 100 * GB / 0.95)
    small = changed(outage_s=3000, cache_bytes=500 * GB)
    assert f"{small.cache.needed_bytes:,} bytes" == small.warnings[0].nearest
    assert changed(outage_s=3000, cache_bytes=700 * GB).warnings == ()


def test_a_tier_that_is_too_slow_is_said_so_with_the_nearest_interval() -> None:
    plan = changed(tiers=(Tier("pfs", 0.4 * GB),))
    assert not plan.holds and plan.cache.needed_bytes is None
    assert plan.warnings[0].what == "pfs cannot carry this interval: it would be busy 200% of the time"
    assert plan.warnings[0].nearest == "an interval of 4000 s, where it is busy 50%"
    assert changed(tiers=(Tier("pfs", 0.4 * GB),), interval_s=4000).warnings == ()


def test_a_tier_of_unknown_rate_is_left_out() -> None:
    plan = changed(tiers=(Tier("pfs", None, source="not measured"),))
    need = next(need for need in plan.needs if need.name == "pfs")
    assert (need.has, need.share, need.interval_min_s, plan.drains[0].drain_s) == (None, None, None, None)


def test_what_an_object_tier_costs() -> None:
    # 64 shards of 12.5 GB: 746 parts of 16 MiB, created and completed; 64 part records and a manifest.
    plan = changed(prices=Prices(0.02, 5.0, 1.0), keep=3)
    item = plan.objects[0]
    assert item.puts_a_checkpoint == 64 * (746 + 2) + 65 and item.gets_a_checkpoint == 64
    checkpoints = needs.MONTH_S / 4000
    assert item.puts_a_month == pytest.approx(checkpoints * item.puts_a_checkpoint)
    assert item.storage_a_month == pytest.approx(3 * 800 * GB / 2**30 * 0.02)
    assert item.requests_a_month == pytest.approx(checkpoints * (item.puts_a_checkpoint * 5 + 64) / 1000)
    assert item.total_a_month == item.storage_a_month + item.requests_a_month
    assert changed(size_bytes=64 * 1000).objects[0].puts_a_checkpoint == 64 + 65
    # No more than 10,000 parts.
    assert changed(size_bytes=64 * TB).objects[0].puts_a_checkpoint == 64 * (10_000 + 2) + 65


def test_how_long_a_disk_lasts() -> None:
    disk = Disk(capacity_bytes=4 * TB, drive_writes_a_day=1.0, rated_years=5.0, amplification=1.25)
    wear = changed(disk=disk).wear
    assert wear.bytes_a_day == pytest.approx(100 * GB * 1.25 * 86.4) and wear.drive_writes_a_day == pytest.approx(2.7)
    assert wear.years == pytest.approx(5 / 2.7) and wear.endurance_bytes == pytest.approx(4 * TB * 5 * 365.25)
    warned = changed(disk=disk).warnings[0]
    assert warned.what == "the cache's disk is worn out after 1.9 years" and "1620 s lasts 3 years" in warned.nearest
    worn = dataclasses.replace(disk, endurance_bytes=8000 * TB, written_bytes=8000 * TB)
    assert changed(disk=worn).wear.years == 0 and "another disk" in changed(disk=worn).warnings[0].nearest
    assert changed().wear.years is None


def test_a_job_that_loses_too_much_is_warned_of() -> None:
    plan = changed(mtbf_s=8 * 2000, interval_s=4000)
    assert "of the time is lost" in plan.warnings[-1].what and "loses" in plan.warnings[-1].nearest


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"interval_s": 0}, "interval is 0 s.*nearest sensible value: 1 s"),
        ({"interval_s": -5}, "nearest sensible value: 1 s"),
        ({"interval_s": float("nan")}, "interval is nan"),
        ({"nodes": 0}, "nearest sensible value: 1 nodes"),
        ({"nodes": 10**6}, "nearest sensible value: 100,000 nodes"),
        ({"size_bytes": -1}, "size is -1"),
        ({"mtbf_s": 0}, "mtbf is 0 s"),
        ({"headroom": 1.5}, "nearest sensible value: 1$"),
        ({"nvme_bytes_per_s": 0}, "nvme bytes is 0"),
        ({"keep": 0}, "nearest sensible value: 1 checkpoints"),
        ({"tiers": (Tier("pfs", 0.0),)}, "tier pfs fleet bytes is 0"),
        ({"tiers": (Tier("pfs", None, every=0),)}, "tier pfs every is 0 checkpoints.*: 1 checkpoints"),
        ({"tiers": (Tier("pfs", None), Tier("pfs", None))}, "named twice"),
        ({"disk": Disk(amplification=0.5)}, "disk amplification is 0.5"),
        ({"prices": Prices(put_1000=-1)}, "price put 1000 is -1"),
    ],
)
def test_what_cannot_be_is_refused_with_the_nearest_value(changes: dict[str, object], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        changed(**changes)


# -- reading -----------------------------------------------------------------------------------------------------------


def test_numbers_as_people_write_them() -> None:
    assert (parse_count("70B"), parse_count("1.5t"), parse_count("1e9")) == (7 * 10**10, 1_500_000_000_000, 10**9)
    assert (parse_size("1.5TB"), parse_size("512MiB"), parse_size("7")) == (1_500_000_000_000, 512 << 20, 7)
    assert (parse_rate("20GB/s"), parse_rate("1MiB")) == (20 * GB, 1 << 20)
    assert (parse_duration("10m"), parse_duration("2h"), parse_duration("1.5d"), parse_duration("90")) == (
        600,
        7200,
        129600,
        90,
    )
    assert parse_size("-5") == -5  # refused later, for what it is
    for parse, text in (
        (parse_count, "many"),
        (parse_size, "5 parsecs"),
        (parse_rate, "1/s/s"),
        (parse_duration, "1 fortnight"),
    ):
        with pytest.raises(ValueError, match="write it like"):
            parse(text)


SMARTCTL = {
    "model_name": "SAMSUNG MZQL23T8HCLS-00A07",
    "user_capacity": {"blocks": 7501476528, "bytes": 3840755982336},
    "nvme_smart_health_information_log": {"percentage_used": 4, "data_units_written": 500_000_000},
}


def test_wear_is_read_from_smartctl_and_from_nvme_cli(tmp_path: Path) -> None:
    file = tmp_path / "disk.json"
    file.write_text(json.dumps(SMARTCTL))
    found = ssd.read(file)
    assert (found.model, found.capacity_bytes) == ("SAMSUNG MZQL23T8HCLS-00A07", 3840755982336)
    assert found.written_bytes == 256 * TB and found.endurance_bytes == pytest.approx(6400 * TB)
    for log in (
        {"percent_used": 4, "data_units_written": 500_000_000},
        {"percentage_used": "4", "data_units_written": "500000000"},
    ):
        other = ssd.parse(json.dumps(log), "nvme")
        assert (other.written_bytes, other.endurance_bytes, other.capacity_bytes) == (256 * TB, pytest.approx(6400 * TB), None)
    fresh = ssd.parse(json.dumps({"percent_used": 0, "data_units_written": 5}), "nvme")
    assert fresh.endurance_bytes is None  # below the counter's step it says nothing


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"smartctl": {"messages": [{"string": "Permission denied"}]}}', "\0\xff"])
def test_what_says_nothing_of_wear_is_refused(tmp_path: Path, call, text: str) -> None:
    file = tmp_path / "disk.json"
    file.write_text(text)
    said = call("--bytes", "1TB", "--tier", "pfs=1GB/s", "--disk", str(file), code=1)
    assert "disk.json" in said and ("Permission denied" in said) == ("Permission" in text)


@pytest.mark.parametrize("installed", [(), ("smartctl",), ("nvme",), ("smartctl", "nvme")])
def test_a_device_is_asked_with_what_is_installed(tmp_path: Path, monkeypatch, installed: tuple[str, ...]) -> None:
    """smartctl first; where it says nothing useful, nvme."""
    answers = {"smartctl": json.dumps(SMARTCTL) if "nvme" not in installed else "", "nvme": '{"percent_used": 9}'}
    for name in installed:
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\ncat <<'END'\n{answers[name]}\nEND\nexit 4\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if installed else str(tmp_path))
    device = Path("/dev/null")
    if not installed:
        with pytest.raises(ValueError, match="smartctl is not installed; nvme is not installed"):
            ssd.read(device)
        return
    assert ssd.read(device).used_share == (0.09 if "nvme" in installed else 0.04)


def test_the_disk_below_a_directory_is_found_or_not(tmp_path: Path) -> None:
    found = ssd.device_of(tmp_path)
    assert found is None or found.is_block_device()
    assert ssd.device_of(tmp_path / "none") is None and ssd.device_of(Path("/proc")) is None


# -- the command -------------------------------------------------------------------------------------------------------

WORDS = ("--params", "7B", "--nodes", "16", "--interval", "10m", "--tier", "pfs=20GB/s", "--tier", "object=2GB/s,s3,every=4")


def test_the_command_says_it_as_text(call) -> None:
    said = call(*WORDS, "--disk-size", "3.84TB", "--cache", "2TB")
    for part in (
        "a checkpoint has 91.3 GiB, on each of 16 nodes 5.7 GiB",
        "7.0 times the weights",
        "not saved",
        "saturates first  object",
        "out on pfs       in 4.9 s",
        "object costs",
        "drive writes (rated: 1)",
        "it has 1.8 TiB",
    ):
        assert part in said, said
    assert "warning" not in said


def test_without_tiers_and_gateway_it_says_what_is_left_out(call) -> None:
    assert "no tier is known: give one" in call("--bytes", "1TB")
    assert "no tier is known" not in call("--bytes", "1TB", "--tier", "pfs=1GB/s")


def test_the_document_shows_what_the_command_says(call) -> None:
    text = (Path(__file__).parents[2] / "gateway" / "OPERATIONS.md").read_text(encoding="utf-8")
    command, _, shown = text.partition("    $ forebay plan ")[2].partition("\n")
    said = call(*command.split())
    assert shown.startswith("".join(f"    {line}\n" if line else "\n" for line in said.splitlines()))


def test_the_json_has_the_documented_keys(call) -> None:
    said = json.loads(call(*WORDS, "--simulate", "--json"))
    help_text = str(plan_command.__doc__)

    def keys(value: object) -> set[str]:
        if isinstance(value, dict):
            return set(value).union(*map(keys, value.values()))
        return set().union(*map(keys, value)) if isinstance(value, list) else set()

    undocumented = (
        keys(said) - keys(said["inputs"]) - set(help_text.replace("(", " ").replace(")", " ").replace(",", " ").split())
    )
    assert undocumented == set()
    assert said["inputs"]["nodes"] == 16
    outcome = said["simulation"]
    assert outcome["saves"] == sum(outcome[fate] for fate in ("complete", "dropped", "skipped", "waiting"))
    assert json.loads(call(*WORDS, "--json"))["simulation"] is None
    assert json.loads(call(*WORDS, "--simulate", "--json")) == said  # the same seed


def test_the_simulation_is_told(call) -> None:
    said = call(*WORDS, "--simulate", "--duration", "12h", "--jobs", "2", "--seed", "5", "--skip", "--stagger", "30s")
    assert "simulated 12 h 0 min, 16 nodes, 2 jobs, seed 5" in said and "complete on the tier" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--bytes", "1TB", "--params", "7B"), "either --params"),
        ((), "either --params"),
        (("--params", "-7B"), "--params is -7000000000"),
        (("--params", "7B", "--dtype", "int4"), "--dtype 'int4' is none of"),
        (("--params", "7B", "--optimizer", "adagrad"), "nearest: adam"),
        (("--bytes", "1TB", "--interval", "0"), "interval is 0 s"),
        (("--bytes", "1TB", "--interval", "soon"), "--interval: 'soon'"),
        (("--bytes", "1TB", "--tier", "pfs"), "write it like pfs=20GB/s"),
        (("--bytes", "1TB", "--tier", "pfs=1GB/s,tape"), "'tape' is none of s3, posix, every=N"),
        (("--bytes", "1TB", "--tier", "pfs=1GB/s,every=0"), "tier pfs every is 0"),
        (("--bytes", "1TB", "--loader-bytes", "-1", "--params", "7B"), "either --params"),
        (("--params", "7B", "--loader-bytes=-1"), "--loader-bytes is -1"),
        (("--bytes", "1TB", "--plot", "plan.jpg"), "neither .svg nor .png"),
        (("--bytes", "1TB", "--simulate"), "give one, such as --tier"),
        (("--bytes", "1TB", "--tier", "pfs=1GB/s", "--simulate", "--duration", "1m"), "hold no two saves; nearest: 18000 s"),
        (("--bytes", "1TB", "--tier", "pfs=1GB/s", "--simulate", "--nodes", "20000"), "nearest: 10000"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(call, words: tuple[str, ...], said: str) -> None:
    assert said in call(*words, code=2)


def test_a_simulation_without_the_gateway_says_what_to_install(call, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "forebay_gateway.plan.simulate", None)
    assert "install Forebay's extra 'gateway' (in its tree: pip install '.[gateway]')" in call(*WORDS, "--simulate", code=1)


def test_the_plot_is_svg(call, tmp_path: Path) -> None:
    file = tmp_path / "plan.svg"
    call(*WORDS, "--simulate", "--plot", str(file))
    root = ElementTree.parse(file).getroot()
    space = "{http://www.w3.org/2000/svg}"
    texts = [element.text for element in root.iter(f"{space}text")]
    assert {"By interval", "Simulated backlog", "best", "pfs busy"} <= set(texts)
    # Eight curves (what is lost, seven resources), and two of the simulation; all within the paper.
    curves = [element.get("points", "") for element in root.iter(f"{space}polyline")]
    assert len(curves) == 10
    places = [tuple(map(float, point.split(","))) for curve in curves for point in curve.split()]
    assert all(0 <= x <= plot.WIDTH and 0 <= y <= plot.HEIGHT for x, y in places)


def test_what_is_drawn_lies_where_it_belongs() -> None:
    chart = plot.Chart(
        "t <&>", "x", "y", (plot.Line("a", ((1, 0), (10, 50), (100, 200))),), (("m", 10),), log_x=True, y_max=100
    )
    root = ElementTree.fromstring(plot.svg([chart]))
    curve = next(root.iter("{http://www.w3.org/2000/svg}polyline")).get("points", "")
    left, middle, right = (tuple(map(float, point.split(","))) for point in curve.split())
    assert left == (plot.LEFT, plot.HEIGHT - plot.BOTTOM) and right == (plot.WIDTH - plot.RIGHT, plot.TOP)  # cut off at the top
    assert middle == pytest.approx(((left[0] + right[0]) / 2, (left[1] + right[1]) / 2), abs=0.1)


def test_a_png_needs_matplotlib(call, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = call(*WORDS, "--plot", str(tmp_path / "plan.png"), code=2)
    assert "pip install matplotlib" in said and not (tmp_path / "plan.png").exists()


def test_without_tiers_the_running_gateway_is_asked(memory, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--address", memory.address, "plan", "--bytes", "1GB", "--nodes", "2", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [drain["tier"] for drain in said["drains"]] == ["pfs"] and said["cache"]["has_bytes"] > 0


def test_a_measured_rate_counts_for_each_node_and_the_disk_is_asked(
    memory, monkeypatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from forebay.api import Client

    status = Client.status

    def draining(self: Client):
        found = status(self)
        return dataclasses.replace(found, tiers=tuple(dataclasses.replace(t, drain_bytes_per_s=1e9) for t in found.tiers))

    monkeypatch.setattr(Client, "status", draining)
    monkeypatch.setattr(ssd, "device_of", lambda cache: Path("/dev/null"))
    monkeypatch.setattr(ssd, "_ask", lambda device: json.dumps(SMARTCTL))
    assert run(["--address", memory.address, "plan", "--bytes", "1GB", "--nodes", "2", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["drains"][0]["carries_bytes_per_s"] == 2e9 and said["drains"][0]["source"].startswith("measured on")
    assert "SAMSUNG" in said["wear"]["source"] and said["wear"]["endurance_bytes"] == pytest.approx(6400 * TB)


def test_a_gateway_that_was_named_has_to_answer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["--address", f"unix://{tmp_path}/none", "plan", "--bytes", "1GB"]
    assert run(words) == 5
    assert "no gateway answers" in capsys.readouterr().err
    assert run([*words, "--tier", "pfs=1GB/s"]) == 0
