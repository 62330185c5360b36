"""A proxy before the real S3 server that loses, breaks, delays or replaces chosen answers; all others pass as they are.

Owns what happens on the wire. Knows S3 only as far as it must: which call a request is (`call_of`), and where an answer holds
an ETag or a checksum. `faulty_proxy` runs it in the caller's event loop, `ProxyThread` in a thread of its own.
"""

import asyncio
import contextlib
import re
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType

import aiohttp
from aiohttp import web
from yarl import URL

ERROR_XML = "<?xml version='1.0'?><Error><Code>{code}</Code><Message>made up</Message></Error>"
FOREIGN_HTML = "<html><body>Welcome. Please log in.</body></html>"
FOREVER = 1 << 30
REOPEN_S = 0.15
_OTHER_CRC = "AAAAAQ=="
_OTHER_ETAG = '"0123456789abcdef0123456789abcdef"'


def call_of(request: web.BaseRequest) -> str:
    """The S3 call that a path-style request is."""
    of_bucket = "/" not in request.path.strip("/")
    query = request.query
    match request.method:
        case "HEAD":
            return "HeadBucket" if of_bucket else "HeadObject"
        case "GET" if of_bucket:
            return "ListMultipartUploads" if "uploads" in query else "ListObjectsV2"
        case "GET":
            return "GetObject"
        case "PUT":
            return "UploadPart" if "partNumber" in query else "PutObject"
        case "POST" if "delete" in query:
            return "DeleteObjects"
        case "POST":
            return "CompleteMultipartUpload" if "uploadId" in query else "CreateMultipartUpload"
        case "DELETE":
            return "AbortMultipartUpload" if "uploadId" in query else "DeleteObject"
    return request.method


@dataclass
class Fault:
    """Applies to the next `times` requests for which `when` holds. Kinds, in the order of a request's life:

    refused: the port is closed, for REOPEN_S after the last time, else until `clear`. reset-before, reset-inside, reset-after:
    a reset before, inside or after the request's body, which is not passed on (refuse: an orderly close instead).
    stall: no answer until `clear`. stall-inside: the request's body is not read.
    lose: pass on, then close without an answer. slow: pass on, and answer in pieces during `delay_s`.
    answer: do not pass on (after=False) or pass on first (after=True), then give this status and S3 error code.
    foreign: a login page instead, with status 200. empty: status 200 and no body. cut: half of the answer's body.
    bare: an XML answer of the right shape in which keys, upload ids and ETags are not.
    etag, checksum: the answer with another one. damage: one bit of the answer's body is other.
    undeleted: a deletion of many is not passed on, and the answer (200) names each key with this S3 error code.
    stale-absent, stale-size, stale-bytes: a HEAD's answer from before the object was there, or was this one.
    """

    kind: str
    when: Callable[[web.Request], bool]
    times: int = 1
    status: int = 503
    code: str = "SlowDown"
    after: bool = False
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.25


@dataclass
class _Answer:
    status: int
    headers: dict[str, str]
    body: bytes


