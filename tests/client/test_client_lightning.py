"""forebay.lightning with real Trainers: what ModelCheckpoint keeps, resuming, saves in the background, what goes wrong."""

import importlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="forebay.lightning needs torch, which this environment does not have")
pytest.importorskip("lightning", reason="forebay.lightning needs lightning, which this environment does not have")

import lightning.pytorch as pl  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.plugins.io import AsyncCheckpointIO  # noqa: E402

import forebay  # noqa: E402
from client import launched, lit_jobs  # noqa: E402
from forebay import Client  # noqa: E402
from forebay.lightning import ForebayCheckpointIO  # noqa: E402
from forebay.lightning.places import Place  # noqa: E402
from forebay.lightning.removals import Removals  # noqa: E402
from forebay.testing import MemoryGateway  # noqa: E402

# Lightning warns of few workers, of directories that are not empty, and of its own dependencies.
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

RUN = "team/lit"
ROWS = torch.arange(64, dtype=torch.float32).reshape(16, 4) / 64


class Lit(pl.LightningModule):
    """A model with dropout, which makes each step random; batches in order."""

    def __init__(self, width: int = 8, extra: Any = None) -> None:
        super().__init__()
        self.extra = extra
        self.net = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Dropout(0.2), torch.nn.Linear(width, 1))
        self.seen: list[float] = []

    def training_step(self, batch: Any, index: int) -> Any:
        """Its loss goes into the checkpoint's name, too."""
        torch.manual_seed(self.global_step)  # Lightning saves no generators
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        self.seen.append(loss.item())
        return loss

    def test_step(self, batch: Any, index: int) -> None:
        """Nothing to look at."""

    def configure_optimizers(self) -> Any:
        """With a schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Something of the user's own."""
        if self.extra is not None:
            checkpoint["extra"] = self.extra


def trainer_with(plugin: Any, steps: int, root: Path, *callbacks: Any, **keys: Any) -> pl.Trainer:
    """On the CPU, quiet."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "devices": 1}
    options = {**quiet, "max_steps": steps, "max_epochs": -1, "default_root_dir": root, "barebones": False, **keys}
    return pl.Trainer(plugins=[plugin], callbacks=list(callbacks), **options)


def every(directory: Path, steps: int = 2, **keys: Any) -> ModelCheckpoint:
    """A callback that saves each so many steps."""
    return ModelCheckpoint(dirpath=directory, every_n_train_steps=steps, **keys)


def batches() -> Any:
    """Four an epoch."""
    return torch.utils.data.DataLoader(ROWS, batch_size=4)


def model(seed: int = 0, **keys: Any) -> Lit:
    """With weights of that seed."""
    torch.manual_seed(seed)
    return Lit(**keys)


def steps_of(client: Client, run: str = RUN) -> list[int]:
    """The complete ones."""
    return [each.step for each in client.checkpoints(run) if each.complete]


@pytest.fixture
def client(memory: MemoryGateway) -> Iterator[Client]:
    with Client(memory.address) as client:
        yield client


@pytest.fixture(params=[False, True], ids=["save", "background"])
def plugin(request: pytest.FixtureRequest, memory: MemoryGateway) -> ForebayCheckpointIO:
    return ForebayCheckpointIO(RUN, memory.address, background=request.param)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of ten steps without a stop, by Lightning's own plugin."""
    lit = model()
    root = tmp_path_factory.mktemp("whole")
    pl.Trainer(
        max_steps=10, max_epochs=-1, accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=root
    ).fit(lit, batches())
    return lit.seen


