"""The toy store itself: a dictionary behind a socket. ``python toy_server.py 7171`` runs it."""

from __future__ import annotations

import json
import socketserver
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

NBYTES_MAX = 1 << 30


class _Store(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int]) -> None:
        super().__init__(address, _Client)
        self.objects: dict[str, bytes] = {}


class _Client(socketserver.StreamRequestHandler):
    server: _Store

    def handle(self) -> None:
        """Answer one line after the other, until there is none or it is wrong."""
        try:
            while line := self.rfile.readline(65_536):
                self._answer(json.loads(line))
        except (OSError, ValueError, KeyError, TypeError):
            return

    def _answer(self, asked: dict[str, object]) -> None:
        objects, key, do = self.server.objects, str(asked["key"]), asked["do"]
        data: bytes | None = None
        if do == "write":
            nbytes = int(str(asked["nbytes"]))
            if nbytes > NBYTES_MAX:
                raise ValueError("too much")
            whole = self.rfile.read(nbytes)
            if len(whole) < nbytes:
                raise OSError("the upload breaks off")
            objects[key] = whole
        elif do == "delete":
            objects.pop(key, None)
        else:
            data = objects.get(key)
        answer: dict[str, object] = {"nbytes": None if data is None else len(data)}
        if do == "read" and data is not None:
            start = int(str(asked["offset"]))
            data = data[start : start + int(str(asked["nbytes"]))]
            answer = {"nbytes": len(data)}
        self.wfile.write(json.dumps(answer).encode() + b"\n")
        if do == "read" and data:
            self.wfile.write(data)


@contextmanager
def toy_server(port: int = 0) -> Iterator[tuple[str, int]]:
    """Run a server in a thread; yield where it listens."""
    with _Store(("127.0.0.1", port)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield ("127.0.0.1", int(server.server_address[1]))
        finally:
            server.shutdown()
            thread.join()


if __name__ == "__main__":
    with toy_server(int(sys.argv[1])):
        threading.Event().wait()
