"""Each safeguard of the code as a text that can be taken out, and the tests that must notice: an fsync, a comparison of
checksums, a condition on a put. mutations.py takes them out."""

from dataclasses import dataclass


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
LAYOUT, FOOTER = f"{GATEWAY}/cache/layout.py", f"{GATEWAY}/cache/footer.py"
STORAGE, WRITE = f"{GATEWAY}/catalog/storage.py", f"{GATEWAY}/paths/write.py"
INCOMING, LEASE = f"{GATEWAY}/cache/incoming.py", f"{GATEWAY}/paths/lease.py"
FD_ABUSE = ("tests/integration/test_fd_abuse.py",)
DURABLE, POSIX = f"{GATEWAY}/base/durable.py", f"{GATEWAY}/tiers/posix/tier.py"
POSIX_DOCUMENTS = f"{GATEWAY}/tiers/posix/documents.py"
S3, DOCUMENT, ENTRIES = f"{GATEWAY}/tiers/s3/tier.py", "proto/forebay_wire/document.py", "proto/forebay_wire/entries.py"
STREAM, DIRECTORIES = "client/forebay/lanes/stream.py", "client/forebay/directories.py"
ACTS = ("tests/base/test_durable_acts.py",)
OF_WRITER, OF_READER = ("tests/cache/test_cache_writer.py",), ("tests/cache/test_cache_reader.py",)
CONTRACT, OF_S3, OF_POSIX = (
    ("tests/conformance/test_tier_contract.py",),
    ("tests/conformance/test_tier_s3.py",),
    ("tests/conformance/test_tier_posix.py",),
)
RESTORES = ("tests/client/test_client_directories.py",)
CHECKS = ("tests/paths/test_write_checks.py",)

PACKS, FD_READ = "proto/forebay_wire/packs.py", "client/forebay/lanes/fd_read.py"