def test_a_trainer_saves_and_another_goes_on(
    plugin: ForebayCheckpointIO, client: Client, tmp_path: Path, whole: list[float]
) -> None:
    lit = model()
    trainer_with(plugin, 4, tmp_path, every(tmp_path / "ckpt", save_top_k=-1)).fit(lit, batches())
    assert lit.seen == whole[:4]
    assert steps_of(client) == [2, 4]
    assert client.open(RUN, 2).names() == ["epoch=0-step=2.ckpt"]
    named = tmp_path / "ckpt" / "epoch=0-step=4.ckpt"
    assert json.loads(named.read_text())["forebay"] == f"forebay://{RUN}/4/epoch=0-step=4.ckpt"
    other = model(5)
    trainer_with(plugin, 10, tmp_path, enable_checkpointing=False).fit(other, batches(), ckpt_path=str(named))
    assert other.seen == whole[4:]
    named.unlink()
    for path in (plugin.newest(), f"forebay://{RUN}/latest", f"forebay://{RUN}/4/{named.name}", str(named)):
        assert path is not None
        other = model(5)
        trainer_with(plugin, 10, tmp_path, enable_checkpointing=False).fit(other, batches(), ckpt_path=path)
        assert other.seen == whole[4:], path
    plugin.teardown()


def test_files_are_lightnings_own(plugin: ForebayCheckpointIO, client: Client, tmp_path: Path) -> None:
    lit = model()
    trainer_with(plugin, 2, tmp_path, every(tmp_path / "ckpt")).fit(lit, batches())
    client.restore_dir(RUN, "latest", tmp_path / "plain")
    loaded = Lit.load_from_checkpoint(tmp_path / "plain" / "epoch=0-step=2.ckpt", weights_only=True)
    assert all(torch.equal(one, two) for one, two in zip(loaded.parameters(), lit.parameters(), strict=True))


def test_the_best_are_kept(plugin: ForebayCheckpointIO, client: Client, tmp_path: Path) -> None:
    """What top-k drops is removed; `best` is loaded through the plugin."""
    best = every(tmp_path / "ckpt", monitor="loss", mode="max", save_top_k=2, filename="{step}-{loss:.4f}")
    lit = model()
    trainer = trainer_with(plugin, 10, tmp_path, best)
    trainer.fit(lit, batches())
    kept = sorted(int(Path(path).name.partition("-")[0].removeprefix("step=")) for path in best.best_k_models)
    assert len(kept) == 2
    assert steps_of(client) == kept
    assert sorted(path.name for path in (tmp_path / "ckpt").iterdir()) == sorted(Path(each).name for each in best.best_k_models)
    trainer.test(lit, batches(), ckpt_path="best", verbose=False)
    assert plugin.load_checkpoint(best.best_model_path)["global_step"] in kept
    plugin.teardown()


def test_only_the_newest_and_last(plugin: ForebayCheckpointIO, client: Client, tmp_path: Path, whole: list[float]) -> None:
    """`save_last`, and "last" of a job that comes back; names and versions as with Lightning's own plugin."""
    lit = model()
    trainer_with(plugin, 4, tmp_path, every(tmp_path / "ckpt", save_last=True)).fit(lit, batches())
    assert steps_of(client) == [4]
    assert steps_of(client, f"{RUN}/last") == [4]
    assert sorted(path.name for path in (tmp_path / "ckpt").iterdir()) == ["epoch=0-step=4.ckpt", "last.ckpt"]
    other = model(3)
    again = trainer_with(plugin, 10, tmp_path, every(tmp_path / "ckpt", save_last=True))
    again.fit(other, batches(), ckpt_path="last")
    assert other.seen == whole[4:]
    assert sorted(path.name for path in (tmp_path / "ckpt").iterdir()) == ["epoch=2-step=10.ckpt", "last.ckpt"]
    assert steps_of(client, f"{RUN}/last") == [10]


def test_last_as_a_link(plugin: ForebayCheckpointIO, client: Client, tmp_path: Path, whole: list[float]) -> None:
    trainer_with(plugin, 4, tmp_path, every(tmp_path / "ckpt", save_last="link")).fit(model(), batches())
    assert (tmp_path / "ckpt" / "last.ckpt").is_symlink()
    assert {each.run for each in client.runs()} == {RUN}
    other = model(3)
    trainer_with(plugin, 10, tmp_path, every(tmp_path / "ckpt", 50)).fit(other, batches(), ckpt_path="last")
    assert other.seen == whole[4:]


