"""What a gateway refuses to start with, and what it starts in spite of: one clear line, no traceback, nothing taken over."""

import socket
import subprocess
from pathlib import Path

import pytest

import forebay
from forebay.demo.gateways import FOREBAY, GatewayProcess, posix_tier, s3_tier
from forebay.demo.seaweedfs import ACCESS_KEY, SeaweedFS
from integration.conftest import Bucket, MakeGateway
from integration.kit import Job, assert_refused, eventually


def serve(config: Path) -> "subprocess.CompletedProcess[str]":
    """`forebay serve` that is expected to end by itself."""
    return subprocess.run([str(FOREBAY), "serve", "--config", str(config)], capture_output=True, text=True, timeout=30)


BAD_FILES: dict[str, tuple[str | bytes, str]] = {
    "no TOML": ("[node\nid = 1", "TOML"),
    "not UTF-8": (b"\xff\xfe\x00[node]", "utf-8"),
    "unknown key": ('[node]\nlissten = ["127.0.0.1:1"]\n[cache]\npath = "/tmp/x"\n', "node.listen"),
    "unknown section": ('[cash]\npath = "/tmp/x"\n', "[cache]"),
    "wrong type": ('[cache]\npath = "/tmp/x"\ncapacity = []\n', "cache.capacity"),
    "rules across keys": ('[cache]\npath = "/tmp/x"\nreopen = 0.99\n', "cache.reopen"),
    "unknown kind": ('[cache]\npath = "/tmp/x"\n[[tier]]\nname = "t"\nkind = "ftp"\n', '"posix"'),
    "two tiers of one name": (
        '[cache]\npath = "/tmp/x"\n' + '[[tier]]\nname = "t"\nkind = "posix"\npath = "/tmp/y"\n' * 2,
        "t",
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_configuration(case: str, tmp_path: Path) -> None:
    text, names = BAD_FILES[case]
    config = tmp_path / "bad.toml"
    config.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert_refused(serve(config), 1, names, str(config))
    check = subprocess.run([str(FOREBAY), "config", "check", str(config)], capture_output=True, text=True, timeout=30)
    assert_refused(check, 1, names)


def test_a_configuration_that_is_not_there(tmp_path: Path) -> None:
    assert_refused(serve(tmp_path / "none.toml"), 1, "none.toml", "No such file")
    assert_refused(serve(tmp_path), 1, str(tmp_path))


def test_a_port_in_use(make: MakeGateway) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        gateway = make()
        gateway.cache.mkdir()  # one that is made is told of
        gateway.config.write_text(gateway.config.read_text().replace("listen = [", f'listen = ["{address}", ', 1))
        assert_refused(serve(gateway.config), 1, address, "already in use")
    assert not gateway.socket.exists()  # nothing stays of a start that was refused


def test_a_socket_of_a_live_gateway(make: MakeGateway) -> None:
    first = make().start()
    second = make("b")
    second.cache.mkdir()
    second.config.write_text(second.config.read_text().replace(str(second.socket), str(first.socket)))
    assert_refused(serve(second.config), 1, str(first.socket), "another gateway")
    assert first.status()["node"] == "a"  # its socket is still its own


def test_a_cache_of_a_live_gateway(make: MakeGateway) -> None:
    first = make().start()
    second = make("b")
    second.config.write_text(second.config.read_text().replace(str(second.cache), str(first.cache)))
    assert_refused(serve(second.config), 1, f"pid={first.pid}", "cache")
    assert not second.socket.exists()
    first.cli("status")


def test_a_stale_socket_is_taken_over(make: MakeGateway) -> None:
    gateway = make().start()
    gateway.kill()
    assert gateway.socket.is_socket()  # nobody removed it
    gateway.start()
    assert gateway.status()["health"] in ("ok", "warning")
    assert gateway.terminate() == 0
    assert not gateway.socket.exists()


def test_a_file_in_the_sockets_place_stays(make: MakeGateway) -> None:
    gateway = make()
    gateway.cache.mkdir()
    gateway.socket.write_text("precious")
    assert_refused(serve(gateway.config), 1, str(gateway.socket), "no socket")
    assert gateway.socket.read_text() == "precious"


def test_a_directory_that_is_no_cache_stays_as_it_is(make: MakeGateway) -> None:
    gateway = make()
    (gateway.cache / "data").mkdir(parents=True)
    (gateway.cache / "data" / "thesis.txt").write_text("precious")
    assert_refused(serve(gateway.config), 1, str(gateway.cache), "no forebay cache")
    assert (gateway.cache / "data" / "thesis.txt").read_text() == "precious"


def test_what_cannot_serve_is_refused_before_anything_is_made(make: MakeGateway, tmp_path: Path) -> None:
    gateway = make(capacity="4000000TB")
    assert_refused(serve(gateway.config), 1, "cache.capacity is", "set at most")
    (tmp_path / "file").write_text("precious")
    gateway.config.write_text(gateway.config.read_text().replace(str(gateway.cache), f"{tmp_path}/file/cache"))
    assert_refused(serve(gateway.config), 1, f"cache.path {tmp_path}/file/cache lies below {tmp_path}/file, a file")
    assert not gateway.cache.exists() and (tmp_path / "file").read_text() == "precious"


def test_a_cache_that_was_made_is_told_once(make: MakeGateway) -> None:
    gateway = make()
    for _ in range(2):
        gateway.start()
        gateway.terminate()
    log = gateway.log.read_text()
    assert log.count("the cache's directory was not there, and was made") == 1
    assert log.count("forebay.serve stopping\n") == log.count("forebay.serve stopped\n") == 2  # with nothing under way


# -- object stores that do not let us in: the gateway starts, and saves -----------------------------------------------------


def assert_starts_without(gateway: GatewayProcess, job: Job, state: str, *reason: str) -> None:
    """It runs, takes saves, says what is wrong with the tier, and loses nothing."""
    gateway.start()
    found = eventually(
        lambda: {tier["name"]: tier for tier in gateway.status()["tiers"]}["object"], lambda t: t["state"] == state
    )
    for part in reason:
        assert part in found["reason"], found["reason"]
    job.save_all([gateway])
    job.wait(gateway, "cache")
    status = gateway.status()
    assert status["cache"]["dirty_bytes"] > 0
    assert any("object" in alarm["what"] and state in alarm["what"] for alarm in status["alarms"])
    shown = gateway.cli("status").stdout
    assert state in shown
    with forebay.Client(gateway.address) as client:
        with pytest.raises(forebay.DeadlineExceeded):
            client.wait(job.run, job.step, "object", timeout=0.5)
        assert client.latest(job.run) == job.step


def test_s3_with_a_wrong_key(make: MakeGateway, bucket: Bucket, tmp_path: Path) -> None:
    environment = {**bucket.server.environment, "AWS_SECRET_ACCESS_KEY": "wrong"}
    gateway = make(tiers=[bucket.tier()], environment=environment)
    job = Job(writers=1)
    assert_starts_without(gateway, job, "denied")
    # The operator mends the key: what was saved meanwhile comes out.
    gateway.terminate()
    gateway.environment = bucket.server.environment
    gateway.start()
    job.wait(gateway, "object")
    job.assert_restores(gateway, tmp_path / "restored", "object")


def test_s3_with_an_unknown_key(make: MakeGateway, bucket: Bucket) -> None:
    environment = {**bucket.server.environment, "AWS_ACCESS_KEY_ID": f"not-{ACCESS_KEY}"}
    assert_starts_without(make(tiers=[bucket.tier()], environment=environment), Job(writers=1), "denied")


def test_s3_with_a_wrong_bucket(make: MakeGateway, bucket: Bucket) -> None:
    tier = s3_tier(bucket.server.endpoint, "no-such-bucket", prefix=bucket.prefix)
    assert_starts_without(make(tiers=[tier]), Job(writers=1), "away", "no-such-bucket")


def test_s3_that_comes_up_later(make: MakeGateway, tmp_path: Path) -> None:
    """No route at first; then the server starts on that very port, and everything goes on by itself."""
    server = SeaweedFS(tmp_path / "late")
    gateway = make(tiers=[s3_tier(server.endpoint, server.bucket)], environment=server.environment)
    job = Job(writers=1)
    assert_starts_without(gateway, job, "away")
    with server:
        job.wait(gateway, "object")
        assert eventually(gateway.status, lambda status: not status["alarms"])["health"] == "ok"
        job.assert_restores(gateway, tmp_path / "restored", "object")
        gateway.close()


def test_a_posix_tier_that_is_not_mounted(make: MakeGateway, root: Path, tmp_path: Path) -> None:
    """Files, but not ours: a mount point without its file system. Nothing is written there."""
    (root / "somebody.txt").write_text("precious")
    gateway = make(tiers=[posix_tier(root, name="object")])
    assert_starts_without(gateway, Job(writers=1), "away", "not mounted")
    assert {path.name for path in root.iterdir()} == {"somebody.txt"}
