"""The gateway's configuration, read from TOML text and the environment.

Owns the rules across keys and the text forms (TOML, the table in README). Does not own the keys (core/config_sections), how a
single value is read (core/config_keys), nor files: callers read the text and pass the host's facts in.
"""

import json
import tomllib
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from posixpath import dirname
from typing import Any, get_type_hints

import msgspec

from forebay_gateway.core.config_keys import READERS, BadValue, Cadence, Key, from_environment
from forebay_gateway.core.config_sections import (
    CacheConfig,
    Config,
    LogConfig,
    MetricsConfig,
    NodeConfig,
    PolicyConfig,
    RetainConfig,
    TierConfig,
)
from forebay_gateway.core.errors import StartupError
from forebay_gateway.core.quantities import format_duration, format_size, parse_duration
from forebay_wire.sockets import SYSTEM_SOCKET, fallback_socket, session_socket

ENV_PREFIX = "FOREBAY_"
# Of clients and of tests; the gateway has one, too.
OTHER_VARIABLES = tuple(ENV_PREFIX + name for name in ("ADDRESS", "SESSION", "BACKGROUND_BYTES", "FAILPOINTS"))


class ConfigError(StartupError):
    """A configuration that cannot be used; the message names the key, the value, the rule and a value that would do."""


_SECTIONS: dict[str, type[msgspec.Struct]] = {
    "node": NodeConfig,
    "cache": CacheConfig,
    "tier": TierConfig,
    "policy": PolicyConfig,
    "retain": RetainConfig,
    "metrics": MetricsConfig,
    "log": LogConfig,
}
# Part of the contract, not yet built: refused by name, so that nobody believes they have an effect.
_LATER_SECTIONS = ("peers", "security")
_LATER_KEYS = {"tier": ("stripe",)}
_LISTS = ("tier", "policy", "retain")  # sections that are lists of tables
_UNNAMED = ("policy", "retain")  # whose tables have no name that an environment variable could hold


def _metas(section: str) -> dict[str, msgspec.Meta]:
    hints = get_type_hints(_SECTIONS[section], include_extras=True)
    return {_key_name(field.name): hints[field.name].__metadata__[0] for field in msgspec.structs.fields(_SECTIONS[section])}


def _key_name(field: str) -> str:
    """As it is written in TOML: `class` is a word of Python's."""
    return field.rstrip("_")


def _fact(meta: msgspec.Meta) -> Key:
    key: Key = (meta.extra or {})["key"]
    return key


_KEYS: dict[str, dict[str, Key]] = {
    section: {name: _fact(meta) for name, meta in _metas(section).items()} for section in _SECTIONS
}


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value) if isinstance(value, str) else repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, or nesting without end
        return f"a {type(value).__name__} too large to show"
    return text if len(text) <= 80 else text[:77] + "..."


def _word(name: str) -> str:
    """A key's name as it goes into a message."""
    return name if name.isidentifier() and name.isascii() and len(name) <= 80 else _shown(name)


