"""The repository follows its style guide."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest

from kvtier_engine.options import OPTIONS
from tests.tidy import code_rules, tree_rules
from tests.tidy.sources import ROOT, TOP_FOLDERS, Finding, Source, load_sources


@cache
def tree() -> tuple[Source, ...]:
    return tuple(load_sources())


def expect_none(findings: Iterable[Finding]) -> None:
    found = list(findings)
    if found:
        pytest.fail("\n".join(map(str, found)), pytrace=False)


@pytest.mark.parametrize("rule", code_rules.CODE_RULES, ids=lambda rule: rule.__name__)
def test_code(rule: code_rules.Rule) -> None:
    expect_none(found for source in tree() if source.is_python for found in rule(source))


@pytest.mark.parametrize("rule", code_rules.TEXT_RULES, ids=lambda rule: rule.__name__)
def test_text(rule: code_rules.Rule) -> None:
    expect_none(found for source in tree() for found in rule(source))


@pytest.mark.parametrize("rule", tree_rules.TREE_RULES, ids=lambda rule: rule.__name__)
def test_tree(rule: tree_rules.TreeRule) -> None:
    expect_none(rule(tree()))


def test_no_dead_modules() -> None:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    expect_none(tree_rules.no_dead_modules(tree(), tree_rules.entry_point_modules(project)))


def test_environment_is_documented() -> None:
    built = frozenset(option.variable for option in OPTIONS)
    expect_none(tree_rules.environment_is_documented(tree(), built))


def test_links_resolve() -> None:
    paths = [path for folder in TOP_FOLDERS for path in (ROOT / folder).rglob("*")]
    paths += ROOT.iterdir()
    files = frozenset(path.relative_to(ROOT).as_posix() for path in paths)
    expect_none(tree_rules.links_resolve(tree(), files))


def test_allowances_are_needed() -> None:
    known = {source.path for source in tree()}
    stale = [key for key in code_rules.LONGER_ALLOWED if key.partition("::")[0] not in known]
    assert not stale
