"""`make bench`: each figure as a ratio, both sides in one run, in turn; medians.

usage: run.py [ROW ...] [--quick] [--json FILE] [--strict]     measure all rows, or those named (a row, a group: save)
       run.py --list                                           the rows
       run.py --readme FILE --json FILE                        put an earlier run's figures into a document
Everything runs in one temporary directory on the disk under test (--directory), on loopback, and is gone afterwards. A row that
cannot run here says why. Exit code: 0; 1 where a measurement failed, with --strict also where a goal is not met.
"""

import argparse
import contextlib
import fcntl
import json
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from bench import readme, registry
from bench.harness import DROP_CACHES, Job
from bench.machine import facts
from bench.rows import CannotRun, Row, as_json, line, not_run, table

FORMAT = "forebay-bench-1"
GIB = 1 << 30
SETTLE_S = 3.0  # what others have just ended may still write back


def run(job: Job, measurements: Sequence[registry.Measurement], lock: Path | None = None) -> Iterator[Row]:
    """Every row, as it is measured. What cannot run, or fails, becomes a row that says so; the others go on."""
    for measurement in measurements:
        yielded: set[str] = set()
        try:
            with _alone(lock):
                for row in measurement.run(job):
                    yielded.add(row.name)
                    yield row
        except CannotRun as error:
            yield from _without_value(measurement, yielded, str(error), failed=False)
        except Exception as error:
            if _interrupted(error):  # what failed is only how something ended
                raise KeyboardInterrupt from error
            traceback.print_exc()
            yield from _without_value(measurement, yielded, f"{type(error).__name__}: {error}", failed=True)


@contextlib.contextmanager
def _alone(lock: Path | None) -> Iterator[None]:
    if lock is None:
        yield
        return
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        time.sleep(SETTLE_S)
        yield


def _interrupted(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _without_value(measurement: registry.Measurement, yielded: set[str], reason: str, failed: bool) -> Iterator[Row]:
    reason = " ".join(reason.split())
    for spec in measurement.specs:
        if spec.name not in yielded:
            yield not_run(spec, reason, failed=failed)


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="of --list; none: all")
    parser.add_argument("--quick", action="store_true", help="a short look: less data, fewer pairs; marked so in the output")
    parser.add_argument("--strict", action="store_true", help="exit 1 also where a goal is not met")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--readme", type=Path, metavar="FILE")
    parser.add_argument(
        "--lock", type=Path, metavar="FILE", help="flock held while something is measured, for who shares the machine"
    )
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="on the disk under test")
    parser.add_argument("--size-mib", type=int, help="of one side of a pair (default: 1536)")
    parser.add_argument("--pairs", type=int, help="default: 5")
    parser.add_argument("--through-gib", type=float, help="through the gateway in the row memory (default: 20)")
    parser.add_argument("--small-shards", type=int, help="in the row small-shards (default: 10,000)")
    parser.add_argument("--catalog-shards", type=int, help="in the rows catalog (default: 1,000,000)")
    parser.add_argument("--load-s", type=float, help="seconds of load in the row loop-lag (default: 75)")
    parser.add_argument("--largest-gib", type=float, help="largest shard of the rows scaling-sizes (default: 8)")
    return parser.parse_args(words)


def _job(asked: argparse.Namespace, directory: Path) -> Job:
    given: dict[str, Any] = {
        "size": asked.size_mib and asked.size_mib << 20,
        "pairs": asked.pairs,
        "through": asked.through_gib and int(asked.through_gib * GIB),
        "shards": asked.small_shards,
        "catalog_shards": asked.catalog_shards,
        "load_s": asked.load_s,
        "largest": asked.largest_gib and int(asked.largest_gib * GIB),
    }
    quick: dict[str, Any] = {
        "size": 256 << 20, "pairs": 2, "through": 2 * GIB, "shards": 2_000, "catalog_shards": 20_000, "load_s": 10.0,
        "largest": GIB, "quick": True,
    }  # fmt: skip
    values = (quick if asked.quick else {}) | {name: value for name, value in given.items() if value}
    return Job(directory, **values)


def main(words: Sequence[str] | None = None) -> int:
    """Run what was asked for; the exit code."""
    asked = _arguments(words)
    try:
        measurements = registry.chosen(asked.rows)
        if asked.readme is not None:
            if asked.json is None:
                raise ValueError("--readme needs --json, the results to show")
            readme.write(asked.json, asked.readme)
            return 0
    except (ValueError, OSError) as error:
        print(f"run.py: {error}", file=sys.stderr)
        return 2
    if asked.list:
        print("\n".join(f"{spec.name:22} {spec.what}" for each in measurements for spec in each.specs))
        return 0
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)
    try:
        return _measure(asked, measurements)
    except KeyboardInterrupt:
        print("run.py: interrupted; what it had started is gone", file=sys.stderr)
        return 130


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """Once: a second Ctrl-C would only cut short how everything ends."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _measure(asked: argparse.Namespace, measurements: Sequence[registry.Measurement]) -> int:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="forebay-bench-", dir=asked.directory) as name:
        job = _job(asked, Path(name))
        machine, began_s = facts(job.directory), time.monotonic()
        about = {key: value for key, value in asdict(job).items() if key != "directory"}
        about["cold"] = "drop_caches" if _may_drop() else "posix_fadvise"
        print("  ".join(f"{key}: {value}" for key, value in machine.items()))
        if job.quick:
            print("QUICK: less data and fewer pairs than the figures ask for; no result to quote")
        print(next(table(())), flush=True)
        for row in run(job, measurements, asked.lock):
            rows.append(row)
            print(line(row), flush=True)
            if asked.json is not None:  # after each: what an interrupt cuts short has cost its time too
                result = {
                    "format": FORMAT,
                    "quick": job.quick,
                    "machine": machine,
                    "job": about,
                    "seconds": round(time.monotonic() - began_s, 1),
                    "rows": [{**as_json(row), "shown": row.shown, "verdict": row.verdict} for row in rows],
                }
                asked.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    missed, failed = [row.name for row in rows if row.met is False], [row.name for row in rows if row.failed]
    print(_summary(rows, missed, failed))
    return 1 if failed or (asked.strict and missed) else 0


def _summary(rows: Sequence[Row], missed: Sequence[str], failed: Sequence[str]) -> str:
    parts = [f"{sum(row.met is True for row in rows)} goals met"]
    parts += [f"not met: {' '.join(missed)}"] if missed else []
    parts += [f"failed: {' '.join(failed)}"] if failed else []
    absent = [row.name for row in rows if row.value is None and not row.failed]
    parts += [f"not run: {' '.join(absent)}"] if absent else []
    return "; ".join(parts)


def _may_drop() -> bool:
    try:
        with DROP_CACHES.open("r+b"):
            return True
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
