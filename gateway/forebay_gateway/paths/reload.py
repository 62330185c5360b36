"""The configuration file, read again while the gateway serves.

    read and check the whole file -> what may change now is taken over -> whoever keeps rules of it looks again

Owns how they change and how it is told what else differs; which may is said beside each key (core/config_sections). A file that
is not valid, or whose policies need tiers that this process does not have, changes nothing.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from forebay_gateway.base.logs import set_level
from forebay_gateway.core.config import is_live
from forebay_gateway.core.config_sections import Config
from forebay_gateway.core.errors import InvalidArgument, StartupError, Unsupported
from forebay_gateway.paths.node import Node

log = logging.getLogger("forebay.reload")

S = TypeVar("S", bound=msgspec.Struct)

STAYS = "the configuration stays as it is"
SECTIONS = ("node", "cache", "metrics", "log")  # those with one table


@dataclass(frozen=True, slots=True)
class Reloaded:
    """Keys that were applied, and keys that differ and take a restart."""

    changed: tuple[str, ...]
    needs_restart: tuple[str, ...]


class Reloader:
    """Of one gateway. `read` gives the configuration as the file says now; `listeners` are called once it holds."""

    def __init__(self, node: Node, read: Callable[[], Config] | None, listeners: Sequence[Callable[[], None]]) -> None:
        self._node = node
        self._read = read
        self._listeners = listeners

    def reload(self) -> Reloaded:
        """Apply what may change now. Raises InvalidArgument for a file that is not valid, Unsupported where there is none."""
        if self._read is None:
            raise Unsupported("this gateway was started without a configuration file, so there is none to read again")
        try:
            wanted = self._read()
        except StartupError as error:
            raise InvalidArgument(f"{STAYS}: {error}") from error
        now = self._node.config
        merged = _merged(now, wanted)
        changed = list(_different(now, merged))
        _check_tiers(self._node, merged)
        self._node.config = merged
        set_level(merged.log.level)
        for listener in self._listeners:
            listener()
        self._node.changes.tell()
        left = tuple(_different(merged, wanted))
        log.info("configuration read again changed=%s needs_restart=%s", ",".join(changed), ",".join(left))
        return Reloaded(tuple(changed), left)


def _merged(now: Config, wanted: Config) -> Config:
    """As it is, but for what may change."""
    by_name = {tier.name: tier for tier in wanted.tiers}
    return replace(
        now,
        tiers=tuple(_merged_section("tier", tier, by_name.get(tier.name, tier)) for tier in now.tiers),
        policies=wanted.policies,
        retain=wanted.retain,
        **{section: _merged_section(section, getattr(now, section), getattr(wanted, section)) for section in SECTIONS},
    )


def _merged_section(section: str, now: S, wanted: S) -> S:
    live = (field.name for field in msgspec.structs.fields(now) if is_live(section, field.name))
    return replace(now, **{name: getattr(wanted, name) for name in live})


def _check_tiers(node: Node, config: Config) -> None:
    """The file's rules fit the file's tiers; do they fit those that there are?"""
    for policy in config.policies:
        where = f"policy.tiers of policy {policy.run!r}"
        for name in policy.tiers or ():
            _check_tier(node, where, name)
        if policy.tiers is not None and not any(node.tiers[name].required for name in policy.tiers):
            raise InvalidArgument(f"{STAYS}: {where} names no tier that is required before a restart")
    for rule in config.retain:
        if rule.tier:
            _check_tier(node, f"retain.tier of {rule.run!r}", rule.tier)


def _check_tier(node: Node, where: str, name: str) -> None:
    if name not in node.tiers:
        raise InvalidArgument(f"{STAYS}: {where} names {name!r}, a tier that this gateway has only after a restart")


def _different(one: Config, other: Config) -> Iterator[str]:
    """Keys whose values differ, as section.key, of tiers tier.<name>.key; a tier that only one has by its name."""
    ours, theirs = dict(_keys(one)), dict(_keys(other))
    for key in dict.fromkeys((*ours, *theirs)):
        if ours.get(key) != theirs.get(key):
            yield key


def _keys(config: Config) -> Iterator[tuple[str, Any]]:
    for section in SECTIONS:
        for name, value in msgspec.structs.asdict(getattr(config, section)).items():
            yield f"{section}.{name}", value
    for tier in config.tiers:
        for name, value in msgspec.structs.asdict(tier).items():
            yield f"tier.{tier.name}.{name}", value
    yield "policy", config.policies
    yield "retain", config.retain
