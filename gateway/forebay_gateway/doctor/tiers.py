"""A tier through its own verbs: what its probe proves, and how fast an object store takes and gives.

Owns the objects it writes, below `.forebay/probe/`, and their removal. Does not own the proofs: those are the tiers'.
"""

import asyncio
import contextlib
import os
import statistics
import time
from dataclasses import dataclass, field

from msgspec.structs import replace

from forebay_gateway.core.config_sections import TierConfig
from forebay_gateway.core.errors import ForebayError, InvalidArgument, PermissionDenied, Unsupported
from forebay_gateway.core.layout import CONTROL_DIR
from forebay_gateway.core.quantities import size_text
from forebay_gateway.doctor.probe_files import is_left_over, new_name
from forebay_gateway.doctor.report import Check
from forebay_gateway.doctor.throughput import BLOCK_BYTES
from forebay_gateway.doctor.watch import Watch
from forebay_gateway.tiers.base import Capabilities, PutOptions, Tier
from forebay_gateway.tiers.factory import open_tier
from forebay_gateway.tiers.s3.parts import MAX_PARTS, part_size
from forebay_wire.checksums import crc32c, crc32c_of_chunks

_CLEAN_UP_S = 20.0
_SKEW_S = 5.0
_SKEW_S_MAX = 15 * 60.0  # AWS refuses requests beyond
_SLOW_TRIP_S = 0.5
_PART_BYTES_MAX = 5 << 30  # https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html
_PROBES = f"{CONTROL_DIR}/probe"


