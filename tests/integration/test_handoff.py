"""Libraries that know directories only, through gateways: Orbax itself, and the trees that DeepSpeed and Megatron write."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

import forebay
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


def _run(script: Path, *arguments: str) -> str:
    done = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


# -- Orbax ----------------------------------------------------------------------------------------------------------------


needs_orbax = pytest.mark.skipif(
    find_spec("orbax") is None or find_spec("jax") is None,
    reason="needs orbax-checkpoint and jax, which this environment does not have",
)


@needs_orbax
@pytest.mark.parametrize("lane", ["stream", "fd"])
def test_orbax(make: MakeGateway, under: Path, root: Path, lane: str) -> None:
    """Both of its checkpointers and its manager, as orbax_steps.py says."""
    script = Path(__file__).with_name("orbax_steps.py")
    assert _run(script, make("a").start().address, str(under), lane, str(root)) == "all restored\n"
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
    """No gateway knows of the other's writer until both are on the tier, and nothing completes. Then writer 0, whose gateway
    puts the parts together, is told at once, however long it would wait; the other hears nothing before its time is over."""
    a, b = make("a").start(), make("b").start()
    errors: dict[int, forebay.ForebayError] = {}

    def save(rank: int) -> None:
        try:
            with forebay.directory(
                "job", 1, writers=2, writer=rank, session="s", wait="pfs", timeout=(None, 8)[rank],
                address=(a, b)[rank].address, under=under,
            ) as path:  # fmt: skip
                (path / "config.json").write_bytes((b"the same", content)[rank])
                (path / f"rank{rank}").write_bytes(b"own")
        except forebay.ForebayError as error:
            errors[rank] = error

    together([partial(save, rank) for rank in range(2)])
    assert {rank: type(error) for rank, error in errors.items()} == {0: forebay.Incomplete, 1: forebay.DeadlineExceeded}
    assert "writers 0 and 1 both put 'config.json'" in errors[0].message
    with Client(a.address) as client:
        assert client.latest("job", "pfs") is None
    for gateway in (a, b):
        gateway.kill()  # an ordered end would wait for what never completes


# -- examples -------------------------------------------------------------------------------------------------------------


def test_the_directory_example(make: MakeGateway) -> None:
    """client/examples/directory.py, as a reader of it would start it."""
    said = _run(EXAMPLES / "directory.py", "--address", make("a").start().address)
    assert [line.partition(":")[0] for line in said.splitlines()] == [
        "config.json",
        *(f"rank{at}/weights.bin" for at in range(4)),
    ]


@needs_orbax
def test_the_orbax_example(make: MakeGateway) -> None:
    """client/examples/jax_orbax.py, as a reader of it would start it."""
    said = _run(EXAMPLES / "jax_orbax.py", "--address", make("a").start().address)
    assert "goes on from step 3 with weights of 6.0" in said
