"""How one configuration value is read: a reader for each kind of value, with the rule that it states when it refuses.

Owns the meaning of single values. Does not own which keys exist, their defaults, or rules across keys (core/config).
"""

import json
import math
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from posixpath import normpath
from typing import Any
from urllib.parse import urlsplit

import msgspec

from forebay_gateway.core.quantities import format_duration, format_size, parse_duration, parse_size

MAX_SOCKET_PATH_BYTES = 107  # sockaddr_un.sun_path is 108 bytes with its final NUL; unix(7)
MAX_NUMBER = 2**62
MAX_INTERVAL_S = 30 * 86400.0
RESERVED_TIER_NAMES = ("cache", "peer", "all", "any", "auto")


class Cadence(msgspec.Struct, frozen=True):
    """Which periodic checkpoints go: each `count`-th, none sooner than `interval_s` seconds after the one before."""

    count: int = 1
    interval_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.interval_s:g}s" if self.interval_s else str(self.count)


@dataclass(frozen=True, slots=True)
class Key:
    """What is known of one key beside its type. `only` names the tier kind it belongs to, "" for every kind."""

    read: str
    low: float = 0
    high: float = MAX_NUMBER
    choices: tuple[str, ...] = ()
    only: str = ""
    default: str = ""  # as shown, where the default is not a constant
    live: bool = False  # it may change while the gateway serves


class BadValue(ValueError):
    """A value that a reader refuses: the rule it breaks, and the nearest value that would do ("" where there is none)."""

    def __init__(self, rule: str, nearest: str = "") -> None:
        super().__init__(rule)
        self.rule = rule
        self.nearest = nearest


Reader = Callable[[Any, Key], Any]


def _text(value: Any, key: Key) -> str:
    if not isinstance(value, str):
        raise BadValue("text in quotes", f'"{value}"' if isinstance(value, int | float) and abs(value) < MAX_NUMBER else "")
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in value):
        raise BadValue("text without control characters")
    return value


def _node_id(value: Any, key: Key) -> str:
    # The id becomes a file name on every tier.
    text = _text(value, key)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", text):
        nearest = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:200]
        raise BadValue(
            "1 to 200 letters, digits, '.', '_' or '-', beginning with a letter or digit", f'"{nearest or "node-1"}"'
        )
    return text


def _tier_name(value: Any, key: Key) -> str:
    text = _text(value, key)
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,63}", text):
        nearest = re.sub(r"[^a-z0-9_-]+", "-", text.lower()).strip("-_")[:64]
        raise BadValue("1 to 64 of a-z, 0-9, '_' and '-', beginning with a letter or digit", f'"{nearest or "pfs"}"')
    if text in RESERVED_TIER_NAMES:
        raise BadValue(f"none of the words {', '.join(RESERVED_TIER_NAMES)}, which mean something else", f'"{text}-tier"')
    return text


def _path(value: Any, key: Key) -> str:
    text = _text(value, key)
    if not text.startswith("/"):
        # None is named: what it is relative to, or whose home is meant, is not known here, and below / it is not.
        raise BadValue("an absolute path, one that begins with '/' ('~' and variables are not replaced)")
    if text.startswith("//") or normpath(text) != text:
        raise BadValue("a path without '.', '..', doubled or trailing '/'", f'"/{normpath(text).lstrip("/")}"')
    if text == "/":
        raise BadValue("a directory below '/'", '"/var/lib/forebay"')
    return text


def _port_problem(address: str) -> bool:
    """Whether host:port or [address]:port is malformed."""
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.%\w]+\]|[A-Za-z0-9._-]+):(\d{1,5})", address, re.ASCII)
    return match is None or int(match.group(2)) > 65535


def _check_socket(address: str) -> None:
    path = address.removeprefix("unix://")
    length_bytes = len(path.encode())
    if length_bytes > MAX_SOCKET_PATH_BYTES:
        raise BadValue(
            f"a socket path of at most {MAX_SOCKET_PATH_BYTES} bytes; this one has {length_bytes}",
            '"unix:///run/forebay/gateway.sock"',
        )
    try:
        _path(path, Key("path"))
    except BadValue as error:
        nearest = f'"unix://{error.nearest.strip(chr(34))}"' if error.nearest else '"unix:///run/forebay/gateway.sock"'
        raise BadValue(f'"unix://" and then {error.rule}', nearest) from None


