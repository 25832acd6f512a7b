"""What an extra brings is missed by no part of the core before it is used."""

from __future__ import annotations

from tests.lib.fresh_python import run_python
from tests.tidy.sources import load_sources

#: What an extra brings. Importing any part of the core must work without them.
EXTRAS = (
    "torch",
    "matplotlib",
    "triton",
    "fastapi",
    "uvicorn",
    "starlette",
    "prometheus_client",
    "redis",
    "boto3",
    "transformers",
    "tokenizers",
    "safetensors",
    "gguf",
    "jinja2",
    "zstandard",
)


def core_modules() -> list[str]:
    modules = [source.module for source in load_sources() if source.path.startswith("kvtier/")]
    return [name for name in modules if name and not name.startswith("kvtier.testing")]


def test_every_core_module_imports_without_extras() -> None:
    modules = core_modules()
    assert "kvtier.types" in modules
    code = (
        f"import sys, importlib\nfor name in {EXTRAS}: sys.modules[name] = None\n"
        f"for name in {modules}: importlib.import_module(name)\nprint('done')"
    )
    assert run_python(code) == "done"
