"""The pressure that travels with every acknowledgement.

Owns how often it is computed, and who was told which. Does not own what it says (encode.pressure).
"""

from forebay_gateway.paths.node import Node
from forebay_gateway.rpc import encode
from forebay_wire.v1 import gateway_pb2 as pb

AGE_S_MAX = 0.25  # so that an acknowledgement costs no look-up; clients act on it in seconds


class PressureBoard:
    """One a gateway."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._message = pb.Pressure()
        self._computed_s = float("-inf")

    def now(self) -> pb.Pressure:
        """The newest, at most AGE_S_MAX old. Not to be changed by who gets it; one that says something else is a new object."""
        now_s = self._node.clock.monotonic()
        if now_s - self._computed_s >= AGE_S_MAX:
            self._computed_s = now_s
            found = encode.pressure(self._node)
            if found != self._message:
                self._message = found
        return self._message


class StreamPressure:
    """What one stream of acknowledgements was told."""

    def __init__(self, board: PressureBoard) -> None:
        self._board = board
        self._told: pb.Pressure | None = None

    def news(self) -> pb.Pressure | None:
        """The pressure, where the stream was told another one or none."""
        now = self._board.now()
        if now is self._told:
            return None
        self._told = now
        return now