class _Reader:
    """One pass over a parsed document. Knows where each value came from, so that an error can say it."""

    def __init__(self, raw: Mapping[str, Any], env: Mapping[str, str], source: str) -> None:
        self._source = source
        self._origin: dict[tuple[str, int, str], str] = {}  # (section, index, key): environment variable
        self.sections = self._tables(raw)
        self._override(env)

    def fail(self, sentence: str, **details: Any) -> ConfigError:
        return ConfigError(sentence, **details, source=self._source)

    def _tables(self, raw: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
        """Each section as a list of tables; only those of _LISTS may have other than one."""
        tables: dict[str, list[dict[str, Any]]] = {section: [] if section in _LISTS else [{}] for section in _SECTIONS}
        for section, content in raw.items():
            if section in _LATER_SECTIONS:
                raise self.fail(f"section [{section}] is not available in this release")
            if section not in _SECTIONS:
                near = get_close_matches(section, _SECTIONS, 1, 0.0)
                known = f"[[{near[0]}]]" if near[0] in _LISTS else f"[{near[0]}]"
                raise self.fail(f"unknown section or key {_word(section)} at the top; the nearest known section is {known}")
            if section in _LISTS:
                if not isinstance(content, list) or not all(isinstance(entry, dict) for entry in content):
                    raise self.fail(
                        f"{section} is {_shown(content)} but must be a list of tables; begin each with [[{section}]]"
                    )
                tables[section] = [dict(entry) for entry in content]
            elif isinstance(content, dict):
                tables[section] = [dict(content)]
            else:
                raise self.fail(f"{section} is {_shown(content)} but must be a table; begin it with [{section}]")
        return tables

    def _variables(self) -> Iterator[tuple[str, tuple[str, int, str]]]:
        """Every override that this document has a place for."""
        for section, keys in _KEYS.items():
            for index, table in enumerate(() if section in _UNNAMED else self.sections[section]):
                middle = f"{section}_{table.get('name', index)}" if section == "tier" else section
                for key in keys:
                    if (section, key) != ("tier", "name"):  # names the tier, so it cannot be changed by that name
                        yield _variable(middle, key), (section, index, key)

    def _tier_name(self, place: tuple[str, int, str]) -> Any:
        return self.sections[place[0]][place[1]].get("name")

    def _override(self, env: Mapping[str, str]) -> None:
        places: dict[str, tuple[str, int, str]] = {}
        for variable, place in self._variables():
            if variable in places and self._tier_name(place) != self._tier_name(places[variable]):
                raise self.fail(f"two tiers share the environment variable {_word(variable)}; rename one of them")
            places[variable] = place
        for variable, text in env.items():
            if not variable.startswith(tuple(f"{ENV_PREFIX}{section.upper()}_" for section in _SECTIONS)):
                continue
            if variable not in places:
                raise self._unknown_variable(variable, list(places))
            if not text:
                continue  # set but empty is how many launchers say "not set"
            section, index, key = places[variable]
            self.sections[section][index][key] = from_environment(text, _KEYS[section][key])
            self._origin[section, index, key] = variable

    def _unknown_variable(self, variable: str, known: list[str]) -> ConfigError:
        for section, keys in _LATER_KEYS.items():
            for key in keys:
                if variable.startswith(f"{ENV_PREFIX}{section.upper()}_") and variable.endswith(f"_{key.upper()}"):
                    return self.fail(
                        f"environment variable {_word(variable)}: {section}.{key} is not available in this release"
                    )
        near = get_close_matches(variable, known, 1, 0.0)
        return self.fail(f"unknown environment variable {_word(variable)}; the nearest known one is {near[0]}")

    def values(self, section: str, index: int = 0) -> dict[str, Any]:
        """The section's values, read; absent keys stay absent. Raises ConfigError at the first that breaks a rule."""
        table, keys = self.sections[section][index], _KEYS[section]
        tier = f" of {section} {_shown(table.get('name', table.get('run', index + 1)))}" if section in _LISTS else ""
        for name in table:
            if name not in keys:
                raise self._unknown_key(section, name, tier)
        read: dict[str, Any] = {}
        for name, key in keys.items():
            if name not in table:
                continue
            if key.only and key.only != read.get("kind"):
                raise self.fail(
                    f"{section}.{name}{tier} is a key of kind {key.only!r}; this tier is {_shown(read.get('kind'))}"
                )
            try:
                read[name] = READERS[key.read](table[name], key)
            except BadValue as bad:
                origin = self._origin.get((section, index, name)) if section == "tier" else None
                via = f" (from {origin})" if origin else ""
                raise self.bad(f"{section}.{name}{tier}{via}", table[name], bad.rule, bad.nearest) from bad
            if name == "kind":
                self._check_kind(read, table, tier)
        return read

    def _check_kind(self, read: dict[str, Any], table: dict[str, Any], tier: str) -> None:
        for name, key in _KEYS["tier"].items():
            if key.only == read["kind"] and key.default == "required" and name not in table:
                raise self.fail(f"tier.{name}{tier} is missing; a tier of kind {key.only!r} needs it")

    def bad(self, where: str, value: Any, rule: str, nearest: str) -> ConfigError:
        advice = f"; the nearest that would do is {nearest}" if nearest else ""
        section, _, name = where.partition(".")
        if (origin := self._origin.get((section, 0, name))) is not None and section != "tier":
            where = f"{where} (from {origin})"
        return self.fail(f"{where} is {_shown(value)} but must be {rule}{advice}")

    def _unknown_key(self, section: str, name: str, tier: str) -> ConfigError:
        if name in _LATER_KEYS.get(section, ()):
            return self.fail(f"{section}.{name}{tier} is not available in this release")
        elsewhere = [f"{other}.{name}" for other, keys in _KEYS.items() if name in keys]
        near = get_close_matches(name, _KEYS[section], 1, 0.6) or elsewhere or get_close_matches(name, _KEYS[section], 1, 0.0)
        known = near[0] if "." in near[0] else f"{section}.{near[0]}"
        return self.fail(f"unknown key {section}.{_word(name)}{tier}; the nearest known key is {known}")


def _variable(middle: str, key: str) -> str:
    return f"{ENV_PREFIX}{middle}_{key}".upper().replace("-", "_")


def _default_socket(env: Mapping[str, str], uid: int | None, may_use_system: bool) -> str:
    if uid == 0:
        return SYSTEM_SOCKET
    # A service account has no session, but a unit that makes /run/forebay; in a container there may be neither.
    return session_socket(env) or (SYSTEM_SOCKET if may_use_system or uid is None else fallback_socket(uid))


def _node(reader: _Reader, socket: str, hostname: str) -> NodeConfig:
    table = reader.sections["node"][0]
    table.setdefault("listen", [f"unix://{socket}"])
    table.setdefault("id", hostname)
    listen = table["listen"] if isinstance(table["listen"], list) else []
    sockets = [entry.removeprefix("unix://") for entry in listen if isinstance(entry, str) and entry.startswith("unix://")]
    table.setdefault("runtime_dir", dirname((sockets or [socket])[0]))
    return NodeConfig(**reader.values("node"))


def _cache(reader: _Reader) -> CacheConfig:
    values = reader.values("cache")
    if "path" not in values:
        raise reader.fail('cache.path is missing; set it to a directory on a local disk, such as "/var/lib/forebay/cache"')
    cache = CacheConfig(**values)
    if not cache.soft < cache.hard:
        raise reader.bad("cache.soft", cache.soft, f"below cache.hard, which is {cache.hard:g}", f"{cache.hard * 2 / 3:.2g}")
    if not cache.hard <= cache.refuse:
        raise reader.bad("cache.hard", cache.hard, f"at most cache.refuse, which is {cache.refuse:g}", f"{cache.refuse:g}")
    if not cache.reopen < cache.refuse:
        raise reader.bad(
            "cache.reopen", cache.reopen, f"below cache.refuse, which is {cache.refuse:g}", f"{cache.refuse * 0.9:.2g}"
        )
    least = 4 * cache.chunk_size  # the window of one stream
    if cache.capacity is not None and cache.capacity < least:
        raise reader.bad("cache.capacity", cache.capacity, "at least four chunks", f'"{format_size(least)}"')
    return cache


def _nested(first: str, second: str) -> bool:
    return f"{first}/".startswith(f"{second}/") or f"{second}/".startswith(f"{first}/")


def _tiers(reader: _Reader, cache: CacheConfig) -> tuple[TierConfig, ...]:
    tiers: list[TierConfig] = []
    for index in range(len(reader.sections["tier"])):
        for key in ("name", "kind"):
            if key not in reader.sections["tier"][index]:
                raise reader.fail(f"tier.{key} of tier {index + 1} is missing")
        tier = TierConfig(**reader.values("tier", index))
        if any(tier.name == other.name for other in tiers):
            raise reader.bad(f"tier.name of tier {index + 1}", tier.name, "unique", f'"{tier.name}-{index + 1}"')
        for label, path in [
            ("cache.path", cache.path),
            *((f"tier.path of tier {other.name!r}", other.path) for other in tiers),
        ]:
            if tier.path and path and _nested(tier.path, path):
                raise reader.bad(f"tier.path of tier {tier.name!r}", tier.path, f"apart from {label}, which is {path!r}", "")
        tiers.append(tier)
    if not any(tier.required for tier in tiers):
        # Without one, nothing would ever hold a shard in the cache, and eviction would drop the only copy.
        raise reader.fail("no tier is required; configure at least one [[tier]] with required = true, which is the default")
    return tuple(tiers)


def _policies(reader: _Reader, tiers: tuple[TierConfig, ...]) -> tuple[PolicyConfig, ...]:
    policies: list[PolicyConfig] = []
    for index in range(len(reader.sections["policy"])):
        values = reader.values("policy", index)
        if "run" not in values:
            raise reader.fail(f"policy.run of policy {index + 1} is missing")
        if "class" in values:
            values["class_"] = values.pop("class")
        policy = PolicyConfig(**values)
        where = f"of policy {_shown(policy.run)}"
        for name in policy.tiers or ():
            _check_tier(reader, f"policy.tiers {where}", name, tiers)
        if policy.tiers is not None and not any(tier.required for tier in tiers if tier.name in policy.tiers):
            required = [tier.name for tier in tiers if tier.required]
            rule = "a list with at least one tier that is required; else set transient = true, for the cache alone"
            raise reader.bad(f"policy.tiers {where}", list(policy.tiers), rule, json.dumps([required[0], *policy.tiers]))
        for key in ("tiers", "every", "skip", "class_", "quota"):
            if policy.transient and key in values:
                raise reader.fail(
                    f"policy.{_key_name(key)} {where} has no meaning beside transient = true; remove one of the two"
                )
        if any(policy.run == other.run for other in policies):
            raise reader.fail(f"two policies are for run {_shown(policy.run)}; only the first could count")
        policies.append(policy)
    return tuple(policies)


def _check_tier(reader: _Reader, where: str, name: str, tiers: tuple[TierConfig, ...]) -> None:
    names = [tier.name for tier in tiers]
    if name not in names:
        near = get_close_matches(name, names, 1, 0.0)
        raise reader.bad(where, name, f"the name of a configured tier: {', '.join(names)}", f'"{near[0]}"')


def _retain(reader: _Reader, tiers: tuple[TierConfig, ...]) -> tuple[RetainConfig, ...]:
    rules: list[RetainConfig] = []
    for index in range(len(reader.sections["retain"])):
        values = reader.values("retain", index)
        if "run" not in values:
            raise reader.fail(f"retain.run of retain {index + 1} is missing")
        rule = RetainConfig(**values)
        where = f"of retain {_shown(rule.run)}"
        if rule.tier:
            _check_tier(reader, f"retain.tier {where}", rule.tier, tiers)
        if rule.keep_last is None and rule.keep_every is None and rule.keep_for is None:
            raise reader.fail(
                f"retain {where} says nothing of what to keep, so nothing would stay; the nearest is keep_last = 1"
            )
        if any((rule.run, rule.tier) == (other.run, other.tier) for other in rules):
            raise reader.fail(f"two rules are for run {_shown(rule.run)} on the same tier; only the first could count")
        rules.append(rule)
    return tuple(rules)


def _build(raw: Mapping[str, Any], env: Mapping[str, str], source: str, socket: str, hostname: str) -> Config:
    reader = _Reader(raw, env, source)
    node = _node(reader, socket, hostname)
    cache = _cache(reader)
    metrics, log = MetricsConfig(**reader.values("metrics")), LogConfig(**reader.values("log"))
    tiers = _tiers(reader, cache)
    policies, retain = _policies(reader, tiers), _retain(reader, tiers)
    return Config(node=node, cache=cache, tiers=tiers, policies=policies, retain=retain, metrics=metrics, log=log)


def unknown_variables(config: Config, env: Mapping[str, str]) -> list[tuple[str, str]]:
    """Variables that look like this program's and mean nothing to it, each with the nearest that does. Those that begin as a
    section's do are errors, and never come so far."""
    middles = [(section, section) for section in _SECTIONS if section not in _LISTS]
    middles += [("tier", f"tier_{tier.name}") for tier in config.tiers]
    known = [_variable(middle, key) for section, middle in middles for key in _KEYS[section]]
    known += OTHER_VARIABLES
    strange = (name for name in env if name.startswith(ENV_PREFIX) and name not in known)
    return [(name, get_close_matches(name, known, 1, 0.0)[0]) for name in sorted(strange)]


def is_live(section: str, field: str) -> bool:
    """Whether a key may change while the gateway serves; of policies and retention rules all may."""
    return section in _UNNAMED or _KEYS[section][_key_name(field)].live


def load_config(
    text: str, env: Mapping[str, str], source: str, *, uid: int | None = None, hostname: str = "", may_use_system: bool = True
) -> Config:
    """The configuration in TOML `text`, overridden by FOREBAY_* of `env`. `source` names the text in errors.

    `uid`, `hostname` and whether the user may make the system's socket give the defaults of node.listen and node.id. Raises
    ConfigError, and nothing else.
    """
    try:
        raw = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError is a ValueError and names line and column
        raise ConfigError(f"not TOML: {error}", source=source) from error
    return _build(raw, env, source, _default_socket(env, uid, may_use_system), hostname)


def default_config(env: Mapping[str, str], uid: int, home: str, hostname: str, may_use_system: bool = True) -> Config:
    """The configuration without a file: all data below the user's state home, one POSIX tier beside the cache."""
    state = env.get("XDG_STATE_HOME", "")
    base = f"{state.rstrip('/') if state.startswith('/') else home.rstrip('/') + '/.local/state'}/forebay"
    raw = {
        "cache": {"path": f"{base}/cache"},
        "tier": [{"name": "pfs", "kind": "posix", "path": f"{base}/pfs"}],
    }
    return _build(raw, env, "embedded default", _default_socket(env, uid, may_use_system), hostname)


def _toml_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")  # TOML forbids a bare DEL


def _toml_value(value: Any, read: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Cadence):
        return _toml_string(format_duration(value.interval_s)) if value.interval_s else repr(value.count)
    if isinstance(value, tuple):
        return f"[{', '.join(_toml_string(entry) for entry in value)}]"
    if isinstance(value, str):
        return _toml_string(value)
    if "size" in read:
        return _toml_string(format_size(value))
    if read.startswith("duration") and parse_duration(text := format_duration(value)) == value:  # below 1 ns it is not
        return _toml_string(text)
    return repr(value)


def _lines(section: str, struct: msgspec.Struct) -> Iterator[str]:
    for field, (name, key) in zip(msgspec.structs.fields(struct), _KEYS[section].items(), strict=True):
        value = getattr(struct, field.name)
        if isinstance(struct, TierConfig) and key.only not in ("", struct.kind):
            continue
        yield f"# {name} = (unset)" if value is None else f"{name} = {_toml_value(value, key.read)}"


def _policy_lines(policy: PolicyConfig) -> Iterator[str]:
    for line in _lines("policy", policy):
        if not policy.transient or line.startswith(("run ", "transient ")):  # others have no meaning there
            yield line


def render_toml(config: Config) -> str:
    """The whole configuration as TOML, defaults included; load_config gives the same configuration back. What has no value is a
    comment, `# key = (unset)`."""
    blocks = [["[node]", *_lines("node", config.node)], ["[cache]", *_lines("cache", config.cache)]]
    blocks += [["[[tier]]", *_lines("tier", tier)] for tier in config.tiers]
    blocks += [["[[policy]]", *_policy_lines(policy)] for policy in config.policies]
    blocks += [["[[retain]]", *_lines("retain", rule)] for rule in config.retain]
    blocks.append(["[metrics]", *_lines("metrics", config.metrics)])
    blocks.append(["[log]", *_lines("log", config.log)])
    return "\n".join("\n".join(block) + "\n" for block in blocks)


def _default_shown(key: Key, default: Any) -> str:
    if key.default:
        return key.default
    if isinstance(default, str):
        return f'`"{default}"`'
    if "size" in key.read:
        return f'`"{format_size(default)}"`'
    return f"`{_toml_value(default, key.read)}`"


def config_table() -> str:
    """Every key as a Markdown table: key, type, default, environment variable, meaning."""
    rows = ["| key | type | default | environment | meaning |", "|---|---|---|---|---|"]
    for section, keys in _KEYS.items():
        metas = _metas(section)
        defaults = {_key_name(field.name): field.default for field in msgspec.structs.fields(_SECTIONS[section])}
        for name, key in keys.items():
            kind = " or ".join(f'`"{choice}"`' for choice in key.choices) or key.read
            variable = _variable("tier_<name>" if section == "tier" else section, name)
            shown = "" if (section, name) == ("tier", "name") or section in _UNNAMED else f"`{variable}`"
            meaning = (metas[name].description or "") + (f" Kind `{key.only}` only." if key.only else "")
            meaning += " Live." if key.live else ""  # README says of policies and retention rules that all of their keys are
            label = f"`{section}.{name}`"
            rows.append(f"| {label} | {kind} | {_default_shown(key, defaults[name])} | {shown} | {meaning} |")
    return "\n".join(rows) + "\n"
