"""The style guide, file by file. A rule takes a source and yields its findings."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

from tests.tidy.sources import Finding, Source

FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 400

#: A ratchet: what may be longer today, and how long it is. It never grows; best it is empty.
LONGER_ALLOWED: dict[str, int] = {}

#: The modules that read the environment.
ENVIRONMENT_READERS = {
    "engine_adapter/kvtier_engine/main.py",
    "kvtier/model_files/cache.py",
}

#: The one place where production waits by the wall clock; benchmarks measure by it.
SLEEPERS = ("kvtier/clock.py", "bench/")

UNSAFE_MODULES = ("pickle", "marshal", "shelve", "dill", "cloudpickle")
SEEDABLE = {
    "random.Random",
    "random.seed",
    "numpy.random.default_rng",
    "numpy.random.RandomState",
    "numpy.random.seed",
}
TORCH_RANDOM = re.compile(r"torch\.(rand|randn|randint|randperm|normal|multinomial|bernoulli)")
HIDING = {
    "pytest.mark.skip",
    "pytest.mark.xfail",
    "pytest.mark.flaky",
    "pytest.skip",
    "pytest.xfail",
    "pytest.importorskip",
}
#: What no package brings: a device, a library, the browser of the system and the environments of
#: other engines, which CI has.
MISSING = (
    "needs a CUDA device",
    "needs Chromium",
    "needs Mooncake",
    "needs atheris",
    "needs root",
    "needs redis-server",
    "needs `make test-engines`",
)
TASK_MARK = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
LINK = re.compile(r"https?://")

#: What the project does not speak of: how and where it was written. Split, so that this file
#: does not hold the words either.
FORBIDDEN = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"\b(design|style|faults|infra)" + r"\.md\b",
        r"(?<![\w/.-])sha" + r"red/",
        r"/wo" + r"rk/",
        r"/ro" + r"ot/",
        r"/ho" + r"me/\w",
        r"/tm" + r"p/w/",
        r"\bcla" + r"ude\b",
        r"\banth" + r"ropic\b",
        r"\bcoding assi" + r"stant",
        r"\b(coding|developer) ses" + r"sion\b",
        r"(?<![&\w])iss" + r"ue #?\d+",
    )
]

Rule = Callable[[Source], Iterator[Finding]]


def file_length(source: Source) -> Iterator[Finding]:
    limit = max(FILE_LINES_MAX, LONGER_ALLOWED.get(source.path, 0))
    if source.is_python and len(source.lines) > limit:
        yield source.found(1, f"{len(source.lines)} lines; a file has at most {limit}")


def function_length(source: Source) -> Iterator[Finding]:
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list):
            continue
        limit = max(FUNCTION_LINES_MAX, LONGER_ALLOWED.get(f"{source.path}::{node.name}", 0))
        count = (node.end_lineno or node.lineno) - node.lineno + 1
        if count > limit:
            yield source.found(node.lineno, f"{node.name} has {count} lines, at most {limit}")


def no_sleep(source: Source) -> Iterator[Finding]:
    for node, name in source.calls():
        if name == "time.sleep" and not source.path.startswith(SLEEPERS):
            yield source.found(node.lineno, "time.sleep: take a Clock, wait for an event")


def no_print(source: Source) -> Iterator[Finding]:
    if not source.is_package or source.path.startswith("kvtier/cli/"):
        return
    for node, name in source.calls():
        if name == "print":
            yield source.found(node.lineno, "print: a package logs, or returns what it has to say")


def narrow_excepts(source: Source) -> Iterator[Finding]:
    for function, node in _handlers(source.tree, ""):
        if node.type is None:
            yield source.found(node.lineno, "bare except")
            continue
        caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        broad = {source.dotted(each) for each in caught} & {"Exception", "BaseException"}
        if broad and not function.endswith("_boundary"):
            yield source.found(
                node.lineno, f"except {broad.pop()} outside a function named *_boundary"
            )


def _handlers(node: ast.AST, function: str) -> Iterator[tuple[str, ast.ExceptHandler]]:
    for child in ast.iter_child_nodes(node):
        inside = function
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            inside = child.name
        if isinstance(child, ast.ExceptHandler):
            yield function, child
        yield from _handlers(child, inside)


def no_unsafe_decoding(source: Source) -> Iterator[Finding]:
    if not source.is_package:
        return
    for name in sorted(source.imports):
        if name.partition(".")[0] in UNSAFE_MODULES:
            yield source.found(1, f"imports {name}: bytes of others are never executed")
    for node, name in source.calls():
        if name in {"eval", "exec", "torch.load"}:
            yield source.found(node.lineno, f"{name}: bytes of others are never executed")


def seeded_random(source: Source) -> Iterator[Finding]:
    for node, name in source.calls():
        # A parameter may be called `random`; only the module is meant.
        if ast.unparse(node.func).partition(".")[0] not in source.names:
            continue
        given = bool(node.args or node.keywords)
        if name in SEEDABLE:
            bad = not given
        elif TORCH_RANDOM.fullmatch(name):
            bad = source.is_package and all(word.arg != "generator" for word in node.keywords)
        else:
            bad = name.startswith(("random.", "numpy.random.")) and name != "random.SystemRandom"
        if bad:
            yield source.found(node.lineno, f"{name} without a seed: take a seeded generator")


def no_environment(source: Source) -> Iterator[Finding]:
    if source.path in ENVIRONMENT_READERS or not source.is_package:
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute | ast.Name):
            name = source.dotted(node)
            if name in {"os.environ", "os.environb", "os.getenv"}:
                yield source.found(node.lineno, f"{name}: settings come as values")


def no_builtin_hash(source: Source) -> Iterator[Finding]:
    if not source.is_package:
        return
    for node, name in source.calls():
        if name == "hash":
            yield source.found(node.lineno, "hash(): differs from process to process")


def tasks_have_links(source: Source) -> Iterator[Finding]:
    for number, line in enumerate(source.lines, 1):
        match = TASK_MARK.search(line)
        if match and not LINK.search(line) and not source.path.startswith("tests/tidy/"):
            yield source.found(number, f"{match[0]} without a link to where it is tracked")


def speaks_of_itself(source: Source) -> Iterator[Finding]:
    for number, line in enumerate(source.lines, 1):
        for pattern in FORBIDDEN:
            match = pattern.search(line)
            if match:
                yield source.found(number, f"{match[0]!r}: the project speaks of itself alone")


def has_docstrings(source: Source) -> Iterator[Finding]:
    if not source.is_package:
        return
    if ast.get_docstring(source.tree) is None:
        yield source.found(1, "the module has no docstring")
    for node in source.tree.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        members = node.body if isinstance(node, ast.ClassDef) else []
        for each in (node, *members):
            if (
                isinstance(each, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
                and not node.name.startswith("_")
                and not each.name.startswith("_")
                and ast.get_docstring(each) is None
            ):
                yield source.found(each.lineno, f"{each.name} has no docstring")


def imports_ship(source: Source) -> Iterator[Finding]:
    if not source.is_package:
        return
    for name in sorted(source.imports):
        if name.partition(".")[0] in {"tests", "bench", "examples"}:
            yield source.found(1, f"imports {name}, which does not ship")


def no_hidden_tests(source: Source) -> Iterator[Finding]:
    if not source.path.startswith("tests/"):
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and source.dotted(node) in HIDING:
            yield source.found(node.lineno, f"{source.dotted(node)}: a test runs and passes")
    for call, name in source.calls():
        text = ast.unparse(call)
        if name == "pytest.mark.skipif" and not any(reason in text for reason in MISSING):
            yield source.found(call.lineno, f"skipif for another reason than {MISSING}")


TEXT_RULES: tuple[Rule, ...] = (tasks_have_links, speaks_of_itself)
CODE_RULES: tuple[Rule, ...] = (
    file_length,
    function_length,
    no_sleep,
    no_print,
    narrow_excepts,
    no_unsafe_decoding,
    seeded_random,
    no_environment,
    no_builtin_hash,
    has_docstrings,
    imports_ship,
    no_hidden_tests,
)
