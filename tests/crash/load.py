"""What goes on while a gateway is killed or loses its disk: trainers that outlive it, and a reader that believes nothing."""

import random
import threading

from crash.kit import LARGE, MIDDLE, RUN, SMALL, Job, Trainer, delete, listed

THREADS = 3
KEPT = 3  # checkpoints a thread keeps; older ones are deleted
SIZES = (LARGE, MIDDLE, SMALL, 0)
RETRY_S = 600.0  # the gateway is gone most of the time, on a busy machine all the more


class Load:
    """Trainers, each with steps of its own, and a reader that believes nothing."""

    def __init__(self, bench: Trainer, rng: random.Random) -> None:
        self._bench = bench
        self._stop = threading.Event()
        self._on_tier: set[tuple[int, str]] = set()  # (step, tier) reported complete there
        seeds = [rng.random() for _ in range(THREADS)]
        self.jobs = [Job(lambda n=n, seed=seed: self._train(n, seed)) for n, seed in enumerate(seeds)]  # type: ignore[misc]
        self.jobs.append(Job(self._watch))
        for job in self.jobs:
            job.start()

    def finish(self) -> set[int]:
        """Let all come to their end; the steps that are to be there."""
        self._stop.set()
        for job in self.jobs:
            job.finish(120.0)
        return self._bench.log.promised - self._bench.log.deleting

    def check_alive(self) -> None:
        for job in self.jobs:
            if job.error is not None:
                raise job.error

    def _train(self, number: int, seed: float) -> None:
        rng = random.Random(seed)
        mine: list[int] = []
        with self._bench.client(retry_s=RETRY_S) as client:
            step = number
            while not self._stop.is_set():
                step += THREADS
                sizes = {f"shard-{n}": rng.choice(SIZES) for n in range(rng.randint(1, 4))}
                if rng.random() < 0.3:
                    sizes |= {f"tiny/{n:02}": rng.randint(0, 3000) for n in range(70)}
                if rng.random() < 0.3:
                    self._bench.abort(client, step, sizes)
                    if rng.random() < 0.3:
                        continue  # and nothing of it is ever to be seen
                self._bench.save(client, step, sizes)
                mine.append(step)
                self._bench.compare(client, rng.choice(mine))
                if rng.random() < 0.5:
                    client.wait(RUN, step, rng.choice(self._bench.tiers), timeout=120)
                if len(mine) > KEPT:
                    self._bench.log.deleting.add(mine[0])
                    delete(client, mine.pop(0), force=True)

    def _watch(self) -> None:
        """What was reported complete on a tier stays so."""
        with self._bench.client(retry_s=RETRY_S) as client:
            while not self._stop.wait(0.3):
                self._bench.check_visible()
                before = self._on_tier.copy()
                found = listed(client)
                now = {(each.step, level.level) for each in found for level in each.levels if level.state == "complete"}
                self._on_tier = {entry for entry in now if entry[1] in self._bench.tiers}
                gone = {entry for entry in before - now if entry[0] not in self._bench.log.deleting}
                assert not gone, f"complete on a tier, and then no more: {gone}"
