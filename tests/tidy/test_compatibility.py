"""The page of what works in which engine names tests that exist, and all that were listed."""

from __future__ import annotations

import ast
import re

from tests.engines.compatibility import PAGE, read_plugs
from tests.tidy.sources import ROOT


def names_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def named() -> set[str]:
    return {test for plug in read_plugs() for row in plug.rows for test in row.tests}


def test_every_test_that_is_named_exists() -> None:
    missing = [
        test for test in sorted(named()) if test.split("::")[1] not in names_in(test.split("::")[0])
    ]
    assert not missing


def test_the_page_is_of_the_present_list() -> None:
    """Written anew where it is not: its second paragraph says how."""
    assert set(re.findall(r"`(\w+/\w+\.py::\w+)`", PAGE.read_text())) == named()
