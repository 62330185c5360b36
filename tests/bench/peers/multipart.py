"""A bare multipart upload with aiobotocore: no checksum, no verification, unsigned bodies; parts as large and as many at a time
as the gateway's.

Owns the upload, in a process of its own so that its CPU can be told apart.
"""

import asyncio
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

from bench.peers.bucket import own_bucket
from bench.rows import Measured
from forebay.demo.seaweedfs import ACCESS_KEY, REGION, SECRET_KEY, SeaweedFS

PART_BYTES = 16 << 20
PARTS_AT_A_TIME = 4
FILES_AT_A_TIME = 4


def upload(server: SeaweedFS, paths: list[Path]) -> Measured:
    """Put the files into a bucket of their own, which is gone afterwards."""
    with own_bucket(server, paths) as bucket:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_main, args=(theirs, server.endpoint, bucket, paths), daemon=True)
        process.start()
        theirs.close()
        try:
            seconds, cpu_s = ours.recv()
        except EOFError:
            raise RuntimeError("the multipart upload failed; its error is above") from None
        finally:
            process.join(30)
            ours.close()
        return Measured(seconds, cpu_s)


def _main(answer: Any, endpoint: str, bucket: str, paths: list[Path]) -> None:
    os.sync()
    cpu_s, began_s = asyncio.run(_upload(endpoint, bucket, paths))
    answer.send((time.perf_counter() - began_s, time.process_time() - cpu_s))


async def _upload(endpoint: str, bucket: str, paths: list[Path]) -> tuple[float, float]:
    from aiobotocore.config import AioConfig
    from aiobotocore.session import get_session

    config = AioConfig(
        max_pool_connections=PARTS_AT_A_TIME * FILES_AT_A_TIME,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": "path", "payload_signing_enabled": False},
    )
    keys = {"aws_access_key_id": ACCESS_KEY, "aws_secret_access_key": SECRET_KEY}
    session = get_session()
    async with session.create_client("s3", region_name=REGION, endpoint_url=endpoint, config=config, **keys) as client:
        await client.head_bucket(Bucket=bucket)
        cpu_s, began_s = time.process_time(), time.perf_counter()  # without imports and the connection's beginning
        files = asyncio.Semaphore(FILES_AT_A_TIME)
        await asyncio.gather(*(_file(client, bucket, path, files) for path in paths))
        return cpu_s, began_s


async def _file(client: Any, bucket: str, path: Path, files: asyncio.Semaphore) -> None:
    async with files:
        begun = await client.create_multipart_upload(Bucket=bucket, Key=path.name)
        named = {"Bucket": bucket, "Key": path.name, "UploadId": begun["UploadId"]}
        slots = asyncio.Semaphore(PARTS_AT_A_TIME)
        count = -(-path.stat().st_size // PART_BYTES)

        async def part(number: int) -> dict[str, Any]:
            async with slots:
                body = await asyncio.to_thread(_read, path, (number - 1) * PART_BYTES)
                answer = await client.upload_part(**named, PartNumber=number, Body=body)
                return {"PartNumber": number, "ETag": answer["ETag"]}

        parts = await asyncio.gather(*(part(number) for number in range(1, count + 1)))
        await client.complete_multipart_upload(**named, MultipartUpload={"Parts": parts})


def _read(path: Path, offset: int) -> bytes:
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        return file.read(PART_BYTES)
