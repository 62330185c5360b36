"""Installs the programs to measure against: the extra `bench`, pinned by constraints.txt, each for itself.

Owns nothing but that: what cannot be installed is named, and is no failure.
"""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]


def main() -> None:
    """Install what is not there yet."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for peer in project["optional-dependencies"]["bench"]:
        done = subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), peer], capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
            print(f"{peer} cannot be installed here, its rows will say so: {last}")


if __name__ == "__main__":
    main()
