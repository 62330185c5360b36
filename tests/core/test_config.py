"""Configuration: what is read, what is refused and with which words, overrides, and the way back to TOML."""

import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forebay_gateway import serve
from forebay_gateway.core.config import (
    ConfigError,
    config_table,
    default_config,
    load_config,
    render_toml,
    unknown_variables,
)
from forebay_gateway.core.config_sections import Config
from forebay_gateway.core.errors import StartupError

MINIMAL = '[cache]\npath = "/c"\n[[tier]]\nname = "pfs"\nkind = "posix"\npath = "/p"\n'
S3 = '[[tier]]\nname = "object"\nkind = "s3"\nbucket = "bucket-1"\n'


def load(text: str = MINIMAL, **env: str) -> Config:
    return load_config(text, env, "test.toml", uid=0, hostname="node-1")


def refused(text: str = MINIMAL, **env: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text, **env)
    assert isinstance(caught.value, StartupError)
    assert str(caught.value).endswith("source=test.toml")
    return str(caught.value)


def test_minimal_takes_the_documented_defaults() -> None:
    config = load()
    assert config.node.id == "node-1"
    assert config.node.listen == ("unix:///run/forebay/gateway.sock",)
    assert config.node.runtime_dir == "/run/forebay"
    assert (config.node.abandon_after, config.node.complete_within, config.node.takeover_after) == (3600.0, 3600.0, 60.0)
    assert (config.node.movers, config.node.drain_timeout) == (1, 20.0)
    assert (config.cache.soft, config.cache.hard, config.cache.refuse, config.cache.reopen) == (0.60, 0.90, 0.95, 0.85)
    assert (config.cache.capacity, config.cache.chunk_size, config.cache.catalog_reserve) == (None, 4 << 20, 256 << 20)
    (tier,) = config.tiers
    assert (tier.name, tier.kind, tier.path, tier.required, tier.concurrency) == ("pfs", "posix", "/p", True, 4)
    assert (tier.bandwidth, tier.iops) == (None, None)
    assert (config.log.level, config.log.format) == ("info", "text")


def test_all_keys_of_an_s3_tier() -> None:
    text = (
        MINIMAL
        + S3
        + (
            'prefix = "team/ckpt"\nendpoint = "http://127.0.0.1:8333/"\nregion = "eu-west-1"\naddressing = "path"\n'
            'sign_payload = true\npart_size = "64MiB"\nbandwidth = "1.5GB/s"\niops = 100\nconcurrency = 8\nrequired = false\n'
        )
    )
    tier = load(text).tiers[1]
    assert tier.endpoint == "http://127.0.0.1:8333"
    assert (tier.prefix, tier.region, tier.addressing, tier.sign_payload) == ("team/ckpt", "eu-west-1", "path", True)
    assert (tier.part_size, tier.bandwidth, tier.iops, tier.concurrency) == (64 << 20, 1_500_000_000, 100, 8)
    assert not tier.required


@pytest.mark.parametrize(
    ("env", "uid", "socket"),
    [
        ({"XDG_RUNTIME_DIR": "/run/user/7"}, 7, "/run/user/7/forebay/gateway.sock"),
        ({"XDG_RUNTIME_DIR": "/run/user/0"}, 0, "/run/forebay/gateway.sock"),
        ({}, 7, "/run/forebay/gateway.sock"),
        ({"XDG_RUNTIME_DIR": "relative"}, 7, "/run/forebay/gateway.sock"),
    ],
)
def test_default_socket(env: dict[str, str], uid: int, socket: str) -> None:
    config = default_config(env, uid, "/home/u", "n")
    assert config.node.listen == (f"unix://{socket}",)
    assert config.node.runtime_dir == socket.rsplit("/", 1)[0]


def test_the_default_socket_without_a_session_and_without_a_unit() -> None:
    assert default_config({}, 7, "/h", "n", may_use_system=False).node.listen == ("unix:///tmp/forebay-7/gateway.sock",)
    assert load_config(MINIMAL, {}, "f", uid=7, hostname="n", may_use_system=False).node.runtime_dir == "/tmp/forebay-7"
    with_session = load_config(MINIMAL, {"XDG_RUNTIME_DIR": "/r"}, "f", uid=7, hostname="n", may_use_system=False)
    assert with_session.node.listen == ("unix:///r/forebay/gateway.sock",)


