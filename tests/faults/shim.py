"""The LD_PRELOAD layer from the tests' side: built once, and steered through a file that its processes map.

Owns the layout of `struct control` in posix_shim.c. Standard library only: the child process of the cells imports it too.
"""

import errno
import mmap
import shutil
import struct
import subprocess
from pathlib import Path

CALLS = ("open", "pwrite", "fsync", "pread", "rename", "link", "unlink", "dirfsync")
SPECIAL = {"hang": -1, "short": -2, "flip": -3}
FOREVER = 1 << 30
_HEAD = struct.Struct("<iiii")
_SIZE = _HEAD.size + 512 + 128


def build(directory: Path) -> Path | None:
    """The shared object; None where there is no compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return None
    target = directory / "posix_shim.so"
    source = Path(__file__).with_name("posix_shim.c")
    command = [compiler, "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(target), str(source), "-ldl"]
    subprocess.run(command, check=True)
    return target


class Shim:
    """`strike` arms one fault below `root`; `clear` ends it, and every hang with it."""

    def __init__(self, control: Path, root: Path) -> None:
        self.control = control
        if not control.exists():
            control.write_bytes(bytes(_SIZE))
        with control.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self._map[_HEAD.size : _HEAD.size + 512] = str(root).encode().ljust(512, b"\0")

    def environment(self, library: Path) -> dict[str, str]:
        """Of a process that is to run under it."""
        return {"LD_PRELOAD": str(library), "FOREBAY_SHIM": str(self.control)}

    def strike(self, call: str, action: str, times: int = FOREVER, match: str = "") -> None:
        """`action`: the name of an errno, or hang, short, flip."""
        self.clear()
        number = SPECIAL[action] if action in SPECIAL else int(getattr(errno, action))
        self._map[_HEAD.size + 512 :] = match.encode().ljust(128, b"\0")
        _HEAD.pack_into(self._map, 0, 1 + CALLS.index(call), number, times, 0)

    @property
    def hits(self) -> int:
        """How often it has struck since it was armed."""
        return int(_HEAD.unpack_from(self._map, 0)[3])

    def clear(self) -> None:
        """No fault."""
        _HEAD.pack_into(self._map, 0, 0, 0, 0, self.hits)

    def close(self) -> None:
        """Let go of the map."""
        self._map.close()
