"""Names: each rule, its message, and that what passes is safe as a path."""

import hashlib
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forebay_wire.names import InvalidName, check_run, check_session, check_shard_name, check_step, session8

PATH_RULES = [
    ("", "is empty"),
    ("a" * 256, "segment longer than 255 bytes"),
    ("ä" * 128, "segment longer than 255 bytes"),
    ("/".join(["a" * 200] * 6), "at most 1024"),
    ("a\x00b", "control character U+0000"),
    ("a\nb", "control character U+000A"),
    ("a\x7f", "control character U+007F"),
    ("a\x85", "control character U+0085"),
    ("/a", "empty segment"),
    ("a/", "empty segment"),
    ("a//b", "empty segment"),
    (".", "the segment '.'"),
    ("a/../b", "the segment '..'"),
    (".forebay", "reserved"),
    ("a/.forebayx", "reserved"),
    ("a\ud800", "lone surrogate"),
]


@pytest.mark.parametrize(("name", "rule"), PATH_RULES)
@pytest.mark.parametrize(("check", "kind"), [(check_run, "run"), (check_shard_name, "shard name")])
def test_each_rule_is_told(check: Callable[[str], str], kind: str, name: str, rule: str) -> None:
    with pytest.raises(InvalidName) as caught:
        check(name)
    assert str(caught.value).startswith(kind)
    assert rule in str(caught.value)
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize(
    "name", ["a", "team-a/llama-70b", ".metadata", "__0_0.distcp", "ä/ö", "a" * 255, "a b", "..a", "a\\b", "x.forebay"]
)
def test_good_names(name: str) -> None:
    assert check_run(name) == check_shard_name(name) == name


@pytest.mark.parametrize("run", ["step-1", "a/step-000000000001", "step-²"])
def test_a_run_is_no_step_directory(run: str) -> None:
    with pytest.raises(InvalidName, match="step directory"):
        check_run(run)
    assert check_shard_name(run) == run


@pytest.mark.parametrize("step", [-1, 2**64, True, False])
def test_bad_steps(step: int) -> None:
    with pytest.raises(InvalidName, match="unsigned 64-bit"):
        check_step(step)


@pytest.mark.parametrize("step", [0, 1, 2**64 - 1])
def test_good_steps(step: int) -> None:
    assert check_step(step) == step


@pytest.mark.parametrize("session", ["", "a" * 256, "a\n", "\ud800"])
def test_bad_sessions(session: str) -> None:
    with pytest.raises(InvalidName, match=r"^session"):
        check_session(session)


def test_session8() -> None:
    assert check_session("job/1 restart 2") == "job/1 restart 2"
    assert session8("job-1") == hashlib.sha256(b"job-1").hexdigest()[:8]


@given(st.text() | st.lists(st.text(max_size=3) | st.sampled_from([".", "..", ".forebay", "step-1"]), max_size=5).map("/".join))
@example("a" * 255 + "/" + "b" * 255)
def test_what_passes_is_safe_as_a_path(name: str) -> None:
    for check in (check_run, check_shard_name):
        try:
            check(name)
        except InvalidName as error:
            assert str(error).isprintable()  # a message stands in logs and terminals
            continue
        assert 1 <= len(name.encode()) <= 1024
        for segment in name.split("/"):
            assert segment not in ("", ".", "..")
            assert not segment.startswith(".forebay")
            assert len(segment.encode()) <= 255
            assert "\x00" not in segment
