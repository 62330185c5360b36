"""The fd lane's socket, as both ends know it: where it is, and the lengths of what travels over it.

Owns these agreements. Who opens, checks and closes what is the gateway's and the client's own business.
"""

from struct import Struct

SECRET_BYTES = 32  # a ticket, a token
REPLY = Struct(">H")  # bytes of the ErrorDetail that follows; 0: none, and the descriptor came with it
SIGN_OF_LIFE = b"."
WRITE_FAILED = b"!"  # a sign of life too, to gateways that do not know it: the disk has refused a write, not for want of space
SOCKET_PATH_BYTES_MAX = 107  # sockaddr_un.sun_path is 108 bytes with its final NUL; unix(7)

_SUFFIX = ".sock"


def fd_socket_path(socket_path: str) -> str:
    """The socket for descriptors of a gateway that serves `socket_path`: beside it, so that whoever sees one directory, under
    whatever name, finds both. May be longer than a socket's path may be: then the gateway has none."""
    return f"{socket_path.removesuffix(_SUFFIX)}.fd{_SUFFIX}"
