"""What every test runs under: one seed, one scale, few threads, no network, nothing left behind."""

from __future__ import annotations

import hashlib
import os
import random
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings

if TYPE_CHECKING:
    from tests.lib.opened import Opened

# Before anything imports torch or transformers: two cores, and no look at a model hub.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"

SEED = int(os.environ.get("KVTIER_SEED", "1"))
SCALE = int(os.environ.get("KVTIER_SCALE", "1"))
ENGINES = os.environ.get("KVTIER_ENGINES", "")
HYPOTHESIS_EXAMPLES = 100
#: A thread whose owner has been closed may need a moment to leave its loop.
THREAD_EXIT_TIMEOUT_S = 5.0

settings.register_profile(
    "ci",
    deadline=None,
    print_blob=True,
    database=None,
    max_examples=HYPOTHESIS_EXAMPLES,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "soak", settings.get_profile("ci"), max_examples=HYPOTHESIS_EXAMPLES * SCALE
)
settings.load_profile("soak" if SCALE > 1 else "ci")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give Hypothesis the run's seed, unless its own option was used."""
    if config.getoption("--hypothesis-seed", default=None) is None:
        config.option.hypothesis_seed = str(SEED)


def pytest_report_header() -> str:
    """Say how to run the same again."""
    return f"kvtier: KVTIER_SEED={SEED} KVTIER_SCALE={SCALE} (set both to replay this run)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what a soak runs for longer: tests that ask for the scale, or that Hypothesis drives.

    And tests inside other engines, which take environments, unless ``KVTIER_ENGINES`` asks for
    ``test_*_smallest.py`` or for ``all`` of them. Those that it asks for fail without one.
    """
    for item in items:
        if item.path.parent.name == "engines" and not (
            ENGINES == "all" or (ENGINES == "smallest" and item.path.stem.endswith("_smallest"))
        ):
            item.add_marker(pytest.mark.skipif(True, reason="needs `make test-engines`"))
        if isinstance(item, pytest.Function) and (
            "scale" in item.fixturenames or is_hypothesis_test(item.obj)
        ):
            item.add_marker(pytest.mark.soak)


def _seed_of(node_id: str) -> int:
    digest = hashlib.sha256(f"{SEED}:{node_id}".encode()).digest()
    return int.from_bytes(digest[:4], "little")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A 32-bit seed of this test's own: other tests and their order do not change it."""
    return _seed_of(request.node.nodeid)


@pytest.fixture
def rng(seed: int) -> random.Random:
    """A generator of this test's own."""
    return random.Random(seed)


@pytest.fixture(scope="session")
def scale() -> int:
    """How many times its normal work a scaled test does: 1 in CI, more in ``make soak``."""
    return SCALE


@pytest.fixture
async def opened() -> AsyncIterator[Opened]:
    """Closes at the end what it is called with."""
    from tests.lib.opened import Opened

    made = Opened()
    yield made
    await made.close_all()


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    """Seed the generators that libraries share, so that no test depends on its neighbours."""
    seed = _seed_of(request.node.nodeid)
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed)


@pytest.fixture(autouse=True)
def integrity() -> Iterator[None]:
    """Fail a test that leaves a thread of ours running.

    Threads of fixtures with a wider scope were there before and may stay.
    """
    before = set(threading.enumerate())
    yield
    started = [t for t in threading.enumerate() if t not in before and t.name.startswith("kvtier-")]
    for thread in started:
        thread.join(THREAD_EXIT_TIMEOUT_S)
    left = sorted(thread.name for thread in started if thread.is_alive())
    if left:
        pytest.fail(f"threads left running: {', '.join(left)}", pytrace=False)
