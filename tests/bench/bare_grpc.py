"""The baseline of the stream lane: a bare grpcio stream whose bytes the other side throws away.

Owns both ends: a server process without protobuf, checksum or disk, and the client's loops. Chunks have the same size as the
gateway's.
"""

import asyncio
import multiprocessing
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
import grpc.aio

from bench.harness import measure
from bench.rows import Measured

OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def _serve(address: str, ready: Any) -> None:
    async def put(stream: AsyncIterator[bytes], _context: object) -> bytes:
        total = 0
        async for message in stream:
            total += len(message)
        return str(total).encode()

    async def get(request: bytes, _context: object) -> AsyncIterator[bytes]:
        chunk, total = map(int, request.split())
        block = os.urandom(chunk)
        for _ in range(total // chunk):
            yield block

    async def run() -> None:
        server = grpc.aio.server(options=OPTIONS)
        methods = {
            "Put": grpc.stream_unary_rpc_method_handler(put),
            "Get": grpc.unary_stream_rpc_method_handler(get),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Bare", methods),))
        server.add_insecure_port(address)
        await server.start()
        ready.set()
        await server.wait_for_termination()

    asyncio.run(run())


class BareStream:
    """A running baseline server and a channel to it; its socket lies in `directory`."""

    def __init__(self, directory: Path, chunk_size: int) -> None:
        self._address = f"unix:{directory / 'bare.sock'}"
        self._chunk_size = chunk_size

    def __enter__(self) -> "BareStream":
        context = multiprocessing.get_context("spawn")
        ready = context.Event()
        self._server = context.Process(target=_serve, args=(self._address, ready), daemon=True)
        self._server.start()
        try:
            if not ready.wait(30):
                raise RuntimeError("the bare grpcio server did not start")
            self._channel = grpc.insecure_channel(self._address, options=OPTIONS)
        except BaseException:
            self._end()
            raise
        self._put = self._channel.stream_unary("/Bare/Put")
        self._get = self._channel.unary_stream("/Bare/Get")
        self._block = os.urandom(self._chunk_size)
        self.up(4 * self._chunk_size)  # the first call pays for the connection
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._channel.close()
        self._end()

    def _end(self) -> None:
        self._server.terminate()
        self._server.join(10)
        self._server.close()

    def up(self, size: int) -> Measured:
        """Send `size` bytes."""

        def messages() -> Iterator[bytes]:
            for _ in range(size // self._chunk_size):
                yield self._block

        return measure(lambda: self._put(messages()), self._server.pid or 0)

    def down(self, size: int) -> Measured:
        """Receive `size` bytes."""
        request = f"{self._chunk_size} {size}".encode()
        return measure(lambda: sum(len(message) for message in self._get(request)), self._server.pid or 0)