def test_embedded_default_lies_below_the_state_home() -> None:
    config = default_config({}, 7, "/home/u", "n")
    assert config.cache.path == "/home/u/.local/state/forebay/cache"
    assert [(tier.name, tier.kind, tier.path) for tier in config.tiers] == [
        ("pfs", "posix", "/home/u/.local/state/forebay/pfs")
    ]
    moved = default_config({"XDG_STATE_HOME": "/state", "FOREBAY_TIER_PFS_PATH": "/mnt/x"}, 7, "/home/u", "n")
    assert (moved.cache.path, moved.tiers[0].path) == ("/state/forebay/cache", "/mnt/x")


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("1073741824", 1 << 30),
        ('"512MiB"', 512 << 20),
        ('"6GiB"', 6 << 30),
        ('"1.5TB"', 1_500_000_000_000),
        ('"64 mib"', 64 << 20),
    ],
)
def test_sizes(written: str, size: int) -> None:
    assert load(MINIMAL.replace('"/c"', f'"/c"\ncapacity = {written}')).cache.capacity == size


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("90", 90.0), ("1.5", 1.5), ('"10m"', 600.0), ('"1h"', 3600.0), ('"1500ms"', 1.5), ('"2d"', 172800.0)],
)
def test_durations(written: str, seconds: float) -> None:
    assert load(f"[node]\nabandon_after = {written}\n" + MINIMAL).node.abandon_after == seconds


NODE, CACHE, TIER, LOG = (
    "[node]\n{}\n" + MINIMAL,
    MINIMAL.replace('"/c"', '"/c"\n{}'),
    MINIMAL + "{}\n",
    MINIMAL + "[log]\n{}\n",
)


