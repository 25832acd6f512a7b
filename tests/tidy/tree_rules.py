"""The style guide, for the repository as a whole. A rule takes all sources and yields findings."""

from __future__ import annotations

import ast
import posixpath
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tests.tidy.sources import PACKAGES, Finding, Source

ENVIRONMENT_PAGE = "docs/reference/env.md"
ENVIRONMENT_NAME = re.compile(r"\bKVTIER_[A-Z0-9_]*[A-Z0-9]\b")
LIMIT_NAME = re.compile(r"_(MAX|MIN|HIGH)\b|_DEADLINE_S\b")
MARKDOWN_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)

TreeRule = Callable[[Sequence[Source]], Iterator[Finding]]


def no_dead_modules(sources: Sequence[Source], entry_points: frozenset[str]) -> Iterator[Finding]:
    """Every module that ships is imported by another one, named by one, or an entry point.

    The test kit ships for tests, so a test counts as its user.
    """
    users: dict[str, set[str]] = defaultdict(set)
    for source in sources:
        if not source.is_python:
            continue
        for name in source.imports | _module_texts(source):
            users[name].add(source.path)
    for source in sources:
        module = source.module
        if module is None or source.path.endswith(("/__init__.py", "/__main__.py")):
            continue
        ships = {path for path in users[module] if not path.startswith(("tests/", "bench/"))}
        is_kit = module.startswith("kvtier.testing.")
        used = (users[module] if is_kit else ships) - {source.path}
        if not used and module not in entry_points:
            yield source.found(1, f"nothing uses {module}")


def _module_texts(source: Source) -> set[str]:
    """Module names that stand as texts, as in a table of lazily imported back ends."""
    return {
        node.value.partition(":")[0]
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.partition(".")[0] in PACKAGES
    }


def entry_point_modules(project: dict[str, Any]) -> frozenset[str]:
    """The modules that ``[project]`` of pyproject.toml names."""
    groups = [project.get("scripts", {}), *project.get("entry-points", {}).values()]
    return frozenset(target.partition(":")[0] for group in groups for target in group.values())


def limits_are_tested(sources: Sequence[Source]) -> Iterator[Finding]:
    """Every limit of a ``constants.py`` or ``limits.py`` is named by a test."""
    tests = "\n".join(
        source.text
        for source in sources
        if source.is_python and source.path.startswith(("tests/", "kvtier/testing/"))
    )
    for source in sources:
        if not source.is_package or not source.path.endswith(("/constants.py", "/limits.py")):
            continue
        for node in source.tree.body:
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            name = node.target.id
            if LIMIT_NAME.search(name) and not re.search(rf"\b{name}\b", tests):
                yield source.found(node.lineno, f"no test names the limit {name}")


def tests_have_own_names(sources: Sequence[Source]) -> Iterator[Finding]:
    """No two test files share a name, and a test folder is no package."""
    first: dict[str, str] = {}
    for source in sources:
        if not source.path.startswith("tests/") or not source.is_python:
            continue
        name = posixpath.basename(source.path)
        if name == "__init__.py":
            yield source.found(1, "a test folder is no package")
        elif name in first:
            yield source.found(1, f"{first[name]} has the same name")
        first.setdefault(name, source.path)


def top_folders_are_no_packages(sources: Sequence[Source]) -> Iterator[Finding]:
    """``kernels/__init__.py`` would hide other projects' ``kernels`` from whoever runs here."""
    for source in sources:
        folder, _, name = source.path.rpartition("/")
        if name == "__init__.py" and "/" not in folder and folder != "kvtier":
            yield source.found(1, f"{folder or 'the root'} is no package")


def environment_is_documented(
    sources: Sequence[Source], built: frozenset[str]
) -> Iterator[Finding]:
    """Every variable of ours that is used is on the page, and the other way round.

    ``built`` are names that the code puts together and that therefore stand nowhere as a whole.
    Tests other than their common fixtures may name what does not exist.
    """
    used = dict.fromkeys(built, ("pyproject.toml", 1))
    listed: dict[str, int] = {}
    for source in sources:
        is_test = source.path.startswith("tests/") and source.path != "tests/conftest.py"
        for number, line in enumerate(source.lines, 1):
            for name in ENVIRONMENT_NAME.findall(line):
                if source.path == ENVIRONMENT_PAGE:
                    listed.setdefault(name, number)
                elif not is_test and not source.path.endswith(".md"):
                    used[name] = (source.path, number)
    for name in sorted(used.keys() - listed.keys()):
        yield Finding(*used[name], f"{name} is not in {ENVIRONMENT_PAGE}")
    for name in sorted(listed.keys() - used.keys()):
        yield Finding(ENVIRONMENT_PAGE, listed[name], f"nothing reads {name}")


def changelog_is_open(sources: Sequence[Source]) -> Iterator[Finding]:
    """The changelog has a place for what is not released yet."""
    for source in sources:
        if source.path == "CHANGELOG.md" and "\n## Unreleased\n" in source.text:
            return
    yield Finding("CHANGELOG.md", 1, "no section '## Unreleased'")


def links_resolve(sources: Sequence[Source], files: frozenset[str]) -> Iterator[Finding]:
    """Relative links of Markdown files lead to a file, a folder or a heading that is there.

    ``files`` holds every path of the tree, folders included.
    """
    anchors = {
        source.path: {_slug(match[1]) for match in HEADING.finditer(FENCE.sub("", source.text))}
        for source in sources
        if source.path.endswith(".md")
    }
    for source in sources:
        if not source.path.endswith(".md"):
            continue
        for match in MARKDOWN_LINK.finditer(source.text):
            target = match[1] or match[2]
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            folder = posixpath.dirname(source.path)
            resolved = posixpath.normpath(posixpath.join(folder, path)) if path else source.path
            line = source.text.count("\n", 0, match.start()) + 1
            if resolved not in files:
                yield source.found(line, f"{target} leads nowhere")
            elif anchor and anchor not in anchors.get(resolved, {anchor}):
                yield source.found(line, f"{target}: no such heading")


def pages_are_listed(sources: Sequence[Source]) -> Iterator[Finding]:
    """Every page of ``docs`` but the decisions is linked from the page that lists them."""
    listed = {
        posixpath.normpath(posixpath.join("docs", match[1].partition("#")[0]))
        for source in sources
        if source.path == "docs/README.md"
        for match in MARKDOWN_LINK.finditer(source.text)
        if match[1]
    }
    for source in sources:
        is_page = source.path.startswith("docs/") and source.path.endswith(".md")
        apart = source.path.startswith("docs/adr/") or source.path == "docs/README.md"
        if is_page and not apart and source.path not in listed:
            yield source.found(1, "docs/README.md does not list this page")


def _slug(heading: str) -> str:
    """Anchor of a heading, as GitHub makes it."""
    words = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower())
    return words.replace(" ", "-")


TREE_RULES: tuple[TreeRule, ...] = (
    limits_are_tested,
    tests_have_own_names,
    top_folders_are_no_packages,
    changelog_is_open,
    pages_are_listed,
)