def _listen(value: Any, key: Key) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise BadValue("a list of at least one address", '["unix:///run/forebay/gateway.sock"]')
    addresses = tuple(_text(entry, key) for entry in value)
    for address in addresses:
        if address.startswith("unix://"):
            _check_socket(address)
        elif address.startswith("unix:"):
            raise BadValue(
                "made of unix:///path and host:port entries", f'"unix:///{address.removeprefix("unix:").lstrip("/")}"'
            )
        elif address.startswith("/"):
            raise BadValue("made of unix:///path and host:port entries", f'"unix://{address}"')
        elif _port_problem(address):
            raise BadValue("made of unix:///path and host:port entries", '"127.0.0.1:7400"')
    if len(set(addresses)) != len(addresses):
        raise BadValue("a list without duplicates", repr(list(dict.fromkeys(addresses))))
    return addresses


def _advertise(value: Any, key: Key) -> str:
    text = _text(value, key)
    if text and _port_problem(text):
        raise BadValue("host:port, or empty", '"node-1.cluster:7400"')
    return text


def _number(value: Any, rule: str) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float) or (isinstance(value, float) and not math.isfinite(value)):
        raise BadValue(rule)
    return value


def _within(value: int | float, key: Key, show: Callable[[Any], str], rule: str) -> None:
    if not key.low <= value <= key.high:
        nearest = key.low if value < key.low else key.high
        if key.high < MAX_NUMBER:
            rule = f"{rule} from {show(key.low)} to {show(key.high)}"
        else:
            rule = f"{rule} of at least {show(key.low)}"
        raise BadValue(rule, show(nearest))


def _size(value: Any, key: Key) -> int:
    rule = 'bytes as a whole number, or text such as "512MiB" or "1.5TB"'
    if isinstance(value, str):
        try:
            value = parse_size(value)
        except ValueError:
            raise BadValue(rule) from None
    number = _number(value, rule)
    if number != int(number):
        raise BadValue(rule, str(int(number)))
    _within(number, key, lambda size: f'"{format_size(int(size))}"', "a size")
    return int(number)


def _rate(value: Any, key: Key) -> int:
    if isinstance(value, str) and value.endswith("/s"):
        value = value[:-2]
    return _size(value, key)


def _rate_or_off(value: Any, key: Key) -> int:
    return 0 if value == "off" else _rate(value, key)


def _duration_or_off(value: Any, key: Key) -> float:
    return 0.0 if value == "off" else _duration(value, key)


def _chunk_size(value: Any, key: Key) -> int:
    size = _size(value, key)
    if size & (size - 1):
        lower = 1 << (size.bit_length() - 1)
        nearest = lower if size - lower <= 2 * lower - size else 2 * lower
        raise BadValue("a power of two", f'"{format_size(nearest)}"')
    return size


def _duration(value: Any, key: Key) -> float:
    rule = 'seconds as a number, or text such as "500ms", "10m" or "1h"'
    if isinstance(value, str):
        try:
            value = parse_duration(value)
        except ValueError:
            raise BadValue(rule) from None
    number = _number(value, rule)
    _within(number, key, lambda duration: f'"{format_duration(float(duration))}"', "a duration")
    return float(number)


def _fraction(value: Any, key: Key) -> float:
    number = _number(value, "a fraction between 0 and 1, such as 0.90")
    if 1 < number <= 100:
        raise BadValue("a fraction between 0 and 1", f"{number / 100:g}")
    _within(number, key, lambda fraction: f"{fraction:g}", "a fraction")
    return float(number)


def _count(value: Any, key: Key) -> int:
    number = _number(value, "a whole number")
    if not isinstance(number, int):
        raise BadValue("a whole number", str(int(number)))
    _within(number, key, lambda count: str(int(count)), "a whole number")
    return number


def _cadence(value: Any, key: Key) -> Cadence:
    if isinstance(value, str) and not value.strip().isdigit():
        try:
            interval_s = parse_duration(value)
        except ValueError:
            interval_s = -1.0
        if not 0 < interval_s <= MAX_INTERVAL_S:
            raise BadValue('a whole number of checkpoints, or an interval such as "30m"', "1")
        return Cadence(1, interval_s)
    number = (
        int(value) if isinstance(value, str) else _number(value, 'a whole number of checkpoints, or an interval such as "30m"')
    )
    if not isinstance(number, int):
        raise BadValue("a whole number of checkpoints", str(max(1, int(number))))
    _within(number, Key("cadence", low=1, high=1_000_000), lambda count: str(int(count)), "a whole number of checkpoints")
    return Cadence(number)