def test_two_callbacks_at_one_step(plugin: ForebayCheckpointIO, client: Client, tmp_path: Path) -> None:
    """Neither replaces the other; to resume, what has only weights does not count."""
    full = every(tmp_path / "full", 4, save_top_k=-1)
    weights = every(tmp_path / "weights", 2, save_top_k=-1, save_weights_only=True, filename="w-{step}")
    trainer_with(plugin, 6, tmp_path, weights, full).fit(model(), batches())
    assert steps_of(client) == [2, 4, 6]
    assert steps_of(client, f"{RUN}/2") == [4]
    assert plugin.newest() == f"forebay://{RUN}/2/4/epoch=0-step=4.ckpt"
    assert "optimizer_states" in plugin.load_checkpoint(tmp_path / "full" / "epoch=0-step=4.ckpt")
    assert "optimizer_states" not in plugin.load_checkpoint(tmp_path / "weights" / "w-step=4.ckpt")
    plugin.teardown()


def test_what_changes_after_the_call_is_not_saved(memory: MemoryGateway) -> None:
    plugin = ForebayCheckpointIO(RUN, memory.address, background=True)
    weights = torch.randn(2_000_000)
    kept = weights.clone()
    plugin.save_checkpoint({"global_step": 3, "w": weights}, f"forebay://{RUN}/x.ckpt")
    weights.fill_(7)
    assert torch.equal(plugin.load_checkpoint(f"forebay://{RUN}/3/x.ckpt", weights_only=True)["w"], kept)
    plugin.teardown()


@pytest.mark.slow
def test_two_ranks(memory: MemoryGateway, client: Client, tmp_path: Path) -> None:
    """Of DDP: one saves for both, both load, and the losses of each are those of a job that did not stop.

    The second job, on a node of its own, has not dropped what the first one kept.
    """
    assert all("WELL" in said for said in launched.ranks(lit_jobs.__file__, 2, memory.address, str(tmp_path)))
    assert steps_of(client, lit_jobs.RUN) == steps_of(client, f"{lit_jobs.RUN}/last") == [4, 8]


@pytest.mark.slow
def test_a_save_that_fails_ends_every_rank(memory: MemoryGateway, tmp_path: Path) -> None:
    """The rank that saves says why; the others do not wait for it."""
    memory.fail("CommitPart", forebay.PermissionDenied("read only"), times=9)
    (first, _, said), (second, *_) = launched.launch(lit_jobs.__file__, 2, memory.address, str(tmp_path))
    assert first != 0
    assert second != 0
    assert f"commit of {lit_jobs.RUN}/2 in the background" in said
    assert "read only" in said


def test_inside_lightnings_own_wrapper(memory: MemoryGateway, client: Client, tmp_path: Path) -> None:
    plugin = AsyncCheckpointIO(ForebayCheckpointIO(RUN, memory.address))
    trainer_with(plugin, 4, tmp_path, every(tmp_path / "ckpt", save_top_k=-1)).fit(model(), batches())
    assert steps_of(client) == [2, 4]


