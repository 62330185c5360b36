"""Libraries that write and read by fsspec and know nothing of Forebay, over every gateway and lane."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fsspec", reason="forebay.fsspec needs fsspec, which this environment does not have")

import forebay
from client.conftest import Gateway
from forebay import Client
from forebay.fsspec import ForebayFileSystem

# torch warns of a process alone; pandas, pyarrow and Lightning of each other.
pytestmark = pytest.mark.filterwarnings("ignore")

RUN = "team/hosts"
STEP = f"forebay://{RUN}/3"


@pytest.fixture
def fs(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForebayFileSystem]:
    """The instance that a library gets for forebay:// by itself."""
    monkeypatch.setenv("FOREBAY_ADDRESS", gateway.address)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    ForebayFileSystem.clear_instance_cache()  # they keep the address that they began with
    fs = ForebayFileSystem()
    yield fs
    for step in fs.uncommitted():
        fs.discard(step)
    ForebayFileSystem.clear_instance_cache()


def names(client: Client, step: int = 3) -> list[str]:
    """What another program sees."""
    return client.open(RUN, step).names()


def test_pandas_writes_and_reads(fs: ForebayFileSystem, client: Client) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = pandas.DataFrame({"loss": [1.5, 0.25], "name": ["a", "ü"]})
    frame.to_csv(f"{STEP}/loss.csv", index=False, storage_options={"commit": "close"})
    assert names(client) == ["loss.csv"]
    pandas.testing.assert_frame_equal(pandas.read_csv(f"{STEP}/loss.csv"), frame)
    with fs.transaction:
        frame.to_csv(f"forebay://{RUN}/4/loss.csv.gz", index=False)
        frame.to_json(f"forebay://{RUN}/4/loss.json")
        assert client.latest(RUN) == 3
    assert names(client, 4) == ["loss.csv.gz", "loss.json"]
    pandas.testing.assert_frame_equal(pandas.read_csv(f"forebay://{RUN}/latest/loss.csv.gz"), frame)


@pytest.mark.expected_logs("is given up: ZeroDivisionError")
def test_pandas_that_fails_leaves_nothing(fs: ForebayFileSystem, client: Client) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")

    class Unprintable:
        def __str__(self) -> str:
            raise ZeroDivisionError

    frame = pandas.DataFrame({"a": ["x"] * 10 + [Unprintable()]})
    with pytest.raises(ZeroDivisionError):
        frame.to_csv(f"{STEP}/a.csv", storage_options={"commit": "close"}, chunksize=1)
    assert client.latest(RUN) is None and not fs.exists(f"{STEP}/a.csv")


def test_parquet_whole_and_partitioned(fs: ForebayFileSystem, client: Client) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    frame = pandas.DataFrame({"loss": [0.5 * n for n in range(1000)], "rank": [n % 2 for n in range(1000)]})
    frame.to_parquet(f"{STEP}/all.parquet", storage_options={"commit": "close"})
    pandas.testing.assert_frame_equal(pandas.read_parquet(f"{STEP}/all.parquet"), frame)
    assert list(pandas.read_parquet(f"{STEP}/all.parquet", columns=["rank"])) == ["rank"]
    with fs.transaction:
        frame.to_parquet(f"forebay://{RUN}/4/by", partition_cols=["rank"])
    assert [name.rpartition("/")[0] for name in names(client, 4)] == ["by/rank=0", "by/rank=1"]
    found = pandas.read_parquet(f"forebay://{RUN}/4/by")
    assert sorted(found["loss"]) == sorted(frame["loss"])


@pytest.mark.torch
def test_torch_save_and_load(fs: ForebayFileSystem, client: Client) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    import fsspec

    state = {"w": torch.randn(700, 1100), "step": 7}
    with fsspec.open(f"{STEP}/model.pt", "wb", commit="close") as file:
        torch.save(state, file)
    assert names(client) == ["model.pt"]
    for _ in range(2):
        with fsspec.open(f"{STEP}/model.pt") as file:
            found = torch.load(file)
        assert torch.equal(found["w"], state["w"]) and found["step"] == 7


@pytest.mark.torch
def test_safetensors_whole_and_by_ranges(fs: ForebayFileSystem, client: Client) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    state = {f"layer.{n}": torch.randn(64, 100 + n) for n in range(8)}
    path = f"{STEP}/model.safetensors"
    with fs.transaction:
        fs.pipe_file(path, safetensors.save(state))
    found = safetensors.load(fs.cat_file(path))
    assert found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state)

    begin = 8 + int.from_bytes(fs.cat_file(path, 0, 8), "little")
    header = json.loads(fs.cat_file(path, 8, begin))
    wanted = ["layer.6", "layer.1"]
    bounds = [header[name]["data_offsets"] for name in wanted]
    parts = fs.cat_ranges([path] * 2, [begin + low for low, _ in bounds], [begin + high for _, high in bounds])
    for name, part in zip(wanted, parts, strict=True):
        tensor = torch.frombuffer(bytearray(part), dtype=torch.float32).reshape(header[name]["shape"])
        assert torch.equal(tensor, state[name])


