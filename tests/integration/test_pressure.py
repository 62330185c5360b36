"""A cache that fills: refused before data flows, taken again by itself; verified data goes first, dirty data never."""

import itertools
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import forebay
from forebay.demo.gateways import GatewayProcess, posix_tier
from forebay.errors import CacheFull, InvalidArgument
from integration.conftest import MakeGateway
from integration.kit import CHUNK, SMALL_CHUNKS, Leftovers, assert_clear, assert_refused, eventually, pause_after, some_bytes

MIB = 1 << 20
KEYS = f"{SMALL_CHUNKS}\nsoft = 0.5\nhard = 0.6\nrefuse = 0.8\nreopen = 0.6"
# Of 20 MiB: refused above 16, taken again below 12.


@pytest.fixture
def gateway(make: MakeGateway) -> GatewayProcess:
    return make(capacity="20MiB", cache_keys=KEYS).start()


def save(client: forebay.Client, step: int, size: int = 3 * MIB) -> bytes:
    data = some_bytes(size, ("pressure", step))
    with client.checkpoint("run", step, session="s") as part:
        part.put("data.bin", data)
        part.commit()
    return data


def test_full_is_refused_before_data_flows_and_taken_again(gateway: GatewayProcess, tmp_path: Path) -> None:
    gateway.cli("queue", "hold")
    saved: dict[int, bytes] = {}
    flowed: list[int] = []
    with forebay.Client(gateway.address, admit_timeout=0) as client:
        for step in range(5):
            saved[step] = save(client, step)
        assert client.pressure().level == "hard"
        left = Leftovers(gateway)
        with client.checkpoint("run", 5, session="s") as part:
            with pytest.raises(CacheFull) as caught:
                part.put("data.bin", bytes(3 * MIB), on_bytes=flowed.append)
            assert_clear(caught.value, CacheFull)
            assert caught.value.retry_after_s is not None
            assert caught.value.retry_after_s > 0
            assert "does not drain" in str(caught.value) and "pfs=held" in str(caught.value)
            with pytest.raises(CacheFull):
                part.put_many({"small": b"x"})  # between refuse and reopen nothing is taken, however small
        assert flowed == []
        left.none()
        left.close()

        status = gateway.status()
        assert status["pressure"]["level"] == "refusing"
        assert "full" in status["pressure"]["reason"]
        assert status["pressure"]["retry_after_s"] > 0
        assert status["cache"]["dirty_bytes"] == status["cache"]["used_bytes"] > 15 * MIB
        assert status["health"] == "critical"
        assert any("refused" in alarm["what"] for alarm in status["alarms"])
        (tmp_path / "state").mkdir()
        (tmp_path / "state" / "x").write_bytes(b"x")

        # Dirty data stays, whatever is asked: every step is in the cache, bit-exact.
        for step, data in saved.items():
            assert client.open("run", step, source="cache").read("data.bin") == data

    # A client that may wait gets in once the drain goes on, with nothing done by hand but the release.
    got_in = threading.Event()

    def patient() -> None:
        with forebay.Client(gateway.address, admit_timeout=60) as other:
            saved[6] = save(other, 6)
        got_in.set()

    waiting = threading.Thread(target=patient)
    waiting.start()
    assert not got_in.wait(1.0)
    gateway.cli("queue", "release")
    waiting.join(60)
    assert got_in.is_set()
    with forebay.Client(gateway.address) as client:
        assert eventually(lambda: client.pressure().level, lambda level: level != "refusing") in ("ok", "soft", "hard")
        for step, data in saved.items():
            client.wait("run", step, "pfs", timeout=30)
            assert client.open("run", step).read("data.bin") == data


