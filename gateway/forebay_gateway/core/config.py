"""The gateway's configuration: every key with its meaning, read from TOML text and the environment.

Owns the keys, their defaults, the rules across keys, and the text forms (TOML, the table in README). Does not own how a
single value is read (core/config_keys), nor files: callers read the text and pass the host's facts in.
"""

import json
import tomllib
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from posixpath import dirname
from typing import Annotated, Any, get_type_hints

import msgspec

from forebay_gateway.core.config_keys import READERS, BadValue, Key, from_environment
from forebay_gateway.core.errors import StartupError
from forebay_gateway.core.quantities import format_duration, format_size

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
DAY_S = 86400.0
SYSTEM_SOCKET = "/run/forebay/gateway.sock"
ENV_PREFIX = "FOREBAY_"


class ConfigError(StartupError):
    """A configuration that cannot be used; the message names the key, the value, the rule and a value that would do."""


def _key(description: str, read: str, **facts: Any) -> msgspec.Meta:
    return msgspec.Meta(description=description, extra={"key": Key(read, **facts)})


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """[node]: this gateway and how it is reached. Durations are seconds."""

    id: Annotated[
        str, _key("Name of this node on the tiers and in status; unique in the cluster.", "node id", default="host name")
    ]
    listen: Annotated[
        tuple[str, ...],
        _key(
            "Addresses to serve: `unix:///path` and `host:port`.",
            "list of addresses",
            default=f"`unix://{SYSTEM_SOCKET}`, or below `$XDG_RUNTIME_DIR` when not root",
        ),
    ]
    runtime_dir: Annotated[
        str,
        _key("Directory for sockets and other files of a running gateway.", "path", default="directory of the first socket"),
    ]
    advertise: Annotated[str, _key("Address under which other nodes reach this one; empty: none.", "address")] = ""
    abandon_after: Annotated[
        float, _key("A session silent for this long loses its shards that were never committed.", "duration", low=1)
    ] = 3600.0
    complete_within: Annotated[
        float,
        _key(
            "After this long a checkpoint that lacks a writer's commit is reported incomplete, with an alarm, and waits end.",
            "duration",
            low=1,
        ),
    ] = 3600.0
    takeover_after: Annotated[
        float, _key("After this long another gateway than writer 0's may complete a checkpoint on a tier.", "duration", low=1)
    ] = 60.0
    stream_timeout: Annotated[
        float, _key("A stream of a shard that sends nothing for this long is ended, and nothing of it kept.", "duration", low=1)
    ] = 60.0
    movers: Annotated[
        int,
        _key("Mover processes that fetch for restores; each tier's drain has one of its own.", "whole number", low=1, high=16),
    ] = 1
    drain_timeout: Annotated[
        float, _key("Time to finish work under way at SIGTERM before it is cancelled.", "duration", high=3600)
    ] = 20.0


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """[cache]: the NVMe directory that takes the surge. Sizes are bytes, watermarks fractions of capacity."""

    path: Annotated[str, _key("Directory of shards and catalog, on a local disk.", "path", default="required")]
    capacity: Annotated[
        int | None, _key("Bytes the cache may fill, footers and padding included.", "size", low=1, default="80% of the disk")
    ] = None
    chunk_size: Annotated[
        int, _key("Unit of checksums and transfer, a power of two.", "power-of-two size", low=64 * KIB, high=64 * MIB)
    ] = 4 * MIB
    soft: Annotated[
        float, _key("Fill above which verified shards are evicted, oldest first.", "fraction", low=0.01, high=1)
    ] = 0.60
    hard: Annotated[float, _key("Fill at which pressure is reported as `hard`.", "fraction", low=0.01, high=1)] = 0.90
    refuse: Annotated[float, _key("Fill at which new shards are refused.", "fraction", low=0.01, high=1)] = 0.95
    reopen: Annotated[float, _key("Fill below which refused writers are let in again.", "fraction", low=0.01, high=1)] = 0.85
    catalog_reserve: Annotated[int, _key("Bytes kept free on the disk for the catalog.", "size", low=MIB)] = 256 * MIB
    direct_io: Annotated[
        str, _key("`auto` uses O_DIRECT where the file system has it; `off` never does.", "choice", choices=("auto", "off"))
    ] = "auto"
    pack: Annotated[
        str,
        _key(
            "`auto` puts small shards (below 1 MiB) together into pack files where they are many: 64 in a request or in their "
            "part so far; `never` gives each a file of its own, which other software can read on a tier.",
            "choice",
            choices=("auto", "never"),
        ),
    ] = "auto"
    repair: Annotated[
        str,
        _key(
            "`auto` replaces bytes that were found damaged, in the cache or on a tier, from another good copy; "
            "`ask` leaves them in quarantine for `forebay repair`.",
            "choice",
            choices=("auto", "ask"),
        ),
    ] = "auto"
    rebuild: Annotated[
        str,
        _key(
            "A catalog that is lost or damaged: `auto` rebuilds it from the cache's files at start and keeps the damaged one "
            "aside; `ask` refuses to start and says what to run.",
            "choice",
            choices=("auto", "ask"),
        ),
    ] = "auto"
    scrub_rate: Annotated[
        int,
        _key("Most bytes a second that the background scrub reads; 0 or `off`: no scrub.", "size per second or off"),
    ] = 50 * MIB
    scrub_every: Annotated[
        float, _key("Pause between scrubs of the whole cache; 0 or `off`: only when started.", "duration or off")
    ] = 7 * DAY_S


