"""The command ``kvtier``: its own options, and commands that other packages bring."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import kvtier
import kvtier.registry
from kvtier.cli.main import app, run
from kvtier.errors import MissingExtraError
from kvtier.registry import Registry

PLUGIN = Path(__file__).parent.parent / "package_with_entrypoint"


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process where the fake distribution is installed."""
    monkeypatch.syspath_prepend(PLUGIN)
    monkeypatch.setattr(kvtier.registry, "commands", Registry("kvtier.commands", "command"))


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"{kvtier.__version__}\n")


def test_help_lists_doctor() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "doctor" in result.stdout


def test_unknown_command_is_refused_on_stderr() -> None:
    result = CliRunner().invoke(app, ["doctr"])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "doctor" in result.stderr


@pytest.mark.usefixtures("plugin")
def test_another_packages_command_runs() -> None:
    result = CliRunner().invoke(app, ["hello", "--name", "you"])
    assert (result.exit_code, result.stdout) == (0, "hello you\n")


@pytest.mark.usefixtures("plugin")
def test_a_command_that_cannot_be_imported_spoils_no_other() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "hello" in result.stdout
    assert "Not available" in result.stdout
    assert CliRunner().invoke(app, ["hello"]).exit_code == 0
    failed = CliRunner().invoke(app, ["fancy"])
    assert isinstance(failed.exception, MissingExtraError)


@pytest.mark.usefixtures("plugin")
def test_an_error_of_ours_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(["fancy"])
    assert caught.value.code == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: command 'fancy' needs kvtier_absent_dependency")
    assert 'pip install "kvtier-fake-plugin[fancy]"' in output.err
    assert len(output.err.splitlines()) == 1
