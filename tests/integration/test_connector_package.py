"""The example of a connector in a package of its own, as who installs it has it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.tidy.sources import ROOT

PACKAGE = ROOT / "examples" / "connector_package"


def installed(folder: Path) -> Path:
    """What installing the package leaves in a folder: its modules, and what is said of it."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    for path in PACKAGE.glob("*.py"):
        shutil.copy(path, folder)
    told = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    told.mkdir()
    (told / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = [
        line
        for group, names in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in names.items()))
    ]
    (told / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


def test_the_kit_proves_a_connector_of_another_package(tmp_path: Path) -> None:
    """Contract and sweep, by the package's own tests and settings, and by its URL."""
    folder = installed(tmp_path)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("-c", PACKAGE / "pyproject.toml", f"--rootdir={folder}", folder),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    match = re.search(r"(\d+) passed", done.stdout)
    assert match
    assert int(match[1]) > 30
    assert "skipped" not in done.stdout
