"""What a start and `config check` see of directories before anything is made."""

import errno
import logging
import os
import shutil
from pathlib import Path

import pytest

from conftest import ExpectedLogs
from forebay_gateway.core.config import load_config
from forebay_gateway.core.config_sections import Config
from forebay_gateway.core.errors import StartupError
from forebay_gateway.paths import preflight
from forebay_gateway.paths.preflight import check_places, open_cache


def config(cache: Path, tier: Path, keys: str = "") -> Config:
    text = f'[cache]\npath = "{cache}"\n{keys}\n[[tier]]\nname = "pfs"\nkind = "posix"\npath = "{tier}"\n'
    return load_config(text, {}, "test", uid=0, hostname="test")


def test_directories_that_are_there_and_that_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "pfs").mkdir()
    check_places(config(tmp_path / "cache", tmp_path / "pfs"))
    check_places(config(tmp_path / "deep" / "cache", tmp_path / "mounted-later" / "pfs"))
    assert [path.name for path in tmp_path.iterdir()] == ["pfs"]  # nothing is made


def test_more_than_the_disk_has(tmp_path: Path) -> None:
    more = shutil.disk_usage(tmp_path).total + 1
    with pytest.raises(StartupError, match=r"cache\.capacity is .* (GiB|TiB), and the disk of cache\.path has"):
        check_places(config(tmp_path / "cache", tmp_path / "pfs", f'capacity = "{more}B"'))


def test_files_in_the_way(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("precious")
    for path, words in ((file, "is a file"), (file / "below", f"lies below {file}, a file")):
        with pytest.raises(StartupError, match=rf"cache\.path {path} {words}"):
            check_places(config(path, tmp_path / "pfs"))
        with pytest.raises(StartupError, match=rf"tier\.path of tier 'pfs' {path} {words}"):
            check_places(config(tmp_path / "cache", path))


def test_links_that_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(StartupError, match=r"cache\.path .*/loop/cache cannot be reached: Too many levels"):
        check_places(config(tmp_path / "loop" / "cache", tmp_path / "pfs"))
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(StartupError, match=r"cannot be made: .*/dangling is a link that leads nowhere"):
        check_places(config(tmp_path / "dangling", tmp_path / "pfs"))


def test_no_right_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def refuses(path: Path, mode: int, *, effective_ids: bool) -> bool:
        asked.append(path)
        assert mode & os.W_OK and effective_ids
        return False

    monkeypatch.setattr(preflight.os, "access", refuses)  # root may write everywhere
    with pytest.raises(StartupError, match=rf"cache\.path .*/new/cache cannot be made: this user may not write in {tmp_path};"):
        check_places(config(tmp_path / "new" / "cache", tmp_path / "pfs"))
    (tmp_path / "cache").mkdir()
    with pytest.raises(StartupError, match=r"is not this user's to write; give uid \d+ the directory"):
        check_places(config(tmp_path / "cache", tmp_path / "pfs"))
    assert asked == [tmp_path, tmp_path / "cache"]


def test_no_right_to_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(path: Path) -> os.stat_result:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refuses)  # root may look everywhere
    with pytest.raises(StartupError, match=r"cannot be reached: this user \(uid \d+\) may not look into a directory above it"):
        check_places(config(tmp_path / "cache", tmp_path / "pfs"))


def test_a_cache_that_was_made_is_told_with_its_device(tmp_path: Path, expected_logs: ExpectedLogs) -> None:
    wanted = config(tmp_path / "cache", tmp_path / "pfs")
    for _ in range(2):
        cache, capacity = open_cache(wanted)
        cache.release()
        assert 0 < capacity < shutil.disk_usage(tmp_path).total
    (told,) = expected_logs.records  # at the first start alone
    device = (tmp_path / "cache").stat().st_dev
    assert told.levelno == logging.WARNING
    assert f"path={tmp_path / 'cache'} device={os.major(device)}:{os.minor(device)}" in told.getMessage()
