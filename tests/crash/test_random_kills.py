"""SIGKILL at random moments of a loaded gateway, again and again, and every promise looked at afterwards.

Several threads save, restore and delete while two tiers drain and a small cache evicts. FOREBAY_CRASH_ROUNDS (default 3) says
how often the gateway is killed, FOREBAY_CRASH_SEED repeats a run's choices; the seed is printed.
"""

import random
import signal
import time
from collections.abc import Callable

import psutil
import pytest

from crash.kit import Bench
from crash.load import Load
from soak.figures import reported
from soak.form import given

ROUNDS = int(given("FOREBAY_CRASH_ROUNDS", "3"))


@pytest.mark.timeout(120 + 30 * ROUNDS)
def test_random_kills_under_load(make_bench: Callable[..., Bench]) -> None:
    seed = int(given("FOREBAY_CRASH_SEED", str(random.SystemRandom().randrange(1 << 32))))
    print(f"FOREBAY_CRASH_SEED={seed} FOREBAY_CRASH_ROUNDS={ROUNDS}")
    rng = random.Random(seed)
    bench = make_bench(soft=0.2, capacity="64MiB")
    bench.gateway.start()
    load = Load(bench, rng)
    with reported("random-kills", bench.figures, seed=seed, crash_rounds=0) as figures:
        for _ in range(ROUNDS):
            time.sleep(rng.uniform(0.2, 4.0))
            if rng.random() < 0.3:
                kill_a_mover(bench, rng)
                time.sleep(rng.uniform(0.0, 0.5))
            bench.gateway.kill()
            load.check_alive()
            bench.gateway.start()
            figures["crash_rounds"] += 1
        bench.check_settled(load.finish())


def kill_a_mover(bench: Bench, rng: random.Random) -> None:
    movers = psutil.Process(bench.gateway.pid).children()
    if movers:
        rng.choice(movers).send_signal(signal.SIGKILL)
