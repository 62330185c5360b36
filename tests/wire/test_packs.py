"""Packs: the index and the head read back equal, and nothing damaged, doubled or out of bounds is believed."""

import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay_wire import document as wire
from forebay_wire.checksums import crc32c
from forebay_wire.manifest import Manifest, ManifestError, PackEntry, PartRecord, ShardEntry, pack_chunk_crcs
from forebay_wire.names import InvalidName, check_shard_name
from forebay_wire.packs import (
    VERSION,
    NewerPack,
    PackedShard,
    PackError,
    PackIndex,
    decode_head,
    encode_head,
    head_bytes,
    is_pack_name,
    pack_name,
)

CHUNK = 64 << 10
NAME = pack_name(3, "0123456789abcdef")
names = st.text(st.characters(codec="utf-8", exclude_categories=("Cc",), exclude_characters="/."), min_size=1, max_size=30)
contents = st.dictionaries(names, st.binary(max_size=200), min_size=1, max_size=20)


def packed(shards: dict[str, bytes]) -> tuple[PackIndex, bytes]:
    """A pack's index and its whole bytes."""
    index = PackIndex.laid_out((name, len(data), crc32c(data)) for name, data in shards.items())
    return index, encode_head(index) + b"".join(shards.values())


def entry(shards: dict[str, bytes], name: str = NAME) -> PackEntry:
    index, data = packed(shards)
    crcs = [crc32c(data[at : at + CHUNK]) for at in range(0, len(data), CHUNK)]
    return PackEntry(ShardEntry(name, len(data), crc32c(data), CHUNK, pack_chunk_crcs(crcs)), index)


def record(*packs: PackEntry, plain: tuple[ShardEntry, ...] = (), writer: int = 3) -> PartRecord:
    return PartRecord("team/run", 7, "job-1", writer, 4, "n1", plain, {}, packs)


@given(contents)
def test_a_pack_reads_back_from_its_own_bytes(shards: dict[str, bytes]) -> None:
    index, data = packed(shards)
    again = decode_head(data, len(data))
    assert again == index
    assert {shard.name: data[shard.offset : shard.offset + shard.size] for shard in again} == shards
    assert [shard.name for shard in again] == sorted(shards)
    assert again.size == sum(map(len, shards.values())) and len(again) == len(shards)


def test_only_a_whole_head_is_a_newer_release_s() -> None:
    index, whole = packed({"a": b"x"})
    head = bytearray(encode_head(index))
    head[8] = VERSION + 1
    with pytest.raises(PackError, match="damaged"):
        decode_head(bytes(head), len(whole))
    head[16:20] = crc32c(index.encoded, crc32c(bytes(head[:16]))).to_bytes(4, "little")
    with pytest.raises(NewerPack, match="version 2"):
        decode_head(bytes(head), len(whole))


