"""The stream lane with chunks of several sizes: GB/s saved, and CPU-s a GB of client and gateway together.

usage: chunk_sizes.py [--mib 1024] [--rounds 5] [--directory DIR]
One shard a save, durable; all sizes in each round, in turns; medians.
"""

import argparse
import os
import resource
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import psutil

import forebay
from forebay.demo.gateways import GatewayProcess, posix_tier

SIZES_MIB = (1, 2, 4, 8, 16)


def _own_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _save(gateway: GatewayProcess, data: bytes, step: int) -> tuple[float, float]:
    assert gateway.process is not None
    process = psutil.Process(gateway.process.pid)
    with forebay.Client(gateway.address, progress=False) as client:
        client.hold()
        began_s, cpu_s = time.perf_counter(), _own_cpu_s() + _cpu_s(process)
        with client.checkpoint("chunks", step, lane="stream") as checkpoint:
            checkpoint.put("x", data)
            checkpoint.commit()
        took_s, used_s = time.perf_counter() - began_s, _own_cpu_s() + _cpu_s(process) - cpu_s
        client.delete("chunks", step, force=True)
    return len(data) / took_s / 1e9, used_s / len(data) * 1e9


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=None)
    asked = parser.parse_args()
    data = os.urandom(1 << 20) * asked.mib
    figures: dict[int, list[tuple[float, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="forebay-bench-", dir=asked.directory) as name:
        gateways = {}
        for size in SIZES_MIB:
            tier = Path(name) / f"pfs-{size}"
            tier.mkdir()
            keys = f'chunk_size = "{size}MiB"'
            gateways[size] = GatewayProcess(
                Path(name), f"n{size}", [posix_tier(tier)], capacity="8GiB", cache_keys=keys
            ).start()
        try:
            for step in range(asked.rounds + 1):
                for size, gateway in gateways.items():
                    figure = _save(gateway, data, step)
                    if step:  # the first one of each warms up
                        figures[size].append(figure)
        finally:
            for gateway in gateways.values():
                gateway.terminate()
    for size, found in figures.items():
        rates, costs = zip(*found, strict=True)
        print(f"{size:>3} MiB  {statistics.median(rates):.2f} GB/s  {statistics.median(costs):.2f} CPU-s a GB")


if __name__ == "__main__":
    main()
