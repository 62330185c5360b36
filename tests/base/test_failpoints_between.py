"""Between any two durable acts of one function lies a failpoint, so that a kill there is among those that are tried."""

import ast
import itertools
from collections.abc import Iterator

import pytest

from soak.figures import SOURCE

# What a power loss or a kill may cut off from what comes after it: on file systems, and of S3's API.
ACTS = {
    "fsync", "fdatasync", "sync_dir", "rename", "replace", "link", "symlink", "unlink", "rmdir", "ftruncate", "posix_fallocate",
    "pwrite", "put_object", "upload_part", "create_multipart_upload", "complete_multipart_upload", "abort_multipart_upload",
    "delete_object", "delete_objects", "copy_object",
}  # fmt: skip
# These pass failpoints of their own.
PASSING = {"failpoints.hit", "durable.write_temp", "durable.create_file", "durable.replace_file", "durable.make_dirs"}
NEVER_COUNTS = "a temporary file, which counts for nothing and is swept by the next start"
ONE_OF_TWO = "one or the other, never both"
EXEMPT = {
    ("base/durable.py", "create_file"): NEVER_COUNTS,
    ("cache/incoming.py", "drop"): ONE_OF_TWO,
    ("cache/layout.py", "_take_lock"): "the process's id in a lock that ends with the process: for people to read",
    ("cache/layout.py", "_probe_write"): NEVER_COUNTS,
    ("catalog/storage.py", "_note_created"): "syncs after the one write, each as good as another",
    ("tiers/posix/documents.py", "_put_temp"): NEVER_COUNTS,
    ("tiers/posix/documents.py", "_replace_temp"): NEVER_COUNTS,
    ("tiers/posix/documents.py", "_point"): NEVER_COUNTS,
    ("tiers/posix/lock.py", "_create"): NEVER_COUNTS,
    ("tiers/posix/lock.py", "take_over"): ONE_OF_TWO,
}


def acts(body: ast.AST) -> Iterator[str]:
    """Of one function, in the order of its lines; "" for a failpoint."""
    for node in ast.iter_child_nodes(body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler):
            continue  # what follows a failure follows no act
        yield from acts(node)
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            name = called.rpartition(".")[2]
            if called in PASSING:
                yield ""
            elif name in ACTS and (name != "replace" or called == "os.replace"):
                yield name


def unbroken(source: str) -> Iterator[tuple[str, str, str]]:
    """Function, and two acts of it that follow each other."""
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            found = list(acts(function))
            yield from ((function.name, *pair) for pair in itertools.pairwise(found) if all(pair))


def test_a_failpoint_lies_between_any_two_durable_acts() -> None:
    found = {
        (str(path.relative_to(SOURCE)), name): f"{first}, then {then}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path.relative_to(SOURCE).parts[0] != "doctor"  # measures disks, with files of its own
        for name, first, then in unbroken(path.read_text())
    }
    assert {place: pair for place, pair in found.items() if place not in EXEMPT} == {}
    assert set(EXEMPT) <= set(found), "no longer so: take it out"


@pytest.mark.parametrize("between", ["", "    failpoints.hit('here')\n"])
def test_what_is_looked_for_is_found(between: str) -> None:
    source = f"def act():\n    os.rename(a, b)\n{between}    os.fsync(c)\n"
    assert list(unbroken(source)) == ([] if between else [("act", "rename", "fsync")])