class RandomSource:
    """A shard of random bytes that repeat from chunk to chunk; no more than one chunk is in memory."""

    def __init__(self, size: int, watch: Watch) -> None:
        self.size = size
        self.chunk_size = BLOCK_BYTES
        self._chunk = memoryview(os.urandom(min(size, BLOCK_BYTES)))
        self._watch = watch
        rest = size % BLOCK_BYTES
        crcs = [crc32c(self._chunk)] * (size // BLOCK_BYTES)
        self.chunk_crcs = (*crcs, crc32c(self._chunk[:rest])) if rest else tuple(crcs)
        self.crc32c = crc32c_of_chunks(self.chunk_crcs, BLOCK_BYTES, size)

    async def read_chunk(self, index: int) -> memoryview:
        """Part of the contract of a source."""
        self._watch.tick()
        return self._chunk[: min(BLOCK_BYTES, self.size - index * BLOCK_BYTES)]


@dataclass(slots=True)
class Speeds:
    """Bytes a second."""

    writes: list[float] = field(default_factory=list)
    read: float | None = None


def unlimited(config: TierConfig, name: str) -> Tier:
    """The tier without the limits of its configuration: what it can do is measured, what it may do is known. `name` is this
    run's: the tier's own trials lie under it."""
    return open_tier(replace(config, bandwidth=None, iops=None), owner=name)


async def prove_posix(config: TierConfig, checks: list[Check]) -> None:
    """The probe of a POSIX tier whose root bears its marker."""
    tier = unlimited(config, new_name())
    try:
        began_s = time.perf_counter()
        proved = await tier.probe()
        checks.append(posix_check(config.name, proved, time.perf_counter() - began_s))
    finally:
        await tier.close()


def posix_check(where: str, proved: Capabilities, took_s: float) -> Check:
    """From the record."""
    atomic = proved.conditional_create and proved.conditional_replace
    lacks = [
        name
        for name in ("conditional_create", "conditional_replace", "links", "direct_io", "list_after_put")
        if not getattr(proved, name)
    ]
    return Check(
        where,
        "probe",
        "FAIL" if not atomic or not proved.list_after_put else "WARN" if lacks else "OK",
        f"lacks {', '.join(lacks)}" if lacks else f"atomic create and replace, links, O_DIRECT; {took_s:.2f} s",
        "nodes agree on a checkpoint by files that only one of them can create",
        "mount it with its locks and caches coherent (NFS: no nolock; Lustre: flock)" if lacks else "",
        {
            "conditional_create": proved.conditional_create,
            "conditional_replace": proved.conditional_replace,
            "links": proved.links,
            "direct_io": proved.direct_io,
            "list_after_put": proved.list_after_put,
            "seconds": took_s,
        },
    )


async def measure_s3(config: TierConfig, size: int, rounds: int, documents: int, watch: Watch, checks: list[Check]) -> Speeds:
    """Probe, round trips, so many writes of `size`, and one read. `checks` get a line as soon as it is known."""
    name = new_name()
    tier = unlimited(config, name)
    # Not in the directory of the probe, which cleans it before it begins.
    directory = f"{_PROBES}/{new_name()}"
    try:
        proved = await tier.probe()
        watch.tick()
        checks += s3_checks(config, proved, size)
        await _sweep(tier)
        try:
            checks.append(trip_check(config.name, await _round_trips(tier, directory, documents, watch)))
            return await _speeds(tier, f"{directory}/data", size, rounds, watch)
        finally:
            await _remove(tier, directory)
    finally:
        await tier.close()


async def _round_trips(tier: Tier, directory: str, count: int, watch: Watch) -> list[float]:
    taken_s, data = [], os.urandom(1000)
    for _ in range(count):
        watch.tick()
        began_s = time.perf_counter()
        await tier.put_small(f"{directory}/document", data)
        await tier.get_small(f"{directory}/document")
        taken_s.append(time.perf_counter() - began_s)
    return taken_s


async def _speeds(tier: Tier, key: str, size: int, rounds: int, watch: Watch) -> Speeds:
    speeds, source = Speeds(), RandomSource(size, watch)
    options = PutOptions(on_progress=lambda count: watch.tick())
    for _ in range(rounds):
        began_s = time.perf_counter()
        await tier.put(key, source, options)
        speeds.writes.append(size / (time.perf_counter() - began_s))
    began_s = time.perf_counter()
    async with contextlib.aclosing(tier.read(key, 0, size)) as pieces:  # type: ignore[type-var]
        async for _ in pieces:
            watch.tick()
    speeds.read = size / (time.perf_counter() - began_s)
    return speeds


async def _remove(tier: Tier, directory: str) -> None:
    """What was put, and an upload that was broken off. Within bounds: a store that went away cannot be cleaned."""
    async with asyncio.timeout(_CLEAN_UP_S):
        await tier.delete_many([f"{directory}/{name}" for name in ("document", "data")])
        with contextlib.suppress(PermissionDenied, Unsupported, InvalidArgument):  # no listing of uploads
            await tier.sweep(f"{directory}/data")


async def _sweep(tier: Tier) -> None:
    """What killed doctors of this machine left: names of processes that are no more."""
    with contextlib.suppress(ForebayError):
        for name in (await tier.list(_PROBES)).directories:
            if is_left_over(name):
                await tier.delete_many([found.key for found in (await tier.list(f"{_PROBES}/{name}")).objects])
        for upload in await tier.leftovers(_PROBES):
            if is_left_over(upload.key.removeprefix(f"{_PROBES}/").partition("/")[0]):
                await tier.abort_upload(upload.key, upload.id)


def trip_check(where: str, taken_s: list[float]) -> Check:
    """From the seconds of each small document that was put and got."""
    median_s = statistics.median(taken_s)
    slow = median_s > _SLOW_TRIP_S
    return Check(
        where,
        "round_trip",
        "WARN" if slow else "OK",
        f"a small document put and read back in {median_s * 1000:.0f} ms, {len(taken_s) / sum(taken_s):.0f} a second",
        "a checkpoint is complete there after some documents, one after another",
        "use an endpoint that is nearer, or raise the tier's concurrency" if slow else "",
        {"median_s": median_s, "per_s": len(taken_s) / sum(taken_s)},
    )


def s3_checks(config: TierConfig, proved: Capabilities, size: int) -> list[Check]:
    """The probe's record, in lines."""
    return [
        _conditional(config.name, proved),
        _checksums(config.name, proved),
        _listing(config.name, proved),
        _skew(config.name, proved.clock_skew_s),
        _multipart(config, proved, size),
    ]


def _note(proved: Capabilities, name: str) -> str:
    return f": {proved.notes[name]}" if proved.notes.get(name) else ""


def _conditional(where: str, proved: Capabilities) -> Check:
    create, replaces = proved.conditional_create, proved.conditional_replace
    value = "create and replace" if create and replaces else "create, but no replace" if create else "none"
    if not create or not replaces:
        value += _note(proved, "no_conditional_replace" if create else "no_conditional_create")
    return Check(
        where,
        "conditional_create",
        "OK" if create and replaces else "WARN" if create else "FAIL",
        value,
        "nodes agree on a checkpoint by an object that only one of them can create",
        "" if create and replaces else "use a store that honours If-None-Match and If-Match, or a newer release of this one",
        {"create": create, "replace": replaces},
    )


def _checksums(where: str, proved: Capabilities) -> Check:
    from forebay_gateway.tiers.s3.probe import PUT_CHECKSUM  # only here: the S3 client takes long to load

    put, full = PUT_CHECKSUM in proved.notes, proved.server_checksum
    kinds = [text for has, text in ((put, "CRC32C of a put"), (full, "CRC32C of a full multipart object")) if has]
    return Check(
        where,
        "checksums",
        "OK" if full else "WARN",
        (" and ".join(kinds) or "none") + ("" if full else _note(proved, "no_server_checksum")),
        "with the store's own checksum a copy is proved without reading it back",
        "" if full else "nothing is lost: every copy is read back instead, which doubles the traffic",
        {"put": put, "full_object": full},
    )


def _listing(where: str, proved: Capabilities) -> Check:
    listed = proved.list_after_put
    return Check(
        where,
        "list_after_put",
        "OK" if listed else "WARN",
        "what was put is listed at once" if listed else "what was put is not listed at once",
        "a node that takes over finds runs by a listing",
        "" if listed else "use a store with consistent listings",
        {"listed": listed},
    )


def _skew(where: str, skew_s: float | None) -> Check:
    why = "requests are signed with the time: beyond 15 minutes stores refuse them"
    if skew_s is None:
        return Check(where, "clock_skew", "OK", "the store tells no time", why)
    far = abs(skew_s)
    return Check(
        where,
        "clock_skew",
        "FAIL" if far >= _SKEW_S_MAX else "WARN" if far > _SKEW_S else "OK",
        f"{round(skew_s, 1) + 0.0:+.1f} s between the store's clock and this node's",
        why,
        "set both clocks by NTP (chronyc tracking)" if far > _SKEW_S else "",
        {"seconds": skew_s},
    )


def _multipart(config: TierConfig, proved: Capabilities, size: int) -> Check:
    part = part_size(size, BLOCK_BYTES, config.part_size)
    most = min(proved.max_parts, MAX_PARTS)
    largest = most * (_PART_BYTES_MAX if config.part_size is None else part)
    why = "a shard that is larger than one part needs it"
    if not proved.multipart:
        figures = {"supported": False, "max_parts": None, "part_bytes": None, "largest_bytes": None}
        return Check(
            config.name, "multipart", "WARN", "none" + _note(proved, "no_multipart"), why, "keep shards small", dict(figures)
        )
    return Check(
        config.name,
        "multipart",
        "OK",
        f"at most {most:,} parts; {size_text(size)} goes in {-(-size // part):,} of {size_text(part)}",
        why,
        "",
        {"supported": True, "max_parts": most, "part_bytes": part, "largest_bytes": largest},
    )
