"""Memory for direct I/O: page-aligned buffers, and what a fork may do to them.

Owns allocation. Does not own addresses (forebay_wire/memory.py) or files.
"""

import mmap

BLOCK = 4096  # O_DIRECT takes addresses, offsets and lengths that are multiples of this on any disk in use


def align(size: int) -> int:
    """`size` rounded up to whole blocks."""
    return -(-size // BLOCK) * BLOCK


def aligned(size: int) -> memoryview:
    """Zeroed memory of whole blocks, page-aligned; freed when the last view of it goes. A forked child does not have it: direct
    reads under way would else end in whichever process's copy of a page."""
    memory = mmap.mmap(-1, max(align(size), BLOCK), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)
    return memoryview(memory)


def give_to_children(view: memoryview) -> None:
    """Aligned memory that is handed out: nothing is read into it any more, and a child may look at what its parent got."""
    assert isinstance(view.obj, mmap.mmap)
    view.obj.madvise(mmap.MADV_DOFORK)
