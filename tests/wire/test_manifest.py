"""Part records and manifests: round trip, and no damage, mixture or gap goes unseen."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay_wire import document as written
from forebay_wire import manifest as wire
from forebay_wire.checksums import crc32c
from forebay_wire.manifest import (
    Manifest,
    ManifestError,
    NewerVersion,
    PartRecord,
    ShardEntry,
    chunk_count,
    pack_chunk_crcs,
    unpack_chunk_crcs,
    what_is_wrong,
)

CHUNK = 64 << 10


def entry(name: str, data: bytes) -> ShardEntry:
    crcs = [crc32c(data[at : at + CHUNK]) for at in range(0, len(data), CHUNK)]
    return ShardEntry(name, len(data), crc32c(data), CHUNK, pack_chunk_crcs(crcs))


def part(writer: int = 0, writers: int = 1, names: tuple[str, ...] = ("a.pt",), **changes: Any) -> PartRecord:
    fields: dict[str, Any] = {"run": "team/run", "step": 7, "session": "job-1", "node": "n1", "metadata": {"loss": 0.5}}
    shards = tuple(entry(name, f"{name}{writer}".encode() * 30000) for name in names)
    return PartRecord(writer=writer, writers=writers, shards=shards, **(fields | changes))


def whole(writers: int = 3) -> Manifest:
    return Manifest.of_parts([part(writer, writers, (f"{writer}.pt", f"d/{writer}")) for writer in range(writers)], "n1")


def sealed(body: dict[str, Any]) -> bytes:
    """A document with a right checksum over wrong content."""
    body = {key: value for key, value in body.items() if key != "crc32c"}
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    return json.dumps({**body, "crc32c": f"{crc32c(canonical):08x}"}).encode()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8")), st.lists, max_leaves=5
)
names = st.text(st.characters(codec="utf-8", exclude_categories=("Cc",), exclude_characters="/."), min_size=1, max_size=20)


@given(st.data(), st.dictionaries(st.text(st.characters(codec="utf-8")), json_values, max_size=3))
def test_a_part_record_reads_back_equal(data: st.DataObject, metadata: dict[str, Any]) -> None:
    shards = data.draw(st.dictionaries(names, st.binary(max_size=50), max_size=4))
    record = part(metadata=metadata, session=data.draw(names), node=data.draw(names))
    record = PartRecord(
        record.run, record.step, record.session, 2, 5, record.node, tuple(entry(*item) for item in shards.items()), metadata
    )
    assert PartRecord.from_json(record.to_json()) == record


@pytest.mark.parametrize("kind", ["", "final", "preemption", "of a later release"])
def test_a_part_record_keeps_its_kind_and_has_none_where_it_is_periodic(kind: str) -> None:
    record = part(kind=kind)
    assert PartRecord.from_json(record.to_json()) == record
    assert ("kind" in json.loads(record.to_json())) is bool(kind)


def test_a_manifest_reads_back_equal() -> None:
    manifest = whole()
    again = Manifest.from_json(manifest.to_json())
    assert (again.run, again.step, again.session, again.writers) == ("team/run", 7, "job-1", 3)
    assert list(again.shards()) == list(manifest.shards())
    assert again.metadata == {"loss": 0.5}
    assert again.to_json() == manifest.to_json()


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK])
def test_shards_of_every_size_class(size: int) -> None:
    shard = entry("s", bytes(size))
    shard.check()
    assert len(shard.chunk_crcs()) == chunk_count(size, CHUNK) == (size + CHUNK - 1) // CHUNK


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_chunk_tables_are_little_endian_and_read_back(crcs: list[int]) -> None:
    table = pack_chunk_crcs(crcs)
    assert table == b"".join(crc.to_bytes(4, "little") for crc in crcs)
    assert list(unpack_chunk_crcs(table)) == crcs


PART_DOCUMENT = part(names=("a.pt", "ä/b")).to_json()
MANIFEST_DOCUMENT = whole().to_json()


@given(st.integers(0, 8 * len(MANIFEST_DOCUMENT) - 1))
def test_every_flipped_bit_is_seen(bit: int) -> None:
    for cls, document in ((PartRecord, PART_DOCUMENT), (Manifest, MANIFEST_DOCUMENT)):
        damaged = bytearray(document)
        damaged[bit // 8 % len(damaged)] ^= 1 << bit % 8
        with pytest.raises(ManifestError):
            cls.from_json(bytes(damaged))


@given(st.integers(0, len(MANIFEST_DOCUMENT) - 1))
def test_a_truncated_document_is_seen(length: int) -> None:
    with pytest.raises(ManifestError):
        Manifest.from_json(MANIFEST_DOCUMENT[:length])


@given(st.binary() | st.text().map(str.encode))
def test_any_bytes_are_refused(document: bytes) -> None:
    for cls in (PartRecord, Manifest):
        with pytest.raises(ManifestError):
            cls.from_json(document)


@pytest.mark.parametrize(
    "document", [b"[" * 100_000, b'{"format":"forebay.part"}', b'"forebay.part"', b"1" * 5000, b"\xff\xfe"]
)
def test_hostile_documents(document: bytes) -> None:
    with pytest.raises(ManifestError):
        PartRecord.from_json(document)


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_version_is_named(version: object) -> None:
    with pytest.raises(ManifestError, match=r"version .* this release reads 1"):
        PartRecord.from_json(sealed({**json.loads(PART_DOCUMENT), "version": version}))


def test_only_a_whole_document_is_a_newer_release_s() -> None:
    """A version that flipped bits make is damage, and may be mended; what a newer release wrote is not ours."""
    for version in (3, 5, 9):  # each one bit away from 1
        newer = sealed({**json.loads(PART_DOCUMENT), "version": version})
        with pytest.raises(NewerVersion) as told:
            PartRecord.from_json(newer)
        assert "by a newer release" in what_is_wrong("it", told.value)
        flipped = PART_DOCUMENT.replace(b'"version":1', b'"version":%d' % version)
        with pytest.raises(ManifestError, match="damaged") as told_of_damage:
            PartRecord.from_json(flipped)
        assert not isinstance(told_of_damage.value, NewerVersion)
        assert what_is_wrong("it", told_of_damage.value).startswith("it is damaged")


def test_the_kinds_are_not_mixed_up() -> None:
    with pytest.raises(ManifestError, match=r"not a forebay\.manifest"):
        Manifest.from_json(PART_DOCUMENT)
    with pytest.raises(ManifestError, match=r"not a forebay\.part"):
        PartRecord.from_json(MANIFEST_DOCUMENT)


ODD_VALUES = [None, True, -1, 1.5, "", "x", [], [1], {}, {"x": 1}, "../x", 2**80, "\x00"]


@pytest.mark.parametrize("key", ["run", "step", "session", "writer", "writers", "node", "metadata", "shards"])
@pytest.mark.parametrize("value", ODD_VALUES)
def test_a_part_record_with_an_odd_value_is_refused_or_read_as_written(key: str, value: object) -> None:
    body = {**json.loads(PART_DOCUMENT), key: value}
    try:
        record = PartRecord.from_json(sealed(body))
    except ManifestError:
        return
    read = getattr(record, key)
    assert (list(read) if key == "shards" else read) == value
    assert type(value) in (str, int, dict, list)


@pytest.mark.parametrize("key", ["name", "size", "crc32c", "chunk_size", "chunks"])
@pytest.mark.parametrize("value", [*ODD_VALUES, 0, 3 << 16, "zz", "AAAA", "00000000"])
def test_a_shard_with_an_odd_value_is_refused(key: str, value: object) -> None:
    body = json.loads(PART_DOCUMENT)
    body["shards"][0][key] = value
    if key == "name" and value in ("x", "zz", "AAAA", "00000000"):
        assert PartRecord.from_json(sealed(body)).shards[0].name == value
        return
    with pytest.raises(ManifestError):
        PartRecord.from_json(sealed(body))


@pytest.mark.parametrize("key", ["run", "step", "session", "writers", "node", "metadata", "parts"])
@pytest.mark.parametrize("value", ODD_VALUES)
def test_a_manifest_with_an_odd_value_is_refused_or_read_as_written(key: str, value: object) -> None:
    body = {**json.loads(MANIFEST_DOCUMENT), key: value}
    try:
        manifest = Manifest.from_json(sealed(body))
    except ManifestError:
        return
    assert getattr(manifest, key) == value
    assert key in ("run", "session", "node", "metadata")


def test_a_claim_of_very_many_writers_costs_nothing() -> None:
    with pytest.raises(ManifestError, match="do not cover"):
        Manifest.from_json(sealed({**json.loads(MANIFEST_DOCUMENT), "writers": 10**15}))


@pytest.mark.parametrize("key", sorted(json.loads(PART_DOCUMENT).keys() - {"format", "version", "crc32c"}))
def test_a_missing_key_is_named(key: str) -> None:
    body = json.loads(PART_DOCUMENT)
    del body[key]
    with pytest.raises(ManifestError, match=f"key '{key}' is missing"):
        PartRecord.from_json(sealed(body))


def test_a_missing_checksum_is_no_checksum() -> None:
    body = json.loads(PART_DOCUMENT)
    del body["crc32c"]
    with pytest.raises(ManifestError, match="damaged"):
        PartRecord.from_json(json.dumps(body).encode())


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([], "at least one part"),
        ([part(0, 2)], "do not cover writers 0 to 1"),
        ([part(1, 2)], "do not cover writers 0 to 1"),
        ([part(0, 2), part(0, 2)], "do not cover"),
        ([part(0, 1), part(1, 1, ("b",))], "do not cover"),
        ([part(0, 2), part(1, 2)], "writers 0 and 1 both put 'a.pt'"),
        ([part(0, 1, ("a", "a"))], "writers 0 and 0 both put 'a'"),
        ([part(0, 2), part(1, 2, ("b",), session="job-2")], "another checkpoint or session"),
        ([part(0, 2), part(1, 2, ("b",), step=8)], "another checkpoint or session"),
        ([part(0, 2), part(1, 2, ("b",), run="other")], "another checkpoint or session"),
        ([part(0, 2), part(1, 3, ("b",))], "another checkpoint or session"),
    ],
)
def test_what_makes_no_whole_checkpoint(parts: list[PartRecord], words: str) -> None:
    with pytest.raises(ManifestError, match=words):
        Manifest.of_parts(parts, "n1")


def test_parts_may_come_in_any_order() -> None:
    parts = [part(writer, 3, (f"{writer}",)) for writer in (2, 0, 1)]
    assert [each.writer for each in Manifest.of_parts(parts, "n1").parts] == [0, 1, 2]


def test_a_manifest_that_lost_a_part_on_its_way_is_refused() -> None:
    body = json.loads(MANIFEST_DOCUMENT)
    del body["parts"][1]
    with pytest.raises(ManifestError, match="do not cover"):
        Manifest.from_json(sealed(body))


def test_the_format_on_disk_is_pinned() -> None:
    # Version 1 as it lies on tiers; a change here breaks every checkpoint that was ever written.
    shard = ShardEntry("a", 3, crc32c(b"abc"), CHUNK, pack_chunk_crcs([crc32c(b"abc")]))
    assert PartRecord("r", 1, "s", 0, 1, "n", (shard,), {}).to_json() == (
        b'{"crc32c":"e2655840","format":"forebay.part","metadata":{},"node":"n","run":"r","session":"s","shards":[{"chunk_siz'
        b'e":65536,"chunks":"tz9LNg==","crc32c":"364b3fb7","name":"a","size":3}],"step":1,"version":1,"writer":0,"writers":1}'
    )
    assert wire.FORMAT_VERSION == 1


def long_manifest(shards: int = 1500) -> Manifest:
    entries = [ShardEntry(f'sh\u00e4rd/{number},{{}}[]\\"', 0, 0, CHUNK, b"") for number in range(shards)]
    metadata = {"parts": [1, {"shards": []}]}
    first = PartRecord("r", 1, "s", 0, 2, "n", tuple(entries[: shards // 2]), metadata)
    return Manifest.of_parts([first, PartRecord("r", 1, "s", 1, 2, "n", tuple(entries[shards // 2 :]))], "n")


def test_long_documents_are_the_same_in_pieces() -> None:
    document = long_manifest().to_json()
    assert len(document) > written.LONG_DOCUMENT_BYTES
    body = json.loads(document)
    assert json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode() == document
    assert written.loads(document) == body
    assert Manifest.from_json(document) == long_manifest()
    spaced = json.dumps(body, indent=1).encode()  # another form of the same
    assert written.loads(spaced) == body
    assert Manifest.from_json(spaced) == long_manifest()


@pytest.mark.parametrize("cut", [1, 25, 5000, 60_000, -60_000, -200, -40, -2, -1])
def test_a_long_document_that_is_cut_off_or_broken(cut: int) -> None:
    document = long_manifest().to_json()
    with pytest.raises(ManifestError):
        Manifest.from_json(document[:cut] + b" " * (written.LONG_DOCUMENT_BYTES if cut > 0 else 0))
    with pytest.raises(ManifestError):
        Manifest.from_json(document[:cut] + b"\x01" + document[cut:])
    with pytest.raises(ManifestError):
        Manifest.from_json(document + b"]")


@pytest.mark.parametrize(
    "text", ['{"parts":[1 2]}', '{"parts":[{"a":1,}]}', '{"parts" [1]}', "{1:2}", '{"parts":[', '{"shards":[,1]}', "[1]x"]
)
def test_the_long_reader_refuses_what_json_refuses(text: str) -> None:
    padded = (" " * written.LONG_DOCUMENT_BYTES + text).encode()
    with pytest.raises(ValueError):
        json.loads(padded)
    with pytest.raises(ValueError):
        written.loads(padded)


@pytest.mark.parametrize(
    "text",
    ['{"parts":[1, {"parts":[]}, [2]],"":{"a":[]},"shards":[ ]}', "[1]", "{}", '{"parts":{"shards":[{}]}}', '{"a":1,"a":2}'],
)
def test_the_long_reader_reads_what_json_reads(text: str) -> None:
    padded = (" " * written.LONG_DOCUMENT_BYTES + text + "\n").encode()
    assert written.loads(padded) == json.loads(padded)