def test_the_command_line_says_cache_full(gateway: GatewayProcess, tmp_path: Path) -> None:
    gateway.cli("queue", "hold")
    with forebay.Client(gateway.address, admit_timeout=0) as client:
        for step in range(5):
            save(client, step)
    pressure = json.loads(gateway.cli("pressure", "--json").stdout)
    assert pressure["level"] == "hard"
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "data.bin").write_bytes(bytes(17 * MIB))
    result = gateway.cli("save", str(tmp_path / "state"), "--run", "run", "--step", "9", check=False)
    assert_refused(result, 2, "does not fit")  # no waiting would help


def test_verified_data_is_evicted_by_watermark_oldest_first_and_pinned_stays(gateway: GatewayProcess) -> None:
    saved = {}
    with forebay.Client(gateway.address) as client:
        for step in range(10):
            saved[step] = save(client, step)
            if step == 1:
                client.pin("run", 1)
            client.wait("run", step, "pfs", timeout=30)
        eventually(lambda: client.status().cache.used_bytes, lambda used: used <= 10 * MIB)

        def cached() -> list[int]:
            return [step for step in saved if client.describe("run", step).shards[0].state == "evictable"]

        assert cached() == [1, 8, 9]  # the pinned one and the newest
        assert client.describe("run", 1).pinned
        files = sorted(gateway.cache.glob("data/*/*.shard"))
        assert len(files) == 3
        for step, data in saved.items():
            assert client.open("run", step).read("data.bin") == data
        client.unpin("run", 1)
        save(client, 10)
        client.wait("run", 10, "pfs", timeout=30)
        eventually(cached, lambda steps: 1 not in steps)
        assert client.open("run", 1).read("data.bin") == saved[1]


def test_dirty_data_is_never_evicted_for_room(gateway: GatewayProcess) -> None:
    with forebay.Client(gateway.address, admit_timeout=0) as client:
        verified = save(client, 0)
        client.wait("run", 0, "pfs", timeout=30)
        client.hold()
        saved = {step: save(client, step) for step in range(1, 6)}  # room for the last comes from step 0
        with pytest.raises(CacheFull):
            save(client, 6)
        states = {step: client.describe("run", step).shards[0].state for step in range(6)}
        assert states == {0: "evicted", **dict.fromkeys(saved, "sealed")}
        for step, data in saved.items():
            assert client.open("run", step, source="cache").read("data.bin") == data
        assert client.open("run", 0).read("data.bin") == verified  # streams through: the cache has no room


def test_a_stream_of_unknown_size_grows_its_reservation(gateway: GatewayProcess) -> None:
    """An iterable: what it has taken is reserved as it goes, and given back to the byte."""
    data = some_bytes(5 * MIB + 777, "unknown")
    gate = threading.Event()
    with forebay.Client(gateway.address, admit_timeout=0) as client:
        part = client.checkpoint("run", 1, session="s")
        put = threading.Thread(target=lambda: part.put("data.bin", pause_after(data, 40, gate)))
        put.start()
        eventually(lambda: client.status().cache.reserved_bytes >= 40 * CHUNK)
        gate.set()
        put.join(30)
        part.commit()
        cache = client.status().cache
        assert (cache.reserved_bytes, cache.open_streams) == (0, 0)
        assert len(data) <= cache.used_bytes <= len(data) + 64 * 1024
        assert client.open("run", 1).read("data.bin") == data


def test_a_stream_of_unknown_size_is_refused_cleanly_where_it_stops_fitting(gateway: GatewayProcess) -> None:
    gateway.cli("queue", "hold")

    def endless() -> Iterator[bytes]:
        while True:
            yield bytes(MIB)

    with forebay.Client(gateway.address, admit_timeout=0) as client:
        saved = save(client, 1)
        left = Leftovers(gateway)
        with client.checkpoint("run", 2, session="s") as part, pytest.raises((CacheFull, InvalidArgument)) as caught:
            part.put("data.bin", endless())
        assert_clear(caught.value, type(caught.value))
        left.none()
        left.close()
        assert client.open("run", 1).read("data.bin") == saved


