"""torch.distributed.checkpoint through gateways: real ranks over gloo, real gateways, the POSIX tier read by torch alone."""

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="forebay.torch needs torch, which this environment does not have")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint import state_dict_saver  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402

import forebay  # noqa: E402
from forebay.torch import ForebayStorageReader  # noqa: E402
from integration import dcp_ranks as ranks  # noqa: E402
from integration.conftest import MakeGateway  # noqa: E402
from soak.form import SOAK  # noqa: E402

# torch warns of a process alone, and of its own API.
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]


def test_ranks_over_two_gateways(make: MakeGateway, root: Path, tmp_path: Path) -> None:
    """Four ranks save, other counts load; a rank's error is everybody's; a node is lost; torch reads the tier alone."""
    a, b = make("a"), make("b")
    a.start(ready=False)
    b.start()
    a.wait_ready()
    ranks.run_ranks(ranks.save_and_load, 4, tmp_path, a.address, b.address)
    with forebay.Client(b.address) as client:
        for step in (1, 2, *([3] if ranks.SHARDS_ON_CPU else []), 4, 21):
            client.wait(ranks.RUN, step, "pfs", timeout=60)
        assert client.open(ranks.RUN, 1).names() == [
            ".metadata",
            *(f"__{rank}_{n}.distcp" for rank in range(4) for n in (0, 1)),
        ]
    a.kill()
    a.wipe()
    alone = ranks.plain_state()
    dcp.load(alone, storage_reader=ForebayStorageReader(f"forebay://{ranks.RUN}/1", address=b.address))
    ranks.assert_is_saved_state(alone)
    for step in (1, 2):
        plain = ranks.plain_state()
        where = root / ranks.RUN / f"step-{step:012d}" / "current"
        dcp.load(plain, storage_reader=dcp.FileSystemReader(str(where)))
        ranks.assert_is_saved_state(plain)


def test_a_rank_that_dies(make: MakeGateway, tmp_path: Path) -> None:
    """The others end soon, and learn who it was; nobody takes what is there for a checkpoint."""
    gateway = make("a").start()
    for took_s, said, lacking in ranks.run_ranks(ranks.last_rank_dies, 3, tmp_path, gateway.address, dies=2)[:2]:
        assert took_s < 30, said
        assert said != "saved"
        assert "writer 2 (absent)" in lacking
    with pytest.raises(CheckpointException, match=r"not complete; missing: .*writer 2 \(absent\)"):
        dcp.load(ranks.plain_state(), storage_reader=ForebayStorageReader(ranks.RUN, 31, gateway.address))
    gateway.kill()  # an ordered end would wait for what never completes


@pytest.mark.skipif(not hasattr(state_dict_saver, "AsyncCheckpointerType"), reason="this torch has no process checkpointer")
def test_the_process_checkpointer(make: MakeGateway, tmp_path: Path) -> None:
    """DCP pickles the writer into a process that it keeps."""
    a = make("a").start()
    ranks.run_ranks(ranks.save_from_another_process, 2 if SOAK else 1, tmp_path, a.address)


@pytest.mark.skipif(not ranks.SHARDS_ON_CPU, reason="FSDP2 of this torch needs a GPU")
def test_the_example(make: MakeGateway) -> None:
    """client/examples/dcp.py, as a reader of it would start it."""
    a = make("a").start()
    example = Path(__file__).parents[2] / "client" / "examples" / "dcp.py"
    command = [sys.executable, str(example), "--address", a.address, "--ranks", "4" if SOAK else "2"]

    def said(*words: str) -> str:
        done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=150)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    whole = said()
    assert "go on from step 3" in whole
    assert "step 3: " in whole
    compared = said("--compare", "8", "--directory", str(a.directory)).splitlines()
    ways = [line.rsplit(maxsplit=2)[0] for line in compared if line.startswith("dcp.")]  # gloo says something of its own
    assert ways == [f"dcp.{verb}, {writer}" for verb in ("save", "async_save") for writer in ("FileSystemWriter", "Forebay")]
