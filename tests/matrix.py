"""`make test-matrix`: the tests of forebay.torch on older releases of torch, each in a virtual environment of its own.

usage: matrix.py [RELEASE ...] [--directory DIR]     one line a release; exit code 1 where one failed

Environments are kept below --directory for the next time: some gigabytes each where pip finds only builds with CUDA. It takes a
CPU build where it is configured to find one. All but torch, and what torch itself asks for, is as constraints.txt has it.
"""

import argparse
import subprocess
import sys
import time
import venv
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
RELEASES = ("2.6.0", "2.8.0")
TESTS = (
    "tests/client/test_client_torch.py",
    "tests/client/test_client_torch_direct.py",
    "tests/client/test_client_torch_staging.py",
    "tests/integration/test_torch_dcp.py",
)
NEEDS = ("pytest", "pytest-asyncio", "pytest-timeout", "hypothesis", "numpy", "psutil", "-e", f"{ROOT}[gateway]")
TORCHS_OWN = ("torch", "sympy", "networkx", "setuptools")  # pinned for the newest torch; an older one asks for others
SHOWN_LINES = 60


def environment(release: str, directory: Path) -> Path:
    """A release's Python; installed where it is not there yet. Raises CalledProcessError."""
    home = directory / f"torch-{release}"
    python, made, pins = home / "bin" / "python", home / "made", home / "constraints.txt"
    if made.exists():
        return python
    venv.create(home, clear=True, with_pip=True)
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins.write_text("\n".join(line for line in lines if line.partition("==")[0] not in TORCHS_OWN), encoding="utf-8")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(pins)]
    subprocess.run([*pip, f"torch=={release}"], check=True)
    subprocess.run([*pip, *NEEDS], check=True)
    made.touch()
    return python


def tested(release: str, python: Path) -> tuple[bool, str]:
    """Whether all tests passed, and the line that says so; the end of their output goes to stderr where not."""
    report, began_s = python.parents[1] / "report.xml", time.monotonic()
    report.unlink(missing_ok=True)
    command = [str(python), "-m", "pytest", "-q", f"--junitxml={report}", *TESTS]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        print("\n".join(done.stdout.splitlines()[-SHOWN_LINES:]), file=sys.stderr)
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in ElementTree.parse(report).iter("testsuite") if report.exists() else ():
        for name in counts:
            counts[name] += int(suite.get(name, 0))
    failed = counts["failures"] + counts["errors"]
    passed = counts["tests"] - failed - counts["skipped"]
    good = done.returncode == 0 and passed > 0
    said = f"{passed} passed, {failed} failed, {counts['skipped']} skipped, {time.monotonic() - began_s:.0f} s"
    return good, f"torch {release:8} {'ok' if good else 'FAILED':7} {said}"


def main(words: Sequence[str] | None = None) -> int:
    """All releases that were asked for; the exit code."""
    parser = argparse.ArgumentParser(
        prog="matrix.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("releases", nargs="*", metavar="RELEASE", default=RELEASES, help=f"default: {' '.join(RELEASES)}")
    parser.add_argument("--directory", type=Path, default=ROOT / ".bench" / "matrix")
    asked = parser.parse_args(words)
    results = []
    for release in asked.releases:
        try:
            good, line = tested(release, environment(release, asked.directory.resolve()))
        except subprocess.CalledProcessError as error:
            good, line = False, f"torch {release:8} FAILED  cannot be installed here: pip ended with {error.returncode}"
        results.append(good)
        print(line, flush=True)
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
