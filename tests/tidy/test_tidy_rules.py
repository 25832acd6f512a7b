"""Each tidy rule finds what it is there to find, and lets its neighbour pass."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.tidy import code_rules, tree_rules
from tests.tidy.sources import Finding, Source

SHIPPED = "kvtier/tiers/some.py"
TEST = "tests/unit/test_some.py"


def long_function(lines: int, decorator: str = "") -> str:
    body = "    value = 1\n" * (lines - 1)
    return f"{decorator}def grow():\n{body}"


# rule, path, what it must find, what it must pass
CASES: list[tuple[code_rules.Rule, str, str, str]] = [
    (code_rules.file_length, SHIPPED, "a = 1\n" * 401, "a = 1\n" * 400),
    (code_rules.function_length, SHIPPED, long_function(71), long_function(70)),
    (code_rules.function_length, SHIPPED, long_function(71), long_function(99, "@triton.jit\n")),
    (code_rules.no_sleep, SHIPPED, "import time\ntime.sleep(1)", "clock.sleep(1)"),
    (code_rules.no_sleep, TEST, "from time import sleep as nap\nnap(1)", "asyncio.sleep(0)"),
    (code_rules.no_sleep, SHIPPED, "import time as t\nt.sleep(1)", "import time\ntime.monotonic()"),
    (code_rules.no_print, SHIPPED, "print(1)", "console.print(1)"),
    (code_rules.narrow_excepts, SHIPPED, "try:\n a\nexcept:\n b", "try:\n a\nexcept OSError:\n b"),
    (
        code_rules.narrow_excepts,
        SHIPPED,
        "def run():\n try:\n  a\n except (OSError, Exception):\n  b",
        "def run_boundary():\n try:\n  a\n except Exception:\n  b",
    ),
    (
        code_rules.narrow_excepts,
        SHIPPED,
        "def run_boundary():\n def inner():\n  try:\n   a\n  except BaseException:\n   b",
        "def run_boundary():\n with a:\n  try:\n   a\n  except BaseException:\n   b",
    ),
    (code_rules.no_unsafe_decoding, SHIPPED, "import pickle", "import msgpack"),
    (code_rules.no_unsafe_decoding, SHIPPED, "from marshal import loads", "import json"),
    (code_rules.no_unsafe_decoding, SHIPPED, "eval(text)", "model.eval()"),
    (code_rules.no_unsafe_decoding, SHIPPED, "import torch\ntorch.load(path)", "policies.load(a)"),
    (code_rules.seeded_random, TEST, "import random\nrandom.random()", "random.random()"),
    (
        code_rules.seeded_random,
        TEST,
        "from random import Random\nRandom()",
        "from random import Random\nRandom(7)",
    ),
    (
        code_rules.seeded_random,
        TEST,
        "import numpy as np\nnp.random.rand(3)",
        "import numpy as np\nnp.random.default_rng(7)",
    ),
    (
        code_rules.seeded_random,
        SHIPPED,
        "import torch\ntorch.randn(3)",
        "import torch\ntorch.randn(3, generator=g)",
    ),
    (code_rules.no_environment, SHIPPED, "import os\nos.environ['A']", "import os\nos.cpu_count()"),
    (code_rules.no_environment, SHIPPED, "from os import getenv\ngetenv('A')", "settings.getenv()"),
    (code_rules.no_builtin_hash, SHIPPED, "hash(key)", "hashlib.sha256(key)"),
    (code_rules.has_docstrings, SHIPPED, "a = 1", '"""Says."""\na = 1'),
    (
        code_rules.has_docstrings,
        SHIPPED,
        '"""Says."""\nclass Some:\n  """Says."""\n  def act(self): ...',
        '"""Says."""\nclass Some:\n  """Says."""\n  def _act(self): ...',
    ),
    (code_rules.imports_ship, SHIPPED, "from tests.lib import a", "from kvtier.keys import a"),
    (
        code_rules.no_hidden_tests,
        TEST,
        "import pytest\n@pytest.mark.skip(reason='slow')\ndef test_a(): ...",
        "import pytest\n@pytest.mark.soak\ndef test_a(): ...",
    ),
    (
        code_rules.no_hidden_tests,
        TEST,
        "import pytest\nslow = pytest.mark.skipif(True, reason='slow')",
        "import pytest\ncuda = pytest.mark.skipif(True, reason='needs a CUDA device')",
    ),
    (
        code_rules.no_hidden_tests,
        TEST,
        "import pytest\nslow = pytest.mark.skipif(True, reason='needs time')",
        "import pytest\nseen = pytest.mark.skipif(True, reason='needs Chromium')",
    ),
    (
        code_rules.no_hidden_tests,
        TEST,
        "from pytest import mark\nslow = mark.xfail",
        "from pytest import mark\nslow = mark.parametrize",
    ),
    (
        code_rules.tasks_have_links,
        SHIPPED,
        "# TO" + "DO later",
        "# TO" + "DO https://example.org/1",
    ),
    (code_rules.speaks_of_itself, SHIPPED, "# see des" + "ign.md", "# see docs/adr"),
    (code_rules.speaks_of_itself, "README.md", "cd /wo" + "rk/x", "cd network/x"),
]


@pytest.mark.parametrize(
    ("rule", "path", "bad", "good"),
    CASES,
    ids=[f"{case[0].__name__}-{number}" for number, case in enumerate(CASES)],
)
def test_rule_tells_bad_from_good(rule: code_rules.Rule, path: str, bad: str, good: str) -> None:
    assert list(rule(Source(path, bad)))
    assert not list(rule(Source(path, good)))


def test_every_rule_has_a_case() -> None:
    rules = {*code_rules.CODE_RULES, *code_rules.TEXT_RULES}
    assert rules == {case[0] for case in CASES}


def test_rules_for_shipped_code_leave_tests_alone() -> None:
    for rule in (code_rules.no_print, code_rules.no_unsafe_decoding, code_rules.no_environment):
        text = "import os\nimport pickle\nprint(os.environ)"
        assert not list(rule(Source(TEST, text)))


def test_the_clock_may_sleep() -> None:
    text = "import time\ntime.sleep(1)"
    assert not list(code_rules.no_sleep(Source("kvtier/clock.py", text)))


def messages(findings: Iterable[Finding]) -> list[str]:
    return [f"{each.path}: {each.message}" for each in findings]


def test_dead_module_is_found() -> None:
    sources = [
        Source("kvtier/keys.py", ""),
        Source("kvtier/types.py", ""),
        Source("kvtier/lazy.py", ""),
        Source("kvtier/entry.py", ""),
        Source("kvtier/cache/cache.py", "from kvtier import types\nBACK_END = 'kvtier.lazy:Some'"),
        Source("kvtier/cache/__init__.py", "from .cache import Cache"),
        Source("kvtier/testing/kit.py", ""),
        Source("tests/unit/test_keys.py", "from kvtier.keys import a\nimport kvtier.testing.kit"),
    ]
    found = messages(tree_rules.no_dead_modules(sources, frozenset({"kvtier.entry"})))
    assert found == ["kvtier/keys.py: nothing uses kvtier.keys"]


def test_entry_points_are_read_from_the_project_table() -> None:
    project = {"scripts": {"a": "x.main:run"}, "entry-points": {"group": {"b": "x.b:B"}}}
    assert tree_rules.entry_point_modules(project) == {"x.main", "x.b"}


def test_untested_limit_is_found() -> None:
    constants = Source("kvtier/constants.py", "A_MAX: Final = 1\nB_MAX: Final = 2\nC: Final = 3")
    test = Source(TEST, "from kvtier.constants import A_MAX")
    found = messages(tree_rules.limits_are_tested([constants, test]))
    assert found == ["kvtier/constants.py: no test names the limit B_MAX"]


def test_same_test_name_is_found() -> None:
    sources = [
        Source("tests/unit/test_a.py", ""),
        Source("tests/fault/test_a.py", ""),
        Source("tests/fault/__init__.py", ""),
    ]
    assert messages(tree_rules.tests_have_own_names(sources)) == [
        "tests/fault/test_a.py: tests/unit/test_a.py has the same name",
        "tests/fault/__init__.py: a test folder is no package",
    ]


def test_top_level_package_is_found() -> None:
    paths = ["kvtier/__init__.py", "kernels/kvtier_kernels/__init__.py", "kernels/__init__.py"]
    sources = [Source(path, "") for path in paths]
    found = messages(tree_rules.top_folders_are_no_packages(sources))
    assert found == ["kernels/__init__.py: kernels is no package"]


def test_undocumented_and_unread_variables_are_found() -> None:
    sources = [
        Source("Makefile", "KVTIER_ONE"),
        Source("docs/reference/env.md", "KVTIER_TWO KVTIER_THREE"),
        Source("kvtier/some.py", "f'KVTIER_{name}'"),
        Source("tests/unit/test_some.py", "KVTIER_FOUR"),
    ]
    found = messages(tree_rules.environment_is_documented(sources, frozenset({"KVTIER_THREE"})))
    assert found == [
        "Makefile: KVTIER_ONE is not in docs/reference/env.md",
        "docs/reference/env.md: nothing reads KVTIER_TWO",
    ]


def test_closed_changelog_is_found() -> None:
    closed = Source("CHANGELOG.md", "# Changes\n\n## 0.1.0\n")
    assert messages(tree_rules.changelog_is_open([closed]))
    opened = Source("CHANGELOG.md", "# Changes\n\n## Unreleased\n\n## 0.1.0\n")
    assert not list(tree_rules.changelog_is_open([opened]))


def test_broken_links_are_found() -> None:
    page = Source(
        "docs/concepts/a.md",
        "# Head of `a`\n[ok](../b.md) [ok](../b.md#two-words) [ok](#head-of-a) "
        "[ok](https://example.org/x) [ok](..)\n[bad](c.md)\n![bad](../b.png)\n"
        "[bad](../b.md#three)\n[bad](#two-words)\n",
    )
    other = Source("docs/b.md", "## Two words\n```\n## Three\n```\n")
    files = frozenset({"docs", "docs/concepts", "docs/b.md", "docs/concepts/a.md"})
    found = list(tree_rules.links_resolve([page, other], files))
    assert [each.line for each in found] == [3, 4, 5, 6]


def test_unlisted_page_is_found() -> None:
    sources = [
        Source("docs/README.md", "[A](concepts/a.md#part)"),
        Source("docs/concepts/a.md", ""),
        Source("docs/concepts/b.md", ""),
        Source("docs/adr/0001-c.md", ""),
    ]
    found = messages(tree_rules.pages_are_listed(sources))
    assert found == ["docs/concepts/b.md: docs/README.md does not list this page"]
