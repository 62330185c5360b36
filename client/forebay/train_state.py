"""TrainState: everything that a training loop needs to go on as if it had never stopped, saved and restored in one call.

Owns which parts a state has, which writer saves what, and the order in which parts are taken and given back. Does not own the
formats (state/). A checkpoint of it:

    train_state.json         what all ranks share, by writer 0; its tensors in PART.safetensors
    rank-00000.json          what each rank has of its own: generators, the loader's position; tensors in rank-00000.safetensors
"""

import json
import logging
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, cast

from forebay.api import Client
from forebay.background_checkpoint import PendingCommit
from forebay.errors import Corrupt, InvalidArgument, how_to_install
from forebay.reader import Reader
from forebay.session import save_session
from forebay.types import CommitReceipt

if TYPE_CHECKING:
    from torch.distributed.checkpoint import DefaultLoadPlanner

    from forebay.state.document import Json

FORMAT = 1
SHARED = "train_state.json"

_log = logging.getLogger("forebay")


class CommitOptions(TypedDict, total=False):
    """As CheckpointWriter.commit() has them."""

    metadata: Mapping[str, Any] | None
    wait: str
    timeout: float | None
    final: bool


class SaveOptions(CommitOptions, total=False):
    """Of save() and async_save(), all by name."""

    session: str | None


