"""Needs a package that its distribution never asked for."""

from __future__ import annotations

import kvtier_forgotten_dependency  # type: ignore[import-not-found]

BrokenConnector = kvtier_forgotten_dependency.Connector