SYNCS = (
    Mutation("cache: fsync of the file", INCOMING, "os.fsync(descriptor)", "pass", OF_WRITER),
    Mutation("cache: directory after rename", INCOMING, "durable.sync_dir(self.path.parent)", "pass", OF_WRITER),
    Mutation("cache: a new cache's directory", LAYOUT, "            durable.sync_dir(path)\n", "", ACTS),
    Mutation(
        "cache: session directory synced",
        LAYOUT,
        "                # Also where it was there before: who made it may have been killed before this.\n"
        "                durable.sync_dir(path.parent)",
        "                pass",
        ("tests/cache/test_cache_layout.py",),
    ),
    Mutation(
        "cache: a session's directory gone",
        LAYOUT,
        'gone")\n            durable.sync_dir(path.parent)',
        'gone")',
        ACTS,
    ),
    Mutation("cache: files gone", LAYOUT, "durable.sync_dir(directory)", "pass", ACTS),
    Mutation(
        "durable: fsync of a directory", DURABLE, "    try:\n        os.fsync(descriptor)", "    try:\n        pass", ACTS
    ),
    Mutation("durable: new directories", DURABLE, "        sync_dir(directory.parent)", "        pass", ACTS),
    Mutation(
        "durable: fsync of the file",
        DURABLE,
        "            os.fsync(descriptor)\n        finally:\n            os.close(descriptor)\n    except",
        "            pass\n        finally:\n            os.close(descriptor)\n    except",
        ("tests/base/test_durable.py", *ACTS),
    ),
    Mutation(
        "durable: directory after rename",
        DURABLE,
        '    failpoints.hit("durable.before_dir_fsync")\n    sync_dir(path.parent)\n\n\ndef create_file',
        '    failpoints.hit("durable.before_dir_fsync")\n\n\ndef create_file',
        ACTS,
    ),
    Mutation(
        "durable: directory after link",
        DURABLE,
        '        temp.unlink(missing_ok=True)\n    failpoints.hit("durable.before_dir_fsync")\n    sync_dir(path.parent)',
        "        temp.unlink(missing_ok=True)",
        ACTS,
    ),
    Mutation(
        "catalog: synced commits",
        STORAGE,
        "        sync=True,",
        "        sync=False,",
        ("tests/catalog/test_catalog_crash.py",),
    ),
    Mutation("catalog: its owner's file", STORAGE, "    os.fsync(owner)\n", "", ACTS),
    Mutation("catalog: its directory", STORAGE, "    sync_dir(path)\n", "", ACTS),
    Mutation("catalog: its directory's name", STORAGE, "    sync_dir(path.parent)\n", "", ACTS),
    Mutation("rebuild: the old catalog's name", f"{GATEWAY}/paths/care/rebuild.py", "    durable.sync_dir(path)\n", "", ACTS),
    Mutation("posix: fsync of the file", f"{GATEWAY}/tiers/posix/files.py", "os.fsync(descriptor)", "pass", ACTS),
    Mutation(
        "posix: directory after rename",
        POSIX,
        '        failpoints.hit("posix.before_dir_fsync")\n        durable.sync_dir(path.parent)',
        "        pass",
        ACTS,
    ),
    Mutation(
        "posix: directory after a document",
        POSIX_DOCUMENTS,
        """            raise AlreadyExists("the file is already there", tier=self.name, key=key) from error
        finally:
            temp.unlink(missing_ok=True)
        failpoints.hit("posix.document_placed")
        durable.sync_dir(path.parent)""",
        """            raise AlreadyExists("the file is already there", tier=self.name, key=key) from error
        finally:
            temp.unlink(missing_ok=True)""",
        ACTS,
    ),
    Mutation(
        "posix: directory after a replacement",
        POSIX_DOCUMENTS,
        '        failpoints.hit("posix.document_replaced")\n        durable.sync_dir(path.parent)',
        "",
        ACTS,
    ),
    Mutation(
        "posix: directory after a link",
        POSIX_DOCUMENTS,
        '        failpoints.hit("posix.pointed")\n        durable.sync_dir(path.parent)',
        "",
        ACTS,
    ),
    Mutation("posix: directory after a deletion", POSIX, "        durable.sync_dir(directory)\n", "", ACTS),
    Mutation(
        "posix: directory after an earlier deletion",
        POSIX,
        "            durable.sync_dir(path.parent)  # perhaps an earlier try unlinked it, and this is what failed\n",
        "",
        ACTS,
    ),
    Mutation(
        "posix: a new root", f"{GATEWAY}/tiers/posix/marker.py", "            durable.sync_dir(self._root.parent)\n", "", ACTS
    ),
    Mutation(
        "posix: settling a directory",
        POSIX,
        'await self._run("fsync", key, durable.sync_dir, self._path(key).parent)',
        "pass",
        ACTS,
    ),
    Mutation(
        "client: the restored directory's own name",
        DIRECTORIES,
        "            os.fsync(descriptor)\n        finally:\n            os.close(descriptor)\n\n    def publish",
        "            pass\n        finally:\n            os.close(descriptor)\n\n    def publish",
        RESTORES,
    ),
    Mutation(
        "client: fsync of a restored file",
        DIRECTORIES,
        "                os.fsync(descriptor)",
        "                pass",
        RESTORES,
    ),
    Mutation(
        "client: a restored directory", DIRECTORIES, "                os.fsync(directory)", "                pass", RESTORES
    ),
)

