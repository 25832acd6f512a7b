"""The command ``kvtier``. Other packages add commands through the entry points ``kvtier.commands``.

Data goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperGroup

import kvtier
from kvtier import registry
from kvtier.cli.doctor import doctor
from kvtier.errors import KVTierError


class _Commands(TyperGroup):
    """The built-in commands and those of the registry, which are imported when they are run.

    An entry point is a ``typer.Typer`` or a function with typer's annotations.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """All names, built-in ones first."""
        built_in = super().list_commands(ctx)
        return built_in + [name for name in registry.commands.names() if name not in built_in]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command, None for an unknown name."""
        built_in = super().get_command(ctx, cmd_name)
        if built_in is not None or cmd_name not in registry.commands.names():
            return built_in
        try:
            return _as_command(cmd_name, registry.commands.load(cmd_name))
        except KVTierError as error:
            # The list of commands still works; running this one says what is missing.
            return _failing_command(cmd_name, error)


app = typer.Typer(name="kvtier", cls=_Commands, no_args_is_help=True, add_completion=False)
app.command("doctor")(doctor)


def _show_version(wanted: bool) -> None:  # noqa: FBT001
    if wanted:
        typer.echo(kvtier.__version__)
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(  # noqa: FBT001
        False, "--version", callback=_show_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """KVTier: tiered, verified storage for the KV cache of LLM engines."""


def run(arguments: list[str] | None = None) -> None:
    """Run the command line and exit the process; an error of ours ends it with status 1."""
    try:
        app(arguments)
    except KVTierError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)


def _as_command(name: str, target: Any) -> Any:
    if isinstance(target, typer.Typer):
        group = target
    else:
        group = typer.Typer(add_completion=False)
        group.command(name)(target)
    command = typer.main.get_command(group)
    command.name = name
    return command


def _failing_command(name: str, error: KVTierError) -> Any:
    def fail() -> None:
        raise error

    fail.__doc__ = f"Not available: {error}"
    return _as_command(name, fail)
