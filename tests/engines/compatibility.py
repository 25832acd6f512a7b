"""Write docs/reference/compatibility.md: what works in which engine, and the test that shows it.

``make test-engines`` leaves the results that it is made from. A line whose test failed, or did not
run, says so.

    python -m tests.engines.compatibility [.peer/results.xml ...]
"""

from __future__ import annotations

import sys
import tomllib
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

from bench.tiers.peers import venvs

LIST = Path(__file__).with_suffix(".toml")
PAGE = venvs.ROOT / "docs" / "reference" / "compatibility.md"
RESULTS = venvs.FOLDER / "results.xml"
COMMAND = "python -m tests.engines.compatibility"


@dataclass(frozen=True, slots=True)
class Row:
    """What a user may ask for, and the answer; each test is a file below ``tests`` and a name."""

    what: str
    answer: str
    tests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plug:
    """One way into an engine, and where it is tried."""

    name: str
    guide: str
    peer: str
    where: str
    rows: tuple[Row, ...]


def read_plugs() -> list[Plug]:
    """Return what ``compatibility.toml`` lists."""
    tables = tomllib.loads(LIST.read_text())["plug"]
    return [
        Plug(
            **{name: table[name] for name in ("name", "guide", "peer", "where")},
            rows=tuple(Row(what, answer, tuple(tests)) for what, answer, *tests in table["rows"]),
        )
        for table in tables
    ]


def read_results(path: Path) -> dict[str, str]:
    """Return ``passed``, ``failed`` or ``not run`` for each test, of all its cases the worst."""
    found: dict[str, str] = {}
    for case in ET.parse(path).iter("testcase"):
        module = case.attrib["classname"].removeprefix("tests.").replace(".", "/")
        name = f"{module}.py::{case.attrib['name'].partition('[')[0]}"
        tags = {child.tag for child in case}
        said = "passed"
        if tags & {"failure", "error"}:
            said = "failed"
        elif "skipped" in tags:
            said = "not run"
        ranks = ("failed", "not run", "passed")
        found[name] = min(said, found.get(name, said), key=ranks.index)
    return found


def state(row: Row, results: dict[str, str]) -> str:
    """What the tests of a line came to; those of the project's own suite run with each change."""
    said = [results.get(test, "not run") for test in row.tests if test.startswith("engines/")]
    if not said:
        return "in CI"
    if "failed" in said:
        return "**failed**"
    return "not run" if "not run" in said else "passed"


def page(results: dict[str, str], when: str) -> str:
    """Return the text of the page."""
    lines = [
        "# Compatibility",
        "",
        "What works in which engine, and the test that shows it. This page is written by",
        f"`{COMMAND}`, after `make test-engines`; last on {when}.",
        "*Passed*: inside the real engine, in that run. *In CI*: in the project's own suite, with",
        "a double of the engine. *Not run*: that run left it out, and says nothing of it.",
    ]
    for plug in read_plugs():
        where = f"`{venvs.release(plug.peer)}` {plug.where}"
        lines += ["", f"## {plug.name}", "", f"[Guide](../guides/{plug.guide}); {where}.", ""]
        lines += ["| Wish | Answer | Seen | Shown by |", "|---|---|---|---|"]
        for row in plug.rows:
            tests = "<br>".join(f"`{test}`" for test in row.tests)
            lines.append(f"| {row.what} | {row.answer} | {state(row, results)} | {tests} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    paths = [Path(path) for path in sys.argv[1:]] or [RESULTS]
    results: dict[str, str] = {}
    for path in paths:
        for name, said in read_results(path).items():
            if said != "not run" or name not in results:
                results[name] = said
    suite = ET.parse(paths[-1]).find("testsuite")
    assert suite is not None
    PAGE.write_text(page(results, suite.attrib["timestamp"][:10]))
    print(PAGE.relative_to(venvs.ROOT))  # noqa: T201


if __name__ == "__main__":
    main()
