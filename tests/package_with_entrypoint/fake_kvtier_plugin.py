"""A third party's connector and command, found through entry points only."""

from __future__ import annotations

from typing import Self

import typer

from kvtier.config import url_options
from kvtier_connectors.memory import MemoryConnector


class FakeConnector(MemoryConnector):
    """A connector with one option."""

    @classmethod
    def from_url(cls, url: str) -> Self:
        options = url_options(url, ["colour"])
        connector = cls()
        connector.colour = options.get("colour", "none")
        return connector

    colour: str


def hello(name: str = "world") -> None:
    """Greet."""
    typer.echo(f"hello {name}")
