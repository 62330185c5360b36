"""Who can reach an address that the gateway listens on: a port asks nobody who they are.

Owns that judgement, for the gateway's log and for the doctor. A Unix socket is guarded by its file's permissions (rpc/listen).
"""

from collections.abc import Iterable
from ipaddress import ip_address
from typing import Literal

__all__ = ["Reach", "reach_of", "tcp_addresses", "unguarded"]

# Those whom the file's permissions let in; any user of this host; any host that can connect.
Reach = Literal["socket", "host", "network"]
_CAN = "read, write and delete checkpoints and the gateway's settings: a port has neither authentication nor encryption"


def reach_of(address: str) -> Reach:
    """Of one entry of node.listen. A name but `localhost` counts as one of the network, whatever it resolves to."""
    if address.startswith("unix:"):
        return "socket"
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return "host"
    try:
        return "host" if ip_address(host.partition("%")[0]).is_loopback else "network"
    except ValueError:
        return "network"


def tcp_addresses(listen: Iterable[str]) -> dict[str, Reach]:
    """The addresses that are no Unix sockets, each with its reach."""
    return {address: reach for address in listen if (reach := reach_of(address)) != "socket"}


def unguarded(listen: Iterable[str]) -> str:
    """What it means to listen there, in one sentence; empty where it is on Unix sockets alone."""
    found = tcp_addresses(listen)
    if not found:
        return ""
    wide = [address for address, reach in found.items() if reach == "network"]
    who = f"every host that can reach {', '.join(wide)}" if wide else f"every user of this host, through {', '.join(found)},"
    return f"{who} can {_CAN}; a unix socket is guarded by its file's permissions"
