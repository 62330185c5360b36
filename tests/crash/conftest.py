"""A bucket for all crash tests; each gets a prefix of its own."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from crash.kit import Bench
from forebay.demo.seaweedfs import SeaweedFS

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def s3_server(seaweed: SeaweedFS) -> SeaweedFS:
    return seaweed.with_bucket("crash")


@pytest.fixture
def make_bench(tmp_path: Path, s3_server: SeaweedFS) -> Iterator[Callable[..., Bench]]:
    """A factory; whatever it made is ended."""
    made: list[Bench] = []

    def make(**options: object) -> Bench:
        number = next(_numbers)
        directory = tmp_path / str(number)
        directory.mkdir()
        made.append(Bench(directory, s3_server, f"p{number}", **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for bench in made:
        bench.gateway.close()


@pytest.fixture
def bench(make_bench: Callable[..., Bench]) -> Bench:
    return make_bench()