@pytest.mark.parametrize(
    ("form", "line", "words"),
    [
        (NODE, 'id = "a b"', ['node.id is "a b" but must be', 'nearest that would do is "a-b"']),
        (NODE, 'id = ""', ["node.id", '"node-1"']),
        (NODE, "listen = []", ["node.listen is [] but must be a list of at least one address"]),
        (NODE, 'listen = "unix:///s"', ["node.listen", "a list"]),
        (NODE, 'listen = ["unix:/run/s"]', ['"unix:///run/s"']),
        (NODE, f'listen = ["unix:///{"d" * 120}"]', ["at most 107 bytes"]),
        (NODE, 'listen = ["/run/s"]', ['"unix:///run/s"']),
        (NODE, 'listen = ["localhost"]', ["host:port", '"127.0.0.1:7400"']),
        (NODE, 'listen = ["localhost:70000"]', ["host:port"]),
        (NODE, 'listen = ["a:1", "a:1"]', ["without duplicates"]),
        (NODE, 'advertise = "x"', ["node.advertise", "host:port"]),
        (NODE, "abandon_after = 0", ['node.abandon_after is 0 but must be a duration of at least "1s"']),
        (NODE, "abandon_after = inf", ["node.abandon_after is inf", "seconds as a number"]),
        (NODE, 'drain_timeout = "2 weeks"', ['node.drain_timeout is "2 weeks"', '"10m"']),
        (NODE, "movers = 0", ["node.movers is 0 but must be a whole number from 1 to 16", "do is 1"]),
        (NODE, "movers = true", ["node.movers is True"]),
        (NODE, "movers = 1.5", ["a whole number", "do is 1"]),
        (NODE, 'runtime_dir = "run"', ["node.runtime_dir", "an absolute path, one that begins with '/'"]),
        (NODE, 'listen = ["unix://run/s"]', ["an absolute path", '"unix:///run/forebay/gateway.sock"']),
        (CACHE, 'capacity = "1 zebra"', ['cache.capacity is "1 zebra"', '"512MiB"']),
        (CACHE, "capacity = -1", ["cache.capacity is -1"]),
        (CACHE, 'capacity = "1MiB"', ["at least four chunks", '"16MiB"']),
        (CACHE, "chunk_size = 3000000", ["cache.chunk_size is 3000000 but must be a power of two", '"2MiB"']),
        (CACHE, "chunk_size = 4096", ['from "64KiB" to "64MiB"', 'do is "64KiB"']),
        (CACHE, 'chunk_size = "1GiB"', ['do is "64MiB"']),
        (CACHE, "soft = 60", ["cache.soft is 60 but must be a fraction", "do is 0.6"]),
        (CACHE, "soft = 0.9", ["cache.soft is 0.9 but must be below cache.hard, which is 0.9"]),
        (CACHE, "hard = 0.96", ["cache.hard is 0.96 but must be at most cache.refuse, which is 0.95"]),
        (CACHE, "reopen = 0.95", ["cache.reopen is 0.95 but must be below cache.refuse"]),
        (CACHE, 'direct_io = "on"', ['cache.direct_io is "on" but must be one of "auto", "off"']),
        (CACHE, "soft = nan", ["cache.soft is nan"]),
        (TIER, "required = 1", ['tier.required of tier "pfs" is 1 but must be true or false', "do is true"]),
        (TIER, "concurrency = 0", ["whole number from 1 to 256"]),
        (TIER, 'bucket = "b-1"', ['tier.bucket of tier "pfs" is a key of kind \'s3\'; this tier is "posix"']),
        (TIER, "bandwidth = 10", ["tier.bandwidth", 'at least "64KiB"']),
        (MINIMAL + S3 + "{}\n", 'path = "/x"', ["tier.path of tier \"object\" is a key of kind 'posix'"]),
        (MINIMAL + S3 + "{}\n", 'endpoint = "s3.example.com"', ["tier.endpoint", '"https://s3.example.com"']),
        (MINIMAL + S3 + "{}\n", 'endpoint = "https://key:secret@h"', ["credentials", 'do is "https://h"']),
        (MINIMAL + S3 + "{}\n", 'endpoint = "http://[::1"', ["tier.endpoint"]),
        (MINIMAL + S3 + "{}\n", 'prefix = "/a//b/"', ["tier.prefix", 'do is "a/b"']),
        (MINIMAL + S3 + "{}\n", 'part_size = "1MiB"', ["tier.part_size", '"5MiB"']),
        (LOG, 'level = "INFO"', ['log.level is "INFO" but must be one of', 'do is "info"']),
        (LOG, 'format = "xml"', ['log.format is "xml"']),
    ],
)
def test_a_bad_value_is_told_with_key_value_rule_and_a_better_one(form: str, line: str, words: list[str]) -> None:
    message = refused(form.format(line))
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (MINIMAL.replace("[cache]", "[cahce]"), ["cahce", "nearest known section is [cache]"]),
        (MINIMAL.replace('"/c"', '"/c"\ncapcity = 1'), ["unknown key cache.capcity; the nearest known key is cache.capacity"]),
        (MINIMAL.replace('"/c"', '"/c"\nlisten = 1'), ["unknown key cache.listen; the nearest known key is node.listen"]),
        (MINIMAL + "pth = 1\n", ['unknown key tier.pth of tier "pfs"; the nearest known key is tier.path']),
        ("path = 1\n" + MINIMAL, ["unknown section or key path at the top"]),
        (MINIMAL.replace("[[tier]]", "[tier]"), ["begin each with [[tier]]"]),
        (MINIMAL.replace("[[tier]]", "[[tiers]]"), ["unknown section or key tiers", "nearest known section is [[tier]]"]),
        ("cache = 1", ["cache is 1 but must be a table; begin it with [cache]"]),
        ("[cache]\npath = \n", ["not TOML", "line 2, column 8"]),
    ],
)
def test_unknown_and_misplaced_names_get_the_nearest_known(text: str, words: list[str]) -> None:
    message = refused(text)
    for word in words:
        assert word in message


