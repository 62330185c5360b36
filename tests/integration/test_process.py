"""The gateway as a process: an ordered end under load, nothing of it left, and the standard services that look at it."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf import descriptor_pool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

import forebay
from forebay.demo.gateways import GatewayProcess, posix_tier
from integration.conftest import MakeGateway
from integration.kit import Job, eventually, pause_after, some_bytes

MIB = 1 << 20


def family(gateway: GatewayProcess) -> list[psutil.Process]:
    """The gateway and all below it."""
    process = psutil.Process(gateway.pid)
    return [process, *process.children(recursive=True)]


def assert_gone(processes: list[psutil.Process]) -> None:
    eventually(lambda: [each.pid for each in processes if each.is_running()], lambda alive: not alive, 10.0)


def busy(make: MakeGateway, root: Path, drain_timeout: str) -> tuple[GatewayProcess, Job]:
    """A gateway in the middle of a drain that takes long."""
    gateway = make(
        tiers=[posix_tier(root, bandwidth="1MiB", concurrency=1)], node_keys=f'drain_timeout = "{drain_timeout}"'
    ).start()
    job = Job(writers=1, size=8 * MIB)
    job.save(gateway, 0)
    eventually(lambda: [mover for mover in gateway.status()["movers"] if mover["doing"] == "drain"])
    return gateway, job


@pytest.mark.expected_logs("the abort did not reach the gateway")
def test_sigterm_while_streams_and_drains_run(make: MakeGateway, root: Path, tmp_path: Path) -> None:
    gateway, job = busy(make, root, "1s")
    processes = family(gateway)
    assert len(processes) >= 2
    data = some_bytes(4 * MIB, "late")
    gate = threading.Event()
    outcome: list[object] = []

    def unfinished() -> None:
        with forebay.Client(gateway.address, retry_timeout=0) as client, client.checkpoint("late", 1, session="s") as part:
            try:
                outcome.append(part.put("data.bin", pause_after(data, 8, gate)))
            except forebay.ForebayError as error:
                outcome.append(error)

    stream = threading.Thread(target=unfinished)
    stream.start()
    eventually(lambda: gateway.status()["cache"]["open_streams"])
    began_s = time.monotonic()
    assert gateway.terminate() == 0
    assert time.monotonic() - began_s < 60.0, "it hung"
    gate.set()
    stream.join(20)
    assert isinstance(outcome[0], forebay.Unavailable)
    assert_gone(processes)
    assert not gateway.socket.exists()
    assert list((gateway.cache / "incoming").iterdir()) == []

    # What was acknowledged goes on; what was not is not there.
    gateway.config.write_text(gateway.config.read_text().replace('bandwidth = "1MiB"\n', ""))
    gateway.start()
    job.wait(gateway, "pfs")
    job.assert_restores(gateway, tmp_path / "restored", "pfs")
    with forebay.Client(gateway.address) as client:
        assert client.latest("late") is None


def test_sigterm_lets_a_stream_finish_that_can(make: MakeGateway, tmp_path: Path) -> None:
    gateway = make(node_keys='drain_timeout = "20s"').start()
    data = some_bytes(2 * MIB, "in time")
    gate = threading.Event()
    receipts: list[forebay.Receipt] = []
    client = forebay.Client(gateway.address, retry_timeout=30)
    part = client.checkpoint("run", 1, session="s")
    stream = threading.Thread(target=lambda: receipts.append(part.put("data.bin", pause_after(data, 8, gate))))
    stream.start()
    eventually(lambda: gateway.status()["cache"]["open_streams"])
    codes: list[int] = []
    ending = threading.Thread(target=lambda: codes.append(gateway.terminate()))
    ending.start()
    time.sleep(0.5)
    gate.set()
    for thread in (stream, ending):
        thread.join(30)
    assert codes == [0]
    assert [receipt.size for receipt in receipts] == [len(data)]
    log = gateway.log.read_text()
    assert "stopping; streams under way (1) have 20 s to finish" in log and log.rstrip().endswith("stopped")
    gateway.start()
    part.commit()
    assert client.open("run", 1).read("data.bin") == data
    client.close()


def test_a_client_with_bytes_to_send_again_survives_the_restart(make: MakeGateway) -> None:
    gateway = make(node_keys='drain_timeout = "0s"').start()
    data = some_bytes(48 * MIB, "again")
    with forebay.Client(gateway.address, retry_timeout=40) as client:
        part = client.checkpoint("run", 1, session="s")
        flowed = threading.Event()
        stream = threading.Thread(target=lambda: part.put("data.bin", data, on_bytes=lambda _: flowed.set()))
        stream.start()
        assert flowed.wait(20)
        gateway.terminate()
        gateway.start()
        stream.join(60)
        part.commit()
        assert client.open("run", 1).read("data.bin") == data


def test_a_gateway_that_has_no_turn_for_a_moment_is_not_away(make: MakeGateway) -> None:
    """One attempt to connect outlasts what a node that is busy training may do to it."""
    gateway = make().start()
    process = psutil.Process(gateway.pid)
    with forebay.Client(gateway.address, retry_timeout=0) as client:
        process.suspend()
        turn = threading.Timer(0.5, process.resume)
        turn.start()
        try:
            assert client.runs() == []
        finally:
            turn.join()


def test_movers_end_when_the_gateway_is_killed(make: MakeGateway, root: Path) -> None:
    gateway, _ = busy(make, root, "1s")
    processes = family(gateway)
    assert len(processes) >= 2
    gateway.kill()
    assert_gone(processes)


@pytest.fixture
def channel(make: MakeGateway) -> Iterator[grpc.Channel]:
    gateway = make().start()
    with grpc.insecure_channel(f"unix:{gateway.socket}") as opened:
        yield opened


def test_the_health_service_answers(channel: grpc.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    for service in ("", "forebay.v1.Gateway", "forebay.v1.Admin"):
        answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as caught:
        stub.Check(health_pb2.HealthCheckRequest(service="forebay.v1.Nobody"), timeout=10)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_reflection_is_enough_to_call_a_method(channel: grpc.Channel) -> None:
    """As grpcurl does: nothing but the server's own descriptors."""
    database = ProtoReflectionDescriptorDatabase(channel)
    assert {"forebay.v1.Gateway", "forebay.v1.Admin", "grpc.health.v1.Health"} <= set(database.get_services())
    service = descriptor_pool.DescriptorPool(database).FindServiceByName("forebay.v1.Admin")
    method = service.methods_by_name["GetStatus"]
    call: Any = channel.unary_unary(
        "/forebay.v1.Admin/GetStatus",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=GetMessageClass(method.output_type).FromString,
    )
    answer = call(GetMessageClass(method.input_type)(), timeout=10)
    assert answer.node == "a"
    assert "PutShard" in {each.name for each in service.file.pool.FindServiceByName("forebay.v1.Gateway").methods}


def test_a_gateway_of_its_own_takes_no_settings_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the demo's and the benchmark's are, on a machine whose own gateway is set up by variables."""
    monkeypatch.setenv("FOREBAY_NODE_LISTEN", f"unix://{tmp_path}/other.sock")
    monkeypatch.setenv("FOREBAY_CACHE_PATH", str(tmp_path / "other"))
    with GatewayProcess(tmp_path, "own", [posix_tier(tmp_path / "pfs")]) as gateway:
        assert gateway.status()["cache"]["path"] == str(gateway.cache)
    assert not (tmp_path / "other").exists()