def _run_glob(value: Any, key: Key) -> str:
    text = _text(value, key)
    segments = text.split("/")
    if not text or len(text.encode()) > 1024 or any(segment in ("", ".", "..") for segment in segments):
        kept = "/".join(segment for segment in segments if segment not in ("", ".", ".."))
        raise BadValue('a run or a pattern of runs, path-like, such as "team-a/*" or "**"', f'"{kept or "**"}"')
    return text


def _tier_list(value: Any, key: Key) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise BadValue("a list of at least one tier; for none, set transient = true", '["pfs"]')
    names = tuple(_tier_name(entry, key) for entry in value)
    if len(set(names)) != len(names):
        raise BadValue("a list without duplicates", json.dumps(list(dict.fromkeys(names))))
    return names


def _tier_or_none(value: Any, key: Key) -> str:
    return "" if value == "" else _tier_name(value, key)


def _flag(value: Any, key: Key) -> bool:
    if not isinstance(value, bool):
        raise BadValue("true or false", {"1": "true", "0": "false"}.get(str(value)[:8], ""))
    return value


def _choice(value: Any, key: Key) -> str:
    words = ", ".join(f'"{choice}"' for choice in key.choices)
    text = value if isinstance(value, str) else ""
    if text not in key.choices:
        near = [
            choice for choice in key.choices if choice == text.strip().lower() or (text and choice.startswith(text[:1].lower()))
        ]
        raise BadValue(f"one of {words}", f'"{near[0]}"' if near else "")
    return text


def _bucket(value: Any, key: Key) -> str:
    text = _text(value, key)
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", text):
        nearest = re.sub(r"[^a-z0-9.-]+", "-", text.lower().removeprefix("s3://")).strip("-.")[:63]
        raise BadValue("a bucket's name: 3 to 63 of a-z, 0-9, '.' and '-'", f'"{nearest}"' if len(nearest) >= 3 else "")
    return text


def _prefix(value: Any, key: Key) -> str:
    text = _text(value, key)
    segments = text.split("/")
    if text and any(segment in ("", ".", "..") for segment in segments):
        kept = "/".join(segment for segment in segments if segment not in ("", ".", ".."))
        raise BadValue("path-like, without leading, trailing or doubled '/' and without '.' or '..'", f'"{kept}"')
    return text


def _endpoint(value: Any, key: Key) -> str:
    text = _text(value, key)
    rule = "a URL such as https://s3.example.com:9000, without path or credentials (those come from the AWS chain)"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise BadValue(rule) from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        nearest = f'"https://{text}"' if re.fullmatch(r"[A-Za-z0-9.-]+(:\d{1,5})?", text, re.ASCII) else ""
        raise BadValue(rule, nearest)
    if parts.username is not None or parts.path not in ("", "/") or parts.query or parts.fragment:
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        raise BadValue(rule, f'"{parts.scheme}://{host}{f":{port}" if port is not None else ""}"')
    return text.rstrip("/")


READERS: dict[str, Reader] = {
    "text": _text,
    "node id": _node_id,
    "tier name": _tier_name,
    "path": _path,
    "list of addresses": _listen,
    "address": _advertise,
    "size": _size,
    "size per second": _rate,
    "size per second or off": _rate_or_off,
    "power-of-two size": _chunk_size,
    "duration": _duration,
    "duration or off": _duration_or_off,
    "fraction": _fraction,
    "whole number": _count,
    "cadence": _cadence,
    "run glob": _run_glob,
    "list of tiers": _tier_list,
    "tier or none": _tier_or_none,
    "true or false": _flag,
    "choice": _choice,
    "bucket": _bucket,
    "key prefix": _prefix,
    "URL": _endpoint,
}


def from_environment(text: str, key: Key) -> Any:
    """The value a TOML file would hold, from a variable's text; what cannot be converted is left for the reader to refuse."""
    if key.read == "list of addresses":
        return [entry.strip() for entry in text.split(",") if entry.strip()]
    if key.read == "true or false":
        return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(text.strip().lower(), text)
    if key.read in ("whole number", "fraction"):
        if re.fullmatch(r"\d{1,19}", text.strip(), re.ASCII):
            return int(text)
        if re.fullmatch(r"\d{0,9}\.\d{1,19}", text.strip(), re.ASCII):
            return float(text)
    return text
