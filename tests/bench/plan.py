"""The drain scheduler with a million copies pending, a day of ten thousand nodes simulated, a prediction beside a real drain.

Owns the rows plan-*.
"""

import gc
import os
import statistics
import time
from collections.abc import Iterator

from bench.harness import RUN, TIMEOUT_S, Job, gateway
from bench.rows import BY_NAME, Row, measured
from forebay.demo.gateways import posix_tier
from forebay_gateway.core.schedule import Kind, Next, Part, Rules, RunRules, Scheduler
from forebay_gateway.plan.scenario import Scenario
from forebay_gateway.plan.simulate import simulate

PARTS, COPIES, RUNS, WRITERS = 10_000, 100, 25, 8
RATE, SIZE, INTERVAL_S, SAVES = 16_000_000, 32 << 20, 3.0, 6


def decisions(job: Job) -> Iterator[Row]:
    """Fill, then drain batch by batch: periodic and final parts of many runs, two of three parts beyond the largest age."""
    parts = PARTS // 10 if job.quick else PARTS
    queue = Scheduler(
        Rules(max_age_s=parts / 3), lambda run: RunRules(skip_superseded=run.endswith("0"), every=1 + len(run) % 2)
    )
    for order in range(1, parts + 1):
        session = (order - 1) // WRITERS
        kind = Kind.FINAL if session % 50 == 49 else Kind.PERIODIC
        queue.add(Part(order, f"run-{session % RUNS}", session, session, COPIES, float(order), kind))
        if order % WRITERS == 0:
            queue.complete(session)
    taken: list[float] = []
    gc.collect()
    now_s = float(parts)
    while len(queue):
        began_s = time.thread_time()
        found = queue.decide(now_s)
        taken.append(1e3 * (time.thread_time() - began_s))
        if isinstance(found, Next):
            queue.took(found.order, COPIES // 2, 1 << 30, now_s)
            queue.verified(found.order, COPIES // 2)
        now_s += 1.0
    taken.sort()
    at = {share: taken[int(share * (len(taken) - 1))] for share in (0.5, 0.999, 1.0)}
    detail = f"CPU: median {1e3 * at[0.5]:.1f} us, 99.9 % {at[0.999]:.3g} ms, longest {at[1.0]:.3g} ms"
    note = (
        f"{'ONLY ' if job.quick else ''}{parts * COPIES:,} copies in {parts:,} parts of {RUNS} runs, {len(taken):,} decisions"
    )
    yield measured(BY_NAME["plan-decision"], at[0.999], detail, note=note)


def day(job: Job) -> Iterator[Row]:
    """A fleet that saves a little more than its tier takes."""
    scenario = Scenario(
        nodes=1000 if job.quick else 10_000,
        size_bytes=(1000 if job.quick else 10_000) * (20 << 30),
        interval_s=600,
        tier_bytes_per_s=3e10 if job.quick else 3e11,
        jobs=25 if job.quick else 250,
        rules=RunRules(skip_superseded=True),
    )
    began_s = time.process_time()
    found = simulate(scenario)
    taken_s = time.process_time() - began_s
    detail = (
        f"CPU of one core; {found.events:,} events, {found.decisions:,} decisions, {found.saves:,} saves of {found.jobs} jobs"
    )
    yield measured(BY_NAME["plan-simulate"], taken_s, detail, note="ONLY 1,000 nodes" if job.quick else "10,000 nodes, 24 h")


def predicted(job: Job) -> Iterator[Row]:
    """Saves at an interval, to a POSIX tier that is held to a bandwidth: how long until each is out, and what was foreseen."""
    content = os.urandom(SIZE)
    waits = []
    with job.place() as place:
        (place / "pfs").mkdir()
        tier = posix_tier(place / "pfs", bandwidth=RATE)
        with gateway(place, tier, capacity=4 * SAVES * SIZE, held=False) as node:
            for _ in range(SAVES):
                step = node.save({"model.bin": content}, "stream")
                began_s = time.perf_counter()
                node.client.wait(RUN, step, "pfs", timeout=TIMEOUT_S)
                waits.append(time.perf_counter() - began_s)
                time.sleep(max(0.0, INTERVAL_S - waits[-1]))
    scenario = Scenario(1, SIZE, INTERVAL_S, RATE, duration_s=20 * INTERVAL_S, mtbf_s=1e12, save_cost_s=0.0, uneven=0.0)
    foreseen_s = simulate(scenario).drain_mean_s or 0.0
    real_s = statistics.median(waits)
    detail = f"out after {real_s:.2f} s ({min(waits):.2f} to {max(waits):.2f}), foreseen {foreseen_s:.2f} s"
    yield measured(BY_NAME["plan-predicted"], real_s / foreseen_s, detail, {"values": waits}, f"{RATE / 1e6:.0f} MB/s, 32 MiB")
