"""The mark of a tier's root: `.forebay/tier.json`. It tells an empty tier from a mount point without its file system.

Owns making, finding and comparing it. Blocking: runs in the tier's threads.
"""

import contextlib
import json
import logging
import os
import secrets
from pathlib import Path

from forebay_gateway.base import durable
from forebay_gateway.core.errors import Unavailable
from forebay_gateway.core.layout import CONTROL_DIR

log = logging.getLogger("forebay.posix")

MADE = "directory_made"  # by the gateway: nobody had mounted anything there, nor made it for the tier
_NAME = "tier.json"
# What a fresh file system, or another gateway in the middle of the same act, may have put there.
_EMPTY_ENOUGH = frozenset({CONTROL_DIR, "lost+found", ".snapshot"})


class Marker:
    """`id` is None until the marker was first seen; from then on only the same one counts."""

    def __init__(self, tier: str, root: Path, known_id: str | None = None, temp_tag: str = "") -> None:
        self._tier = tier
        self._root = root
        self._path = root / CONTROL_DIR / _NAME
        self.id = known_id
        self._temp_tag = temp_tag

    def check(self) -> None:
        """Raise Unavailable unless the root is there with its marker."""
        found = self._read()
        if found is None:
            raise Unavailable(self._away(), tier=self._tier, path=self._root)
        if self.id is None:
            self.id = found
        elif found != self.id:
            raise Unavailable(
                "another tier's root stands at this path", tier=self._tier, path=self._root, expected=self.id, found=found
            )

    def _away(self) -> str:
        sentence = "the tier's root is away: no .forebay/tier.json below it"
        if not self.id:
            return sentence
        return f'{sentence}; mount it, or to begin anew at this path write {{"id": "{self.id}"}} into that file'

    def adopt(self) -> None:
        """Like check, but first make the marker where this process has not seen one and the directory is empty or new."""
        if self.id is None and self._read() is None:
            self._make()
        self.check()

    def _read(self) -> str | None:
        try:
            body = json.loads(self._path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError:
            return ""  # an operator's own empty file adopts a directory too
        return str(body.get("id", "")) if isinstance(body, dict) else ""

    def _make(self) -> None:
        made = False
        if not self._root.exists() and self._root.parent.is_dir():
            with contextlib.suppress(FileExistsError):
                self._root.mkdir()
                made = True
            durable.sync_dir(self._root.parent)
        if not self._root.is_dir():
            what = (
                "a file is in the place of the tier's directory" if self._root.exists() else "the tier's directory is not there"
            )
            raise Unavailable(what, tier=self._tier, path=self._root)
        others = {entry.name for entry in self._root.iterdir()} - _EMPTY_ENOUGH
        if others:
            raise Unavailable(
                "the directory holds files but no .forebay/tier.json: not mounted, or not this tier's; to adopt it as it is, "
                "create that file",
                tier=self._tier,
                path=self._root,
                example=min(others),
            )
        durable.make_dirs(self._path.parent, self._root)
        body = json.dumps({"format": "forebay.tier", "version": 1, "id": secrets.token_hex(8), MADE: made}).encode()
        if made:
            device = self._root.stat().st_dev
            log.warning(
                "the tier's directory was not there, and was made: if a file system belongs at this path, stop, remove the "
                "directory and mount it tier=%s path=%s device=%s:%s",
                self._tier,
                self._root,
                os.major(device),
                os.minor(device),
            )
        with contextlib.suppress(FileExistsError):  # another gateway was faster; its marker is as good
            durable.create_file(self._path, body, f"{self._temp_tag}{secrets.token_hex(8)}")
