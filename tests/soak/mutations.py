"""Removes one safeguard at a time and expects a named test to fail: an fsync, a checksum comparison, a condition on a put.

usage: mutations.py [--list] [--json FILE] [NAME ...]     (make soak runs all)

Each mutation is made in a copy of the tree below the temporary directory; the tests run there against the copy. A mutation that
its tests let through is a hole in the tests, and the exit code is 1.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = ("proto", "client", "gateway", "tests", "pyproject.toml", "README.md", "deploy")


@dataclass(frozen=True)
class Mutation:
    """In `file`, the one occurrence of `before` becomes `after`; then `tests` must fail."""

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]


GATEWAY = "gateway/forebay_gateway"
WRITER, READER = f"{GATEWAY}/cache/writer.py", f"{GATEWAY}/cache/reader.py"
INCOMING, LEASE = f"{GATEWAY}/cache/incoming.py", f"{GATEWAY}/paths/lease.py"
FD_ABUSE = ("tests/integration/test_fd_abuse.py",)
DURABLE, POSIX = f"{GATEWAY}/base/durable.py", f"{GATEWAY}/tiers/posix/tier.py"
S3, MANIFEST = f"{GATEWAY}/tiers/s3/tier.py", "proto/forebay_wire/manifest.py"

MUTATIONS = (
    Mutation("cache: fsync of the file", INCOMING, "os.fsync(descriptor)", "pass", ("tests/cache/test_cache_writer.py",)),
    Mutation(
        "cache: fsync of the directory",
        INCOMING,
        "durable.sync_dir(self.path.parent)",
        "pass",
        ("tests/cache/test_cache_writer.py",),
    ),
    Mutation("cache: chunk CRC on arrival", WRITER, "if actual != crc:", "if False:", ("tests/cache/test_cache_writer.py",)),
    Mutation("cache: shard CRC at seal", WRITER, "if combined != crc32c:", "if False:", ("tests/cache/test_cache_writer.py",)),
    Mutation("cache: chunk CRC on read", READER, "if actual != expected:", "if False:", ("tests/cache/test_cache_reader.py",)),
    Mutation(
        "cache: session directory synced",
        f"{GATEWAY}/cache/layout.py",
        "                # Also where it was there before: who made it may have been killed before this.\n"
        "                durable.sync_dir(path.parent)",
        "                pass",
        ("tests/cache/test_cache_layout.py",),
    ),
    Mutation(
        "cache: footer CRC",
        f"{GATEWAY}/cache/footer.py",
        "if _CRC.unpack_from(block, BLOCK - _CRC.size)[0] != crc32c(block[: BLOCK - _CRC.size]):",
        "if False:",
        ("tests/cache/test_cache_footer.py",),
    ),
    Mutation(
        "durable: fsync of the file",
        DURABLE,
        "            os.fsync(descriptor)\n        finally:\n            os.close(descriptor)\n    except",
        "            pass\n        finally:\n            os.close(descriptor)\n    except",
        ("tests/base/test_durable.py",),
    ),
    Mutation(
        "durable: directory after rename",
        DURABLE,
        '    failpoints.hit("durable.before_dir_fsync")\n    sync_dir(path.parent)\n\n\ndef create_file',
        '    failpoints.hit("durable.before_dir_fsync")\n\n\ndef create_file',
        ("tests/base/test_durable.py",),
    ),
    Mutation(
        "durable: new directories",
        DURABLE,
        "        sync_dir(directory.parent)",
        "        pass",
        ("tests/base/test_durable.py",),
    ),
    Mutation(
        "catalog: synced commits",
        f"{GATEWAY}/catalog/storage.py",
        "        sync=True,",
        "        sync=False,",
        ("tests/catalog/test_catalog_crash.py",),
    ),
    Mutation(
        "posix: fsync of the file",
        f"{GATEWAY}/tiers/posix/files.py",
        "os.fsync(descriptor)",
        "pass",
        ("tests/conformance/test_tier_posix.py",),
    ),
    Mutation(
        "tiers: read-back comparison",
        f"{GATEWAY}/tiers/readback.py",
        "if actual != expected:",
        "if False:",
        ("tests/conformance/test_tier_posix.py",),
    ),
    Mutation(
        "tiers: chunk CRC on restore",
        f"{GATEWAY}/tiers/chunks.py",
        "                    if crc32c(buffer) != crcs[index]:\n                        raise",
        "                    if False:\n                        raise",
        ("tests/integration/test_main_job.py",),
    ),
    Mutation("s3: If-None-Match", S3, 'return {"IfNoneMatch": "*"}', "return {}", ("tests/conformance/test_tier_contract.py",)),
    Mutation("s3: If-Match", S3, 'else {"IfMatch": if_match}', "else {}", ("tests/conformance/test_tier_contract.py",)),
    Mutation(
        "s3: server checksum compared",
        S3,
        "elif info.crc32c != source.crc32c:",
        "elif False:",
        ("tests/conformance/test_tier_contract.py", "tests/conformance/test_tier_s3.py"),
    ),
    Mutation(
        "commit: planned equals landed",
        f"{GATEWAY}/paths/commit.py",
        "if (row.size, row.crc32c) != (shard.size, shard.crc32c):",
        "if False:",
        ("tests/integration/test_bad_input.py",),
    ),
    Mutation("manifest: its own checksum", MANIFEST, "if expected != actual:", "if False:", ("tests/wire/test_manifest.py",)),
    Mutation(
        "client: chunk CRC on restore",
        "client/forebay/lanes/stream.py",
        "if crc32c(frame.data) != frame.crc32c:",
        "if False:",
        ("tests/client",),
    ),
    Mutation(
        "fd lane: the proof that nobody writes",
        INCOMING,
        "                return True\n            fcntl",
        "                return False\n            fcntl",
        FD_ABUSE,
    ),
    Mutation("fd lane: what was never written", INCOMING, "os.lseek(descriptor, 0, os.SEEK_HOLE) >= size", "True", FD_ABUSE),
    Mutation("fd lane: chunk table at seal", LEASE, "if combined != crc:", "if False:", FD_ABUSE),
    Mutation("fd lane: token compared", LEASE, "not compare_digest(lease.token, token)", "False", FD_ABUSE),
    Mutation(
        "fd lane: chunk CRC on restore",
        "client/forebay/lanes/fd_read.py",
        "if sums.chunk(index) != self._crcs[index]",
        "if False",
        ("tests/integration/test_fd_lane.py",),
    ),
)


def try_one(mutation: Mutation, directory: Path) -> bool:
    """Whether the tests noticed."""
    copy = directory / "tree"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)
    path = copy / mutation.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutation.before) != 1:
        raise SystemExit(f"{mutation.name}: {mutation.file} holds the text {text.count(mutation.before)} times, not once")
    path.write_text(text.replace(mutation.before, mutation.after), encoding="utf-8")
    roots = os.pathsep.join(str(copy / name) for name in ("proto", "client", "gateway"))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", *mutation.tests]
    result = subprocess.run(
        command, cwd=copy, env={**os.environ, "PYTHONPATH": roots}, capture_output=True, text=True, timeout=1200
    )
    if result.returncode not in (0, 1):
        raise SystemExit(f"{mutation.name}: the tests did not run:\n{result.stdout[-2000:]}{result.stderr[-2000:]}")
    return result.returncode == 1


def main() -> int:
    """Try those asked for, or all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    chosen = [mutation for mutation in MUTATIONS if not arguments.names or mutation.name in arguments.names]
    if arguments.list:
        print("\n".join(mutation.name for mutation in chosen))
        return 0
    survived = []
    with tempfile.TemporaryDirectory(prefix="forebay-mutations-") as name:
        for mutation in chosen:
            noticed = try_one(mutation, Path(name))
            print(f"{'noticed' if noticed else 'NOT NOTICED':12} {mutation.name}", flush=True)
            if not noticed:
                survived.append(mutation.name)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"mutations": len(chosen), "survived": survived}, indent=2))
    print(f"{len(chosen) - len(survived)} of {len(chosen)} noticed")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