class TrainState:
    """The state of a training job, by parts: `TrainState(model=model, optimizer=optimizer, scheduler=..., progress={...})`.

    A part is anything with state_dict() and load_state_dict() (model, optimizer, scheduler, gradient scaler, torchdata's
    StatefulDataLoader, ...), a random.Random, a numpy.random.Generator, a torch.Generator, or a dict, which is changed in place
    when it is restored. Its name is yours. A part that is None is left out.

    Besides there are `step`, a counter that is the caller's to count, and with `rng` the state of the random number
    generators: Python's, NumPy's, torch's on the CPU and on every accelerator. These, data loaders, generators that are parts,
    and what is named in `per_rank` (a sampler, say) belong to each rank; all else is the same on all ranks, and rank 0 saves
    it. The rank is that of torch.distributed, where it has been initialised.

    For sharded models hand the TrainState itself to torch.distributed.checkpoint: it is a Stateful, and what DCP then saves can
    be loaded over another number of ranks: `dcp.save({"train": state}, storage_writer=ForebayStorageWriter(...))`. Over more
    ranks than saved it, dcp.load() needs `planner=state.load_planner()`.

    Nothing is pickled by save(), and restore() runs no code of a checkpoint. Raises InvalidArgument for what is no part.
    """

    def __init__(self, *, per_rank: Collection[str] = (), rng: bool = True, **parts: Any) -> None:
        _needs_torch()
        self.step = 0
        self._rng = rng
        self._parts = {name: _part(name, part) for name, part in parts.items() if part is not None}
        self._per_rank = {name for name, part in self._parts.items() if part.own or name in per_rank}

    # Through a client

    def save(self, client: Client, run: str, step: int | None = None, **options: Unpack[SaveOptions]) -> CommitReceipt:
        """Save all parts as `step` (by default self.step); every rank calls it. It is durable when this returns.

        Options are session, metadata, wait="cache", timeout and final=False, as in Client.checkpoint() and
        CheckpointWriter.commit(); without `session` rank 0 gives all ranks a new one. Raises InvalidArgument naming what cannot
        be saved, before anything is sent, and as put() and commit().
        """
        place, shards, commit = self._prepared(step, options)
        with client.checkpoint(run, self.step, *place) as part:
            part.put_many(shards)
            return part.commit(**commit)

    def async_save(self, client: Client, run: str, step: int | None = None, **options: Unpack[SaveOptions]) -> PendingCommit:
        """As save(), and returns once everything is copied: training goes on, and changes nothing of what is saved.

        A save that failed is raised by what this returns, else by the next async_save() of this client, or its close(). Raises
        also DeadlineExceeded, and InvalidArgument where a file of tensors is larger than the client's `background_bytes`.
        """
        place, shards, commit = self._prepared(step, options)
        with client.async_checkpoint(run, self.step, *place) as part:
            part.put_many(shards)
            return part.commit(**commit)

    def _prepared(self, step: int | None, options: SaveOptions) -> tuple[tuple[int, int, str], dict[str, Any], CommitOptions]:
        """(ranks, rank, session), the shards, and what commit() is told. Raises TypeError for an option that there is not."""
        if unknown := sorted(options.keys() - SaveOptions.__annotations__.keys()):
            raise TypeError(f"a TrainState is saved without any option {unknown[0]!r}")
        rank, ranks, session = self._place(options.pop("session", None))
        return (ranks, rank, session), self._shards(rank, self._counted(step)), cast(CommitOptions, options)

    def restore(
        self, client: Client, run: str, step: int | str = "latest", *, strict: bool = True, source: str = "auto"
    ) -> int | None:
        """Give every part back what it had; the step that was restored, None where "latest" was asked for and there is none.

        Every rank calls it; "latest" is what rank 0's gateway says. All is read and checked before any part is touched: names,
        shapes and dtypes of modules too. Without `strict` what is on one side only is passed over: parts, and what a rank has
        of its own, where the checkpoint has fewer ranks.

        Raises InvalidArgument for what does not fit, and as Client.open() and Reader.read(). What a part's own
        load_state_dict() raises comes as it is: then other parts have been restored already.
        """
        from forebay.state import ranks

        rank, _ = ranks.place()
        found = ranks.agreed(lambda: client.latest(run)) if step == "latest" else step
        if found is None:
            return None
        if isinstance(found, bool) or not isinstance(found, int):
            raise InvalidArgument(f"a step is a number or 'latest', not {found!r}")
        what = f"restore {run}/{found}"
        loaded = self._read(client.open(run, found, source=source), rank, what, strict)
        self._load(loaded, what)
        return found

    # As a Stateful of torch.distributed.checkpoint

    def state_dict(self) -> dict[str, Any]:
        """For DCP: modules and optimizers by parameter names, sharded as they are; all else as JSON."""
        from forebay.state import dcp, ranks

        shared, own = dcp.split(self._parts)
        rank, _ = ranks.place()
        made = dcp.sharded_state(shared)
        others = self._take({name: part for name, part in own.items() if name not in self._per_rank})
        made["shared"] = dcp.text({"step": self.step, "parts": others})
        made[_rank_name(rank)] = dcp.text(self._take_own(own))
        return made

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """For DCP: what state_dict() gave."""
        from forebay.state import dcp, ranks

        rank, _ = ranks.place()
        dcp.load_sharded_state(dcp.split(self._parts)[0], state_dict)
        shared, own = dcp.of_text(state_dict["shared"]), dcp.of_text(state_dict[_rank_name(rank)])
        self.step = int(shared["step"])
        self._give({**shared["parts"], **own["parts"]}, own.get("rng"))

    @staticmethod
    def load_planner() -> "DefaultLoadPlanner":
        """For dcp.load() over more ranks than saved: the others keep their generators and loaders. DCP's own planner raises."""
        from forebay.state import dcp

        return dcp.FewerRanksPlanner()

    # What stands in a checkpoint

    @staticmethod
    def _place(session: str | None) -> tuple[int, int, str]:
        """This process's rank, how many there are, and the session that all of them have for this save."""
        from forebay.state import ranks

        rank, count = ranks.place()
        return rank, count, ranks.agreed(save_session) if session is None else session

    def _counted(self, step: int | None) -> int:
        self.step = self.step if step is None else step
        return self.step

    def _take(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in parts.items()}

    def _take_own(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Generators last: a loader that has not begun draws from them when it is asked where it is."""
        from forebay.state import rng

        made: dict[str, Any] = {"parts": self._take({name: part for name, part in parts.items() if name in self._per_rank})}
        return made | {"rng": rng.take()} if self._rng else made

    def _shards(self, rank: int, step: int) -> dict[str, Any]:
        """This writer's, by name. What is small and may change at once is taken now; tensors are read where they lie."""
        from forebay.state.document import encode
        from forebay.state.tensors import Files

        made: dict[str, Any] = {}
        if rank == 0:
            shared: dict[str, Json] = {}
            for name, part in self._parts.items():
                if name not in self._per_rank:
                    files = Files(name)
                    shared[name] = encode(part.state_dict(), name, files)
                    made |= files.sources()
            made[SHARED] = _json({"forebay": FORMAT, "step": step, "parts": shared})
        own = Files(_rank_name(rank))
        document = encode(self._take_own(self._parts), "this rank's own state", own)
        made[f"{_rank_name(rank)}.json"] = _json({"forebay": FORMAT, "state": document})
        return made | own.sources()

    def _read(self, reader: Reader, rank: int, what: str, strict: bool) -> dict[str, Any]:
        """{"parts": states by name, "rng": perhaps, "step"}, all read, and checked as far as it can be without loading it."""
        from forebay.state.document import decode
        from forebay.state.tensors import Loaded, files_of

        names = set(reader.names())
        if SHARED not in names:
            raise InvalidArgument(f"{what}: it has no {SHARED!r}, so no TrainState saved it")
        shared = _document(reader, SHARED, what)
        own_name = f"{_rank_name(rank)}.json"
        if own_name not in names:
            said = f"{what}: rank {rank} saved nothing of its own in it: it was saved by fewer ranks"
            if strict:
                raise InvalidArgument(f"{said}; with strict=False this rank's generators and loaders stay as they are")
            _log.warning("%s; this rank's generators and loaders stay as they are", said)
        own = _document(reader, own_name, what)["state"] if own_name in names else {"parts": {}}
        nodes = {**shared["parts"], **own["parts"]}
        self._check_names(nodes.keys(), what, strict, own_name in names)
        nodes = {name: node for name, node in nodes.items() if name in self._parts}
        wanted: list[Json] = [*nodes.values(), own.get("rng")]
        loaded = Loaded(reader, files_of(wanted))
        states = {name: decode(node, loaded.fetch) for name, node in nodes.items()}
        for name, state in states.items():
            self._parts[name].check(state, f"{what}: {name}")
        return {"parts": states, "rng": decode(own.get("rng"), loaded.fetch), "step": int(shared["step"])}

    def _check_names(self, saved: Collection[str], what: str, strict: bool, own: bool) -> None:
        here = {name for name in self._parts if own or name not in self._per_rank}
        lacking, unknown = sorted(here - set(saved)), sorted(set(saved) - here)
        if not strict or not (lacking or unknown):
            return
        said = [f"it lacks {', '.join(lacking)}"] if lacking else []
        said += [f"it has {', '.join(unknown)}, which this state has not"] if unknown else []
        raise InvalidArgument(f"{what}: {'; '.join(said)}; with strict=False it restores what both have")

    def _load(self, loaded: Mapping[str, Any], what: str) -> None:
        self.step = loaded["step"]
        self._give(loaded["parts"], loaded["rng"])
        _log.debug("%s: done", what)

    def _give(self, states: Mapping[str, Any], generators: dict[str, Any] | None) -> None:
        """Generators last, for what it costs the other parts to take their states."""
        from forebay.state import rng

        for name, state in states.items():
            if name in self._parts:
                self._parts[name].load_state_dict(state)
        if self._rng and generators is not None:
            rng.put(generators)


def _needs_torch() -> None:
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        raise ImportError(f"forebay.TrainState needs PyTorch, which is not installed: {how_to_install('torch')}") from error


def _part(name: str, part: Any) -> Any:
    from forebay.state import parts

    if name in ("step", "shared") or name.startswith("rank"):
        raise InvalidArgument(f"a part may not be called {name!r}")
    return parts.adapted(name, part)


def _rank_name(rank: int) -> str:
    return f"rank-{rank:05d}"


def _json(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def _document(reader: Reader, name: str, what: str) -> dict[str, Any]:
    try:
        found = json.loads(reader.read(name))
        version = found["forebay"]
    except (ValueError, KeyError, TypeError) as error:
        raise Corrupt(f"{what}: {name!r} is no document of a training state: {error!r}") from error
    if version != FORMAT:
        raise InvalidArgument(f"{what}: {name!r} has format {version!r}; this release reads {FORMAT}")
    return found  # type: ignore[no-any-return]
