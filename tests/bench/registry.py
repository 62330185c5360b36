"""Which function measures which rows, and how rows are chosen by name.

Owns the list. A name is a row's, a measurement's, or a group's (its first word).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from bench import background, catalog, drain, load, plan, profiling, restore, save, scaling, small
from bench.harness import Job
from bench.rows import BY_NAME, Row, Spec

Run = Callable[[Job], Iterator[Row]]


@dataclass(frozen=True)
class Measurement:
    """One function and the rows that it yields; `specs` stand for it where it cannot run."""

    name: str
    run: Run
    specs: tuple[Spec, ...]

    @property
    def names(self) -> set[str]:
        """All by which it can be chosen."""
        return {self.name, self.name.partition("-")[0], *(spec.name for spec in self.specs)}


def _known(run: Run, *names: str) -> Measurement:
    return Measurement(names[0], run, tuple(BY_NAME[name] for name in names))


def _open(run: Run, name: str, what: str) -> Measurement:
    return Measurement(name, run, (Spec(name, what, "", None),))


MEASUREMENTS = (
    _known(save.over_fd, "save-fd", "save-fd-unaligned"),
    _known(save.over_stream, "save-stream", "save-stream-cpu"),
    _known(save.against_juicefs, "save-juicefs"),
    _known(save.against_dcp, "save-dcp", "save-dcp-writer"),
    _known(small.put_many, "small-shards"),
    _known(small.read_many, "small-restore"),
    _known(restore.over_fd, "restore-fd"),
    _known(restore.over_stream, "restore-stream", "restore-stream-cpu"),
    _known(restore.against_dcp, "restore-dcp"),
    _known(restore.directory, "restore-dir"),
    _known(restore.from_s3, "restore-s3"),
    _known(drain.to_posix, "drain-posix", "drain-posix-cpu"),
    _known(drain.to_s3, "drain-s3"),
    _known(drain.to_s3_cpu, "drain-s3-cpu"),
    _known(drain.to_s3_torch, "drain-s3-torch"),
    *(_known(run, name) for name, run in drain.BUSY.items()),
    _known(background.blocked, "async-save"),
    _known(background.blocked_by_dcp, "async-dcp", "async-dcp-copy"),
    _known(catalog.at_scale, "catalog-status", "catalog-ls", "catalog-start", "catalog-rss"),
    _known(catalog.evicted, *(f"catalog-evicted-{name}" for name in ("status", "ls", "start", "rss"))),
    _known(plan.decisions, "plan-decision"),
    _known(plan.day, "plan-simulate"),
    _known(plan.predicted, "plan-predicted"),
    _known(load.memory, "memory-peak", "memory-growth"),
    _known(load.loop_lag, "loop-lag"),
    *(
        _open(partial(scaling.clients, lane=lane), f"scaling-clients-{lane}", f"{lane} lane, clients at once")
        for lane in ("stream", "fd")
    ),
    *(
        _open(partial(scaling.sizes, lane=lane), f"scaling-sizes-{lane}", f"{lane} lane, sizes of shards")
        for lane in ("stream", "fd")
    ),
    _open(profiling.where, "profile", "where the CPU goes"),
)


def names() -> list[str]:
    """All names that can be chosen, in order."""
    seen: dict[str, None] = {}
    for measurement in MEASUREMENTS:
        seen.update(
            dict.fromkeys((measurement.name.partition("-")[0], measurement.name, *(spec.name for spec in measurement.specs)))
        )
    return list(seen)


def chosen(wanted: Iterable[str]) -> list[Measurement]:
    """Those that any of the names means, in the list's order; none wanted: all. Raises ValueError that names an unknown one."""
    wanted = list(wanted)
    unknown = set(wanted) - set(names())
    if unknown:
        raise ValueError(f"no row is called {', '.join(sorted(unknown))}; there are: {' '.join(names())}")
    return [each for each in MEASUREMENTS if not wanted or each.names & set(wanted)]
