"""The directory of the socket to serve on: made, and refused where it cannot be this user's own."""

import os
from pathlib import Path

import pytest

from forebay_gateway.core.errors import StartupError
from forebay_gateway.rpc import listen
from forebay_gateway.rpc.listen import claim_socket


@pytest.fixture
def fallback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The socket of a user without a session."""
    path = tmp_path / "forebay-7" / "gateway.sock"
    monkeypatch.setattr(listen, "fallback_socket", lambda uid: str(path))
    return path


def test_the_fallbacks_directory_is_made_for_this_user_alone(fallback: Path) -> None:
    old = os.umask(0)
    try:
        for _ in range(2):
            claim_socket(fallback)
    finally:
        os.umask(old)
    assert fallback.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("what", ["open", "link", "file", "other"])
def test_one_that_others_may_have_made_is_refused(fallback: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if what == "open":
        fallback.parent.mkdir()
        fallback.parent.chmod(0o777)
    elif what == "link":
        (fallback.parent.parent / "theirs").mkdir(0o700)
        fallback.parent.symlink_to("theirs")
    elif what == "file":
        fallback.parent.write_text("")
    else:
        fallback.parent.mkdir(0o700)
        me = os.getuid()
        monkeypatch.setattr(listen.os, "getuid", lambda: me + 1)
    with pytest.raises(StartupError, match=r"cannot use the default socket: .*set XDG_RUNTIME_DIR or node\.listen"):
        claim_socket(fallback)
    assert not fallback.exists()


def test_other_directories_are_made_as_ever(tmp_path: Path) -> None:
    claim_socket(tmp_path / "a" / "b" / "g.sock")
    assert (tmp_path / "a" / "b").is_dir()


def test_a_directory_that_cannot_be_made_is_told_with_the_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        StartupError, match=r"cannot make the socket .*/file/x/g\.sock: Not a directory: .*FOREBAY_NODE_LISTEN=unix"
    ):
        claim_socket(tmp_path / "file" / "x" / "g.sock")
