"""[[policy]], [[retain]] and the cadence of a tier: what they mean, and what is refused before anything runs."""

import pytest

from forebay_gateway.core.config import ConfigError, load_config, render_toml
from forebay_gateway.core.config_sections import Cadence, Config, PolicyConfig, RetainConfig
from forebay_gateway.core.policy import fits, policy_of

BASE = """
[cache]
path = "/c"
[[tier]]
name = "pfs"
kind = "posix"
path = "/p"
[[tier]]
name = "object"
kind = "s3"
bucket = "bucket-1"
required = false
"""


def load(text: str, **env: str) -> Config:
    return load_config(BASE + text, env, "test.toml", uid=0, hostname="node-1")


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text)
    return str(caught.value)


@pytest.mark.parametrize(
    ("written", "cadence"),
    [("5", Cadence(5)), ('"30m"', Cadence(1, 1800.0)), ('"2"', Cadence(2)), ("1", Cadence())],
)
def test_a_cadence_is_a_number_or_an_interval(written: str, cadence: Cadence) -> None:
    config = load(f"every = {written}\n")
    assert config.tiers[1].every == cadence
    assert load_config(render_toml(config), {}, "again", uid=0, hostname="node-1") == config


def test_a_cadence_from_the_environment() -> None:
    config = load("", FOREBAY_TIER_OBJECT_EVERY="3", FOREBAY_TIER_PFS_EVERY="10m")
    assert [tier.every for tier in config.tiers] == [Cadence(1, 600.0), Cadence(3)]


@pytest.mark.parametrize("written", ["0", "-3", "1.5", '"0"', '"0s"', '"often"', "true", '"40d"', "[]"])
def test_a_cadence_that_means_nothing(written: str) -> None:
    message = refused(f"every = {written}\n")
    assert "tier.every" in message
    assert "must be" in message


def test_policies_and_rules_are_read_and_written_again() -> None:
    config = load(
        """
[[policy]]
run = "team-a/**"
tiers = ["pfs"]
every = 10
skip = true
class = "final"
quota = "10GiB"
[[policy]]
run = "scratch/*"
transient = true
[[retain]]
run = "**"
tier = "pfs"
keep_last = 3
keep_every = 1000
keep_for = "2d"
"""
    )
    first, second = config.policies
    wanted = PolicyConfig(run="team-a/**", tiers=("pfs",), every=Cadence(10), skip=True, class_="final", quota=10 << 30)
    assert first == wanted
    assert second == PolicyConfig(run="scratch/*", transient=True)
    assert config.retain == (RetainConfig(run="**", tier="pfs", keep_last=3, keep_every=1000, keep_for=172800.0),)
    assert load_config(render_toml(config), {}, "again", uid=0, hostname="node-1") == config


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[policy]]\nquota = 1\n", ["policy.quota", "at least"]),
        ("[[policy]]\nskip = true\n", ["policy.run of policy 1 is missing"]),
        ('[[policy]]\nrun = "a//b"\n', ["policy.run", '"a/b"']),
        ('[[policy]]\nrun = "a"\nevery = 0\n', ["policy.every", "from 1 to 1000000", "nearest that would do is 1"]),
        ('[[policy]]\nrun = "a"\ntiers = ["psf"]\n', ["policy.tiers", "pfs, object", 'nearest that would do is "pfs"']),
        ('[[policy]]\nrun = "a"\ntiers = []\n', ["policy.tiers", "transient = true"]),
        ('[[policy]]\nrun = "a"\ntiers = ["object"]\n', ["at least one tier that is required", '["pfs", "object"]']),
        ('[[policy]]\nrun = "a"\ntransient = true\nevery = 2\n', ["policy.every", "transient"]),
        ('[[policy]]\nrun = "a"\ntransient = true\nquota = "1GiB"\n', ["policy.quota", "transient"]),
        ('[[policy]]\nrun = "a"\nclass = "urgent"\n', ["policy.class", '"periodic", "final"']),
        ('[[policy]]\nrun = "a"\n[[policy]]\nrun = "a"\n', ["two policies", '"a"']),
        ('[[retain]]\nrun = "a"\n', ["nothing would stay", "keep_last = 1"]),
        ('[[retain]]\nrun = "a"\nkeep_last = 0\n', ["retain.keep_last", "nearest that would do is 1"]),
        ('[[retain]]\nrun = "a"\ntier = "x"\nkeep_last = 1\n', ["retain.tier", "pfs, object"]),
        ("[[retain]]\nkeep_last = 1\n", ["retain.run of retain 1 is missing"]),
        ('[[retain]]\nrun = "a"\nkeep_last = 1\n[[retain]]\nrun = "a"\nkeep_last = 2\n', ["two rules"]),
        ("[policy]\nrun = 1\n", ["begin each with [[policy]]"]),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_nearest_that_would(text: str, words: list[str]) -> None:
    message = refused(text)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("glob", "run", "matches"),
    [
        ("**", "a/b/c", True),
        ("a/*", "a/b", True),
        ("a/*", "a/b/c", False),
        ("a/**", "a", True),
        ("a/**/d", "a/b/c/d", True),
        ("*/b?", "a/b1", True),
        ("a", "A", False),
        ("a/*", "a", False),
    ],
)
def test_globs(glob: str, run: str, matches: bool) -> None:
    assert fits(glob, run) is matches


def test_the_first_policy_that_fits_counts() -> None:
    policies = (PolicyConfig(run="a/*", skip=True), PolicyConfig(run="**", transient=True))
    assert policy_of("a/b", policies).skip
    assert policy_of("b", policies).transient
    assert policy_of("b", policies[:1]) == PolicyConfig(run="**")
