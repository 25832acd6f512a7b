"""Which versions of an engine a plug was tested with. Engines change their interfaces often."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvtier.errors import ConfigError

_VERSION: Final = re.compile(r"(\d+)\.(\d+)\.")

#: Major and minor version.
Minor = tuple[int, int]


@dataclass(frozen=True, slots=True)
class TestedVersions:
    """The minor versions of ``engine`` that ``plug`` takes, and where a user says to try others."""

    engine: str
    plug: str
    minors: Sequence[Minor]
    where: str

    def check(self, version: str, *, forced: bool) -> None:
        """Raise ``ConfigError`` for a version that is not tested, unless it is forced."""
        if forced or minor_of(version) in self.minors:
            return
        known = " and ".join(f"{major}.{minor}" for major, minor in self.minors)
        raise ConfigError(
            f"{self.engine} {version}: {self.plug} is tested with {known}; to try it all the "
            f'same, set "any_version": true in {self.where}'
        )


def minor_of(version: str) -> Minor | None:
    """Return a version's major and minor part; None where it does not begin with them."""
    match = _VERSION.match(version)
    return (int(match[1]), int(match[2])) if match is not None else None
