"""The bench itself: rows are judged rightly, what cannot run says so, and nothing is left behind, also after Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bench import readme, registry, run
from bench.harness import Job, data, in_turn, shards_of
from bench.rows import BY_NAME, SPECS, CannotRun, Measured, Row, cost, measured, not_run, speed

PROGRAM = Path(__file__).with_name("run.py")

CONTRACT = {
    "save-fd": ">= 0.9",
    "save-stream": ">= 0.85",
    "save-stream-cpu": "<= 1.5",
    "save-juicefs": ">= 5",
    "save-dcp": ">= 1.5",
    "save-dcp-writer": ">= 1.5",
    "small-shards": ">= 5",
    "restore-fd": ">= 0.9",
    "restore-stream": ">= 0.85",
    "restore-dcp": ">= 1",
    "drain-posix": ">= 1",
    "drain-s3": ">= 1",
    "drain-s3-cpu": "<= 1.2",
    "busy-s3-stream": ">= 0.7",
    "busy-s3-fd": ">= 0.7",
    "busy-posix-stream": ">= 0.7",
    "busy-posix-fd": ">= 0.7",
    "async-save": "<= 1.5",
    "async-dcp": "<= 1",
    "async-dcp-copy": "<= 1.5",
    "catalog-status": "<= 100",
    "catalog-ls": "<= 50",
    "catalog-start": "<= 5",
    "catalog-rss": "<= 300",
    "catalog-evicted-status": "<= 100",
    "catalog-evicted-ls": "<= 50",
    "catalog-evicted-start": "<= 5",
    "catalog-evicted-rss": "<= 300",
    "plan-decision": "<= 1",
    "plan-simulate": "<= 60",
    "memory-peak": "<= 400",
    "memory-growth": "<= 1.1",
    "loop-lag": "<= 50",
}


def test_the_goals_are_those_of_the_contract() -> None:
    assert {spec.name: str(spec.goal) for spec in SPECS if spec.goal} == CONTRACT
    measured_names = [spec.name for each in registry.MEASUREMENTS for spec in each.specs]
    assert len(measured_names) == len(set(measured_names)) and set(BY_NAME) <= set(measured_names)


def test_a_ratio_is_the_median_of_pairs() -> None:
    ours = [Measured(1.0, 3.0), Measured(2.0, 1.0), Measured(4.0, 2.0)]
    theirs = [Measured(2.0, 1.0), Measured(2.0, 1.0), Measured(2.0, 1.0)]
    row = speed("save-stream", ours, theirs, 2_000_000_000)
    assert (row.value, row.met, row.verdict) == (1.0, True, "met") and row.samples["ratio"] == [2.0, 1.0, 0.5]
    assert "1.00 against 1.00 GB/s; 3 pairs, 0.50 to 2.00" in row.detail
    dear = cost("save-stream-cpu", ours, theirs, 1_000_000_000)
    assert (dear.value, dear.met, dear.verdict) == (2.0, False, "NOT MET")  # for cost, less is better
    free = cost("restore-stream-cpu", ours, theirs, 1_000_000_000)
    assert free.met is None and free.verdict == ""
    assert (not_run(BY_NAME["save-fd"], "why").verdict, not_run(BY_NAME["save-fd"], "x", failed=True).verdict) == (
        "not run",
        "failed",
    )


def test_sides_take_turns_in_changing_order() -> None:
    seen: list[str] = []

    def act(name: str) -> Measured:
        seen.append(name)
        return Measured(1.0)

    results = in_turn(3, lambda: act("a"), lambda: act("b"))
    assert seen == ["a", "b", "b", "a", "a", "b"] and [len(side) for side in results] == [3, 3]


def test_data_is_what_a_row_says_it_is() -> None:
    for size in (4096, (64 << 20) + 4096):
        aligned, shifted = data(size), data(size, unaligned=True)
        assert len(aligned) == len(shifted) == size and bytes(aligned[-4096:]) != bytes(4096)
    import numpy

    assert numpy.frombuffer(aligned, numpy.uint8).ctypes.data % 4096 == 0
    assert numpy.frombuffer(shifted, numpy.uint8).ctypes.data % 4096 == 64
    assert sum(len(view) for view in shards_of(aligned).values()) == len(aligned) and len(shards_of(aligned)) >= 4


def test_rows_are_chosen_by_row_measurement_or_group() -> None:
    def chosen(*wanted: str) -> list[str]:
        return [each.name for each in registry.chosen(wanted)]

    assert chosen("save-stream-cpu") == ["save-stream"]
    assert chosen("save") == ["save-fd", "save-stream", "save-juicefs", "save-dcp"]
    assert chosen() == [each.name for each in registry.MEASUREMENTS]
    with pytest.raises(ValueError, match="no row is called nonsense"):
        registry.chosen(["save", "nonsense"])


def _fake(monkeypatch: pytest.MonkeyPatch, **runs: object) -> None:
    specs = {"good": "save-stream", "bad": "save-dcp", "absent": "save-juicefs", "broken": "save-fd"}
    made = [registry.Measurement(name, act, (BY_NAME[specs[name]],)) for name, act in runs.items()]  # type: ignore[arg-type]
    monkeypatch.setattr(registry, "MEASUREMENTS", tuple(made))


def _good(_: Job) -> Iterator[Row]:
    yield measured(BY_NAME["save-stream"], 0.9, "fine")


def _bad(_: Job) -> Iterator[Row]:
    yield measured(BY_NAME["save-dcp"], 1.0, "slow")


def _absent(_: Job) -> Iterator[Row]:
    raise CannotRun("not installed")
    yield


def _broken(_: Job) -> Iterator[Row]:
    yield measured(BY_NAME["save-fd-unaligned"], 1.0, "before it broke")
    raise RuntimeError("a defect\nof ours")


@pytest.fixture
def signals() -> Iterator[None]:
    numbers = signal.SIGINT, signal.SIGTERM
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("signals")
def test_what_cannot_run_is_no_failure_and_a_defect_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ["--directory", str(tmp_path), "--quick"]
    _fake(monkeypatch, good=_good, bad=_bad, absent=_absent)
    assert run.main(place) == 0  # a goal that is not met is shown, and is no failure ...
    shown = capsys.readouterr().out
    assert "NOT MET" in shown and "not installed" in shown and "1 goals met; not met: save-dcp; not run: save-juicefs" in shown
    assert run.main([*place, "--strict"]) == 1  # ... unless asked for
    _fake(monkeypatch, good=_good, absent=_absent)
    assert run.main([*place, "--strict"]) == 0
    _fake(monkeypatch, broken=_broken, good=_good)
    results = tmp_path / "r.json"
    assert run.main([*place, "--json", str(results)]) == 1
    rows = {row["name"]: row for row in json.loads(results.read_text())["rows"]}
    assert rows["save-fd"]["failed"] and rows["save-fd"]["reason"] == "RuntimeError: a defect of ours"
    assert rows["save-fd-unaligned"]["value"] == 1.0 and rows["save-stream"]["met"] is True  # the others went on
    assert list(tmp_path.iterdir()) == [results]


def _environment() -> dict[str, str]:
    paths = [str(PROGRAM.parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def test_real_rows_in_small(tmp_path: Path) -> None:
    """Gateways, servers and peers as in a whole run, with little data; what is not installed here says so."""
    results = tmp_path / "results.json"
    place = Path(tempfile.mkdtemp(prefix="fb-"))  # sockets have short paths
    words = ["--quick", "--size-mib", "8", "--pairs", "1", "--small-shards", "50"]
    asked = ["save-stream", "save-fd", "small", "restore-stream", "drain-posix"]
    command = [sys.executable, str(PROGRAM), *words, *asked, "--directory", str(place), "--json", str(results)]
    done = subprocess.run(command, capture_output=True, text=True, env=_environment(), timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(results.read_text())
    assert set(found) == {"format", "quick", "machine", "job", "seconds", "rows"}
    assert found["format"] == run.FORMAT and found["quick"] is True and "QUICK" in done.stdout
    assert {"date", "processor", "memory", "kernel", "file_system", "python", "grpcio"} <= set(found["machine"])
    assert found["job"]["size"] == 8 << 20 and found["job"]["cold"] in ("drop_caches", "posix_fadvise")
    rows = {row["name"]: row for row in found["rows"]}
    wanted = {"save-stream", "save-stream-cpu", "small-shards", "small-restore", "drain-posix", "drain-posix-cpu"}
    wanted |= {"restore-stream", "restore-stream-cpu"}
    assert set(rows) == wanted | {"save-fd", "save-fd-unaligned"}
    for name in wanted:
        assert rows[name]["value"] > 0 and rows[name]["detail"] and rows[name]["samples"]["ratio"], rows[name]
        assert name in done.stdout
    for row in rows.values():
        assert not row["failed"] and (row["value"] is None) == bool(row["reason"])
        assert set(row) == {*Row.__dataclass_fields__, "shown", "verdict"}
    place.rmdir()  # nothing was left in it
    with pytest.raises(ValueError, match="quick"):
        readme.render(found)


def test_ctrl_c_leaves_nothing() -> None:
    place = Path(tempfile.mkdtemp(prefix="fb-"))  # sockets have short paths
    command = [sys.executable, str(PROGRAM), "memory", "--directory", str(place), "--through-gib", "500"]
    # A shell's background job ignores SIGINT, and its children with it; the bench takes it all the same.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_environment())
    try:
        deadline_s = time.monotonic() + 100
        while not list(place.glob("*/r-*/bench.sock")) and time.monotonic() < deadline_s:
            if process.poll() is not None:
                raise AssertionError(f"it ended before it began: {''.join(process.communicate())[-600:]}")
            time.sleep(0.05)
        assert list(place.glob("*/r-*/bench.sock")), "the gateway did not start"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=90)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130 and "interrupted" in said and "Traceback" not in said, said
    place.rmdir()  # nothing was left in it
    left = [other.pid for other in psutil.process_iter(["cmdline"]) if str(place) in " ".join(other.info["cmdline"] or ())]
    assert left == []


def _results(quick: bool = False) -> dict[str, object]:
    keys = ("date", "processor", "memory", "file_system", "kernel", "python", "grpcio")
    rows = [
        measured(BY_NAME["save-stream"], 0.8, "0.8 against | 1.0"),
        not_run(BY_NAME["save-juicefs"], "no /dev/fuse"),
    ]
    shown = [{**vars(row), "shown": row.shown, "verdict": row.verdict} for row in rows]
    return {"quick": quick, "machine": dict.fromkeys(keys, "X"), "job": {"size": 3 << 29, "pairs": 5}, "rows": shown}


def test_figures_in_a_document_come_from_the_results(tmp_path: Path) -> None:
    document, results = tmp_path / "README.md", tmp_path / "r.json"
    results.write_text(json.dumps(_results()))
    before = f"# Title\n\n{readme.BEGIN}old\n{readme.END}\nthe rest\n"
    document.write_text(before)
    assert run.main(["--readme", str(document), "--json", str(results)]) == 0
    text = document.read_text()
    assert text.startswith(f"# Title\n\n{readme.BEGIN}Measured on X: ") and text.endswith(f"{readme.END}\nthe rest\n")
    assert "old" not in text and "1.5 GiB a side, medians of 5 pairs" in text
    assert "| 0.80 | >= 0.85 | NOT MET; 0.8 against \\| 1.0 |" in text and "| - | >= 5 | not run: no /dev/fuse |" in text
    for broken in ("# no markers\n", f"{readme.END}{readme.BEGIN}", readme.BEGIN * 2 + readme.END):
        document.write_text(broken)
        assert run.main(["--readme", str(document), "--json", str(results)]) == 2
        assert document.read_text() == broken
    document.write_text(before)
    results.write_text(json.dumps(_results(quick=True)))
    assert run.main(["--readme", str(document), "--json", str(results)]) == 2 and document.read_text() == before
    assert run.main(["--readme", str(document)]) == 2 and run.main(["nonsense"]) == 2