def test_the_other_name_of_lightning(memory: MemoryGateway, tmp_path: Path) -> None:
    """In a process that has not heard of the first."""
    pytest.importorskip("pytorch_lightning", reason="pytorch_lightning is not installed")
    code = f"""
import sys, torch, forebay, forebay.lightning
import pytorch_lightning as pl
class Lit(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
io = forebay.lightning.ForebayCheckpointIO({RUN!r}, {memory.address!r})
keep = pl.callbacks.ModelCheckpoint(dirpath={str(tmp_path)!r}, every_n_train_steps=2)
pl.Trainer(max_steps=4, accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[keep], plugins=[io]).fit(
    Lit(), torch.utils.data.DataLoader(torch.ones(16, 4), batch_size=4))
assert "lightning.fabric" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    with Client(memory.address) as client:
        assert steps_of(client) == [4]


def test_a_directory_that_is_forebays(
    memory: MemoryGateway, client: Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, whole: list[float]
) -> None:
    """ModelCheckpoint asks fsspec for it, and the plugin saves; nothing lies on the local disk."""
    pytest.importorskip("forebay.fsspec", reason="forebay:// as a directory needs forebay.fsspec")
    from forebay.fsspec import ForebayFileSystem

    monkeypatch.setenv("FOREBAY_ADDRESS", memory.address)
    ForebayFileSystem.clear_instance_cache()
    plugin = ForebayCheckpointIO(address=memory.address, background=True)
    keep = ModelCheckpoint(dirpath=f"forebay://{RUN}", every_n_train_steps=2, save_last=True)
    trainer_with(plugin, 4, tmp_path, keep).fit(model(), batches())
    assert keep.best_model_path == f"forebay://{RUN}/epoch=0-step=4.ckpt"
    assert steps_of(client) == [4]
    assert steps_of(client, f"{RUN}/last") == [4]
    for path in (keep.best_model_path, keep.last_model_path, f"forebay://{RUN}/latest"):
        other = model(5)
        trainer_with(plugin, 10, tmp_path, enable_checkpointing=False).fit(other, batches(), ckpt_path=path)
        assert other.seen == whole[4:], path
    assert not list(tmp_path.iterdir())
    ForebayFileSystem.clear_instance_cache()


# What goes wrong


@pytest.mark.expected_logs("abort", "dropped", "failed")
def test_a_save_that_fails(memory: MemoryGateway, client: Client, tmp_path: Path, plugin: ForebayCheckpointIO) -> None:
    """Strictly: training ends with the cause; in the background at the next save, which says whose it is."""
    memory.fail("CommitPart", forebay.PermissionDenied("read only"))
    lit = model()
    with pytest.raises(forebay.PermissionDenied, match="read only") as caught:
        trainer_with(plugin, 10, tmp_path, every(tmp_path / "ckpt")).fit(lit, batches())
    if plugin.background:
        assert f"commit of {RUN}/2 in the background" in str(caught.value)
        assert isinstance(caught.value.__cause__, forebay.PermissionDenied)
    assert len(lit.seen) == (4 if plugin.background else 2)
    assert not client.runs() or not steps_of(client)
    assert not (tmp_path / "ckpt").exists() or not list((tmp_path / "ckpt").iterdir())


@pytest.mark.expected_logs("abort", "dropped", "failed")
def test_the_last_save_that_fails(memory: MemoryGateway, tmp_path: Path) -> None:
    """It is raised when the trainer ends: there is no next save."""
    plugin = ForebayCheckpointIO(RUN, memory.address, background=True)
    memory.fail("CommitPart", forebay.PermissionDenied("read only"))
    with pytest.raises(forebay.PermissionDenied, match=f"commit of {RUN}/2 in the background"):
        trainer_with(plugin, 2, tmp_path, every(tmp_path / "ckpt")).fit(model(), batches())
    plugin.teardown()


def test_training_goes_on_over_failed_saves(
    memory: MemoryGateway, client: Client, tmp_path: Path, expected_logs: Any, plugin: ForebayCheckpointIO
) -> None:
    """Weakly: it is logged, and what the failed save was to replace stays until a later one has been saved."""
    expected_logs.allow("abort", "failed")
    plugin.strict = False
    lit, keep = model(), every(tmp_path / "ckpt")
    seen: dict[int, list[int]] = {}

    class Fails(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                memory.fail("CommitPart", forebay.PermissionDenied("read only"))
            if trainer.global_step == 5 and not plugin.background:
                seen[5] = steps_of(client)

    trainer_with(plugin, 6, tmp_path, Fails(), keep).fit(lit, batches())
    assert len(lit.seen) == 6
    assert steps_of(client) == [6]
    assert plugin.background or seen == {5: [2]}
    said = [record.getMessage() for record in expected_logs.records]
    assert any("training goes on" in each and "read only" in each for each in said)


def test_a_dropped_checkpoint_waits_for_its_successor(memory: MemoryGateway, client: Client) -> None:
    """It is on a tier, and the new one is not: then it stays; later it goes."""
    plugin = ForebayCheckpointIO(RUN, memory.address)

    def save(step: int) -> str:
        plugin.save_checkpoint({"global_step": step}, path := f"forebay://{RUN}/step={step}.ckpt")
        return path

    first = save(1)
    client.hold()
    second = save(2)
    plugin.remove_checkpoint(first)
    assert steps_of(client) == [1, 2]
    client.release()
    third = save(3)
    assert steps_of(client) == [2, 3]
    client.pin(RUN, 2)
    plugin.remove_checkpoint("forebay://team/lit/none.ckpt")
    plugin.teardown()
    assert third != second


def test_removing_while_no_gateway_answers(expected_logs: Any) -> None:
    """It is asked once and not once for each: training waits. All of them are removed when it answers."""
    expected_logs.allow("is removed later")
    away, answers = Answers(forebay.Unavailable("away")), Answers(forebay.NotFound("gone"))
    removals = Removals()
    for step in (1, 2, 3):
        removals.add(Place(RUN, step, "x.ckpt"), 1)
    assert [place.step for place in removals.carry_out(away)] == [1, 2, 3]  # type: ignore[arg-type]
    assert away.asked == [1]
    assert removals.carry_out(answers) == []  # type: ignore[arg-type]
    assert answers.asked == [1, 2, 3]


class Answers:
    """A client that is asked, and raises."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.asked: list[int] = []

    def describe(self, run: str, step: int) -> Any:
        """As Client.describe()."""
        self.asked.append(step)
        raise self.error


