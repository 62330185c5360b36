"""A wall clock that jumps by days, and one that differs from the object store's: nothing is ordered by it, and people are told.

The gateway and its movers run under a shim that shifts CLOCK_REALTIME alone (clock_shim.c).
"""

import asyncio
import contextlib
import json
import random
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path

import pytest
from aiohttp import web

import forebay
from faults.proxy import Fault, FaultyProxy, _Answer
from forebay.demo.gateways import GatewayProcess, posix_tier, s3_tier
from forebay.demo.seaweedfs import SeaweedFS
from forebay.errors import DeadlineExceeded
from hostile.kit import report
from integration.conftest import assert_clean_log
from integration.kit import SMALL_CHUNKS, eventually, some_bytes

DAY_S = 86_400
SHIFTS_S = [-400 * DAY_S, -3 * DAY_S, -3600, 0, 3600, 3 * DAY_S, 400 * DAY_S]


class JumpingClock:
    """Shifts the wall clock of all processes that carry `environment`."""

    def __init__(self, library: Path, file: Path) -> None:
        self._file = file
        self.environment = {"LD_PRELOAD": str(library), "FOREBAY_TEST_CLOCK": str(file)}
        self.jumps = 0
        self.set(0)

    def set(self, shift_s: int) -> None:
        """From here on."""
        mode = "r+b" if self._file.exists() else "wb"
        with self._file.open(mode) as file:
            file.write(struct.pack("q", shift_s))
        self.jumps += 1

    @contextlib.contextmanager
    def jumping(self) -> Iterator[None]:
        """By days, back and forth, many times a second."""
        over = threading.Event()

        def jump() -> None:
            chance = random.Random(9)
            while not over.wait(0.03):
                self.set(chance.choice(SHIFTS_S))

        thread = threading.Thread(target=jump)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc to build the clock's shim with")
    library = tmp_path_factory.mktemp("shim") / "clock_shim.so"
    source = Path(__file__).with_name("clock_shim.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-o", str(library), str(source), "-ldl"], check=True)
    return library


@pytest.fixture
def clock(shim: Path, tmp_path: Path) -> JumpingClock:
    return JumpingClock(shim, tmp_path / "clock")


def save(client: forebay.Client, step: int) -> dict[str, bytes]:
    shards = {f"{step}/{number}.bin": some_bytes(400_000, (step, number)) for number in range(2)}
    with client.checkpoint("jump", step, session="s") as part:
        part.put_many(shards)
        part.put(f"{step}/large.bin", some_bytes(1_500_000, step))
        part.commit(wait="pfs" if step % 2 else "cache", timeout=30)
    return {**shards, f"{step}/large.bin": some_bytes(1_500_000, step)}


def cached_steps(gateway: GatewayProcess, steps: list[int]) -> list[bool]:
    """Which steps are still whole in the cache, in the order given."""
    found = []
    for step in steps:
        shards = json.loads(gateway.cli("info", "jump", str(step), "--json").stdout)["shards"]
        found.append(all(shard["state"] in ("sealed", "evictable") for shard in shards))
    return found