class TierConfig(msgspec.Struct, frozen=True, kw_only=True):
    """[[tier]]: one place that shards drain to. Keys of another kind are errors."""

    name: Annotated[str, _key("Name of the tier, used as a level in waits and status.", "tier name", default="required")]
    kind: Annotated[str, _key("What the tier is.", "choice", choices=("posix", "s3", "memory"), default="required")]
    required: Annotated[bool, _key("Whether a shard must be verified here before the cache may evict it.", "true or false")] = (
        True
    )
    bandwidth: Annotated[
        int | None,
        _key("Most bytes a second that this node sends to the tier.", "size per second", low=64 * KIB, default="no limit"),
    ] = None
    iops: Annotated[
        int | None, _key("Most requests a second that this node sends to the tier.", "whole number", low=1, default="no limit")
    ] = None
    concurrency: Annotated[int, _key("Transfers at a time for each mover.", "whole number", low=1, high=256)] = 4
    scrub_rate: Annotated[
        int,
        _key("Most bytes a second read back from the tier to find silent damage; 0 or `off`: never.", "size per second or off"),
    ] = 20 * MIB
    scrub_every: Annotated[
        float | None,
        _key(
            "Pause between such readings of all that this node put there; 0 or `off`: only when started.",
            "duration or off",
            default="30d; 180d for S3",
        ),
    ] = None
    path: Annotated[str, _key("Directory of the tier.", "path", only="posix", default="required")] = ""
    bucket: Annotated[str, _key("Bucket of the tier.", "bucket", only="s3", default="required")] = ""
    prefix: Annotated[str, _key("Keys begin with this and a `/`; empty: the bucket's root.", "key prefix", only="s3")] = ""
    endpoint: Annotated[str | None, _key("Server, where it is not AWS.", "URL", only="s3", default="AWS")] = None
    region: Annotated[str | None, _key("Region.", "text", only="s3", default="AWS chain")] = None
    addressing: Annotated[
        str, _key("Where the bucket's name stands.", "choice", only="s3", choices=("auto", "path", "virtual"))
    ] = "auto"
    sign_payload: Annotated[
        bool, _key("Sign bodies too; costs CPU, and CRC32C protects them already.", "true or false", only="s3")
    ] = False
    part_size: Annotated[
        int | None,
        _key(
            "Bytes in each part of a multipart upload.",
            "size",
            only="s3",
            low=5 * MIB,
            high=5 * GIB,
            default="from the object's size",
        ),
    ] = None