COMPARISONS = (
    Mutation("cache: chunk CRC on arrival", WRITER, "if actual != crc:", "if False:", OF_WRITER),
    Mutation("cache: shard CRC at seal", WRITER, "if combined != crc32c:", "if False:", OF_WRITER),
    Mutation("cache: chunk CRC on read", READER, "if actual != expected:", "if False:", OF_READER),
    Mutation(
        "cache: footer CRC",
        FOOTER,
        "if _CRC.unpack_from(block, BLOCK - _CRC.size)[0] != crc32c(block[: BLOCK - _CRC.size]):",
        "if False:",
        ("tests/cache/test_cache_footer.py",),
    ),
    Mutation(
        "cache: chunk table against the shard's CRC",
        FOOTER,
        "if crc32c_of_chunks(unpack_chunk_crcs(chunks), footer.chunk_size, footer.size) != footer.crc32c:",
        "if False:",
        ("tests/cache/test_cache_footer.py",),
    ),
    Mutation(
        "cache: marks",
        f"{GATEWAY}/cache/marks.py",
        'document.format != FORMAT or document.crc32c != f"{crc32c(body):08x}":',
        "document.format != FORMAT:",
        ("tests/paths/test_marks.py",),
    ),
    Mutation(
        "catalog: a manifest against the rows",
        f"{GATEWAY}/catalog/mutations.py",
        "elif (row.size, row.crc32c) != (entry.size, entry.crc32c):",
        "elif False:",
        ("tests/catalog/test_catalog_verbs.py", "tests/catalog/test_catalog_model.py"),
    ),
    Mutation(
        "catalog: a row's checksum",
        f"{GATEWAY}/catalog/schema.py",
        "    if crc32c(data) != _CHECKSUM_HOLDS:\n",
        "    if False:\n",
        ("tests/catalog/test_catalog_damage.py",),
    ),
    Mutation(
        "catalog: chunk tables at fsck",
        f"{GATEWAY}/catalog/indexes.py",
        "if crc32c_of_chunks(unpack_chunk_crcs(chunks), row.chunk_size, row.size) != row.crc32c:",
        "if False:",
        ("tests/catalog/test_catalog_indexes.py",),
    ),
    Mutation(
        "care: the row before the copy is judged",
        f"{GATEWAY}/paths/care/proof.py",
        "if not sound or crc32c_of_chunks(unpack_chunk_crcs(item.chunks), item.chunk_size, item.size) != item.crc32c:",
        "if not sound:",
        ("tests/paths/test_tier_scrub.py",),
    ),
    Mutation(
        "write: a small shard on arrival",
        f"{GATEWAY}/paths/small.py",
        "if crc32c(shard.data) != shard.crc32c:",
        "if False:",
        CHECKS,
    ),
    Mutation(
        "write: a shard that comes again",
        WRITE,
        "if (size, crc) != (self.receipt.size, self.receipt.crc32c):",
        "if False:",
        CHECKS,
    ),
    Mutation("write: a chunk that comes again", WRITE, "if crc32c(data) != crc:", "if False:", CHECKS),
    Mutation(
        "write: a trailer that comes again",
        WRITE,
        "if self._offset and (self._offset, self._crc) != (size, crc):",
        "if False:",
        CHECKS,
    ),
    Mutation(
        "commit: planned equals landed",
        f"{GATEWAY}/paths/commit.py",
        "if (row.size, row.crc32c) != (shard.size, shard.crc32c):",
        "if False:",
        ("tests/integration/test_bad_input.py",),
    ),
    Mutation("tiers: read-back comparison", f"{GATEWAY}/tiers/readback.py", "if actual != expected:", "if False:", OF_POSIX),
    Mutation(
        "tiers: chunk CRC on restore",
        f"{GATEWAY}/tiers/chunks.py",
        "                    if crc32c(buffer) != crcs[index]:\n                        raise",
        "                    if False:\n                        raise",
        ("tests/integration/test_main_job.py",),
    ),
    Mutation(
        "tiers: the second read of a chunk",
        f"{GATEWAY}/tiers/chunks.py",
        "                if crc32c(buffer) != crcs[index]:\n                    buffer",
        "                if False:\n                    buffer",
        ("tests/integration/test_main_job.py",),
    ),
    Mutation(
        "posix: a document read back",
        POSIX_DOCUMENTS,
        "if file.chunk_crc(at, len(part), buffers) != crc32c(part):",
        "if False:",
        (*OF_POSIX, "tests/faults/test_posix_matrix.py"),
    ),
    Mutation("s3: server checksum compared", S3, "elif info.crc32c != source.crc32c:", "elif False:", OF_S3),
    Mutation(
        "s3: a document on arrival", S3, "if info.crc32c is not None and info.crc32c != crc32c(data):", "if False:", OF_S3
    ),
    Mutation(
        "s3: a whole object's checksum at its end",
        f"{GATEWAY}/tiers/s3/multipart.py",
        "if crc is not None and crc != self.source.crc32c:",
        "if False:",
        (*OF_S3, "tests/faults/test_s3_matrix.py"),
    ),
    Mutation(
        "mover: what put did not prove is verified",
        f"{GATEWAY}/movers/worker.py",
        "if info.crc32c != item.crc32c:",
        "if False:",
        ("tests/paths/test_mover_proof.py",),
    ),
    Mutation(
        "fd lane: a chunk as the client reads it",
        FD_READ,
        "if crc32c(chunk) != self.crcs[offset // self.chunk_size]:",
        "if False:",
        ("tests/integration/test_fd_read.py",),
    ),
    Mutation(
        "fd lane: a chunk of a mapping",
        "client/forebay/lanes/fd_map.py",
        "good = crc32c(whole[low : min(self._size, low + self._chunk_size)]) == self._crcs[index]",
        "good = True",
        ("tests/client/test_client_mapped.py",),
    ),
    Mutation(
        "write-through: a chunk as it arrives",
        "gateway/forebay_gateway/paths/through.py",
        "if crc32c(data) != crc:",
        "if False:",
        ("tests/paths/test_write_through.py",),
    ),
    Mutation(
        "write-through: the chunks against the shard",
        "gateway/forebay_gateway/paths/through.py",
        "if combined != crc:",
        "if False:",
        ("tests/paths/test_write_through.py",),
    ),
    Mutation(
        "fd lane: the table of chunks against the shard",
        FD_READ,
        "if crc32c_of_chunks(crcs, answer.layout.chunk_size, shard.size) != shard.crc32c:",
        "if False:",
        ("tests/integration/test_fd_read.py",),
    ),
    Mutation(
        "background: the receipt against the snapshot",
        "client/forebay/background.py",
        "if receipts[name].crc32c != copy.crc32c:",
        "if False:",
        ("tests/client/test_client_background.py",),
    ),
    Mutation(
        "export: CRC of a plain shard's chunks",
        "client/forebay/export.py",
        "if crc32c(data) != expected:",
        "if False:",
        ("tests/integration/test_packs.py",),
    ),
    Mutation(
        "packs: CRC of each shard as it is packed",
        f"{GATEWAY}/cache/packs.py",
        "if crc != expected:",
        "if False:",
        ("tests/cache/test_cache_packs.py",),
    ),
    Mutation(
        "packs: checksum of head and index",
        PACKS,
        "if _U32.unpack_from(data, _HEAD.size)[0] != crc32c(encoded, crc32c(data[: _HEAD.size])):",
        "if False:",
        ("tests/wire/test_packs.py",),
    ),
    Mutation(
        "packs: shards lie inside",
        PACKS,
        "if shard.offset < first or shard.offset + shard.size > pack_bytes:",
        "if False:",
        ("tests/wire/test_packs.py",),
    ),
    Mutation(
        "packs: CRC of a shard as it is read",
        f"{GATEWAY}/paths/read.py",
        "if crc32c(whole) != packed.crc32c:",
        "if False:",
        ("tests/paths/test_packed.py",),
    ),
    Mutation(
        "packs: CRC of each shard of many",
        f"{GATEWAY}/cache/packs.py",
        "if len(data) == shard.size and crc32c(data) == shard.crc32c:",
        "if True:",
        ("tests/cache/test_cache_packs.py",),
    ),
    Mutation(
        "client: CRC of each shard of many",
        "client/forebay/lanes/many.py",
        "if len(data) == shard.size and crc32c(data) == shard.crc32c:",
        "if True:",
        ("tests/client/test_client_many.py",),
    ),
    Mutation(
        "packs: the catalog's index against the pack's own",
        f"{GATEWAY}/paths/care/proof.py",
        "if found != index:",
        "if False:",
        ("tests/paths/test_packed.py",),
    ),
    Mutation(
        "packs: the newest first where there is no catalog",
        f"{GATEWAY}/paths/recover.py",
        "(file.session_id in committed, file.shard_id or 0), reverse=True)",
        "(file.session_id in committed, -(file.shard_id or 0)), reverse=True)",
        ("tests/crash/test_packs_crash.py",),
    ),
    Mutation(
        "recover: of two directories of a session the one that was committed",
        f"{GATEWAY}/paths/recover.py",
        "(file.session_id in committed, file.shard_id or 0)",
        "(True, file.shard_id or 0)",
        ("tests/paths/test_adopt.py",),
    ),
    Mutation(
        "export: CRC of a packed shard",
        "client/forebay/export.py",
        "if crc32c(data) != packed.crc32c:",
        "if False:",
        ("tests/integration/test_packs.py",),
    ),
    Mutation("manifest: its own checksum", DOCUMENT, "if expected != actual:", "if False:", ("tests/wire/test_manifest.py",)),
    Mutation(
        "manifest: a shard's chunk table",
        ENTRIES,
        "if crc32c_of_chunks(unpack_chunk_crcs(self.chunks), self.chunk_size, self.size) != self.crc32c:",
        "if False:",
        ("tests/wire/test_manifest.py",),
    ),
    Mutation("client: chunk CRC on restore", STREAM, "if crc32c(frame.data) != frame.crc32c:", "if False:", ("tests/client",)),
    Mutation(
        "client: a receipt",
        STREAM,
        "if (receipt.name, receipt.size, receipt.crc32c) != (name, size, crc):",
        "if False:",
        ("tests/client/test_client_whole.py",),
    ),
    Mutation(
        "client: a whole shard's CRC",
        "client/forebay/reader.py",
        "if crc != shard.crc32c:",
        "if False:",
        ("tests/client/test_client_whole.py",),
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
        "if sums.chunk(index) != self.crcs[index]",
        "if False",
        ("tests/integration/test_fd_read.py",),
    ),
)