@pytest.mark.parametrize("section", ["[peers]", "[security]"])
def test_later_sections_are_refused_by_name(section: str) -> None:
    assert f"section [{section.strip('[]')}] is not available in this release" in refused(f"{section}\n{MINIMAL}")


@pytest.mark.parametrize(
    ("form", "line", "key"),
    [
        (TIER, "stripe = 4", "tier.stripe"),
    ],
)
def test_later_keys_are_refused_by_name(form: str, line: str, key: str) -> None:
    message = refused(form.format(line))
    assert key in message
    assert "is not available in this release" in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[cache]\n", "cache.path is missing"),
        ('[cache]\npath = "/c"\n', "no tier is required"),
        (MINIMAL + "required = false\n", "no tier is required"),
        (MINIMAL + '[[tier]]\nkind = "memory"\n', "tier.name of tier 2 is missing"),
        (MINIMAL + '[[tier]]\nname = "m"\n', "tier.kind of tier 2 is missing"),
        (
            MINIMAL + '[[tier]]\nname = "m"\nkind = "posix"\n',
            "tier.path of tier \"m\" is missing; a tier of kind 'posix' needs it",
        ),
        (MINIMAL + '[[tier]]\nname = "m"\nkind = "s3"\n', 'tier.bucket of tier "m" is missing'),
        (MINIMAL + '[[tier]]\nname = "pfs"\nkind = "memory"\n', 'must be unique; the nearest that would do is "pfs-2"'),
        (MINIMAL.replace('"/p"', '"/c/p"'), "apart from cache.path, which is '/c'"),
        (MINIMAL.replace('"/c"', '"/p/c"'), "apart from cache.path, which is '/p/c'"),
        (MINIMAL + '[[tier]]\nname = "q"\nkind = "posix"\npath = "/p"\n', "apart from tier.path of tier 'pfs'"),
    ],
)
def test_rules_across_keys(text: str, words: str) -> None:
    assert words in refused(text)


@pytest.mark.parametrize("path", ["cache", "./cache", "~/cache", "$HOME/cache"])
def test_no_path_is_made_up_for_a_relative_one(path: str) -> None:
    message = refused(MINIMAL.replace('"/c"', f'"{path}"'))
    assert f'cache.path is "{path}" but must be an absolute path' in message and "nearest" not in message


def test_siblings_with_a_common_beginning_are_not_nested() -> None:
    assert load(MINIMAL.replace('"/p"', '"/cc"')).tiers[0].path == "/cc"


@pytest.mark.parametrize("name", ["cache", "peer", "all", "any", "auto", "", "-a", "A", "a b", "ä", "a/b"])
def test_tier_names_that_are_refused(name: str) -> None:
    assert "tier.name" in refused(MINIMAL.replace('"pfs"', f'"{name}"'))


def test_overrides() -> None:
    config = load(
        MINIMAL.replace('"pfs"', '"pfs-1"'),
        FOREBAY_NODE_ID="other",
        FOREBAY_NODE_LISTEN="unix:///a/b.sock, 127.0.0.1:0",
        FOREBAY_NODE_MOVERS="2",
        FOREBAY_NODE_DRAIN_TIMEOUT="1500ms",
        FOREBAY_CACHE_CAPACITY="1073741824",
        FOREBAY_CACHE_SOFT="0.5",
        FOREBAY_TIER_PFS_1_PATH="/q",
        FOREBAY_TIER_PFS_1_REQUIRED="TRUE",
        FOREBAY_LOG_LEVEL="debug",
        FOREBAY_LOG_FORMAT="",
    )
    assert (config.node.id, config.node.movers, config.node.drain_timeout) == ("other", 2, 1.5)
    assert (config.node.listen, config.node.runtime_dir) == (("unix:///a/b.sock", "127.0.0.1:0"), "/a")
    assert (config.cache.capacity, config.cache.soft) == (1 << 30, 0.5)
    assert (config.tiers[0].path, config.log.level, config.log.format) == ("/q", "debug", "text")


