"""Libraries that know directories only, through gateways: Orbax itself, and the trees that DeepSpeed and Megatron write."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import forebay
from client.lanes import FdClient, StreamClient
from forebay import Client
from integration.conftest import MakeGateway
from integration.kit import files_below, some_bytes, together

RANKS = 4
EXAMPLES = Path(__file__).parents[2] / "client" / "examples"


@pytest.fixture
def under(tmp_path: Path) -> Path:
    path = tmp_path / "scratch"
    path.mkdir()
    return path


def _left(under: Path) -> list[str]:
    return [path.name.partition("-")[0] for path in under.glob("forebay-*/*") if path.name != "lock"]


# -- Orbax ----------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [StreamClient, FdClient])
def test_orbax(make: MakeGateway, under: Path, root: Path, kind: type[Client]) -> None:
    """Both checkpointers, with OCDBT, and the manager; restored from the cache and from the tier's plain files."""
    ocp = pytest.importorskip("orbax.checkpoint", reason="needs orbax-checkpoint, which this environment does not have")
    jax = pytest.importorskip("jax", reason="needs jax, which this environment does not have")
    gateway = make("a").start()
    state = {
        "weights": jax.numpy.arange(600_000.0).reshape(600, 1000),
        "bias": jax.numpy.ones((3,), "bfloat16"),
        "step": 7,
        "nothing": {},
    }

    def same(found: Any) -> bool:
        pairs = jax.tree.map(lambda one, other: bool((jax.numpy.asarray(one) == other).all()), found, state)
        return bool(jax.tree.all(pairs))

    with kind(gateway.address) as client:
        with forebay.directory("orbax", 1, client=client, under=under, wait="pfs", timeout=60) as path:
            with ocp.StandardCheckpointer() as standard:
                standard.save(path / "standard", state)
            ocp.PyTreeCheckpointer(use_ocdbt=True).save(path / "tree", state)
            with ocp.CheckpointManager(path / "manager") as manager:
                manager.save(5, args=ocp.args.StandardSave(state))
                manager.wait_until_finished()
            written = files_below(path)
        assert any(name.endswith("manifest.ocdbt") for name in written)

        def check(path: Path) -> None:
            assert files_below(path) == written
            with ocp.StandardCheckpointer() as standard:
                assert same(standard.restore(path / "standard"))
            assert same(ocp.PyTreeCheckpointer(use_ocdbt=True).restore(path / "tree"))
            with ocp.CheckpointManager(path / "manager") as manager:
                assert manager.latest_step() == 5
                assert same(manager.restore(5, args=ocp.args.StandardRestore(state)))

        with forebay.directory("orbax", "latest", mode="r", client=client, under=under) as path:
            check(path)
    (plain,) = (root / "orbax").glob("step-*/current")
    with ocp.StandardCheckpointer() as standard:
        assert same(standard.restore(plain.resolve() / "standard"))
    assert _left(under) == []


# -- DeepSpeed and Megatron: what each rank writes --------------------------------------------------------------------------