def dcp_state(fill: bool) -> dict[str, Any]:
    """What DCP saves, and what it loads into."""
    import torch

    make = torch.ones if fill else torch.zeros
    return {"w": make(300, 500), "deep": {"b": make(7)}, "step": 5 if fill else 0}


def assert_loaded(state: dict[str, Any]) -> None:
    """All is as dcp_state(True)."""
    assert state["w"].sum() == 150_000 and state["deep"]["b"].sum() == 7 and state["step"] == 5


@pytest.mark.torch
def test_dcps_own_fsspec_classes(fs: ForebayFileSystem, gateway: Gateway, client: Client) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
    from torch.distributed.checkpoint.api import CheckpointException

    from forebay.torch import ForebayStorageReader, ForebayStorageWriter

    writer = FsspecWriter(STEP, thread_count=2, address=gateway.address)
    dcp.save(dcp_state(True), storage_writer=writer, no_dist=True)
    assert fs.uncommitted() == [] and ".metadata" in names(client) and ".metadata.tmp" not in names(client)
    for reader in (FsspecReader(STEP, address=gateway.address), ForebayStorageReader(STEP, address=gateway.address)):
        state = dcp_state(False)
        dcp.load(state, storage_reader=reader, no_dist=True)
        assert_loaded(state)

    with pytest.raises(CheckpointException, match="do not change"):
        dcp.save(dcp_state(True), storage_writer=FsspecWriter(STEP), no_dist=True)
    before = client.describe(RUN, 3).session
    dcp.save(dcp_state(True), storage_writer=FsspecWriter(STEP, replace=True), no_dist=True)
    assert client.describe(RUN, 3).session != before

    # By the name alone, without a storage class; and what forebay.torch has saved.
    dcp.save(dcp_state(True), checkpoint_id=f"forebay://{RUN}/4", no_dist=True)
    dcp.save(dcp_state(True), storage_writer=ForebayStorageWriter(RUN, 5, gateway.address), no_dist=True)
    for step in (4, 5):
        state = dcp_state(False)
        dcp.load(state, checkpoint_id=f"forebay://{RUN}/{step}", no_dist=True)
        assert_loaded(state)


@pytest.mark.torch
def test_a_dcp_save_that_fails_is_no_checkpoint(fs: ForebayFileSystem, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    class Unpicklable:
        def __reduce__(self) -> Any:
            raise ZeroDivisionError

    with pytest.raises((CheckpointException, ZeroDivisionError)):
        dcp.save({**dcp_state(True), "bad": Unpicklable()}, checkpoint_id=STEP, no_dist=True)
    assert client.latest(RUN) is None
    monkeypatch.setenv("WORLD_SIZE", "2")  # a rank of two that saves alone
    with pytest.raises(CheckpointException, match="ForebayStorageWriter"):
        dcp.save(dcp_state(True), checkpoint_id=f"forebay://{RUN}/4", no_dist=True)
    assert client.latest(RUN) is None


@pytest.mark.torch
def test_lightnings_checkpoint_io(fs: ForebayFileSystem, client: Client) -> None:
    """It saves one file in a transaction of fsspec."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    plugins = pytest.importorskip("lightning.fabric.plugins.io.torch_io", reason="lightning is not installed")
    io = plugins.TorchCheckpointIO()
    io.save_checkpoint({"w": torch.ones(3)}, f"{STEP}/epoch=1-step=3.ckpt")
    assert names(client) == ["epoch=1-step=3.ckpt"] and fs.uncommitted() == []
    assert torch.equal(io.load_checkpoint(f"{STEP}/epoch=1-step=3.ckpt")["w"], torch.ones(3))


def test_a_tree_goes_there_and_back(fs: ForebayFileSystem, client: Client, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    files = {"a.bin": b"a" * 100_000, "deep/b.bin": b"b", "deep/empty": b""}
    for name, data in files.items():
        (source / name).write_bytes(data)
    closing = ForebayFileSystem(commit="close")
    closing.put(f"{source}/", STEP, recursive=True)
    assert dict(client.open(RUN, 3).read_many()) == files
    fs.get(STEP, f"{tmp_path}/back", recursive=True)
    assert {name: (tmp_path / "back" / name).read_bytes() for name in files} == files
    mapper = fs.get_mapper(STEP)
    assert dict(mapper) == files
    with pytest.raises(PermissionError):
        mapper["new"] = b"1"
    with pytest.raises(forebay.NotFound):
        fs.get(f"{STEP}/none", f"{tmp_path}/none")
