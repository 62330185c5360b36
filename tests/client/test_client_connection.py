"""How a client holds its connection: pings that the gateway allows, and no retries but our own."""

import re
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from grpc._cython import cygrpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from forebay.connection import CHANNEL_OPTIONS
from forebay.demo.gateways import GatewayProcess, posix_tier
from forebay_gateway.build import SERVER_OPTIONS
from soak.form import SOAK, given

CLIENT, SERVER = dict(CHANNEL_OPTIONS), dict(SERVER_OPTIONS)
ROOT = Path(__file__).parents[2]


def test_a_client_pings_less_often_than_a_gateway_allows() -> None:
    """A gateway counts pings that come too early, and after two of them ends a healthy connection ("too_many_pings")."""
    assert CLIENT["grpc.keepalive_time_ms"] >= 2 * SERVER["grpc.http2.min_ping_interval_without_data_ms"]
    assert SERVER["grpc.keepalive_permit_without_calls"] == 1


@pytest.mark.skipif(not SOAK, reason="minutes: FOREBAY_SOAK=1")
@pytest.mark.timeout(900)
def test_a_quiet_call_with_frequent_pings_lives(tmp_path: Path) -> None:
    """A call that has nothing to say for 10 minutes, over a connection that is pinged every 10 s."""
    (tmp_path / "pfs").mkdir()
    options = [
        *(option for option in CLIENT.items() if option[0] != "grpc.keepalive_time_ms"),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    lasts_s = float(given("FOREBAY_PING_S", "600"))
    with (
        GatewayProcess(tmp_path, "a", [posix_tier(tmp_path / "pfs")]) as gateway,
        grpc.insecure_channel(gateway.address, options=options) as channel,
    ):
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=lasts_s)
        assert next(call).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as ended:
            next(call)
        assert ended.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED, ended.value


class Broken(grpc.GenericRpcHandler):
    """Ends every call at once, before any answer: what gRPC would repeat by itself where it may."""

    def __init__(self) -> None:
        self.calls = 0

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes]":
        """Whatever is called."""

        def end(_requests: object, context: grpc.ServicerContext) -> bytes:
            self.calls += 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "not now")

        return grpc.stream_unary_rpc_method_handler(end)


def test_grpc_itself_repeats_nothing() -> None:
    """Also where a service's configuration, which a resolver may hand out, asks for it: only we know from which offset."""
    policy = (
        '{"methodConfig": [{"name": [{}], "retryPolicy": {"maxAttempts": 5, "initialBackoff": "0.01s", '
        '"maxBackoff": "0.01s", "backoffMultiplier": 1, "retryableStatusCodes": ["UNAVAILABLE"]}}]}'
    )
    broken = Broken()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((broken,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        options = [*CHANNEL_OPTIONS, ("grpc.service_config", policy)]
        with grpc.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
            put = channel.stream_unary("/forebay.v1.Gateway/PutShard")
            with pytest.raises(grpc.RpcError):
                put(iter([b"header"]))
        assert broken.calls == 1
    finally:
        server.stop(None).wait()


def test_every_option_is_one_that_grpc_knows() -> None:
    """It takes any name without a word, and a misspelt one does nothing."""
    known = Path(str(cygrpc.__file__)).read_bytes()
    source = "".join(
        path.read_text(encoding="utf-8") for folder in ("client", "gateway") for path in (ROOT / folder).rglob("*.py")
    )
    used = set(re.findall(r'\("(grpc\.[a-z0-9_.]+)", ', source))
    assert set(CLIENT) | set(SERVER) <= used
    assert {name for name in used if name.encode() + b"\0" not in known} == set()