@given(contents, st.data())
def test_a_flipped_bit_in_head_or_index_is_found(shards: dict[str, bytes], data: st.DataObject) -> None:
    index, whole = packed(shards)
    head = bytearray(encode_head(index))
    bit = data.draw(st.integers(0, 8 * len(head) - 1))
    head[bit // 8] ^= 1 << bit % 8
    with pytest.raises(PackError) as told:
        decode_head(bytes(head), len(whole))
    assert not isinstance(told.value, NewerPack)


@given(contents, st.data())
def test_a_pack_that_is_cut_off_is_found(shards: dict[str, bytes], data: st.DataObject) -> None:
    index, whole = packed(shards)
    head = encode_head(index)
    with pytest.raises(PackError):
        decode_head(head[: data.draw(st.integers(0, len(head) - 1))], len(whole))
    if any(shards.values()):
        with pytest.raises(PackError, match="inside its pack"):
            decode_head(head, len(head))


def refused(*shards: PackedShard, pack_bytes: int = 10_000) -> str:
    with pytest.raises(PackError) as caught:
        PackIndex.of(shards).check(pack_bytes)
    return str(caught.value)


def test_what_an_index_must_not_say() -> None:
    good = PackedShard("a", 10, 1, 100)
    assert "twice" in refused(good, PackedShard("a", 5, 2, 200))
    assert "inside its pack" in refused(good._replace(offset=9_995))
    assert "inside its pack" in refused(good._replace(offset=3))
    assert "reserved" in refused(good._replace(name=".forebay/x"))
    assert "segment" in refused(good._replace(name="../x"))
    assert "too large" in refused(good._replace(size=1 << 32))
    assert "cannot hold 0" in refused()


def test_an_index_that_is_no_index() -> None:
    encoded = PackIndex.of([PackedShard("name", 1, 2, 90)]).encoded
    for damaged in (b"", encoded[:3], encoded[:-1], encoded + b"x", struct.pack("<I", 2**31) + encoded[4:]):
        with pytest.raises(PackError):
            PackIndex(damaged)
    with pytest.raises(PackError, match="UTF-8"):
        PackIndex(encoded[:-1] + b"\xff").check(1000)
    with pytest.raises(PackError, match="none with the number"):
        PackIndex(encoded)[1]


def test_head_bytes_says_where_the_first_shard_lies() -> None:
    shards = [("b", 3, 0), ("ä", 4, 0)]
    assert min(shard.offset for shard in PackIndex.laid_out(shards)) == head_bytes(shards)
    assert len(encode_head(PackIndex.laid_out(shards))) == head_bytes(shards)


def test_no_client_can_name_a_pack() -> None:
    assert is_pack_name(NAME)
    with pytest.raises(InvalidName, match="reserved"):
        check_shard_name(NAME)
    for other in ("packs/0-0123456789abcdef.pack", ".forebay/packs/x.pack", f"{NAME}x", NAME.replace("3-", "03-"), ""):
        assert not is_pack_name(other)
    with pytest.raises(ValueError, match="no name of a pack"):
        pack_name(0, "short")


@given(contents)
def test_documents_with_packs_read_back_equal(shards: dict[str, bytes]) -> None:
    part = record(entry(shards))
    assert PartRecord.from_json(part.to_json()) == part
    assert json.loads(part.to_json())["version"] == 2
    parts = [record(writer=writer) for writer in range(3)] + [part]
    manifest = Manifest.of_parts(parts, "n1")
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert [(writer, file.name, index) for writer, file, index in manifest.files()] == [(3, NAME, part.packs[0].index)]


def test_a_document_without_packs_is_as_it_was() -> None:
    body = json.loads(record().to_json())
    assert body["version"] == 1 and "packs" not in body


def sealed(body: dict[str, Any]) -> bytes:
    body = {key: value for key, value in body.items() if key != "crc32c"}
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    return json.dumps({**body, "crc32c": f"{crc32c(canonical):08x}"}).encode()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda pack: pack.update(entries=[]), "a pack of 0 shards"),
        (lambda pack: pack["entries"][1].__setitem__(0, "a"), "twice"),
        (lambda pack: pack.update(name="plain"), "no name of a pack"),
        (lambda pack: pack["entries"][0].__setitem__(0, "../up"), "segment"),
        (lambda pack: pack["entries"][0].__setitem__(1, 1 << 29), "inside its pack"),
        (lambda pack: pack["entries"][0].__setitem__(1, 1 << 80), "too large"),
        (lambda pack: pack["entries"][0].__setitem__(2, "123456789"), "not a CRC32C"),
        (lambda pack: pack["entries"][0].__setitem__(3, -1), "unsigned"),
        (lambda pack: pack["entries"][0].pop(), "unpack"),
        (lambda pack: pack.update(size=1 << 40), "a pack of"),
        (lambda pack: pack.update(crc32c="00000000"), "combine"),
    ],
)
def test_a_document_that_lies_about_a_pack(change: Any, said: str) -> None:
    body = json.loads(record(entry({"a": b"x" * 50, "b": b"y"})).to_json())
    change(body["packs"][0])
    with pytest.raises(ManifestError, match=said):
        PartRecord.from_json(sealed(body))


def test_a_name_in_two_places_is_found() -> None:
    data = b"same"
    plain = ShardEntry("a", len(data), crc32c(data), CHUNK, pack_chunk_crcs([crc32c(data)]))
    document = record(entry({"a": data}), plain=(plain,)).to_json()
    with pytest.raises(ManifestError, match="both put 'a'"):
        PartRecord.from_json(document)
    first, second = entry({"a": data}), entry({"a": data}, pack_name(3, "f" * 16))
    with pytest.raises(ManifestError, match="both put 'a'"):
        PartRecord.from_json(record(first, second).to_json())


def test_a_version_that_does_not_fit_the_content_is_refused() -> None:
    """A release that knows no packs must not take such a checkpoint for complete without them."""
    for document, version in ((record(entry({"a": b"x"})), 1), (record(), 2)):
        body = json.loads(document.to_json()) | {"version": version}
        with pytest.raises(ManifestError, match="version"):
            PartRecord.from_json(sealed(body))


def test_long_documents_with_packs_are_made_and_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call over all that lies in packs would hold up every other thread, the event loop's too."""
    packs = [entry({f"{p}/sh\u00e4rd-{n}": b"x" for n in range(700)}, pack_name(3, f"{p:016x}")) for p in range(3)]
    part = record(*packs)
    longest: list[int] = []
    dumps, decode = wire._dumps, wire._DECODER.raw_decode
    monkeypatch.setattr(wire, "_dumps", lambda value: longest.append(len(dumps(value))) or dumps(value))
    document = part.to_json()
    assert len(document) > wire.LONG_DOCUMENT_BYTES > 2 * max(longest)
    body = json.loads(document)
    assert json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode() == document

    class Counting:
        def raw_decode(self, text: str, at: int) -> tuple[Any, int]:
            value, end = decode(text, at)
            longest.append(end - at)
            return value, end

    monkeypatch.setattr(wire, "_DECODER", Counting())
    assert wire.loads(document) == body
    assert PartRecord.from_json(document) == part
    assert 2 * max(longest) < wire.LONG_DOCUMENT_BYTES
    with pytest.raises(ManifestError):
        PartRecord.from_json(document[:-9] + b" " + document[-9:-1])
