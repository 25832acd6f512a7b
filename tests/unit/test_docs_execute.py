"""What the pages show is true: their Python runs, and prints what stands beneath it.

The blocks of one page share a namespace and run in order, in a fresh interpreter and an empty
folder. A block fenced as ``text output`` holds what the Python block before it must print.
"""

from __future__ import annotations

import doctest
import importlib
import json
import re
import subprocess
import sys
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from tests.tidy.sources import load_sources

PAGE_TIMEOUT_S = 120
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)
RUNNER = """
import contextlib, io, json, sys
namespace = {"__name__": "__main__"}
for block in json.load(sys.stdin):
    code = compile("\\n" * block["line"] + block["code"], block["path"], "exec")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, namespace)
    printed = out.getvalue().strip()
    if block["prints"] is not None and printed != block["prints"].strip():
        sys.exit(f"{block['path']}:{block['line']}: printed\\n{printed}\\nnot\\n{block['prints']}")
"""


@dataclass(frozen=True)
class Block:
    """One Python block; ``line`` is that of its fence."""

    path: str
    line: int
    code: str
    prints: str | None = None


def python_blocks(path: str, text: str) -> list[Block]:
    blocks: list[Block] = []
    for match in FENCE.finditer(text):
        info = match["info"].strip()
        body = textwrap.dedent(match["body"])
        if info == "python":
            blocks.append(Block(path, text.count("\n", 0, match.start()) + 1, body))
        elif info == "text output":
            last = blocks.pop()
            blocks.append(Block(path, last.line, last.code, body))
    return blocks


def run_blocks(blocks: list[Block], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", RUNNER],
        input=json.dumps([asdict(block) for block in blocks]),
        cwd=folder,
        capture_output=True,
        check=False,
        text=True,
        timeout=PAGE_TIMEOUT_S,
    )


PAGES = {
    source.path: blocks
    for source in load_sources()
    if source.path.endswith(".md") and (blocks := python_blocks(source.path, source.text))
}
MODULES = [
    source.module
    for source in load_sources()
    if source.module and re.search(r"^ *>>> ", source.text, re.MULTILINE)
]


@pytest.mark.parametrize("page", PAGES)
def test_page(page: str, tmp_path: Path) -> None:
    done = run_blocks(PAGES[page], tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted
    assert not result.failed


def test_the_first_page_has_python() -> None:
    assert "README.md" in PAGES


PAGE = """# Page
```python
value = 1
```

1. In a list:

   ```python
   print(value + 1)
   ```
   ```text output
   2
   ```

```bash
exit 1
```
"""


def test_blocks_are_found_and_share_a_namespace(tmp_path: Path) -> None:
    blocks = python_blocks("page.md", PAGE)
    assert [(block.line, block.prints) for block in blocks] == [(2, None), (8, "2\n")]
    done = run_blocks(blocks, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("broken", "message"),
    [("value + 1", "printed"), ("value + other", 'File "page.md", line 9')],
)
def test_a_wrong_block_is_found(broken: str, message: str, tmp_path: Path) -> None:
    page = PAGE.replace("print(value + 1)", f"print({broken} + 0 + value)")
    done = run_blocks(python_blocks("page.md", page), tmp_path)
    assert done.returncode != 0
    assert message in done.stderr
