"""Two real engines at one cache server, which is all that is between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.lib.daemon import Daemon, daemon
from tests.lib.server import Served, starting
from tests.lib.tiny_llama import tiny_config, tiny_tensors, write_folder

PROMPT = [(7 * position + position // 5) % 250 for position in range(301)]
NEW_TOKENS = 8
#: Tokens of the prompt's whole chunks.
CHUNK_TOKENS, STORED_TOKENS = 16, 288


@contextmanager
def two_engines(
    folder: Path, way: str, *, dram: str, query: str = "", options: Sequence[str] = ()
) -> Iterator[tuple[Served, Served, Daemon]]:
    """Run both until the context ends; ``way`` is ``shared`` memory or a TCP ``socket``.

    ``query`` belongs to the remote's URL, ``options`` to the server.
    """
    config = tiny_config()
    model = folder / "model"
    write_folder(model, config, tiny_tensors(config))
    where = f"unix:{folder}/socket" if way == "shared" else "127.0.0.1:0"
    with daemon(*options, listen=(where,)) as server:
        engine = [
            f"--model={model}",
            f"--remote={server.urls[0]}{query}",
            "--block-tokens=4",
            f"--chunk-tokens={CHUNK_TOKENS}",
            "--kv-bytes=8MiB",
            f"--dram={dram}",
            # The model is so small that computing would be quicker than any load.
            "--gpu-time-worth=1000000",
        ]
        with starting(*engine) as first, starting(*engine) as second:
            for each in (first, second):
                each.wait_for_line("  curl ")
            yield first, second, server