class LogConfig(msgspec.Struct, frozen=True, kw_only=True):
    """[log]: what goes to standard error."""

    level: Annotated[str, _key("Least severe record shown.", "choice", choices=("debug", "info", "warning", "error"))] = "info"
    format: Annotated[
        str, _key("`text` for people, `json` for collectors, one object a line.", "choice", choices=("text", "json"))
    ] = "text"


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the gateway is told."""

    node: NodeConfig
    cache: CacheConfig
    tiers: tuple[TierConfig, ...]
    log: LogConfig = LogConfig()


_SECTIONS: dict[str, type[msgspec.Struct]] = {"node": NodeConfig, "cache": CacheConfig, "tier": TierConfig, "log": LogConfig}
# Part of the contract, not yet built: refused by name, so that nobody believes they have an effect.
_LATER_SECTIONS = ("policy", "retain", "peers", "security", "metrics")
_LATER_KEYS = {"tier": ("every", "stripe"), "cache": ("max_dirty_age",)}


def _metas(section: str) -> dict[str, msgspec.Meta]:
    hints = get_type_hints(_SECTIONS[section], include_extras=True)
    return {field.name: hints[field.name].__metadata__[0] for field in msgspec.structs.fields(_SECTIONS[section])}


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
        """Each section as a list of tables; only [[tier]] may have other than one."""
        tables: dict[str, list[dict[str, Any]]] = {section: [{}] for section in _SECTIONS}
        tables["tier"] = []
        for section, content in raw.items():
            if section in _LATER_SECTIONS:
                raise self.fail(f"section [{section}] is not available in this release")
            if section not in _SECTIONS:
                near = get_close_matches(section, _SECTIONS, 1, 0.0)
                raise self.fail(f"unknown section or key {_word(section)} at the top; the nearest known section is [{near[0]}]")
            if section == "tier":
                if not isinstance(content, list) or not all(isinstance(entry, dict) for entry in content):
                    raise self.fail(f"tier is {_shown(content)} but must be a list of tables; begin each with [[tier]]")
                tables[section] = [dict(entry) for entry in content]
            elif isinstance(content, dict):
                tables[section] = [dict(content)]
            else:
                raise self.fail(f"{section} is {_shown(content)} but must be a table; begin it with [{section}]")
        return tables

    def _variables(self) -> Iterator[tuple[str, tuple[str, int, str]]]:
        """Every override that this document has a place for."""
        for section, keys in _KEYS.items():
            for index, table in enumerate(self.sections[section]):
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
        tier = f" of tier {_shown(table.get('name', index + 1))}" if section == "tier" else ""
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
                origin = self._origin.get((section, index, name))
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


def _default_socket(env: Mapping[str, str], uid: int | None) -> str:
    # A service account without a session has no XDG_RUNTIME_DIR; its unit makes /run/forebay.
    runtime = env.get("XDG_RUNTIME_DIR", "")
    if uid != 0 and runtime.startswith("/"):
        return f"{runtime.rstrip('/')}/forebay/gateway.sock"
    return SYSTEM_SOCKET


def _node(reader: _Reader, env: Mapping[str, str], uid: int | None, hostname: str) -> NodeConfig:
    table = reader.sections["node"][0]
    socket = _default_socket(env, uid)
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


def _build(raw: Mapping[str, Any], env: Mapping[str, str], source: str, uid: int | None, hostname: str) -> Config:
    reader = _Reader(raw, env, source)
    node = _node(reader, env, uid, hostname)
    cache = _cache(reader)
    return Config(node=node, cache=cache, tiers=_tiers(reader, cache), log=LogConfig(**reader.values("log")))


def load_config(text: str, env: Mapping[str, str], source: str, *, uid: int | None = None, hostname: str = "") -> Config:
    """The configuration in TOML `text`, overridden by FOREBAY_* of `env`. `source` names the text in errors.

    `uid` and `hostname` give the defaults of node.listen and node.id. Raises ConfigError, and nothing else.
    """
    try:
        raw = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError is a ValueError and names line and column
        raise ConfigError(f"not TOML: {error}", source=source) from error
    return _build(raw, env, source, uid, hostname)


def default_config(env: Mapping[str, str], uid: int, home: str, hostname: str) -> Config:
    """The configuration without a file: all data below the user's state home, one POSIX tier beside the cache."""
    state = env.get("XDG_STATE_HOME", "")
    base = f"{state.rstrip('/') if state.startswith('/') else home.rstrip('/') + '/.local/state'}/forebay"
    raw = {
        "cache": {"path": f"{base}/cache"},
        "tier": [{"name": "pfs", "kind": "posix", "path": f"{base}/pfs"}],
    }
    return _build(raw, env, "embedded default", uid, hostname)


def _toml_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")  # TOML forbids a bare DEL


def _toml_value(value: Any, read: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return f"[{', '.join(_toml_string(entry) for entry in value)}]"
    if isinstance(value, str):
        return _toml_string(value)
    if "size" in read:
        return _toml_string(format_size(value))
    return repr(value)


def _lines(section: str, struct: NodeConfig | CacheConfig | TierConfig | LogConfig) -> Iterator[str]:
    for name, key in _KEYS[section].items():
        value = getattr(struct, name)
        if value is None or (isinstance(struct, TierConfig) and key.only not in ("", struct.kind)):
            continue
        yield f"{name} = {_toml_value(value, key.read)}"


def render_toml(config: Config) -> str:
    """The whole configuration as TOML, defaults included; load_config gives the same configuration back."""
    blocks = [["[node]", *_lines("node", config.node)], ["[cache]", *_lines("cache", config.cache)]]
    blocks += [["[[tier]]", *_lines("tier", tier)] for tier in config.tiers]
    blocks.append(["[log]", *_lines("log", config.log)])
    return "\n".join("\n".join(block) + "\n" for block in blocks)


def _default_shown(key: Key, default: Any) -> str:
    if key.default:
        return key.default
    if isinstance(default, str):
        return f'`"{default}"`'
    if "size" in key.read:
        return f'`"{format_size(default)}"`'
    if key.read.startswith("duration"):
        return f'`"{format_duration(default)}"`'
    return f"`{_toml_value(default, key.read)}`"


def config_table() -> str:
    """Every key as a Markdown table: key, type, default, environment variable, meaning."""
    rows = ["| key | type | default | environment | meaning |", "|---|---|---|---|---|"]
    for section, keys in _KEYS.items():
        metas = _metas(section)
        defaults = {field.name: field.default for field in msgspec.structs.fields(_SECTIONS[section])}
        for name, key in keys.items():
            kind = " or ".join(f'`"{choice}"`' for choice in key.choices) or key.read
            variable = _variable("tier_<name>" if section == "tier" else section, name)
            shown = "" if (section, name) == ("tier", "name") else f"`{variable}`"
            meaning = (metas[name].description or "") + (f" Kind `{key.only}` only." if key.only else "")
            label = f"`{section}.{name}`"
            rows.append(f"| {label} | {kind} | {_default_shown(key, defaults[name])} | {shown} | {meaning} |")
    return "\n".join(rows) + "\n"