def test_a_bad_override_names_variable_and_key() -> None:
    assert 'cache.capacity (from FOREBAY_CACHE_CAPACITY) is "lots" but must be' in refused(FOREBAY_CACHE_CAPACITY="lots")
    assert "cache.capacity (from FOREBAY_CACHE_CAPACITY) is 1 but must be at least four chunks" in refused(
        FOREBAY_CACHE_CAPACITY="1"
    )


@pytest.mark.parametrize(
    ("variable", "words"),
    [
        ("FOREBAY_CACHE_CAPACTY", "nearest known one is FOREBAY_CACHE_CAPACITY"),
        ("FOREBAY_NODE_NAME", "unknown environment variable FOREBAY_NODE_NAME"),
        ("FOREBAY_TIER_PSF_PATH", "nearest known one is FOREBAY_TIER_PFS_PATH"),
        ("FOREBAY_TIER_PFS_NAME", "unknown environment variable"),
        ("FOREBAY_TIER_PFS_STRIPE", "tier.stripe is not available in this release"),
        ("FOREBAY_POLICY_0_QUOTA", "unknown environment variable FOREBAY_POLICY_0_QUOTA"),
    ],
)
def test_unknown_overrides(variable: str, words: str) -> None:
    assert words in refused(**{variable: "1"})


def test_client_variables_are_no_overrides() -> None:
    names = ("ADDRESS", "SESSION", "FAILPOINTS", "CONFIG", "SERVICE_HOST", "PORT")
    assert load(**{f"FOREBAY_{name}": "x" for name in names}) == load()


def test_variables_that_mean_nothing_are_named_with_the_nearest_that_does() -> None:
    config = load(MINIMAL)
    assert unknown_variables(config, {"FOREBAY_CACHE_SOFT": "0.5", "FOREBAY_ADDRESS": "x", "PATH": "/bin"}) == []
    strange = {"FOREBAY_ADRESS": "x", "FOREBAY_CACH_SOFT": "0.5", "FOREBAY_TIRE_PFS_PATH": "/p"}
    assert unknown_variables(config, strange) == [
        ("FOREBAY_ADRESS", "FOREBAY_ADDRESS"),
        ("FOREBAY_CACH_SOFT", "FOREBAY_CACHE_SOFT"),
        ("FOREBAY_TIRE_PFS_PATH", "FOREBAY_TIER_PFS_PATH"),
    ]


@pytest.mark.expected_logs("FOREBAY_ADRESS is not known")
def test_serve_warns_of_them(monkeypatch: pytest.MonkeyPatch, expected_logs: Any) -> None:
    monkeypatch.setattr(serve.uvloop, "run", lambda serving: serving.close() or 0)
    monkeypatch.setattr(serve, "setup_logging", lambda level, form: None)
    monkeypatch.setenv("FOREBAY_ADRESS", "unix:///x")
    assert serve.main(None) == 0
    assert ["FOREBAY_ADDRESS" in record.getMessage() for record in expected_logs.records] == [True]


def test_two_tiers_with_one_variable_name() -> None:
    text = MINIMAL + '[[tier]]\nname = "a-b"\nkind = "memory"\n[[tier]]\nname = "a_b"\nkind = "memory"\n'
    assert "two tiers share the environment variable FOREBAY_TIER_A_B_" in refused(text)


segments = st.text(st.characters(exclude_categories=("Cc", "Cs"), exclude_characters="/"), min_size=1, max_size=9).filter(
    lambda text: text not in (".", "..")
)


@st.composite
def configurations(draw: st.DrawFn) -> Config:
    """Through the environment, so that values need no TOML quoting here."""
    env = {
        "FOREBAY_NODE_ABANDON_AFTER": repr(draw(st.integers(1, 10**9)) / 1000 + 1),
        "FOREBAY_CACHE_PATH": f"/c/{draw(segments)}",
        "FOREBAY_CACHE_CAPACITY": str(draw(st.integers(1 << 28, 1 << 60))),
        "FOREBAY_CACHE_CHUNK_SIZE": str(1 << draw(st.integers(16, 26))),
        "FOREBAY_TIER_PFS_PATH": f"/p/{draw(segments)}",
        "FOREBAY_TIER_OBJECT_PREFIX": draw(segments),
        "FOREBAY_TIER_OBJECT_REGION": draw(segments),
        "FOREBAY_TIER_OBJECT_BANDWIDTH": str(draw(st.integers(1 << 16, 1 << 40))),
        "FOREBAY_TIER_OBJECT_SIGN_PAYLOAD": draw(st.sampled_from(["true", "false"])),
    }
    return load(MINIMAL + S3, **env)


