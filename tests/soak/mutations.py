"""Removes one safeguard at a time and expects a named test to fail: an fsync, a checksum comparison, a condition on a put.

usage: mutations.py [--list] [--jobs N] [--json FILE] [NAME ...]     (make soak runs all, two at a time)

Each mutation is made in a copy of the tree below the temporary directory; the tests run there against the copy. A mutation that
its tests let through is a hole in the tests, and the exit code is 1. So it is where its tests cannot run, and where they fail
in a copy that nothing was taken out of: what fails anyhow notices nothing.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a program

from soak.safeguards import MUTATIONS, Mutation

ROOT = Path(__file__).parents[2]
COPIED = ("proto", "client", "gateway", "tests", "pyproject.toml", "README.md", "FIGURES.md", "deploy")

# What is a sync, a comparison of checksums, or a condition, in a line of source: each such line lies in a mutation's text.
NEEDED = (
    r"\bos\.fsync\(|\bsync_dir[(,]|\bfdatasync\(|\bsync=True",
    r"^\s*(?:el)?if (?!len\().*(?:crc|checksum).*!=|^\s*(?:el)?if (?!len\().*!=.*(?:crc|checksum)",
    r"^\s*(?:(?:el)?if |return |\w+ = )(?!.*(?:len\(\w*crcs\)|\bfor\b))"
    r"(?:.*(?:crc|checksum).*(?:==| in )|.*(?:==| in ).*(?:crc|checksum))",
    r"return .*\"If(?:None)?Match\"|^\s*if not if_absent:|^\s*if if_match is not None:",
)
REMEMBER = ("-o", "addopts=--import-mode=importlib")  # which tests failed: elsewhere pytest keeps nothing
SOURCES = ("gateway/forebay_gateway", "proto/forebay_wire", "client/forebay")
EXEMPT = {
    "client/forebay/bench.py": "writes what it measures, and deletes it",
    "gateway/forebay_gateway/doctor/throughput.py": "the same",
    "gateway/forebay_gateway/doctor/syncs.py": "the same",
    "client/forebay/testing.py": "a gateway for users' tests",
    "client/forebay/_memory.py": "the same",
    "gateway/forebay_gateway/tiers/memory.py": "keeps nothing",
    "gateway/forebay_gateway/tiers/posix/lock.py": "a lock that a power loss takes back is a lock that ran out",
}


def uncovered() -> list[str]:
    """Safeguards in the source that no mutation removes."""
    found = []
    for path in (path for source in SOURCES for path in sorted((ROOT / source).rglob("*.py"))):
        name = str(path.relative_to(ROOT))
        text = path.read_text(encoding="utf-8")
        spans = [(at, at + len(each.before)) for each in MUTATIONS if each.file == name and (at := text.find(each.before)) >= 0]
        at = 0
        for line in text.splitlines(keepends=True):
            middle = at + len(line) - len(line.lstrip())
            at += len(line)
            meant = any(re.search(pattern, line.partition("  # ")[0]) for pattern in NEEDED) and not re.match(
                r'\s*(?:def |#|""")', line
            )
            if meant and name not in EXEMPT and not any(begin < at and middle < end for begin, end in spans):
                found.append(f"{name}: {line.strip()}")
    return found


def copy_tree(directory: Path) -> Path:
    """A copy of what the tests need, below `directory`."""
    copy = Path(tempfile.mkdtemp(dir=directory))
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)
    return copy


def run_tests(copy: Path, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """pytest in the copy, with the copy's packages."""
    roots = os.pathsep.join(str(copy / name) for name in ("proto", "client", "gateway"))
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", *arguments]
    environment = {**os.environ, "PYTHONPATH": roots}
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=timeout_s)


def fail_anyhow(chosen: list[Mutation], directory: Path, jobs: int) -> str:
    """What pytest says of tests that fail with every safeguard in place, twice (the second time alone); empty if none does."""
    tests = sorted({name for mutation in chosen for name in mutation.tests})
    copy = copy_tree(directory)
    result = run_tests(copy, *REMEMBER, "-n", str(jobs), "--dist", "loadfile", *tests, timeout_s=3600)
    if result.returncode == 1:
        result = run_tests(copy, *REMEMBER, "--last-failed", *tests, timeout_s=1200)
    shutil.rmtree(copy, ignore_errors=True)
    return "" if result.returncode == 0 else f"{result.stdout[-4000:]}{result.stderr[-2000:]}"


def try_one(mutation: Mutation, directory: Path) -> tuple[str, str]:
    """What came of it, and what pytest says where its tests did not run."""
    copy = copy_tree(directory)
    path = copy / mutation.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutation.before) != 1:
        raise RuntimeError(f"{mutation.name}: {mutation.file} holds the text {text.count(mutation.before)} times, not once")
    path.write_text(text.replace(mutation.before, mutation.after), encoding="utf-8")
    result = run_tests(copy, "-x", *mutation.tests, timeout_s=1200)
    shutil.rmtree(copy, ignore_errors=True)
    if result.returncode not in (0, 1):
        return "NOT RUN", f"\n{result.stdout[-2000:]}{result.stderr[-2000:]}"
    return "noticed" if result.returncode == 1 else "NOT NOTICED", ""


def main() -> int:
    """Try those asked for, or all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    chosen = [mutation for mutation in MUTATIONS if not arguments.names or mutation.name in arguments.names]
    if arguments.list:
        print("\n".join(mutation.name for mutation in chosen))
        return 0
    survived = []
    with tempfile.TemporaryDirectory(prefix="forebay-mutations-") as name, ThreadPoolExecutor(arguments.jobs) as pool:
        if said := fail_anyhow(chosen, Path(name), arguments.jobs):
            print(f"{said}\ntests fail where nothing was taken out: they prove nothing")
            return 1
        tried = pool.map(lambda each: try_one(each, Path(name)), chosen)
        for mutation, (outcome, said) in zip(chosen, tried, strict=True):
            print(f"{outcome:12} {mutation.name}{said}", flush=True)
            if outcome != "noticed":
                survived.append(mutation.name)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"mutations": len(chosen), "survived": survived}, indent=2))
    print(f"{len(chosen) - len(survived)} of {len(chosen)} noticed")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
