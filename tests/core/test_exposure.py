"""Who can reach what a gateway listens on, and how it is told."""

import pytest

from forebay_gateway.core.exposure import reach_of, tcp_addresses, unguarded

SOCKET = "unix:///run/forebay/gateway.sock"


@pytest.mark.parametrize(
    ("address", "reach"),
    [
        (SOCKET, "socket"),
        ("127.0.0.1:7400", "host"),
        ("127.8.8.8:7400", "host"),
        ("localhost:7400", "host"),
        ("[::1]:7400", "host"),
        ("0.0.0.0:7400", "network"),
        ("[::]:7400", "network"),
        ("10.0.0.7:7400", "network"),
        ("[fe80::1%eth0]:7400", "network"),
        ("node-1.cluster:7400", "network"),
    ],
)
def test_reach(address: str, reach: str) -> None:
    assert reach_of(address) == reach
    assert tcp_addresses([SOCKET, address]) == ({} if reach == "socket" else {address: reach})


def test_sockets_alone_say_nothing() -> None:
    assert unguarded([SOCKET, "unix:///b.sock"]) == ""


def test_what_it_means_is_said_of_the_widest() -> None:
    local = unguarded([SOCKET, "127.0.0.1:7400"])
    assert "every user of this host" in local and "127.0.0.1:7400" in local
    wide = unguarded(["127.0.0.1:7400", "0.0.0.0:7401"])
    assert "every host that can reach 0.0.0.0:7401 can read, write and delete checkpoints" in wide
    for told in (local, wide):
        assert "neither authentication nor encryption" in told and "file's permissions" in told
