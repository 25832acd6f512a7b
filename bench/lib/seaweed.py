"""SeaweedFS from its wheel, as an S3 store on this machine for a benchmark."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

BUCKET = "kvtier-bench"
KEY, SECRET = "benchkey", "benchsecret"
START_S_MAX = 60.0


def client(endpoint: str) -> Any:
    """Return boto3's client, as its users make it for a store like this."""
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        config=Config(s3={"addressing_style": "path"}, max_pool_connections=16),
    )


@contextmanager
def seaweed(folder: Path) -> Iterator[str]:
    """Run it with an empty bucket as long as the context lasts; give its endpoint."""
    identity = {"accessKey": KEY, "secretKey": SECRET}
    actions = ["Admin", "Read", "Write", "List"]
    config = {"identities": [{"name": "b", "credentials": [identity], "actions": actions}]}
    (folder / "s3.json").write_text(json.dumps(config))
    ports = {name: _free_port() for name in ("master", "volume", "filer", "s3")}
    command = [str(Path(sys.executable).with_name("weed")), "-v=0", "server", f"-dir={folder}"]
    command += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false", "-volume.max=100"]
    command += ["-master.volumeSizeLimitMB=256", "-filer=true", "-s3=true"]
    command += [f"-s3.config={folder}/s3.json", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    command += ["-master.electionTimeout=500ms"]
    for name, port in ports.items():
        command += [f"-{name}.port={port}", f"-{name}.port.grpc={_free_port()}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        endpoint = f"http://127.0.0.1:{ports['s3']}"
        _wait_until_it_serves(endpoint, process)
        yield endpoint
    finally:
        # Asked to end, it takes twenty seconds.
        process.kill()
        process.wait()


def _wait_until_it_serves(endpoint: str, process: subprocess.Popen[bytes]) -> None:
    user, end = client(endpoint), time.monotonic() + START_S_MAX
    while time.monotonic() < end and process.poll() is None:
        with suppress(ClientError, BotoCoreError):
            with suppress(user.exceptions.BucketAlreadyOwnedByYou):
                user.create_bucket(Bucket=BUCKET)
            user.put_object(Bucket=BUCKET, Key="first", Body=b"x")
            user.delete_object(Bucket=BUCKET, Key="first")
            return
        time.sleep(0.1)
    raise SystemExit("SeaweedFS does not start")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
