"""How often a checkpoint can be saved and drained, from what was measured.

Owns the arithmetic, and nothing that measures. A checkpoint keeps each place busy for as long as it takes to write it there,
and to read it once where that is part of the way: the drain reads the cache, a POSIX copy is read back, and so is one on an
object store without checksums of its own. Places on one disk take turns; else they work at the same time. The busiest bounds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from forebay_gateway.doctor.report import Frequency, Part


@dataclass(frozen=True, slots=True)
class Measured:
    """A place with its rates in bytes a second; `write` None where it could not be measured."""

    name: str
    write: float | None
    read: float | None  # None: nothing is read there on the way
    limit: float | None = None  # of what the configuration lets through
    disks: frozenset[str] = frozenset()
    required: bool = True


def part_of(place: Measured, size: int) -> Part:
    """What `size` bytes cost there."""
    assert place.write is not None
    seconds = size / place.write + (size / place.read if place.read else 0.0)
    if place.limit:
        seconds = max(seconds, size / place.limit)
    return Part(place.name, place.write, place.read, place.limit, seconds, tuple(sorted(place.disks)))


def highest(places: Sequence[Measured], size: int) -> Frequency:
    """For checkpoints of `size` bytes on this node."""
    away = [place for place in places if place.write is None]
    parts = tuple(part_of(place, size) for place in places if place.write is not None)
    needed = [place.name for place in away if place.required]
    if needed:
        return Frequency(None, None, None, needed[0], f"{', '.join(needed)} could not be measured", parts)
    if not parts:
        return Frequency(None, None, None, "", "nothing could be measured", parts)
    taken_s, names, disk = max(_turns(parts), key=lambda turn: turn[0])
    reason = f"{' and '.join(names)} take turns on {disk}" if len(names) > 1 else f"{names[0]} is the slowest"
    if away:
        reason += f"; without {', '.join(place.name for place in away)}, which is not required"
    return Frequency(taken_s, 3600 / taken_s, size / taken_s, "+".join(names), reason, parts)


def _turns(parts: Sequence[Part]) -> list[tuple[float, list[str], str]]:
    """Seconds, names and disk: of each part alone, and of all that share a disk."""
    found = [(part.seconds, [part.name], "") for part in parts]
    for disk in sorted({disk for part in parts for disk in part.devices}):
        together = [part for part in parts if disk in part.devices]
        if len(together) > 1:
            found.append((sum(part.seconds for part in together), [part.name for part in together], disk))
    return found
