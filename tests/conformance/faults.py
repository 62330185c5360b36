"""A proxy before the real S3 server that loses, breaks or replaces chosen answers; all others pass as they are."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web
from yarl import URL

ERROR_XML = "<?xml version='1.0'?><Error><Code>{code}</Code><Message>made up</Message></Error>"


@dataclass
class Fault:
    """Applies to the next `times` requests for which `when` holds.

    lose: pass on, then close without an answer. refuse: close without passing on. cut: half of the answer's body.
    answer: do not pass on (after=False) or pass on first (after=True), then give this status and S3 error code.
    """

    kind: str
    when: Callable[[web.Request], bool]
    times: int = 1
    status: int = 503
    code: str = "SlowDown"
    after: bool = False
    headers: dict[str, str] = field(default_factory=dict)


class FaultyProxy:
    """`faults` are taken in order; `seen` are all requests as "METHOD path?query"."""

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self.faults: list[Fault] = []
        self.seen: list[str] = []
        self.hashes: list[str] = []
        self.endpoint = ""

    def count(self, part: str) -> int:
        return sum(part in each for each in self.seen)

    def _fault(self, request: web.Request) -> Fault | None:
        for fault in self.faults:
            if fault.times > 0 and fault.when(request):
                fault.times -= 1
                return fault
        return None

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(f"{request.method} {request.path_qs}")
        self.hashes.append(request.headers.get("x-amz-content-sha256", ""))
        fault = self._fault(request)
        body = await request.read()
        assert request.transport is not None
        if fault is not None and fault.kind == "refuse":
            request.transport.close()
            return web.Response()
        if fault is not None and fault.kind == "answer" and not fault.after:
            return self._error(fault)
        status, headers, data = await self._forward(request, body)
        if fault is None:
            return web.Response(status=status, headers=headers, body=data)
        if fault.kind == "answer":
            return self._error(fault)
        if fault.kind == "cut":
            response = web.StreamResponse(status=status, headers={**headers, "Content-Length": str(len(data))})
            await response.prepare(request)
            await response.write(data[: len(data) // 2])
        request.transport.close()
        return web.Response()

    def _error(self, fault: Fault) -> web.Response:
        text = ERROR_XML.format(code=fault.code)
        return web.Response(status=fault.status, text=text, content_type="application/xml", headers=fault.headers)

    async def _forward(self, request: web.Request, body: bytes) -> tuple[int, dict[str, str], bytes]:
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
            return answer.status, kept, received

    async def start(self) -> web.AppRunner:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{tail:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.endpoint = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner


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
        await runner.cleanup()
        await asyncio.sleep(0)