class FaultyProxy:
    """`faults` are taken in order; `seen` are all requests as "METHOD path?query", `calls` their S3 names."""

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self.faults: list[Fault] = []
        self.seen: list[str] = []
        self.calls: list[str] = []
        self.hashes: list[str] = []
        self.headers: list[tuple[str, Mapping[str, str]]] = []
        self.endpoint = ""
        self._released = asyncio.Event()
        self._site: web.TCPSite | None = None
        self._reopening: asyncio.Task[None] | None = None

    def count(self, part: str) -> int:
        """Requests seen whose line holds `part`."""
        return sum(part in each for each in self.seen)

    def forget(self) -> None:
        """What was seen so far."""
        self.seen.clear()
        self.calls.clear()

    async def clear(self) -> None:
        """No fault from here on: stalled requests end with a reset, the port is open."""
        self.faults.clear()
        self._released.set()
        self._released = asyncio.Event()
        if self._reopening is not None:
            await self._reopening
        await self._open()

    def _fault(self, request: web.Request) -> Fault | None:
        for fault in self.faults:
            if fault.times > 0 and fault.when(request):
                fault.times -= 1
                return fault
        return None

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(f"{request.method} {request.path_qs}")
        self.calls.append(call_of(request))
        self.headers.append((self.calls[-1], request.headers))
        self.hashes.append(request.headers.get("x-amz-content-sha256", ""))
        transport = request.transport
        assert isinstance(transport, asyncio.Transport)
        return await self._answer(request, transport)

    async def _answer(self, request: web.Request, transport: asyncio.Transport) -> web.StreamResponse:
        fault = self._fault(request)
        kind = fault.kind if fault is not None else ""
        if fault is not None and await self._broken_before(fault, request, transport):
            return web.Response()
        body = await request.read()
        if kind in ("refuse", "reset-after"):
            _reset(transport) if kind == "reset-after" else transport.close()
            return web.Response()
        if kind == "undeleted" and fault is not None:
            return _undeleted(fault, body)
        if kind == "stall":
            await self._stall(transport)
            return web.Response()
        if fault is not None and (made := _made_up(fault)) is not None and not fault.after:
            return made
        answer = await self._forward(request, body)
        if fault is None:
            return web.Response(status=answer.status, headers=answer.headers, body=answer.body)
        if kind == "answer":
            return _made_up(fault) or web.Response()
        if kind == "lose":
            _reset(transport)
            return web.Response()
        if kind in ("cut", "slow"):
            return await _in_pieces(fault, request, answer, transport)
        return _altered(fault, request, answer)

    async def _broken_before(self, fault: Fault, request: web.Request, transport: asyncio.Transport) -> bool:
        """Faults that strike before the request's body has been read whole."""
        if fault.kind == "refused":
            await self._shut()
            if fault.times < FOREVER - 1000:
                self._reopening = asyncio.create_task(self._reopen())
        elif fault.kind == "reset-inside":
            await request.content.read(1000)
        elif fault.kind == "stall-inside":
            await self._stall(transport)
        elif fault.kind != "reset-before":
            return False
        _reset(transport)
        return True

    async def _stall(self, transport: asyncio.Transport) -> None:
        with contextlib.suppress(asyncio.CancelledError):  # the client gave up
            await self._released.wait()
        _reset(transport)

    async def _forward(self, request: web.Request, body: bytes) -> _Answer:
        # A fresh session each time: slow, but no state between requests. The signed Host header stays as it was.
        headers = _without(request.headers, "expect", "transfer-encoding")
        url = URL(self._upstream + request.raw_path, encoded=True)
        data = _stream(body) if body else None
        async with (
            aiohttp.ClientSession(auto_decompress=False) as session,
            session.request(request.method, url, headers=headers, data=data) as answer,
        ):
            received = await answer.read()
            kept = _without(answer.headers, "transfer-encoding", "connection")
            if request.method != "HEAD":
                kept.pop("Content-Length", None)
            return _Answer(answer.status, kept, received)

    async def start(self) -> web.AppRunner:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{tail:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.5)
        await self._runner.setup()
        await self._open()
        self.endpoint = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self._runner

    async def _open(self) -> None:
        if self._site is None:
            port = URL(self.endpoint).port if self.endpoint else 0
            self._site = web.TCPSite(self._runner, "127.0.0.1", port, reuse_address=True)
            await self._site.start()

    async def _shut(self) -> None:
        if self._site is not None:
            site, self._site = self._site, None
            await site.stop()
        server = self._runner.server
        assert server is not None
        for connection in server.connections:  # idle ones too, or a pooled connection would go on being served
            if isinstance(connection.transport, asyncio.Transport):
                _reset(connection.transport)

    async def _reopen(self) -> None:
        await asyncio.sleep(REOPEN_S)
        await self._open()


