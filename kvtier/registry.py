"""Names to objects: policies, admissions, codecs, connectors, commands, as entry points tell.

Built-ins use the same door as third parties: an entry point in a distribution's metadata. Nothing
is imported before it is asked for.
"""

from __future__ import annotations

import re
from functools import cached_property
from importlib.metadata import Distribution, EntryPoint, distribution, entry_points
from itertools import takewhile
from typing import Any, Final

from kvtier.errors import ConfigError, MissingExtraError, RegistryError, nearest
from kvtier.interfaces import Connector

_EXTRA_REQUIREMENT: Final = re.compile(
    r"""(?P<package>[\w.-]+).*;.*extra\s*==\s*["'](?P<extra>[\w.-]+)["']"""
)


class Registry:
    """The entry points of one group. Reads the installed metadata once, at first use."""

    def __init__(self, group: str, kind: str) -> None:
        """``kind`` is the word for messages: "codec", "policy"."""
        self._group = group
        self._kind = kind

    def names(self) -> list[str]:
        """Return what may be loaded, sorted."""
        return sorted(self._points)

    def load(self, name: str) -> Any:
        """Import and return what stands behind ``name``.

        Raises ``RegistryError`` for an unknown name or one that two distributions claim, and
        ``MissingExtraError`` where an optional dependency is not installed.
        """
        points = self._points.get(name)
        if points is None:
            known = ", ".join(self.names()) or "none is installed"
            hint = nearest(name, self._points)
            raise RegistryError(f"no {self._kind} {name!r}{hint}; known: {known}")
        if len(points) > 1:
            claims = ", ".join(sorted(point.value for point in points))
            raise RegistryError(f"{self._kind} {name!r} is claimed more than once: {claims}")
        try:
            return points[0].load()
        except ImportError as error:
            raise import_problem(error, f"{self._kind} {name!r}", points[0].dist) from error
        except AttributeError as error:
            raise RegistryError(f"{self._kind} {name!r}: {error}") from error

    @cached_property
    def _points(self) -> dict[str, list[EntryPoint]]:
        found: dict[str, list[EntryPoint]] = {}
        for point in entry_points(group=self._group):
            if all(point.value != other.value for other in found.get(point.name, [])):
                found.setdefault(point.name, []).append(point)
        return found


def import_problem(
    error: ImportError, what: str, source: Distribution | None = None
) -> MissingExtraError | RegistryError:
    """Return the error to raise when ``what`` could not be imported.

    A module that one of the extras of ``source`` (KVTier itself unless given) brings gives a
    ``MissingExtraError`` with the install command; any other is a ``RegistryError``.
    """
    source = source or distribution("kvtier")
    module = _normalized((error.name or "").partition(".")[0])
    brought: dict[str, list[str]] = {}
    for requirement in source.requires or []:
        if match := _EXTRA_REQUIREMENT.match(requirement):
            brought.setdefault(match["extra"], []).append(_normalized(match["package"]))
    extras = [extra for extra, packages in brought.items() if module in packages]
    if not extras:
        return RegistryError(f"{what} cannot be imported: {error}")
    # The extra that brings the least; others may include it.
    extra = min(extras, key=lambda name: len(brought[name]))
    return MissingExtraError(f'{what} needs {error.name}: pip install "{source.name}[{extra}]"')


def _normalized(name: str) -> str:
    return name.lower().replace("_", "-")


policies: Final = Registry("kvtier.policies", "policy")
admissions: Final = Registry("kvtier.admissions", "admission")
codecs: Final = Registry("kvtier.codecs", "codec")
byte_codecs: Final = Registry("kvtier.byte_codecs", "byte codec")
connectors: Final = Registry("kvtier.connectors", "connector")
decorators: Final = Registry("kvtier.decorators", "decorator of connectors")
commands: Final = Registry("kvtier.commands", "command")


def split_codec(text: str) -> tuple[str | None, str | None]:
    """Split what a tier below DRAM is to use into a codec and a byte codec on top of it.

    None stands for what DRAM has, and for no byte codec. Nothing is loaded. Raises
    ``RegistryError`` for a name that is neither.

    >>> split_codec("int8+zstd"), split_codec("zstd"), split_codec("int4")
    (('int8', 'zstd'), (None, 'zstd'), ('int4', None))
    """
    first, plus, second = text.partition("+")
    codec: str | None = first
    byte_codec = second if plus else None
    if not plus and first in byte_codecs.names():
        codec, byte_codec = None, first
    for name, registry in ((codec, codecs), (byte_codec, byte_codecs)):
        if name is not None and name not in registry.names():
            known = [*codecs.names(), *byte_codecs.names()]
            hint = nearest(name, known)
            raise RegistryError(f"no codec {name!r}{hint}; known: {', '.join(known)}")
    return codec, byte_codec


def split_scheme(scheme: str) -> tuple[list[str], str]:
    """Split the scheme of a URL into the decorators that it names, outermost first, and the rest.

    What stands before a connector's scheme is a decorator, whether there is one of that name or
    not. Nothing is loaded.

    >>> split_scheme("encrypted+redis"), split_scheme("redis+unix")
    ((['encrypted'], 'redis'), ([], 'redis+unix'))
    """
    words = scheme.split("+")
    tails = ["+".join(words[start:]) for start in range(len(words))]
    known = [start for start, tail in enumerate(tails) if tail in connectors.names()]
    decorating = list(takewhile(lambda word: word in decorators.names(), words[:-1]))
    start = known[0] if known else len(decorating)
    return words[:start], tails[start]


def shown_url(url: str) -> str:
    """Return what of a connector's URL may be told: no user, no password, no options.

    Where it is not certain what is a password, the scheme alone.

    >>> shown_url("redis://user:secret@kv.internal:6379/0?ttl_s=60")
    'redis://kv.internal:6379/0'
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        return "a URL without a scheme"
    user, at, place = rest.rpartition("@")
    if at and not set(user).isdisjoint("/?#@"):
        return f"{scheme}://..."
    return f"{scheme}://{re.split('[?#]', place)[0]}"


def connect(url: str) -> Connector:
    """Open the connector that the URL's scheme names: ``memory://name``, ``redis://host``.

    The class behind the scheme reads the rest through its ``from_url(url)``, which raises
    ``ConfigError`` for an option that it does not know. A decorator's name before the scheme, as in
    ``encrypted+redis://host``, opens that decorator, which opens the rest. Does not wait for the
    medium: a store that is down is an outcome of the first batch. The message of an error never
    holds the URL, which may carry a password.
    """
    scheme, separator, _ = url.partition("://")
    if not separator:
        raise RegistryError("a connector's URL starts with its scheme, as in memory://name")
    outer, innermost = split_scheme(scheme)
    opener = decorators.load(outer[0]) if outer else connectors.load(innermost)
    try:
        connector: Connector = opener.from_url(url)
    except ValueError:  # It may quote the URL, so it is not told.
        raise ConfigError(f"a {scheme}:// URL that cannot be taken apart") from None
    return connector