def test_the_shim_works(clock: JumpingClock) -> None:
    """Or the tests below would prove nothing."""
    import os
    import sys

    clock.set(3 * DAY_S)
    told = subprocess.run(
        [
            sys.executable,
            "-c",
            "import time, datetime; print(time.time(), time.monotonic(), datetime.datetime.now().timestamp())",
        ],
        env={**os.environ, **clock.environment},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert abs(float(told[0]) - time.time() - 3 * DAY_S) < 60
    assert abs(float(told[2]) - time.time() - 3 * DAY_S) < 60
    assert abs(float(told[1]) - time.monotonic()) < 60


def test_a_clock_that_jumps_by_days_changes_no_order(clock: JumpingClock, tmp_path: Path) -> None:
    (tmp_path / "pfs").mkdir()
    gateway = GatewayProcess(
        tmp_path,
        "a",
        [posix_tier(tmp_path / "pfs")],
        capacity="24MiB",
        cache_keys=f"{SMALL_CHUNKS}\nsoft = 0.5",
        node_keys='stream_timeout = "10s"\ncomplete_within = "1h"\nabandon_after = "1h"',
        environment=clock.environment,
    )
    order = [5, 3, 8, 1, 7, 2]
    saved: dict[int, dict[str, bytes]] = {}
    with gateway, clock.jumping():
        with forebay.Client(gateway.address) as client:
            for step in order[:3]:
                saved[step] = save(client, step)
                assert client.latest("jump") == max(saved)
            began_s = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                client.wait("jump", 99, "pfs", timeout=1.5)
            assert time.monotonic() - began_s > 1.4
        for end in ("kill", "terminate"):
            clock.set(-400 * DAY_S if end == "kill" else 400 * DAY_S)
            getattr(gateway, end)()
            gateway.start()
            with forebay.Client(gateway.address) as client:
                step = order[len(saved)]
                saved[step] = save(client, step)
                assert client.latest("jump") == max(saved)
        with forebay.Client(gateway.address) as client:
            while len(saved) < len(order):
                step = order[len(saved)]
                saved[step] = save(client, step)
            assert client.latest("jump") == 8
            assert [found.step for found in client.checkpoints("jump") if found.complete] == sorted(order)
            for step in order:
                client.wait("jump", step, "all", timeout=30)
            eventually(lambda: client.status().cache.used_bytes <= 12 << 20)
            states = cached_steps(gateway, order)
            assert states == sorted(states), f"evicted out of order: {list(zip(order, states, strict=True))}"
            assert not states[0]
            assert states[-1]
            status = client.status()
            assert [alarm.what for alarm in status.alarms] == []
            assert 0 <= status.uptime_s < 600
            for step, shards in saved.items():
                reader = client.open("jump", step)
                assert {name: reader.read(name) for name in reader.names()} == shards
            client.delete("jump", 8)
            assert client.latest("jump") == 7
    assert_clean_log(gateway)
    report("clock", jumps=clock.jumps, saves=len(saved))


# -- skew against the object store ---------------------------------------------------------------------------------------------


class OtherClock(FaultyProxy):
    """A store whose clock is behind by an hour, as its answers' Date says."""

    behind_s = 3600

    async def _forward(self, request: web.Request, body: bytes) -> _Answer:
        answer = await super()._forward(request, body)
        answer.headers["Date"] = formatdate(time.time() - self.behind_s, usegmt=True)
        return answer


@contextlib.asynccontextmanager
async def gateway_behind(proxy: FaultyProxy, server: SeaweedFS, directory: Path, prefix: str):  # type: ignore[no-untyped-def]
    """A gateway whose only tier is reached through the proxy, which runs on this loop."""
    runner = await proxy.start()
    gateway = GatewayProcess(
        directory,
        "a",
        [s3_tier(proxy.endpoint, server.bucket, prefix=prefix)],
        cache_keys=SMALL_CHUNKS,
        environment=server.environment,
    )
    try:
        await asyncio.to_thread(gateway.start)
        yield gateway
    finally:
        await asyncio.to_thread(gateway.close)
        await runner.cleanup()
    assert_clean_log(gateway)


async def test_a_store_with_another_clock_is_shown(s3_server: SeaweedFS, tmp_path: Path) -> None:
    async with gateway_behind(OtherClock(s3_server.endpoint), s3_server, tmp_path, "skew") as gateway:
        ok = lambda status: status["tiers"][0]["state"] == "ok"  # noqa: E731
        status = await asyncio.to_thread(eventually, gateway.status, ok)
        assert abs(status["tiers"][0]["clock_skew_s"] + 3600) < 10
        assert any("clock" in alarm["what"] and "-360" in alarm["what"] for alarm in status["alarms"]), status["alarms"]


async def test_requests_refused_for_their_time_are_said_so_and_tried_again(s3_server: SeaweedFS, tmp_path: Path) -> None:
    proxy = FaultyProxy(s3_server.endpoint)
    async with gateway_behind(proxy, s3_server, tmp_path, "refused") as gateway:
        await asyncio.to_thread(eventually, gateway.status, lambda status: status["tiers"][0]["state"] == "ok")
        late = Fault(
            "answer",
            lambda request: True,
            times=1_000_000,
            status=403,
            code="RequestTimeTooSkewed",
            headers={"Date": formatdate(time.time() - 7200, usegmt=True)},
        )
        proxy.faults.append(late)

        def save() -> None:
            with forebay.Client(gateway.address) as client, client.checkpoint("late", 1, session="s") as part:
                part.put("data.bin", some_bytes(200_000, "late"))
                part.commit()

        await asyncio.to_thread(save)
        away = lambda status: status["tiers"][0]["state"] == "away"  # noqa: E731
        status = await asyncio.to_thread(eventually, gateway.status, away)
        reason = status["tiers"][0]["reason"]
        assert "clock" in reason
        assert "skew_s=-7" in reason, reason
        assert status["tiers"][0]["pending_copies"] == 1
        late.times = 0

        def drained() -> None:
            with forebay.Client(gateway.address) as client:
                client.wait("late", 1, "object", timeout=40)
                assert client.open("late", 1, source="object").read("data.bin") == some_bytes(200_000, "late")

        await asyncio.to_thread(drained)