@given(configurations())
@example(load(MINIMAL + S3, FOREBAY_CACHE_MAX_DIRTY_AGE="0.00000000012"))
@example(load(MINIMAL + S3, FOREBAY_TIER_PFS_PATH='/p/"\\\u2028', FOREBAY_CACHE_SOFT="0.1"))
def test_rendered_toml_reads_back_equal(config: Config) -> None:
    assert load_config(render_toml(config), {}, "rendered") == config


def test_rendered_durations_are_as_people_write_them() -> None:
    rendered = render_toml(load(f"[node]\nabandon_after = 90.5\n{MINIMAL}"))
    for line in ('scrub_every = "7d"', 'abandon_after = "90.5s"', 'complete_within = "1h"', 'max_dirty_age = "0s"'):
        assert f"\n{line}\n" in rendered


toml_lines = st.lists(
    st.sampled_from(
        [
            "[cache]",
            "[node]",
            "[[tier]]",
            "[tier]",
            "[log]",
            "[x.y]",
            'path = "/c"',
            'name = "pfs"',
            'kind = "posix"',
            'kind = "s3"',
            "capacity = 0x" + "f" * 6000,
            "soft = 1e308",
            "movers = -0",
            "listen = [[[1]]]",
            "level = {a = 1}",
            "cache.path = 1",
            "abandon_after = 1979-05-27",
            "required = 0x" + "f" * 300,
            'id = "\\uFFFF"',
            'bucket = ["a"]',
            "hard = -1",
            "tier = [1]",
            "abandon_after = 0x" + "f" * 300,
            "iops = 9223372036854775808",
            'endpoint = "http://[::1"',
            "kind = []",
            "name = {}",
            'endpoint = "http://h:99999"',
            'path = "/"',
            'listen = ["unix://"]',
            "'' = 1",
            '"\\u0000" = 1',
            "catalog_reserve = 1e400",
        ]
    ),
    max_size=12,
).map("\n".join)


@given(st.text() | toml_lines, st.dictionaries(st.text() | st.text().map(lambda text: f"FOREBAY_TIER_{text}"), st.text()))
@example("[cache]\ncapacity = " + "9" * 5000, {})
@example("a = " + "[" * 5000, {})
def test_any_text_gives_a_configuration_or_a_config_error(text: str, env: dict[str, str]) -> None:
    try:
        load_config(text, env, "fuzz", hostname="n")
    except ConfigError as error:
        message = str(error)
        assert len(message) < 2000
        assert not re.search(r"[\x00-\x1f]", message.removesuffix("source=fuzz")) or message.startswith("not TOML")


@given(
    st.text(),
    st.sampled_from(["FOREBAY_NODE_LISTEN", "FOREBAY_NODE_ADVERTISE", "FOREBAY_CACHE_CAPACITY", "FOREBAY_CACHE_PATH"]),
)
def test_any_override_text_gives_a_configuration_or_a_config_error(text: str, variable: str) -> None:
    try:
        load(**{variable: text})
    except ConfigError as error:
        assert variable in str(error) or "apart from cache.path" in str(error)


def test_the_table_names_every_key_once() -> None:
    table = config_table()
    rendered = render_toml(load(MINIMAL + S3))
    for key in re.findall(r"^(\w+) = ", rendered, re.MULTILINE):
        assert f".{key}` |" in table
    rows = [line.split(" | ")[0] for line in table.splitlines()[2:]]
    assert len(rows) == len(set(rows))
    assert all(line.count("|") == 6 and not line.endswith("|  |") for line in table.splitlines())
