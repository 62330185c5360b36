"""The example configurations in deploy/ are loadable, and show what they claim to show."""

from pathlib import Path

from forebay_gateway.core.config import load_config
from forebay_gateway.core.config_sections import Config
from forebay_gateway.core.exposure import unguarded

ROOT = Path(__file__).parents[2]


def load(name: str) -> Config:
    return load_config((ROOT / "deploy" / name).read_text(), {}, name, uid=7, hostname="node-1")


def test_workstation() -> None:
    config = load("workstation.toml")
    assert config.cache.capacity == 200 << 30
    assert [(tier.name, tier.kind, tier.bandwidth) for tier in config.tiers] == [("pfs", "posix", 1_000_000_000)]


def test_lustre_and_s3() -> None:
    config = load("lustre-s3.toml")
    assert [(tier.name, tier.kind, tier.required) for tier in config.tiers] == [
        ("lustre", "posix", True),
        ("object", "s3", True),
    ]
    assert config.cache.chunk_size == 8 << 20
    assert config.node.takeover_after == 120.0


def test_every_example_is_tested() -> None:
    assert {path.name for path in (ROOT / "deploy").glob("*.toml")} == {"workstation.toml", "lustre-s3.toml"}


def test_no_example_listens_on_a_port() -> None:
    for path in (ROOT / "deploy").glob("*.toml"):
        assert unguarded(load(path.name).node.listen) == "", path.name


def test_the_unit_gives_the_gateway_time_to_end() -> None:
    unit = (ROOT / "deploy" / "forebay.service").read_text()
    (timeout_line,) = [line for line in unit.splitlines() if line.startswith("TimeoutStopSec=")]
    longest_s = max(load(name).node.drain_timeout for name in ("workstation.toml", "lustre-s3.toml"))
    assert float(timeout_line.removeprefix("TimeoutStopSec=").removesuffix("s")) > longest_s + 5