def _reset(transport: asyncio.Transport) -> None:
    """End a connection as a crashed host or a firewall does: RST instead of FIN."""
    if (raw := transport.get_extra_info("socket")) is not None:
        with contextlib.suppress(OSError):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def _made_up(fault: Fault) -> web.Response | None:
    if fault.kind == "answer":
        text = ERROR_XML.format(code=fault.code)
        return web.Response(status=fault.status, text=text, content_type="application/xml", headers=fault.headers)
    if fault.kind == "foreign":
        return web.Response(text=FOREIGN_HTML, content_type="text/html")
    return web.Response(body=b"") if fault.kind == "empty" else None


def _undeleted(fault: Fault, body: bytes) -> web.Response:
    keys = re.findall(r"<Key>(.*?)</Key>", body.decode())
    errors = "".join(f"<Error><Key>{key}</Key><Code>{fault.code}</Code><Message>made up</Message></Error>" for key in keys)
    return web.Response(text=f"<DeleteResult>{errors}</DeleteResult>", content_type="application/xml")


async def _in_pieces(fault: Fault, request: web.Request, answer: _Answer, transport: asyncio.Transport) -> web.StreamResponse:
    length = answer.headers.get("Content-Length", str(len(answer.body)))
    response = web.StreamResponse(status=answer.status, headers={**answer.headers, "Content-Length": length})
    if fault.kind == "slow":
        await asyncio.sleep(fault.delay_s / 2)
    await response.prepare(request)
    middle = len(answer.body) // 2
    await response.write(answer.body[:middle])
    if fault.kind == "cut":
        transport.close()
        return response
    await asyncio.sleep(fault.delay_s / 2)
    await response.write(answer.body[middle:])
    return response


def _altered(fault: Fault, request: web.Request, answer: _Answer) -> web.Response:
    headers, body, status = dict(answer.headers), answer.body, answer.status
    if fault.kind == "bare":
        body = re.sub(rb"<(Key|UploadId|ETag)>[^<]*</\1>", b"", body)
    if fault.kind in ("etag", "stale-size", "stale-bytes"):
        _put_header(headers, "etag", _OTHER_ETAG)
        body = re.sub(rb"<ETag>.*?</ETag>", f"<ETag>{_OTHER_ETAG}</ETag>".encode(), body)
    if fault.kind in ("checksum", "stale-size", "stale-bytes"):
        _put_header(headers, "x-amz-checksum-crc32c", _OTHER_CRC)
        body = re.sub(rb"<ChecksumCRC32C>.*?<", f"<ChecksumCRC32C>{_OTHER_CRC}<".encode(), body)
    if fault.kind == "stale-size":
        headers["Content-Length"] = str(int(headers["Content-Length"]) // 2)
    if fault.kind == "stale-absent":
        return web.Response(status=404)
    if fault.kind == "damage":
        body = bytes([body[0] ^ 1]) + body[1:]
    return web.Response(status=status, headers=headers, body=body)


def _put_header(headers: dict[str, str], name: str, value: str) -> None:
    for found in [each for each in headers if each.lower() == name]:
        headers[found] = value


def _without(headers: Mapping[str, str], *dropped: str) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in dropped}


async def _stream(body: bytes) -> AsyncIterator[bytes]:
    yield body


@asynccontextmanager
async def faulty_proxy(upstream: str) -> AsyncIterator[FaultyProxy]:
    proxy = FaultyProxy(upstream)
    runner = await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.clear()
        await runner.cleanup()
        await asyncio.sleep(0)


class ProxyThread:
    """A proxy for tests that are not asynchronous themselves; a context manager."""

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="faulty proxy")

    def __enter__(self) -> "ProxyThread":
        self._thread.start()
        self._context = faulty_proxy(self._upstream)
        self.proxy = asyncio.run_coroutine_threadsafe(self._context.__aenter__(), self._loop).result(10)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            asyncio.run_coroutine_threadsafe(self._context.__aexit__(None, None, None), self._loop).result(20)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def clear(self) -> None:
        """No fault from here on."""
        asyncio.run_coroutine_threadsafe(self.proxy.clear(), self._loop).result(10)
