"""What is shipped to run the cache server as a service: unit, settings, container file."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvtier_server.configure import configure
from kvtier_server.options import read_options
from tests.lib.daemon import PROGRAM, daemon

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT = DEPLOY / "systemd" / "kvtier.service"
CONTAINER = DEPLOY / "container" / "Containerfile"
#: 0 is nothing that could be reached, 10 everything; systemd calls less than this well.
EXPOSURE_MAX = 2.0

#: What shuts it in, whether or not systemd is here to weigh it.
HARDENED = {
    "NoNewPrivileges=yes",
    "CapabilityBoundingSet=",
    "ProtectSystem=strict",
    "ProtectHome=yes",
    "PrivateTmp=yes",
    "PrivateDevices=yes",
    "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6",
    "SystemCallFilter=@system-service",
    "User=kvtier",
}


def analyzed(*arguments: str | Path) -> str | None:
    """What systemd says; None where there is none."""
    if shutil.which("systemd-analyze") is None:
        return None
    ended = subprocess.run(
        ["systemd-analyze", *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit as it would be where the program is installed here."""
    text = UNIT.read_text()
    assert text.count("/opt/kvtier/bin/kvtier ") == 1
    unit = tmp_path / "kvtier.service"
    unit.write_text(text.replace("/opt/kvtier/bin/kvtier ", f"{PROGRAM} "))
    return unit


def test_the_unit_is_one_that_systemd_takes(unit: Path) -> None:
    assert not analyzed("verify", "--man=no", unit)


def test_the_unit_is_shut_in(unit: Path) -> None:
    assert set(unit.read_text().splitlines()) >= HARDENED
    said = analyzed("security", "--offline=true", "--no-pager", unit)
    if said is None:
        return
    found = re.search(r"exposure level for kvtier.service: ([0-9.]+)", said)
    assert found is not None, said
    assert float(found[1]) <= EXPOSURE_MAX


def test_the_settings_that_are_shipped_can_be(tmp_path: Path) -> None:
    file = tmp_path / "kvtier.toml"
    text = (DEPLOY / "kvtier.toml").read_text()
    for folder in ("/run/kvtier", "/var/lib/kvtier"):
        assert folder in text
        assert folder.rpartition("/")[2] in UNIT.read_text(), "systemd makes it"
    file.write_text(text.replace("/run/kvtier", str(tmp_path)))
    config = configure(read_options(str(file), {}))
    assert config.http is not None
    assert config.http.loopback
    file.write_text(file.read_text().replace("/var/lib/kvtier", str(tmp_path / "disk")))
    # The helper gives less memory and another port, and the command line wins.
    with daemon(f"--config={file}", listen=(f"unix:{tmp_path}/kvtier.sock",)) as running:
        assert running.get("/health")["tiers"][1]["capacity_bytes"] == 100 << 30
        assert running.stop() == 0


def test_the_container_starts_what_the_unit_starts() -> None:
    text = CONTAINER.read_text()
    assert 'ENTRYPOINT ["kvtier", "daemon"]' in text
    (started,) = re.findall(r"^ExecStart=\S+ daemon (.*)$", UNIT.read_text(), re.MULTILINE)
    assert re.findall(r'"([^"]+)"', text.partition("\nCMD ")[2]) == started.split()
    assert "USER kvtier" in text
