"""The repository as values: files, findings, and the few questions that several rules ask."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: Import package to the folder that holds it.
PACKAGES = {
    "kvtier": "kvtier",
    "kvtier_connectors": "connectors/kvtier_connectors",
    "kvtier_kernels": "kernels/kvtier_kernels",
    "kvtier_server": "server/kvtier_server",
    "kvtier_engine": "engine_adapter/kvtier_engine",
    "kvtier_adapters": "engine_adapter/kvtier_adapters",
}
TOP_FOLDERS = (
    ".ci",
    "kvtier",
    "connectors",
    "kernels",
    "server",
    "engine_adapter",
    "tests",
    "bench",
    "docs",
    "examples",
    "deploy",
)
TEXT_SUFFIXES = {
    ".py",
    ".md",
    ".toml",
    ".txt",
    ".yml",
    ".yaml",
    ".json",
    ".html",
    ".js",
    ".css",
    "",
}


@dataclass(frozen=True)
class Finding:
    """One breach of one rule, printed as compilers do."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


@dataclass(frozen=True)
class Source:
    """One text file; ``path`` is relative to the root, with forward slashes."""

    path: str
    text: str

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @property
    def is_python(self) -> bool:
        return self.path.endswith(".py")

    @property
    def is_package(self) -> bool:
        """Whether the file ships."""
        return self.module is not None

    @property
    def module(self) -> str | None:
        """Dotted name of a module of ours, else None."""
        for package, folder in PACKAGES.items():
            if self.is_python and self.path.startswith(f"{folder}/"):
                inner = self.path.removeprefix(folder).removesuffix(".py").removesuffix("/__init__")
                return package + inner.replace("/", ".")
        return None

    @cached_property
    def names(self) -> dict[str, str]:
        """What each imported local name stands for: ``{"sleep": "time.sleep"}``."""
        names: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    local = alias.asname or alias.name.partition(".")[0]
                    names[local] = alias.name if alias.asname else local
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    names[alias.asname or alias.name] = f"{self._origin(node)}.{alias.name}"
        return names

    @cached_property
    def imports(self) -> frozenset[str]:
        """Dotted names that this file imports; ``from a import b`` gives ``a`` and ``a.b``."""
        found: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                origin = self._origin(node)
                found.add(origin)
                found.update(f"{origin}.{alias.name}" for alias in node.names)
        return frozenset(found)

    def _origin(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = (self.module or "").split(".")
        keep = len(parts) - node.level + self.path.endswith("__init__.py")
        return ".".join([*parts[:keep], *([node.module] if node.module else [])])

    def dotted(self, node: ast.AST) -> str:
        """Full name of ``a.b.c`` with imports resolved, or an empty string."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            owner = self.dotted(node.value)
            return f"{owner}.{node.attr}" if owner else ""
        return ""

    def calls(self) -> Iterator[tuple[ast.Call, str]]:
        """Every call with the full name of what is called."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                yield node, self.dotted(node.func)

    def found(self, line: int, message: str) -> Finding:
        return Finding(self.path, line, message)


def load_sources(root: Path = ROOT) -> list[Source]:
    """Read every text file of the project, in a stable order."""
    files = [path for path in root.iterdir() if path.is_file() and not path.name.startswith(".")]
    for folder in TOP_FOLDERS:
        files.extend(path for path in (root / folder).rglob("*") if path.is_file())
    sources = []
    for path in sorted(files):
        relative = path.relative_to(root)
        if path.suffix in TEXT_SUFFIXES and "__pycache__" not in relative.parts:
            sources.append(Source(relative.as_posix(), path.read_text(encoding="utf-8")))
    return sources
