"""Reading the whole disk tier of a running server, in a thread, and how far that has come."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Literal

from kvtier.tiers.disk.files import LocalFiles
from kvtier.tiers.disk.verify import Verdict, Verifier

State = Literal["none", "running", "done", "failed"]


class DiskCheck:
    """One reading at a time; belongs to the event loop. It changes nothing on disk.

    What the server removes meanwhile is passed over, see ``Verifier``.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._stopping = threading.Event()
        self._task: asyncio.Task[None] | None = None
        self.state: State = "none"
        self.detail = ""
        self.read_bytes = self.total_bytes = 0
        self.verdict: Verdict | None = None

    @property
    def possible(self) -> bool:
        """False where there is no disk."""
        return bool(self._paths)

    def begin(self) -> bool:
        """Begin to read everything; False: that is being done already."""
        if self.state == "running":
            return False
        self.state, self.detail, self.verdict = "running", "", None
        self.read_bytes = self.total_bytes = 0
        self._task = asyncio.get_running_loop().create_task(self._run())
        return True

    async def wait(self) -> None:
        """Return when what runs has come to its end."""
        if self._task is not None:
            await self._task

    async def stop(self) -> None:
        """Give up what runs, after the file that is being read."""
        self._stopping.set()
        await self.wait()

    async def _run(self) -> None:
        try:
            self.verdict = await asyncio.to_thread(self._read)
        except OSError as error:
            self.state, self.detail = "failed", error.strerror or str(error)
            return
        self.state = "failed" if self.verdict is None else "done"

    def _read(self) -> Verdict | None:
        """Read, in a thread; None: given up."""
        verifier = Verifier(self._paths, LocalFiles())
        for read_bytes, total_bytes in verifier.run():
            self.read_bytes, self.total_bytes = read_bytes, total_bytes
            if self._stopping.is_set():
                return None
        return verifier.verdict
