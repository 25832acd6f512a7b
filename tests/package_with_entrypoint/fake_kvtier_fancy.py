"""Needs a package that only an extra of the distribution brings."""

from __future__ import annotations

import kvtier_absent_dependency.client  # type: ignore[import-not-found]

FancyConnector = kvtier_absent_dependency.client.Connector
command = kvtier_absent_dependency.client.command
