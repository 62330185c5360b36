"""client/examples of training loops, as a reader of them would start them: against a real gateway with a tier."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import forebay
from integration.conftest import MakeGateway

pytest.importorskip("torch", reason="these examples need torch, which this environment does not have")

pytestmark = [pytest.mark.torch, pytest.mark.slow]

EXAMPLES = Path(__file__).parents[2] / "client" / "examples"


def output_of(name: str, address: str, *words: str) -> str:
    """What an example prints."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(EXAMPLES / name), "--address", address, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_plain_torch(make: MakeGateway) -> None:
    pytest.importorskip("torchdata", reason="this example needs torchdata, which this environment does not have")
    gateway = make().start()
    said = output_of("plain_torch.py", gateway.address)
    assert "goes on from step 13" in said
    assert "20 losses, the same as of a job that did not stop: True" in said
    assert "step 20 (final): " in said
    compared = output_of("plain_torch.py", gateway.address, "--compare", "8", "--directory", str(gateway.directory))
    ways = [line.rsplit(maxsplit=2)[0] for line in compared.splitlines()[1:]]
    assert ways == ["torch.save, fsync", "state.save", "state.async_save"]


def test_lightning(make: MakeGateway) -> None:
    pytest.importorskip("lightning", reason="this example needs lightning, which this environment does not have")
    gateway = make().start()
    said = output_of("train_lightning.py", gateway.address)
    assert "goes on from forebay://examples/lightning/16/epoch=1-step=16.ckpt" in said
    assert "step 32: epoch=3-step=32.ckpt" in said


def test_huggingface(make: MakeGateway) -> None:
    pytest.importorskip("transformers", reason="this example needs transformers, which this environment does not have")
    gateway = make().start()
    said = output_of("train_huggingface.py", gateway.address)
    assert "goes on from checkpoint-10" in said
    assert "release/1 is the trained model: True" in said
    assert "step 20 (final): " in said
    with forebay.Client(gateway.address) as client:
        assert client.latest("examples/huggingface") == 20
