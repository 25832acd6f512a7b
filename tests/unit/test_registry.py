"""Names to objects: the built-ins, a fake distribution on the path, and what goes wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import kvtier.registry
from kvtier.errors import ConfigError, MissingExtraError, RegistryError
from kvtier.registry import Registry, import_problem
from kvtier_connectors.memory import MemoryConnector

PLUGIN = Path(__file__).parent.parent / "package_with_entrypoint"


@pytest.fixture
def connectors(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """The registry of connectors of a process where the fake distribution is installed."""
    monkeypatch.syspath_prepend(PLUGIN)
    registry = Registry("kvtier.connectors", "connector")
    monkeypatch.setattr(kvtier.registry, "connectors", registry)
    return registry


def test_built_ins_come_through_the_same_door() -> None:
    assert kvtier.registry.connectors.load("memory") is MemoryConnector
    assert "raw" in kvtier.registry.codecs.names()
    assert kvtier.registry.codecs.load("raw")().name == "raw"
    assert "lru" in kvtier.registry.policies.names()


@pytest.mark.parametrize("kind", ["policies", "codecs", "connectors", "decorators", "commands"])
def test_every_name_loads(kind: str) -> None:
    registry: Registry = getattr(kvtier.registry, kind)
    for name in registry.names():
        assert callable(registry.load(name))


def test_a_third_partys_connector_is_found_and_opened(connectors: Registry) -> None:
    assert {"fake", "memory"} <= set(connectors.names())
    connector = kvtier.registry.connect("fake://host/path?colour=red")
    assert isinstance(connector, connectors.load("fake"))
    assert getattr(connector, "colour", None) == "red"


def test_nothing_is_imported_before_it_is_loaded(connectors: Registry) -> None:
    sys.modules.pop("fake_kvtier_plugin", None)
    assert "fake" in connectors.names()
    assert "fake_kvtier_plugin" not in sys.modules
    connectors.load("fake")
    assert "fake_kvtier_plugin" in sys.modules


def test_unknown_name_says_what_is_known_and_what_is_near(connectors: Registry) -> None:
    with pytest.raises(RegistryError) as caught:
        connectors.load("memmory")
    assert str(caught.value) == (
        f"no connector 'memmory' (did you mean 'memory'?); known: {', '.join(connectors.names())}"
    )


def test_an_empty_group_says_so() -> None:
    with pytest.raises(RegistryError, match="no gadget 'x'; known: none is installed"):
        Registry("kvtier.no-such-group", "gadget").load("x")


def test_missing_dependency_of_an_extra_names_the_install_command(connectors: Registry) -> None:
    with pytest.raises(MissingExtraError) as caught:
        connectors.load("fancy")
    assert str(caught.value) == (
        "connector 'fancy' needs kvtier_absent_dependency: "
        'pip install "kvtier-fake-plugin[fancy]"'
    )
    assert isinstance(caught.value.__cause__, ImportError)


def test_an_import_that_no_extra_mends_is_a_registry_error(connectors: Registry) -> None:
    with pytest.raises(RegistryError, match=r"'broken' cannot be imported.*forgotten_dependency"):
        connectors.load("broken")
    with pytest.raises(RegistryError, match=r"'nameless': .*NoSuchName"):
        connectors.load("nameless")


def test_a_name_claimed_twice_is_refused(connectors: Registry) -> None:
    """The fixture installs a distribution that claims ``raw`` as well."""
    codecs = Registry("kvtier.codecs", "codec")
    assert codecs.names().count("raw") == 1
    with pytest.raises(RegistryError, match=r"claimed more than once: .*fake_kvtier_plugin"):
        codecs.load("raw")


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("torch", 'pip install "kvtier[torch]"'),
        ("torch.cuda", 'pip install "kvtier[torch]"'),
        ("fastapi", 'pip install "kvtier[server]"'),
        ("prometheus_client", 'pip install "kvtier[server]"'),
        ("uvicorn", 'pip install "kvtier[server]"'),
    ],
)
def test_kvtiers_own_extras(module: str, command: str) -> None:
    problem = import_problem(ImportError("no", name=module), "x")
    assert isinstance(problem, MissingExtraError)
    assert str(problem) == f"x needs {module}: {command}"


def test_an_import_error_without_a_name_is_a_registry_error() -> None:
    problem = import_problem(ImportError("cannot import name 'x'"), "codec 'y'")
    assert isinstance(problem, RegistryError)
    assert "cannot import name 'x'" in str(problem)


@pytest.mark.parametrize("url", ["memory", "memory:name", ""])
def test_a_url_needs_a_scheme(url: str) -> None:
    with pytest.raises(RegistryError, match="starts with its scheme"):
        kvtier.registry.connect(url)


def test_unknown_scheme_and_option() -> None:
    with pytest.raises(RegistryError, match="no connector 'memori' \\(did you mean 'memory'"):
        kvtier.registry.connect("memori://user:secret@host")
    with pytest.raises(ConfigError, match="allowed: none"):
        kvtier.registry.connect("memory://?size=1")


def test_unknown_option_names_the_nearest(connectors: Registry) -> None:
    with pytest.raises(ConfigError, match="no 'color' \\(did you mean 'colour'\\?\\)"):
        kvtier.registry.connect("fake://host?color=red")
    with pytest.raises(ConfigError, match="given twice"):
        kvtier.registry.connect("fake://host?colour=red&colour=blue")


@pytest.mark.parametrize(
    "url",
    [
        "memori://u:s3cret@host",
        "fake://u:s3cret@host?color=1",
        "fake://u:s3cret@h?colour=1&colour=2",
        "redis://u:s3cret@[::1",
        "redis://u:s3cret@h:port",
        "s3://u:s3cret@[::1",
        "kvtier://u:s3cret@[::1",
        "file://u:s3cret@[::1",
    ],
)
def test_no_message_holds_a_password(connectors: Registry, url: str) -> None:
    with pytest.raises((RegistryError, ConfigError)) as caught:
        kvtier.registry.connect(url)
    assert "s3cret" not in str(caught.value)
