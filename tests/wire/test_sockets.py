"""The default sockets: which one is whose, and what may be trusted below /tmp."""

import os
from pathlib import Path

import pytest

from forebay_wire import sockets
from forebay_wire.sockets import fallback_socket, may_use_system_socket, not_private, session_socket


def test_paths() -> None:
    assert session_socket({"XDG_RUNTIME_DIR": "/run/user/7/"}) == "/run/user/7/forebay/gateway.sock"
    assert session_socket({"XDG_RUNTIME_DIR": "relative"}) == session_socket({}) == ""
    assert fallback_socket(7) == "/tmp/forebay-7/gateway.sock"


def test_who_may_make_the_systems_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(sockets.os, "access", lambda path, mode, effective_ids: asked.append(path) or path == tmp_path / "made")
    monkeypatch.setattr(sockets, "SYSTEM_SOCKET", str(tmp_path / "made" / "gateway.sock"))
    assert not may_use_system_socket()  # the directory above it is not this user's to write
    (tmp_path / "made").mkdir()  # by a unit
    assert may_use_system_socket()
    assert asked == [tmp_path, tmp_path / "made"]


def test_what_is_this_users_alone(tmp_path: Path) -> None:
    me = os.geteuid()
    private = tmp_path / "private"
    private.mkdir(0o700)
    assert not_private(private, me) == ""
    assert f"is of uid {me}, not of this user (uid {me + 1})" in not_private(private, me + 1)
    (tmp_path / "link").symlink_to(private)
    assert "no directory" in not_private(tmp_path / "link", me)
    private.chmod(0o710)
    assert "open to others (mode 710, not 700)" in not_private(private, me)
    with pytest.raises(FileNotFoundError):
        not_private(tmp_path / "none", me)
