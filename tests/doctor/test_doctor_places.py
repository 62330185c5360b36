"""What the doctor says of a tier's directory before it writes anything."""

import json
from pathlib import Path

import pytest

from forebay_gateway.cache.mounts import Mount
from forebay_gateway.doctor import places
from forebay_gateway.doctor.places import Place, look


@pytest.mark.parametrize(
    ("made", "point", "status"), [(True, "/", "WARN"), (True, "/mnt", "OK"), (False, "/", "OK"), (None, "/", "OK")]
)
def test_a_directory_that_a_gateway_made_on_the_root_file_system_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: bool | None, point: str, status: str
) -> None:
    (tmp_path / ".forebay").mkdir()
    (tmp_path / ".forebay" / "tier.json").write_text("" if made is None else json.dumps({"id": "x", "directory_made": made}))
    real = places.find_mount(tmp_path)
    monkeypatch.setattr(places, "find_mount", lambda path: Mount(Path(point), real.file_system, real.source, real.options))
    place = Place("pfs", "posix", tmp_path)
    look(place)
    (check,) = place.checks
    assert (check.status, place.marked, place.usable) == (status, True, True)
    assert ("mount it" in check.do) is (status == "WARN")
    assert (f"on {place.device or 'an unknown device'} ({point})" in check.value) is (made is True)