def _deepspeed(path: Path, rank: int) -> None:
    """ZeRO 2 at data parallelism 4: each rank its optimizer's part; rank 0 the model, `latest` and the script beside them."""
    tag = path / "global_step100"
    tag.mkdir()
    (tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").write_bytes(some_bytes(1_200_000, ("zero", rank)))
    if rank == 0:
        (tag / "mp_rank_00_model_states.pt").write_bytes(some_bytes(2_000_000, "model"))
        (path / "latest").write_text("global_step100")
        (path / "zero_to_fp32.py").write_text("# converts\n")


def _megatron(path: Path, rank: int) -> None:
    """Two by two tensor and pipeline ranks, each with its model and optimizer."""
    directory = path / "iter_0000100" / f"mp_rank_{rank % 2:02d}_{rank // 2:03d}"
    directory.mkdir(parents=True)
    (directory / "model_optim_rng.pt").write_bytes(some_bytes(1_500_000, ("megatron", rank)))
    (directory / "distrib_optim.pt").write_bytes(some_bytes(70_000, ("optim", rank)))
    if rank == 0:
        (path / "latest_checkpointed_iteration.txt").write_text("100")


Write = Callable[[Path, int], None]


@pytest.mark.parametrize("write", [_deepspeed, _megatron])
def test_ranks_on_two_nodes(make: MakeGateway, under: Path, root: Path, tmp_path: Path, write: Write) -> None:
    """Each hands over what it wrote; names survive in the cache, on the tier, and through a node that wrote half of them."""
    a, b = make("a").start(), make("b").start()
    expected: dict[str, bytes] = {}

    def save(rank: int) -> None:
        gateway, lane = (a, b)[rank % 2], ("fd", "stream")[rank // 2]
        with forebay.directory(
            "job", 100, writers=RANKS, writer=rank, session="launch-1", wait="pfs", timeout=60,
            address=gateway.address, under=under, lane=lane,
        ) as path:  # fmt: skip
            write(path, rank)
            expected.update(files_below(path))

    together([partial(save, rank) for rank in range(RANKS)])
    assert len(expected) == {_deepspeed: 7, _megatron: 9}[write]
    for gateway in (a, b):
        with forebay.directory("job", "latest", mode="r", address=gateway.address, under=under) as path:
            assert files_below(path) == expected
        mine = next(name for name in expected if "rank" in name)
        with forebay.directory("job", 100, mode="r", only=mine.__eq__, address=gateway.address, under=under) as path:
            assert files_below(path) == {mine: expected[mine]}
    (plain,) = (root / "job").glob("step-*/current")
    assert {name: data for name, data in files_below(plain.resolve()).items() if ".forebay" not in name} == expected
    assert _left(under) == []


@pytest.mark.parametrize("content", [b"the same", b"another"])
def test_a_name_of_two_ranks_on_two_nodes(make: MakeGateway, under: Path, content: bytes) -> None:
    """No gateway knows of the other's writer until both are on the tier: whoever waits is told, and nothing completes."""
    a, b = make("a").start(), make("b").start()
    errors: list[forebay.ForebayError] = []

    def save(rank: int) -> None:
        try:
            with forebay.directory(
                "job", 1, writers=2, writer=rank, session="s", wait="pfs", timeout=8,
                address=(a, b)[rank].address, under=under,
            ) as path:  # fmt: skip
                (path / "config.json").write_bytes((b"the same", content)[rank])
                (path / f"rank{rank}").write_bytes(b"own")
        except forebay.ForebayError as error:
            errors.append(error)

    together([partial(save, rank) for rank in range(2)])
    assert [type(error) for error in errors] == [forebay.DeadlineExceeded] * 2
    assert any("writers 0 and 1 both put 'config.json'" in error.message for error in errors)
    with Client(a.address) as client:
        assert client.latest("job", "pfs") is None
    for gateway in (a, b):
        gateway.kill()  # an ordered end would wait for what never completes


# -- examples -------------------------------------------------------------------------------------------------------------


def _run(example: str, address: str) -> str:
    command = [sys.executable, str(EXAMPLES / example), "--address", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_directory_example(make: MakeGateway) -> None:
    """client/examples/directory.py, as a reader of it would start it."""
    said = _run("directory.py", make("a").start().address)
    assert [line.partition(":")[0] for line in said.splitlines()] == [
        "config.json",
        *(f"rank{at}/weights.bin" for at in range(4)),
    ]


def test_the_orbax_example(make: MakeGateway) -> None:
    """client/examples/jax_orbax.py, as a reader of it would start it."""
    pytest.importorskip("orbax.checkpoint", reason="needs orbax-checkpoint, which this environment does not have")
    assert "goes on from step 3 with weights of 6.0" in _run("jax_orbax.py", make("a").start().address)
