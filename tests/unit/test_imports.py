"""Torch is loaded by the first use of a codec and by nothing before it."""

from __future__ import annotations

import pytest

from tests.lib.fresh_python import run_python

HEAVY = ("torch", "fastapi", "redis", "boto3", "typer", "rich", "triton")

USE_RAW = """
from kvtier.registry import codecs
codec = codecs.load("raw")()
"""
PACK = """
from kvtier.errors import MissingExtraError
from kvtier.types import HeadSlice, Move, ShardId, ShardLayout, Slot
layout = ShardLayout(1, 1, 4, 4, "float32", 4)
heads = HeadSlice(0, 0, 1)
move = Move(0, "raw", ShardId(0, 0, 0), layout, Slot(0, 0), 0, 0, 1, heads, 0, 0, 4, (0,))
try:
    codec.pack(None, move, memoryview(bytearray(128)))
except MissingExtraError as error:
    print(error)
"""


def loaded_after(code: str) -> str:
    return run_python(f"{code}\nimport sys; print([n for n in {HEAVY} if n in sys.modules])")


@pytest.mark.parametrize(
    ("code", "loaded"),
    [
        ("import kvtier", "[]"),
        ("import kvtier.registry, kvtier.config, kvtier.interfaces", "[]"),
        (USE_RAW + "codec.section_bytes", "[]"),
        ("import kvtier.registry; kvtier.registry.connect('memory://')", "[]"),
        ("import kvtier.cli.main", "['typer', 'rich']"),
    ],
    ids=["kvtier", "parts", "raw codec", "memory connector", "command line"],
)
def test_what_is_loaded(code: str, loaded: str) -> None:
    assert loaded_after(code) == loaded


def test_the_raw_codec_without_torch_names_the_install_command() -> None:
    code = f"import sys; sys.modules['torch'] = None{USE_RAW}{PACK}"
    assert run_python(code) == "codec 'raw' needs torch: pip install \"kvtier[torch]\""