def test_a_pinned_checkpoint_stays(memory: MemoryGateway, client: Client, expected_logs: Any) -> None:
    expected_logs.allow("is pinned")
    plugin = ForebayCheckpointIO(RUN, memory.address)
    for step in (1, 2):
        plugin.save_checkpoint({"global_step": step}, f"forebay://{RUN}/step={step}.ckpt")
    client.pin(RUN, 1)
    plugin.remove_checkpoint(f"forebay://{RUN}/step=1.ckpt")
    plugin.teardown()
    assert steps_of(client) == [1, 2]


@pytest.mark.expected_logs("abort", "dropped")
def test_what_cannot_be_saved(memory: MemoryGateway, plugin: ForebayCheckpointIO, tmp_path: Path) -> None:
    with pytest.raises(forebay.InvalidArgument, match=r"shard 'epoch=0-step=2\.ckpt': it holds something that cannot be saved"):
        trainer_with(plugin, 4, tmp_path, every(tmp_path / "ckpt")).fit(model(extra=lambda: None), batches())
    assert not {"PutShard", "PutMany"} & set(memory.calls)
    with pytest.raises(forebay.InvalidArgument, match="neither what is saved"):
        plugin.save_checkpoint({}, tmp_path / "x.ckpt")
    with pytest.raises(forebay.InvalidArgument, match=r"is no forebay:// path: say which run"):
        ForebayCheckpointIO(address=memory.address).save_checkpoint({"step": 1}, tmp_path / "x.ckpt")
    with pytest.raises(TypeError, match="storage_options"):
        plugin.save_checkpoint({}, tmp_path / "x.ckpt", storage_options={})
    plugin.teardown()


