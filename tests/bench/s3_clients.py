"""Part uploads by aiobotocore and by the AWS CRT client (awscrt) against the same S3 server: GB/s and CPU-s a GB of the client.

usage: s3_clients.py [--size-mib 1024] [--pairs 5] [--part-mib 16] [--concurrency 4] [--json FILE]
Same bytes, same parts, same number of requests at once, no checksum but the full object's; interleaved, medians. awscrt is no
dependency of Forebay: `pip install awscrt` for this comparison.
"""

import argparse
import asyncio
import base64
import contextlib
import io
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aiobotocore.config import AioConfig
from aiobotocore.session import get_session

from forebay.demo.seaweedfs import REGION, SeaweedFS
from forebay_wire.checksums import combine, crc32c

Part = Callable[[int, bytes], Awaitable[str]]  # (number, bytes) -> ETag


@dataclass(frozen=True)
class Measured:
    """One upload: seconds, and CPU seconds of this process."""

    seconds: float
    cpu_s: float


async def _upload(client: Any, bucket: str, key: str, parts: list[bytes], crc: str, concurrency: int, put: Any) -> None:
    begun = await client.create_multipart_upload(Bucket=bucket, Key=key, ChecksumAlgorithm="CRC32C", ChecksumType="FULL_OBJECT")
    slots = asyncio.Semaphore(concurrency)

    async def one(number: int, data: bytes) -> dict[str, Any]:
        async with slots:
            return {"PartNumber": number, "ETag": await put(key, begun["UploadId"], number, data)}

    done = await asyncio.gather(*(one(number, data) for number, data in enumerate(parts, start=1)))
    await client.complete_multipart_upload(
        Bucket=bucket,
        Key=key,
        UploadId=begun["UploadId"],
        MultipartUpload={"Parts": done},
        ChecksumCRC32C=crc,
        ChecksumType="FULL_OBJECT",
    )


def _with_aiobotocore(client: Any, bucket: str) -> Any:
    async def put(key: str, upload: str, number: int, data: bytes) -> str:
        answer = await client.upload_part(Bucket=bucket, Key=key, UploadId=upload, PartNumber=number, Body=data)
        return str(answer["ETag"])

    return put


def _with_crt(server: SeaweedFS, bucket: str, concurrency: int) -> Any:
    from awscrt import s3
    from awscrt.auth import AwsCredentialsProvider, AwsSignedBodyValue, AwsSigningAlgorithm, AwsSigningConfig
    from awscrt.http import HttpHeaders, HttpRequest

    where = urlsplit(server.endpoint)
    keys = server.environment
    provider = AwsCredentialsProvider.new_static(keys["AWS_ACCESS_KEY_ID"], keys["AWS_SECRET_ACCESS_KEY"])
    signing = AwsSigningConfig(
        algorithm=AwsSigningAlgorithm.V4,
        credentials_provider=provider,
        region=REGION,
        service="s3",
        signed_body_value=AwsSignedBodyValue.UNSIGNED_PAYLOAD,
        use_double_uri_encode=False,
        should_normalize_uri_path=False,
    )
    client = s3.S3Client(
        region=REGION,
        tls_mode=s3.S3RequestTlsMode.DISABLED,
        signing_config=signing,
        max_active_connections_override=concurrency,
        throughput_target_gbps=10.0,
    )

    async def put(key: str, upload: str, number: int, data: bytes) -> str:
        headers = HttpHeaders([("Host", where.netloc), ("Content-Length", str(len(data)))])
        path = f"/{bucket}/{key}?partNumber={number}&uploadId={upload}"
        found: dict[str, str] = {}

        def on_headers(status_code: int, headers: list[tuple[str, str]], **_: Any) -> None:
            found.update((name.lower(), value) for name, value in headers)

        request = client.make_request(
            type=s3.S3RequestType.DEFAULT,
            operation_name="UploadPart",
            request=HttpRequest("PUT", path, headers, io.BytesIO(data)),
            on_headers=on_headers,
        )
        await asyncio.wrap_future(request.finished_future)
        return found["etag"]

    return put


async def compare(size: int, pairs: int, part: int, concurrency: int) -> dict[str, list[Measured]]:
    """`pairs` uploads by each client, in turns; the first of each is not counted."""
    data = os.urandom(part)
    parts = [data] * (size // part)
    crc = 0
    for piece in parts:
        crc = combine(crc, crc32c(piece), len(piece))
    encoded = base64.b64encode(crc.to_bytes(4, "big")).decode()
    taken: dict[str, list[Measured]] = {}
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as name, SeaweedFS(Path(name)) as server:
        keys = server.environment
        config = AioConfig(
            s3={"addressing_style": "path", "payload_signing_enabled": False},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            max_pool_connections=concurrency,
        )
        async with contextlib.AsyncExitStack() as stack:
            client = await stack.enter_async_context(
                get_session().create_client(
                    "s3",
                    endpoint_url=server.endpoint,
                    region_name=REGION,
                    aws_access_key_id=keys["AWS_ACCESS_KEY_ID"],
                    aws_secret_access_key=keys["AWS_SECRET_ACCESS_KEY"],
                    config=config,
                )
            )
            sides = {
                "aiobotocore": _with_aiobotocore(client, server.bucket),
                "awscrt": _with_crt(server, server.bucket, concurrency),
            }
            for turn in range(pairs + 1):
                for side, put in sides.items():
                    cpu_s, began_s = time.process_time(), time.perf_counter()
                    await _upload(client, server.bucket, "object", parts, encoded, concurrency, put)
                    measured = Measured(time.perf_counter() - began_s, time.process_time() - cpu_s)
                    await client.delete_object(Bucket=server.bucket, Key="object")
                    if turn:
                        taken.setdefault(side, []).append(measured)
    return taken


def main() -> int:
    """Compare, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size-mib", type=int, default=1024)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--part-mib", type=int, default=16)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    try:
        import awscrt  # noqa: F401
    except ImportError:
        print("not run: awscrt is not installed (pip install awscrt)")
        return 0
    taken = asyncio.run(compare(asked.size_mib << 20, asked.pairs, asked.part_mib << 20, asked.concurrency))
    figures = {}
    for side, measured in taken.items():
        seconds = statistics.median(each.seconds for each in measured)
        cpu_s = statistics.median(each.cpu_s for each in measured)
        size_gb = (asked.size_mib << 20) / 1e9
        figures[side] = {"gb_per_s": round(size_gb / seconds, 3), "cpu_s_per_gb": round(cpu_s / size_gb, 3)}
        print(f"{side:12} {figures[side]['gb_per_s']:6.3f} GB/s   {figures[side]['cpu_s_per_gb']:6.3f} CPU-s a GB")
    if asked.json is not None:
        asked.json.write_text(json.dumps(figures, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
