"""forebay.safetensors: the same bytes as safetensors', read tensor by tensor, from memory or from the cache's own file."""

import gc
import json
import queue
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

host = pytest.importorskip("safetensors", reason="forebay.safetensors needs safetensors, which this environment does not have")
torch = pytest.importorskip("torch", reason="tensors need torch, which this environment does not have")

import safetensors.numpy  # noqa: E402
import safetensors.torch  # noqa: E402

import forebay  # noqa: E402
from client.conftest import Gateway, RealGateway  # noqa: E402
from forebay import Client  # noqa: E402
from forebay.lanes import fd_map  # noqa: E402
from forebay.safetensors import SafetensorError, load_file, safe_open, save_file, serialized  # noqa: E402
from forebay.safetensors.place import place_of  # noqa: E402
from forebay.testing import MemoryGateway  # noqa: E402

pytestmark = pytest.mark.torch

DTYPES = [dtype for dtype in safetensors.torch._SIZE if dtype is not None]


def _tensor(dtype: Any, *shape: int, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    width = torch.empty(0, dtype=dtype).element_size()
    size = torch.Size(shape).numel()
    data = torch.randint(0, 2 if dtype is torch.bool else 256, (size * width,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).reshape(shape)


def _model() -> dict[str, Any]:
    tensors = {str(dtype).partition(".")[2]: _tensor(dtype, 7, 4, seed=at) for at, dtype in enumerate(DTYPES)}
    return tensors | {
        "embedding": torch.arange(900_000, dtype=torch.float32).reshape(3000, 300),
        "scalar": torch.tensor(3.5, dtype=torch.bfloat16),
        "nothing": torch.empty(0, 5),
        'größe \n"q"': torch.ones(3),
    }


def _bits(tensor: Any) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def _assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        got = found[name]
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape), name
        if isinstance(tensor, numpy.ndarray):
            assert got.tobytes() == tensor.tobytes(), name
        else:
            assert _bits(got) == _bits(tensor), name


def _bytes_of(source: Any) -> bytes:
    return b"".join(bytes(piece) for piece in source.chunks(64 << 10))


def test_bytes_are_those_of_safetensors(client: Client, tmp_path: Path) -> None:
    tensors, metadata = _model(), {"format": "pt"}
    receipt = save_file(tensors, "r", 1, metadata=metadata, client=client, wait="pfs", timeout=60)
    safetensors.torch.save_file(tensors, tmp_path / "plain", metadata)
    plain = (tmp_path / "plain").read_bytes()
    assert client.open("r", 1).read("model.safetensors") == plain
    assert (receipt.shard_count, receipt.size, receipt.level) == (1, len(plain), "pfs")
    _assert_same(load_file("r", 1, client=client), tensors)


def test_the_tiers_file_is_read_by_safetensors_alone(real: RealGateway) -> None:
    tensors = _model()
    with Client(real.address) as client:
        save_file(tensors, "forebay://team/r/5/sub/m.safetensors", client=client, wait="pfs", timeout=60)
    (found,) = (real.directory / "pfs").glob("team/r/step-*/current/sub/m.safetensors")
    _assert_same(safetensors.torch.load_file(found), tensors)


SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@settings(max_examples=60)
@given(
    st.dictionaries(st.text(min_size=1), st.tuples(st.sampled_from(DTYPES), SHAPES), min_size=1, max_size=8),
    st.none() | st.dictionaries(st.text(), st.text(), max_size=1),
)
def test_any_dictionary_of_tensors(shapes: dict[str, Any], metadata: dict[str, str] | None) -> None:
    tensors = {name: _tensor(dtype, *shape) for name, (dtype, shape) in shapes.items() if name != "__metadata__"}
    try:
        expected = safetensors.torch.save(tensors, metadata)
    except Exception as error:  # safetensors' own word, whatever it is
        with pytest.raises(type(error)):
            serialized(tensors, metadata)
        return
    source = serialized(tensors, metadata)
    assert _bytes_of(source) == expected and source.size == len(expected)


@pytest.mark.parametrize("metadata", [None, {}, {"k": "v"}])
def test_no_tensors_at_all(memory_client: Client, tmp_path: Path, metadata: dict[str, str] | None) -> None:
    save_file({}, "r", 1, metadata=metadata, client=memory_client)
    assert load_file("r", 1, client=memory_client) == {}
    memory_client.restore_dir("r", 1, tmp_path)
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert (list(file.keys()), file.metadata()) == ([], metadata)


NUMPY = ["float64", "float32", "float16", "int64", "uint64", "int32", "uint32", "int16", "uint16", "int8", "uint8", "bool"]


@pytest.mark.parametrize("order", ["<", ">"])
def test_arrays(client: Client, order: str) -> None:
    arrays = {name: numpy.arange(24).astype(numpy.dtype(name).newbyteorder(order)).reshape(4, 6) for name in NUMPY}
    arrays |= {"complex": numpy.ones(3, "complex64"), "scalar": numpy.array(3.0), "nothing": numpy.zeros((0, 2))}
    save_file(arrays, "r", 1, "a", {"k": "v"}, client=client)
    assert client.open("r", 1).read("a") == safetensors.numpy.save(arrays, {"k": "v"})
    native = {name: array.astype(array.dtype.newbyteorder("=")) for name, array in arrays.items()}
    _assert_same(load_file("r", "latest", "a", framework="np", client=client), native)


def test_metadata_is_in_one_order() -> None:
    """safetensors' own order is another one each time: a save that is repeated would not be the same bytes."""
    metadata = {f"k{at}": f"v{at}" for at in reversed(range(20))}
    made = _bytes_of(serialized({"a": torch.ones(2)}, metadata))
    assert made == _bytes_of(serialized({"a": torch.ones(2)}, dict(reversed(metadata.items()))))
    plain = safetensors.torch.save({"a": torch.ones(2)}, metadata)
    length = int.from_bytes(made[:8], "little")
    assert json.loads(made[8 : 8 + length]) == json.loads(plain[8 : 8 + length])
    assert made[:8] == plain[:8] and made[8 + length :] == plain[8 + length :]


def test_nothing_is_copied() -> None:
    tensor = torch.arange(1 << 20, dtype=torch.int32)
    source = serialized({"a": tensor})
    pieces = list(source.chunks(1 << 20))
    tensor[-1] = 7
    assert int.from_bytes(bytes(pieces[-1])[-4:], "little") != 7  # the last one begins in another chunk
    assert bytes(pieces[1]) == bytes(list(source.chunks(1 << 20))[1])
    assert sum(memoryview(piece).nbytes for piece in pieces) == source.size
    assert bytes(next(iter(source.chunks(1 << 30))))[-4:] == (7).to_bytes(4, "little")


def test_a_conjugated_view_is_saved_as_what_it_shows() -> None:
    tensor = torch.tensor([1 + 2j], dtype=torch.complex64)
    data = _bytes_of(serialized({"a": tensor.conj()}))
    assert safetensors.torch.load(data)["a"].tolist() == [1 - 2j]


SHARED = torch.ones(6)


@pytest.mark.parametrize(
    "tensors,metadata",
    [
        ({"a": SHARED, "b": SHARED}, None),
        ({"a": torch.ones(3, 4).t()}, None),
        ({"a": torch.ones(3).to_sparse()}, None),
        ({"a": torch.ones(2, dtype=torch.complex128)}, None),
        ({1: torch.ones(2)}, None),
        ({"a": [1.0]}, None),
        ({"a": torch.ones(1), "b": numpy.ones(1)}, None),
        ({"a": torch.ones(1)}, {"k": 1}),
        ({"\ud800": torch.ones(1)}, None),
    ],
)
def test_what_safetensors_refuses(memory_client: Client, tensors: dict[Any, Any], metadata: Any) -> None:
    with pytest.raises(Exception) as caught:
        safetensors.torch.save(tensors, metadata)
    with pytest.raises(type(caught.value)) as ours:
        save_file(tensors, "r", 1, metadata=metadata, client=memory_client)
    assert str(ours.value) == str(caught.value)
    assert memory_client.latest("r") is None


def test_what_safetensors_would_save_wrongly(memory_client: Client) -> None:
    with pytest.raises(forebay.InvalidArgument, match="not C-contiguous"):
        save_file({"a": numpy.arange(6).reshape(2, 3).T}, "r", 1, client=memory_client)
    with pytest.raises(forebay.InvalidArgument, match="__metadata__"):
        save_file({"__metadata__": torch.ones(1)}, "r", 1, client=memory_client)


INDEXES: list[Any] = [
    0, 5, -1, slice(None), slice(1, 3), slice(2, 99), slice(-2, None), slice(3, 1), slice(None, None, 2), slice(1, 6, 3),
    (2, slice(1, 3)), (slice(1, 5), 2), (slice(None), slice(0, None, 2)), ..., (..., 1), (1, ...), (3, 2), (),
]  # fmt: skip


@pytest.fixture
def saved(client: Client) -> Client:
    save_file(_model(), "r", 1, metadata={"format": "pt"}, client=client)
    return client


@pytest.mark.parametrize("framework", ["pt", "np"])
def test_a_part_is_what_indexing_the_whole_gives(saved: Client, framework: str) -> None:
    whole = _model()["embedding"]
    whole = whole if framework == "pt" else whole.numpy()
    with safe_open("r", 1, framework=framework, client=saved) as file:
        part = file.get_slice("embedding")
        assert (part.get_shape(), part.get_dtype()) == ([3000, 300], "F32")
        for index in INDEXES:
            found = part[index]
            assert found.shape == whole[index].shape and found.tolist() == whole[index].tolist(), index


def test_it_answers_as_safetensors_does(saved: Client, tmp_path: Path) -> None:
    safetensors.torch.save_file(_model(), tmp_path / "plain", {"format": "pt"})
    for framework in ("pt", "np"):
        with (
            safetensors.safe_open(tmp_path / "plain", framework) as plain,
            safe_open("r", 1, framework=framework, client=saved) as ours,
        ):
            assert (ours.keys(), ours.offset_keys(), ours.metadata()) == (plain.keys(), plain.offset_keys(), plain.metadata())
            for name in plain.keys():  # noqa: SIM118 - it is no dictionary
                assert ours.get_slice(name).get_shape() == plain.get_slice(name).get_shape()
                assert ours.get_slice(name).get_dtype() == plain.get_slice(name).get_dtype()
            acts: list[Any] = [lambda file: file.get_tensor("no"), lambda file: file.get_slice("no")]
            for index in (9000, -9000, (0, 0, 0), slice(None, None, -1), (0, 300)):
                acts.append(lambda file, index=index: file.get_slice("embedding")[index])
            if framework == "np":
                acts += [lambda file: file.get_slice("embedding")[[1, 2]], lambda file: file.get_tensor("float8_e5m2")]
            for act in acts:
                with pytest.raises(Exception) as theirs:
                    act(plain)
                with pytest.raises(type(theirs.value)):
                    act(ours)
        for act in (lambda file: file.keys(), lambda file: file.get_tensor("scalar"), lambda file: file.metadata()):
            with pytest.raises(SafetensorError, match="closed"):
                act(ours)
    with pytest.raises(SafetensorError, match="framework zz is invalid"):
        safe_open("r", 1, framework="zz", client=saved)
    with pytest.raises(forebay.Unsupported, match="convert"):
        safe_open("r", 1, framework="jax", client=saved)


@pytest.mark.parametrize(
    "data",
    [b"", b"1234567", (1 << 40).to_bytes(8, "little") + b"x", (10).to_bytes(8, "little") + b"notjson!!!", b"short", b"long"],
)
def test_what_is_no_such_file(memory_client: Client, tmp_path: Path, data: bytes) -> None:
    good = safetensors.torch.save({"a": torch.ones(4)})
    data = {b"short": good[:-1], b"long": good + b"1"}.get(data, data)
    (tmp_path / "plain").write_bytes(data)
    with memory_client.checkpoint("r", 1) as part:
        part.put("model.safetensors", data)
        part.commit()
    with pytest.raises(SafetensorError) as theirs:
        safetensors.safe_open(tmp_path / "plain", "pt")
    with pytest.raises(SafetensorError) as ours:
        load_file("r", 1, client=memory_client)
    assert str(ours.value) == str(theirs.value)


def test_only_the_bytes_asked_for_are_read(
    memory: MemoryGateway, memory_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forebay.reader import Reader

    save_file(_model(), "r", 1, client=memory_client)
    asked: list[int] = []
    readinto = Reader.readinto

    def counting(reader: Reader, name: str, buffer: Any, offset: int = 0) -> int:
        asked.append(readinto(reader, name, buffer, offset))
        return asked[-1]

    monkeypatch.setattr(Reader, "readinto", counting)
    with safe_open("r", 1, client=memory_client) as file:
        file.get_slice("embedding")[1000:1010, 5]
        file.get_slice("embedding")[3]
        file.get_tensor("scalar")
        file.get_slice("embedding")[5:5]
    assert asked == [10 * 300 * 4, 300 * 4, 2]


@pytest.mark.parametrize(
    "arguments,said",
    [
        (("r",), "give run and step"),
        (("forebay://r",), "of the form"),
        (("forebay://r/x/model",), "of the form"),
        (("forebay://r/1/a", None, "b"), "of the form"),
        (("forebay://r/1", 2), "already"),
        (("forebay://r/latest",), "only a number"),
        (("r", -1), "step"),
        (("r", 1, "a//b"), "segment"),
        ((7, 1), "text"),
    ],
)
def test_bad_places(memory_client: Client, arguments: tuple[Any, ...], said: str) -> None:
    with pytest.raises(forebay.InvalidArgument, match=said):
        save_file({"a": torch.ones(1)}, *arguments, client=memory_client)


@pytest.mark.parametrize(
    "path,place",
    [
        ("forebay://r/1", ("r", 1, "model.safetensors")),
        ("forebay://team/r/1/sub/2/a", ("team/r", 1, "sub/2/a")),
        ("forebay://2026/r/latest/a", ("2026/r", "latest", "a")),
        ("forebay://r/2026/step-0007/a", ("r/2026", 7, "a")),
        (f"forebay://r/{'9' * 5000}/a", ("r", 1 << 64, "a")),
    ],
)
def test_paths(path: str, place: tuple[str, int | str, str]) -> None:
    assert place_of(path, None, None) == place


def test_nothing_there(memory: MemoryGateway, memory_client: Client) -> None:
    with pytest.raises(forebay.NotFound):
        load_file("r", "latest", address=memory.address)
    save_file({"a": torch.ones(1)}, "r", 1, address=memory.address)
    with pytest.raises(forebay.NotFound, match="no shard 'other'"):
        load_file("forebay://r/latest/other", address=memory.address)
    assert load_file("forebay://r/1", client=memory_client)["a"].tolist() == [1.0]
    memory.damage_stored("r", 1, "model.safetensors")
    with pytest.raises(forebay.Corrupt):
        load_file("r", 1, client=memory_client)


def test_several_files_of_one_checkpoint(client: Client) -> None:
    with client.checkpoint("r", 1) as part:
        for at in (1, 2):
            part.put(f"model-0000{at}-of-00002.safetensors", serialized({"a": torch.full((300_000,), float(at))}))
        part.commit()
    for at in (1, 2):
        assert load_file("r", 1, f"model-0000{at}-of-00002.safetensors", client=client)["a"][0] == at


def test_files_of_many_pieces(client: Client) -> None:
    """Of which tensors begin and end anywhere, and many lie in one piece."""
    sizes = [1, 3, 1_500_000, 70_001, 2_000_003, 1, 5, 1_234_567, *range(1, 300)]
    tensors = {f"t{at}": torch.arange(size, dtype=torch.int32) + at for at, size in enumerate(sizes)}
    save_file(tensors, "r", 1, client=client)
    _assert_same(load_file("r", 1, client=client), tensors)
    with safe_open("r", 1, client=client) as file:
        for name in ("t4", "t2", "t6", "t306"):
            assert file.get_tensor(name).equal(tensors[name])
        assert file.get_slice("t4")[1_000_000:1_900_000].equal(tensors["t4"][1_000_000:1_900_000])


def test_a_put_in_the_background(client: Client) -> None:
    tensors = {"a": torch.ones(500_000)}
    with client.checkpoint("r", 1) as part:
        part.put("a", serialized(tensors), background=True)
        tensors["a"].zero_()
        part.commit()
    assert load_file("r", 1, "a", client=client)["a"].min() == 1


# -- mapped ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def fd(real: RealGateway) -> Iterator[Client]:
    with Client(real.address) as client:
        save_file(_model(), "r", 1, client=client)
        yield client


def _held() -> int:
    gc.collect()
    return len(fd_map._leases)


@pytest.mark.parametrize("framework", ["pt", "np"])
def test_mapped_tensors(fd: Client, framework: str) -> None:
    expected = {name: tensor for name, tensor in _model().items() if "float8" not in name and "float4" not in name}
    if framework == "np":
        del expected["bfloat16"], expected["scalar"]
        expected = {name: tensor.numpy() for name, tensor in expected.items()}
    with safe_open("r", 1, framework=framework, mapped=True, client=fd) as file:
        assert _held() == 1
        _assert_same({name: file.get_tensor(name) for name in expected}, expected)
        rows = file.get_slice("embedding")[10:20]
    assert _held() == 1  # for what was handed out
    assert rows.tolist() == expected["embedding"][10:20].tolist()
    rows[:] = 0  # this process's own
    del rows
    assert _held() == 0
    whole = load_file("r", 1, framework=framework, client=fd) if framework == "pt" else expected
    assert whole["embedding"].tolist() == expected["embedding"].tolist()


def test_the_file_is_not_evicted_while_a_tensor_of_it_lives(fd: Client, real: RealGateway) -> None:
    fd.wait("r", 1, "pfs", timeout=60)
    with safe_open("r", 1, mapped=True, client=fd) as file:
        tensor = file.get_tensor("embedding")
    files = set((real.directory / "cache").rglob("*.shard"))
    fd.care.evict("r", 1)
    assert set((real.directory / "cache").rglob("*.shard")) == files
    assert tensor.tolist() == _model()["embedding"].tolist()
    del tensor
    assert _held() == 0
    fd.care.evict("r", 1)
    assert not set((real.directory / "cache").rglob("*.shard"))


def test_the_gateway_goes_while_a_tensor_of_it_lives(fd: Client, real: RealGateway) -> None:
    with safe_open("r", 1, mapped=True, client=fd) as file:
        tensor = file.get_tensor("embedding")
        real.kill()
        assert tensor.sum() == _model()["embedding"].sum()
        assert file.get_tensor("int64").tolist() == _model()["int64"].tolist()
    del tensor
    assert _held() == 0


def test_the_gateway_hears_of_a_mapping_again_and_again(fd: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would end a silent lease, and evict the file. The thread that tells it ends with the last lease."""
    heard: queue.Queue[fd_map.Lease] = queue.Queue()
    monkeypatch.setattr(fd_map, "SIGN_EVERY_S", 0.01)
    monkeypatch.setattr(fd_map.Lease, "alive", lambda lease: heard.put(lease))
    with safe_open("r", 1, mapped=True, client=fd) as file:
        tensor = file.get_tensor("int8")
    (lease,) = fd_map._leases
    assert [heard.get(timeout=30) for _ in range(3)] == [lease] * 3
    signer = fd_map._signer
    del tensor
    assert _held() == 0 and signer is not None
    signer.join(30)
    assert not signer.is_alive() and fd_map._signer is None


def test_damage_in_the_file_is_not_mapped(fd: Client, real: RealGateway) -> None:
    """Found when the tensor is asked for, and read from the tier instead."""
    fd.wait("r", 1, "pfs", timeout=60)
    (path,) = (real.directory / "cache").rglob("*.shard")
    with safe_open("r", 1, mapped=True, client=fd) as file:
        with path.open("r+b") as shard:
            shard.seek(2 << 20)
            byte = shard.read(1)
            shard.seek(2 << 20)
            shard.write(bytes([byte[0] ^ 1]))
        assert file.get_tensor("embedding").tolist() == _model()["embedding"].tolist()


def test_what_cannot_be_mapped(saved: Client, client_class: type[Client]) -> None:
    if client_class.__name__ == "FdClient":
        pytest.skip("the fd lane maps")
    with pytest.raises(forebay.Unsupported):
        safe_open("r", 1, mapped=True, client=saved)


def test_a_child_leaves_its_parents_lease_alone(gateway: Gateway, client_class: type[Client]) -> None:
    if client_class.__name__ != "FdClient":
        pytest.skip("only the fd lane maps")
    code = """
import os, sys, torch, forebay
from forebay.lanes import fd_map
from forebay.safetensors import save_file, safe_open
address = sys.argv[1]
save_file({"a": torch.ones(600000)}, "r", 1, address=address)
file = safe_open("r", 1, mapped=True, address=address)
tensor = file.get_tensor("a")
child = os.fork()
if not child:
    status = 0 if tensor[-1].item() == 1 else 1
    del tensor, file
    os._exit(status)
assert os.waitpid(child, 0)[1] == 0
(lease,) = fd_map._leases
lease._next_sign_s = 0
lease.alive()  # a child that ended its copy of the connection would have ended this one
assert tensor[-1].item() == 1
"""
    command = [sys.executable, "-W", "ignore", "-c", code, gateway.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr


def test_without_safetensors() -> None:
    code = "import sys; sys.modules['safetensors'] = None\nimport forebay\nimport forebay.safetensors"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert "install Forebay's extra 'safetensors' (in its tree: pip install '.[safetensors]')" in done.stderr


def test_forebay_alone_imports_none_of_it() -> None:
    code = "import sys, forebay; forebay.directory; assert not {'torch', 'numpy', 'safetensors'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=100).returncode == 0
