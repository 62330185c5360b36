"""The POSIX tier under every fault of its matrix, in a process of its own with the shim below it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from faults import posix_matrix, shim
from faults.results import cell
from soak.form import GIVEN


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, shim_library: Path) -> dict[str, str]:
    """Cell: what was wrong, "" for nothing."""
    directory = tmp_path_factory.mktemp("posix")
    root = directory / "pfs"
    root.mkdir()
    control = shim.Shim(directory / "control", root)
    # The tests' own variables too, which no process inherits: it has to try the same cells, in the long form as well.
    environment = {**os.environ, **GIVEN, **control.environment(shim_library)}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-m", "faults.posix_matrix", str(root), str(control.control)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    control.close()
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["cell"]: line["problem"] for line in lines}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("each", [str(each) for each in posix_matrix.cells()])
def test_cell(outcomes: dict[str, str], each: str) -> None:
    with cell("posix", each):
        assert outcomes[each] == ""
