"""`make` with a Python that is too old: a sentence that says what to do, and no environment left behind."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def python_of(version: tuple[int, int], path: Path) -> Path:
    """A Python that takes itself for another version, and writes down how it was run; it makes no environments."""
    custom = path.parent / f"site-{path.name}"
    custom.mkdir(parents=True)
    (custom / "sitecustomize.py").write_text(f"import sys\nsys.version_info = ({version[0]}, {version[1]}, 0, 'final', 0)\n")
    path.write_text(
        f'#!/bin/sh\necho "$@" >> {path}.log\n[ "$1" = -m ] && exit 1\nPYTHONPATH={custom} exec {sys.executable} "$@"\n'
    )
    path.chmod(0o755)
    return path


def make(directory: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, directory)
    return subprocess.run(["make", ".venv/.installed", *arguments], cwd=directory, capture_output=True, text=True, timeout=60)


def test_an_old_python_is_named_before_anything_is_made(tmp_path: Path) -> None:
    result = make(tmp_path, f"PYTHON={python_of((3, 10), tmp_path / 'old')}")
    assert result.returncode == 2
    assert "needs Python 3.11 or newer" in result.stderr and "make PYTHON=python3.12" in result.stderr
    assert not (tmp_path / ".venv").exists()


def test_an_environment_of_an_old_python_is_named(tmp_path: Path) -> None:
    directory = tmp_path / ".venv" / "bin"
    directory.mkdir(parents=True)
    python_of((3, 10), directory / "python")
    result = make(tmp_path, f"PYTHON={sys.executable}")
    assert result.returncode == 2
    assert ".venv is of a Python older than 3.11" in result.stderr and "make clean" in result.stderr


def test_a_new_one_is_taken_and_half_an_environment_does_not_stay(tmp_path: Path) -> None:
    python = python_of((3, 13), tmp_path / "new")
    (tmp_path / ".venv").mkdir()  # what a `venv` that fails leaves
    result = make(tmp_path, f"PYTHON={python}")
    assert result.returncode == 2 and "older" not in result.stderr
    assert "-m venv .venv" in Path(f"{python}.log").read_text()
    assert not (tmp_path / ".venv").exists()
