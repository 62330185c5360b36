"""forebay.huggingface: real Trainers of tiny models, alone and as two ranks; save_pretrained; Accelerate. No download."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="forebay.huggingface needs torch, which this environment does not have")
transformers = pytest.importorskip("transformers", reason="forebay.huggingface needs transformers, which is not installed")
accelerate = pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate, which is not installed")

import forebay  # noqa: E402
from client import hf_jobs  # noqa: E402
from client.conftest import RealGateway  # noqa: E402
from client.hf_jobs import RUN, Rows, arguments, losses, tiny  # noqa: E402
from client.launched import ranks  # noqa: E402
from forebay import Client  # noqa: E402
from forebay.huggingface import (  # noqa: E402
    ForebayCallback,
    from_pretrained,
    load_state,
    resume_from_checkpoint,
    save_pretrained,
    save_state,
)
from forebay.testing import MemoryGateway  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

STEPS = 8


@pytest.fixture
def client(memory: MemoryGateway) -> Iterator[Client]:
    with Client(memory.address, progress=False) as client:
        yield client


def train(directory: Path, steps: int, *callbacks: Any, resume: str | None = None, model: Any = None, **keys: Any) -> Any:
    """Train a tiny model; the trainer."""
    args = arguments(directory, steps, **keys)
    trainer = transformers.Trainer(model or tiny(), args, train_dataset=Rows(), callbacks=list(callbacks))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of a job that never stopped."""
    return losses(train(tmp_path_factory.mktemp("whole"), STEPS))


def listed(client: Client, run: str = RUN) -> list[int]:
    """The complete ones."""
    return [each.step for each in client.checkpoints(run) if each.complete]


@pytest.mark.parametrize("background", [False, True], ids=["save", "background"])
def test_a_job_goes_on_where_it_was(
    memory: MemoryGateway, client: Client, tmp_path: Path, whole: dict[int, float], background: bool
) -> None:
    """On a node that has nothing: the losses are those of one job. Rotation on the local disk goes on as it did."""
    callback = ForebayCallback(RUN, memory.address, background=background)
    first = train(tmp_path / "a", 4, callback, save_total_limit=1)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["checkpoint-4"]
    assert listed(client) == [2, 4]
    assert client.open(RUN, 2).checkpoint.metadata["transformers"]["step"] == 2
    done = callback.last.result() if background else callback.last
    assert done.checkpoint_complete
    kept = {path.name: path.read_bytes() for path in (tmp_path / "a" / "checkpoint-4").iterdir()}
    shutil.rmtree(tmp_path / "a")
    where = resume_from_checkpoint(RUN, tmp_path / "b", memory.address)
    assert where == str(tmp_path / "b" / "checkpoint-4")
    assert {path.name: path.read_bytes() for path in Path(where).iterdir()} == kept
    second = train(tmp_path / "b", STEPS, callback, resume=where, model=tiny(9))
    assert {**losses(first), **losses(second)} == whole
    assert listed(client) == [2, 4, 6, 8]


def test_the_last_one_is_final(real: RealGateway, tmp_path: Path) -> None:
    """It goes out before the others, and is never left out."""
    train(tmp_path, 4, ForebayCallback(RUN, real.address))
    with Client(real.address) as client:
        assert {each.step: each.kind for each in client.checkpoints(RUN)} == {2: "periodic", 4: "final"}


def test_nothing_to_resume_from(memory: MemoryGateway, client: Client, tmp_path: Path) -> None:
    assert resume_from_checkpoint(RUN, arguments(tmp_path, 2), client=client) is None
    with pytest.raises(forebay.NotFound):
        resume_from_checkpoint(RUN, tmp_path, client=client, step=3)
    with client.checkpoint(RUN, 3, writers=2, writer=0, session="s") as part:
        part.put("x", b"x")
        part.commit()
    assert resume_from_checkpoint(RUN, tmp_path, client=client) is None
    with pytest.raises(forebay.Incomplete, match="writer 1"):
        resume_from_checkpoint(RUN, tmp_path, client=client, step=3)
    with pytest.raises(forebay.InvalidArgument, match="a step is a number or 'latest'"):
        resume_from_checkpoint(RUN, tmp_path, client=client, step="newest")
    assert not list(tmp_path.iterdir())


def test_a_damaged_checkpoint(memory: MemoryGateway, client: Client, tmp_path: Path) -> None:
    train(tmp_path / "a", 2, ForebayCallback(RUN, client=client))
    memory.damage_stored(RUN, 2, "model.safetensors")
    with pytest.raises(forebay.Corrupt, match=r"model\.safetensors"):
        resume_from_checkpoint(RUN, tmp_path / "b", client=client)
    assert not (tmp_path / "b").exists()


def test_into_a_model_of_another_shape(client: Client, tmp_path: Path) -> None:
    """transformers' own error."""
    train(tmp_path / "a", 2, ForebayCallback(RUN, client=client))
    where = resume_from_checkpoint(RUN, tmp_path / "b", client=client)
    with pytest.raises(RuntimeError, match="size mismatch"):
        train(tmp_path / "b", 4, resume=where, model=tiny(width=32))