def test_writers_slow_from_the_soft_watermark_on_and_a_drain_that_returns_ends_it_once(gateway: GatewayProcess) -> None:
    """The drain held: each save is slower than the one before it, none that was acknowledged is lost, and after the release the
    cache reopens once and stays open."""
    gateway.cli("queue", "hold")
    saved: dict[int, bytes] = {}
    took: list[float] = []
    paces: list[float | None] = []
    with forebay.Client(gateway.address, admit_timeout=0) as client:
        with pytest.raises(CacheFull):
            for step in range(20):
                data = some_bytes(MIB, ("slow", step))
                began_s = time.monotonic()
                with client.checkpoint("run", step, session="s", lane="stream") as part:
                    part.put("data.bin", data)
                    took.append(time.monotonic() - began_s)
                    part.commit()
                saved[step] = data
                paces.append(client.pressure().writers_bytes_per_s)
                assert client.last_pressure is not None
        # Of 20 MiB: soft above 10, hard at 12, refused above 16.
        assert len(saved) == 15
        assert paces[:9] == [None] * 9
        slowed = [pace for pace in paces[10:] if pace is not None]
        assert len(slowed) == 5 and slowed == sorted(slowed, reverse=True) and slowed[-1] == 4 * MIB
        assert min(took[12:15]) >= 0.2  # 1 MiB at 4 MiB a second
        assert client.pressure().level == "refusing"

        levels = []
        done = threading.Event()

        def watch() -> None:
            with forebay.Client(gateway.address) as other:
                while not done.wait(0.02):
                    levels.append(other.pressure().level == "refusing")

        def keep_saving(writer: int) -> None:
            with forebay.Client(gateway.address, admit_timeout=60) as other:
                for step in range(3):
                    with other.checkpoint(f"more-{writer}", step, session="s") as part:
                        part.put("data.bin", bytes(MIB))
                        part.commit()

        threads = [threading.Thread(target=watch)] + [threading.Thread(target=keep_saving, args=(w,)) for w in range(2)]
        for thread in threads:
            thread.start()
        gateway.cli("queue", "release")
        for thread in threads[1:]:
            thread.join(60)
        client.wait("run", 14, "pfs", timeout=30)
        eventually(lambda: client.pressure().writers_bytes_per_s is None)
        done.set()
        threads[0].join()
        changes = sum(before is not after for before, after in itertools.pairwise(levels))
        assert levels[0] and not levels[-1] and changes == 1
        for step, data in saved.items():
            assert client.open("run", step).read("data.bin") == data


def test_a_small_run_beside_one_with_ten_times_its_writers_has_its_share(make: MakeGateway, tmp_path: Path) -> None:
    """Both would bring far more than drains. First come, first served, the small run's one writer would have a tenth of what
    the other's ten have; in equal shares it has as much, less what it misses between its saves (much, on a busy machine)."""
    root = tmp_path / "slow"
    root.mkdir()
    gateway = make(capacity="20MiB", cache_keys=KEYS, tiers=[posix_tier(root, name="slow", bandwidth="6MiB")]).start()
    stop = threading.Event()
    taken = {"small": 0, "large": 0}

    def keep_saving(run: str, writer: int) -> None:
        with forebay.Client(gateway.address, admit_timeout=60) as client:
            step = 100_000 * writer
            while not stop.is_set():
                with client.checkpoint(run, step, session="s") as part:
                    part.put("data.bin", bytes(512 << 10))
                    part.commit()
                step += 1
                taken[run] += 1

    threads = [threading.Thread(target=keep_saving, args=("large", writer)) for writer in range(10)]
    threads.append(threading.Thread(target=keep_saving, args=("small", 0)))
    for thread in threads:
        thread.start()
    try:
        with forebay.Client(gateway.address) as client:
            eventually(lambda: client.pressure().writers_bytes_per_s is not None)
            time.sleep(1.0)
            before = dict(taken)
            eventually(lambda: taken["large"], lambda count: count >= before["large"] + 50)
            got = {run: count - before[run] for run, count in taken.items()}
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert got["small"] >= 0.2 * got["large"], got
