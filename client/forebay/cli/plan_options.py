"""The options of `plan`, as they are given: numbers as numbers, sizes, rates and times still as text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from forebay.cli.app import Json
from forebay.plan import state

_DTYPES, _OPTIMIZERS = ", ".join(state.DTYPES), ", ".join(state.OPTIMIZERS)


def _option(name: str, metavar: str, text: str) -> Any:
    return typer.Option(name, metavar=metavar, help=text)


@dataclass(frozen=True, kw_only=True)
class Options:
    """One field an option."""

    params: Annotated[str | None, _option("--params", "N", "Parameters of the model, such as 70B.")] = None
    size: Annotated[str | None, _option("--bytes", "SIZE", "Bytes of a whole checkpoint instead, such as 1.1TB.")] = None
    dtype: Annotated[str, _option("--dtype", "TYPE", f"Of the weights: {_DTYPES}.")] = "bf16"
    optimizer: Annotated[str, _option("--optimizer", "NAME", f"One of {_OPTIMIZERS}.")] = "adamw"
    master: Annotated[
        bool | None,
        typer.Option("--master/--no-master", help="Whether fp32 master weights are kept (default: below 32 bits, yes)."),
    ] = None
    loader: Annotated[str, _option("--loader-bytes", "SIZE", "State of a rank's data loader.")] = "64KiB"
    nodes: Annotated[int, _option("--nodes", "N", "Nodes that save together.")] = 1
    ranks: Annotated[int, _option("--ranks-per-node", "N", "Writers on a node.")] = 8
    shards: Annotated[int, _option("--shards-per-rank", "N", "Files that each writer saves.")] = 1
    interval: Annotated[str, _option("--interval", "TIME", "Between two saves, such as 10m.")] = "30m"
    mtbf: Annotated[
        str | None, _option("--mtbf", "TIME", "Mean time between failures of one node (default 264d: Llama 3, 2024).")
    ] = None
    cost: Annotated[
        str | None, _option("--save-cost", "TIME", "How long a save stops training (default: until it is on NVMe).")
    ] = None
    restart: Annotated[str, _option("--restart", "TIME", "From a failure until training goes on.")] = "5m"
    tier: Annotated[
        list[str] | None,
        _option(
            "--tier",
            "NAME=RATE[,s3][,every=N]",
            "A tier and what it takes from all nodes together; repeat for more. Without: as measured by the running gateway.",
        ),
    ] = None
    nvme: Annotated[str, _option("--nvme", "RATE", "Of a node's cache disk.")] = "3GB/s"
    network: Annotated[str, _option("--network", "RATE", "Of a node.")] = "12.5GB/s"
    metadata: Annotated[float, _option("--metadata-ops", "N", "Operations a second of a POSIX tier's metadata servers.")] = (
        10_000
    )
    puts: Annotated[float, _option("--object-puts", "N", "PUT requests a second (S3: 3,500 for one prefix).")] = 3500
    headroom: Annotated[float, _option("--headroom", "SHARE", "How busy anything may be on average.")] = 0.7
    outage: Annotated[str, _option("--outage", "TIME", "How long a tier may be away before saves are refused.")] = "1h"
    cache: Annotated[str | None, _option("--cache", "SIZE", "A node's cache (default: the running gateway's).")] = None
    keep: Annotated[int, _option("--keep", "N", "Checkpoints kept on an object tier.")] = 5
    price_month: Annotated[float, _option("--price-gib-month", "USD", "Of a GiB for a month (S3 Standard, us-east-1).")] = 0.023
    price_put: Annotated[float, _option("--price-put-1000", "USD", "Of 1,000 PUT, POST, COPY or LIST requests.")] = 0.005
    price_get: Annotated[float, _option("--price-get-1000", "USD", "Of 1,000 GET or HEAD requests.")] = 0.0004
    disk: Annotated[
        Path | None,
        _option("--disk", "DEVICE|FILE", "The cache's disk, read by smartctl or nvme, or a file with the JSON of either."),
    ] = None
    disk_size: Annotated[str | None, _option("--disk-size", "SIZE", "Its capacity, where it does not say.")] = None
    dwpd: Annotated[float, _option("--dwpd", "N", "Drive writes a day for which it is rated.")] = 1.0
    rated_years: Annotated[float, _option("--rated-years", "N", "For how many years.")] = 5.0
    amplification: Annotated[float, _option("--write-amplification", "N", "Bytes the disk writes for each of ours.")] = 1.1
    plot_file: Annotated[Path | None, _option("--plot", "FILE", "Also draw it, as .svg or .png (needs matplotlib).")] = None
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Also run the fleet, event by event, against the first tier.")
    ] = False
    duration: Annotated[str, _option("--duration", "TIME", "Simulated time.")] = "24h"
    seed: Annotated[int, _option("--seed", "N", "The same seed gives the same simulation.")] = 1
    jobs: Annotated[int, _option("--jobs", "N", "Equal jobs that share the nodes.")] = 1
    stagger: Annotated[str, _option("--stagger", "TIME", "Window over which a job's nodes begin to drain.")] = "0s"
    skip: Annotated[bool, typer.Option("--skip", help="A lagging drain skips superseded checkpoints.")] = False
    json: Json = False