@pytest.mark.expected_logs("abort", "failed", "dropped")
@pytest.mark.parametrize("background", [False, True], ids=["save", "background"])
def test_a_save_that_fails(memory: MemoryGateway, client: Client, tmp_path: Path, background: bool) -> None:
    """Strictly it ends the training; in the background at the next save, which says whose it is."""
    memory.fail("CommitPart", forebay.PermissionDenied("read only"))
    said = r"commit of team/bert/2 in the background: .*read only" if background else "read only"
    seen: list[int] = []

    class Sees(transformers.TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seen.append(state.global_step)

    with pytest.raises(forebay.PermissionDenied, match=said):
        train(tmp_path, 6, ForebayCallback(RUN, memory.address, background=background), Sees())
    assert seen[-1] == (4 if background else 2)


@pytest.mark.parametrize("background", [False, True], ids=["save", "background"])
def test_training_goes_on_over_failed_saves(
    memory: MemoryGateway, client: Client, tmp_path: Path, expected_logs: Any, background: bool
) -> None:
    expected_logs.allow("abort", "failed")
    memory.fail("CommitPart", forebay.PermissionDenied("read only"))
    train(tmp_path, 4, ForebayCallback(RUN, memory.address, background=background, strict=False))
    assert listed(client) == [4]
    assert any("training goes on" in record.getMessage() for record in expected_logs.records)


@pytest.mark.expected_logs("abort", "failed", "dropped")
def test_the_last_save_that_fails(memory: MemoryGateway, tmp_path: Path) -> None:
    memory.fail("CommitPart", forebay.PermissionDenied("read only"))
    with pytest.raises(forebay.PermissionDenied, match="team/bert/2"):
        train(tmp_path, 2, ForebayCallback(RUN, memory.address, background=True))


def test_waiting_for_a_tier(memory: MemoryGateway, client: Client, tmp_path: Path) -> None:
    callback = ForebayCallback(RUN, client=client, wait="pfs", timeout=30)
    train(tmp_path / "a", 2, callback)
    assert isinstance(callback.last, forebay.CommitReceipt)
    assert callback.last.level == "pfs"
    client.hold()
    with pytest.raises(forebay.DeadlineExceeded, match="this part is committed"):
        train(tmp_path / "b", 2, ForebayCallback("team/other", client=client, wait="pfs", timeout=0.1))


@pytest.mark.slow
def test_two_ranks(memory: MemoryGateway, client: Client, tmp_path: Path) -> None:
    """Rank 0 saves what all share, each its own generators; both come back, on a node that has nothing."""
    assert all("WELL" in said for said in ranks(hf_jobs.__file__, 2, memory.address, str(tmp_path)))
    names = {shard.name: shard.writer for shard in client.open(RUN, 2).shards()}
    assert {name for name, writer in names.items() if writer == 1} == {"rng_state_1.pth"}
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json", "rng_state_0.pth"} < names.keys()
    assert listed(client) == [2, 4]
    names = {shard.name: shard.writer for shard in client.open(f"{RUN}/accelerate", 4).shards()}
    assert names == {"model.safetensors": 0, "random_states_0.pkl": 0, "random_states_1.pkl": 1}


def test_accelerate_alone(client: Client, tmp_path: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    assert load_state(accelerator, "team/alone", tmp_path, client=client) is None
    save_state(accelerator, "team/alone", 1, client=client, final=True)
    kept, drawn = model.weight.detach().clone(), torch.rand(2)
    with torch.no_grad():
        model.weight.zero_()
    assert load_state(accelerator, "team/alone", tmp_path, client=client) == 1
    assert torch.equal(model.weight, kept)
    assert torch.equal(torch.rand(2), drawn)
    assert listed(client, "team/alone") == [1]


def test_pretrained(client: Client) -> None:
    """A model and its tokenizer, there and back."""
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    model = tiny(3)
    save_pretrained([model, tokenizer], "forebay://team/release/7", client=client)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(client.open("team/release", 7).names())
    loaded = from_pretrained(transformers.BertForSequenceClassification, "forebay://team/release/latest", client=client)
    for (name, one), two in zip(model.state_dict().items(), loaded.state_dict().values(), strict=True):
        assert torch.equal(one, two), name
    again = from_pretrained(transformers.PreTrainedTokenizerFast, "forebay://team/release/7", client=client)
    assert again("a b")["input_ids"] == tokenizer("a b")["input_ids"]
    with pytest.raises(forebay.InvalidArgument, match="a step is a number"):
        save_pretrained(model, "forebay://team/release/latest", client=client)
    with pytest.raises(forebay.InvalidArgument, match="not of the form"):
        save_pretrained(model, "team/release/7", client=client)
    with pytest.raises(forebay.NotFound):
        from_pretrained(transformers.BertForSequenceClassification, "forebay://team/none/latest", client=client)


def test_without_transformers() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "try:\n    import forebay.huggingface\nexcept ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "install Forebay's extra 'huggingface' (in its tree: pip install '.[huggingface]')" in done.stdout, done.stderr