# Comparisons that say yes instead of no.
AGREEMENTS = (
    Mutation(
        "scrub: the tier's own checksum, under the tag that was proved",
        f"{GATEWAY}/paths/care/scrub.py",
        "elif info.crc32c not in (None, row.crc32c):",
        "elif False:",
        ("tests/paths/test_tier_scrub.py",),
    ),
    Mutation(
        "catalog: a pack's shards against its checksum",
        f"{GATEWAY}/catalog/indexes.py",
        'return "" if crc == row.crc32c else',
        'return "" if True else',
        ("tests/catalog/test_catalog_indexes.py",),
    ),
    Mutation(
        "recover: a file that a fetch left is its row's",
        f"{GATEWAY}/paths/recover.py",
        " and row.crc32c == footer.crc32c and row.size == footer.size:",
        ":",
        ("tests/paths/test_adopt.py",),
    ),
    Mutation(
        "s3: an object that landed is this upload's",
        f"{GATEWAY}/tiers/s3/multipart.py",
        """same = crc == self.source.crc32c if crc is not None else etag.strip('"') == self._expected_etag()""",
        "same = True",
        (*OF_S3, "tests/faults/test_s3_matrix.py"),
    ),
    Mutation(
        "s3: the checksum that a store echoes",
        f"{GATEWAY}/tiers/s3/multipart.py",
        'if sent is not None and echoed_crc not in (None, "", sent):',
        "if False:",
        (*OF_S3, "tests/faults/test_s3_matrix.py"),
    ),
    Mutation(
        "s3: a checksum that the probe sent",
        f"{GATEWAY}/tiers/s3/probe.py",
        "if full_object_crc(answer) == crc:",
        "if True:",
        ("tests/faults/test_s3_matrix.py",),
    ),
    Mutation(
        "s3: what a deletion of many does not call deleted",
        S3,
        "return [key for name, key in by_name.items() if name not in gone]",
        "return []",
        ("tests/faults/test_s3_matrix.py",),
    ),
    Mutation(
        "fd lane: a snapshot that was damaged while it waited",
        "client/forebay/lanes/fd_put.py",
        "if (known := self._source.known_crc32c(0, size)) not in (None, crc):",
        "if False:",
        ("tests/integration/test_fd_lane.py",),
    ),
    Mutation(
        "s3: no checksums of botocore's own on requests",
        f"{GATEWAY}/tiers/s3/client.py",
        'request_checksum_calculation="when_required"',
        'request_checksum_calculation="when_supported"',
        OF_S3,
    ),
    Mutation(
        "s3: no checksums of botocore's own on answers",
        f"{GATEWAY}/tiers/s3/client.py",
        'response_checksum_validation="when_required"',
        'response_checksum_validation="when_supported"',
        OF_S3,
    ),
    Mutation(
        "catalog: readers that died before the start",
        STORAGE,
        "self.stale_readers = self._env.reader_check()",
        "self.stale_readers = 0",
        ("tests/catalog/test_catalog_groups.py",),
    ),
    Mutation(
        "catalog: readers that died since",
        STORAGE,
        "self.stale_readers += self._env.reader_check()",
        "pass",
        ("tests/catalog/test_catalog_groups.py",),
    ),
    Mutation(
        "versions: a damaged document is no newer release's",
        DOCUMENT,
        "    _check_sum(document, body, expected_format)  # first: a bit that flipped in the version makes no newer document\n",
        '    body.pop("crc32c", None)\n',
        ("tests/wire/test_manifest.py",),
    ),
    Mutation(
        "versions: a part file of a newer release stays",
        f"{GATEWAY}/paths/recover.py",
        """        except NewerVersion as error:
            raise _unjudged(file, Unsupported(what_is_wrong("it", error))) from error
""",
        "",
        ("tests/paths/test_newer_release.py",),
    ),
    Mutation(
        "versions: a newer release's manifest is not replaced",
        f"{GATEWAY}/paths/complete.py",
        "        except NewerVersion as error:",
        "        except ZeroDivisionError as error:",
        ("tests/paths/test_newer_release.py",),
    ),
    Mutation(
        "versions: no catalog goes for files that cannot be read",
        f"{GATEWAY}/offline.py",
        "        await asyncio.to_thread(refuse_newer, cache)\n",
        "",
        ("tests/paths/test_newer_release.py",),
    ),
    Mutation(
        "care: where a part may go, in a part file that is written again",
        f"{GATEWAY}/paths/care/repair.py",
        "replace(local_record(self._node, session, part), tiers=session.tiers)",
        "local_record(self._node, session, part)",
        ("tests/paths/test_part_files.py",),
    ),
)

CONDITIONS = (
    Mutation("s3: If-None-Match", S3, 'return {"IfNoneMatch": "*"}', "return {}", CONTRACT),
    Mutation("s3: If-Match", S3, 'else {"IfMatch": if_match}', "else {}", CONTRACT),
    Mutation(
        "posix: create only where nothing is",
        POSIX_DOCUMENTS,
        "            if not if_absent:\n",
        "            if True:\n",
        CONTRACT,
    ),
    Mutation(
        "posix: replace only what was seen",
        POSIX_DOCUMENTS,
        "        if if_match is not None:\n",
        "        if False:\n",
        CONTRACT,
    ),
)

MUTATIONS = SYNCS + COMPARISONS + AGREEMENTS + CONDITIONS