def test_what_cannot_be_loaded(memory: MemoryGateway, client: Client, plugin: ForebayCheckpointIO, tmp_path: Path) -> None:
    """Absent, only known by a file that is left, damaged, of another shape, not of tensors alone; a plain file is one."""
    paths = (tmp_path / "none.ckpt", f"forebay://{RUN}/7/x.ckpt", f"forebay://{RUN}/latest")
    for path in paths:
        with pytest.raises(FileNotFoundError, match="checkpoint not found"):
            plugin.load_checkpoint(path)
    trainer_with(plugin, 2, tmp_path, every(tmp_path / "ckpt")).fit(model(), batches())
    (named,) = (tmp_path / "ckpt").iterdir()
    with pytest.raises(RuntimeError, match="size mismatch"):
        trainer_with(plugin, 4, tmp_path).fit(model(width=9), batches(), ckpt_path=str(named))
    plugin.save_checkpoint({"global_step": 9, "x": threading.Event}, f"forebay://{RUN}/step=9.ckpt")
    with pytest.raises(Exception, match="weights_only"):
        plugin.load_checkpoint(f"forebay://{RUN}/step=9.ckpt")
    assert plugin.load_checkpoint(f"forebay://{RUN}/step=9.ckpt", weights_only=False)["x"] is threading.Event
    memory.damage_stored(RUN, 2, named.name)
    with pytest.raises(forebay.Corrupt):
        plugin.load_checkpoint(named)
    client.delete(RUN, 2, force=True)
    with pytest.raises(FileNotFoundError):
        plugin.load_checkpoint(named)
    torch.save({"plain": 1}, tmp_path / "plain.ckpt")
    assert plugin.load_checkpoint(tmp_path / "plain.ckpt") == {"plain": 1}
    plugin.remove_checkpoint(tmp_path / "plain.ckpt")
    assert not (tmp_path / "plain.ckpt").exists()
    plugin.teardown()


def test_two_jobs_that_write_the_same_run(memory: MemoryGateway, client: Client, tmp_path: Path) -> None:
    """Each finds its own files again, and neither replaces the other's."""
    losses = []
    for name in ("a", "b"):
        plugin = ForebayCheckpointIO(RUN, memory.address, background=True)
        lit = model(len(losses))
        trainer_with(plugin, 2, tmp_path, every(tmp_path / name)).fit(lit, batches())
        losses.append([value.clone() for value in lit.state_dict().values()])
    for name, wanted in zip(("a", "b"), losses, strict=True):
        found = plugin.load_checkpoint(tmp_path / name / "epoch=0-step=2.ckpt")["state_dict"].values()
        assert all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True))
    assert steps_of(client) == steps_of(client, f"{RUN}/2") == [2]
    plugin.teardown()


def test_loader_workers_are_forked(plugin: ForebayCheckpointIO, client: Client, tmp_path: Path, whole: list[float]) -> None:
    """While saves are under way."""
    lit = model()
    loader = torch.utils.data.DataLoader(ROWS, batch_size=4, num_workers=1, multiprocessing_context="fork")
    trainer_with(plugin, 6, tmp_path, every(tmp_path / "ckpt", 1, save_top_k=-1)).fit(lit, loader)
    assert lit.seen == whole[:6]
    assert steps_of(client) == [1, 2, 3, 4, 5, 6]


def test_fabric(memory: MemoryGateway) -> None:
    plugin = ForebayCheckpointIO(RUN, memory.address)
    fabric = importlib.import_module("lightning.fabric").Fabric(accelerator="cpu", plugins=[plugin])
    layer = torch.nn.Linear(2, 2)
    fabric.save(f"forebay://{RUN}/9/state.ckpt", {"model": layer, "note": 3})
    other = torch.nn.Linear(2, 2)
    left = fabric.load(f"forebay://{RUN}/9/state.ckpt", {"model": other})
    assert torch.equal(layer.weight, other.weight)
    assert left == {"note": 3}
    plugin.teardown()


def test_without_lightning() -> None:
    code = (
        "import sys\n"
        "class Hidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('lightning', 'pytorch_lightning', 'lightning_fabric'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "import importlib.util as util, importlib.machinery\n"
        "found = util.find_spec\n"
        "util.find_spec = lambda name, package=None: None if 'lightning' in name else found(name, package)\n"
        "try:\n    import forebay.lightning\nexcept ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "install Forebay's extra 'lightning' (in its tree: pip install '.[lightning]')" in done.stdout, done.stderr
