"""Starting vLLM in its own environment, with prompts of the bundled model's vocabulary."""

from __future__ import annotations

import json
import os
import random
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvtier_engine.weights.load import model_folder
from tests.lib.peers import peer

ROOT: Final = Path(__file__).parents[2]
PYTHON: Final = ROOT / ".peer" / "vllm" / "bin" / "python"
PROGRAM: Final = ROOT / "tests" / "engines" / "vllm_program.py"
#: Longer than any run here on a busy machine; a hang is what these tests look for.
RUN_S: Final = 900.0
BLOCK_TOKENS: Final = 32
CHUNK_TOKENS: Final = 64
_VOCABULARY: Final = 49_152


#: Options with which all that a tier holds is loaded, however busy the machine is.
PATIENT: Final = {"load_deadline_s": 60, "pending_deadline_s": 60, "gpu_time_worth": 1e6}


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens, and the tenant's salt."""

    tokens: list[int]
    salt: str = ""


@dataclass(frozen=True, slots=True)
class Served:
    """What came of a round of prompts, one item a prompt."""

    seconds: float
    tokens: list[list[int]]
    logprobs: list[list[float]]
    cached: list[int]


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process of vLLM ended, and both its outputs."""

    status: int
    output: str
    errors: str

    def rounds(self) -> list[dict[str, Any]]:
        """Return what each round came to. ``AssertionError`` unless it ended well."""
        lines = [line for line in self.output.splitlines() if line.startswith("RESULT ")]
        told = f"vLLM ended with {self.status}:\n{self.errors[-4000:]}"
        assert (self.status, len(lines)) == (0, 1), told
        found: list[dict[str, Any]] = json.loads(lines[0].removeprefix("RESULT "))
        return found

    def served(self) -> list[Served]:
        """Return its rounds of prompts. ``AssertionError`` where one could not forget."""
        rounds = self.rounds()
        assert all(each.get("done", True) for each in rounds), "vLLM could not forget"
        return [Served(**each) for each in rounds if "tokens" in each]


@dataclass(slots=True)
class VllmRun:
    """One process of vLLM and what it is to do; ``options`` None: without a connector."""

    options: dict[str, Any] | None
    engine: dict[str, Any] = field(default_factory=dict)
    zeros: bool = False
    processes: bool = False
    policy: str = "recompute"
    model: Path | None = None
    run_s: float = RUN_S
    _rounds: list[dict[str, Any]] = field(default_factory=list)

    def serve(self, prompts: list[Prompt], count: int = 8) -> VllmRun:
        """Have prompts answered greedily, with so many tokens each."""
        asked = [{"tokens": each.tokens, "salt": each.salt} for each in prompts]
        self._rounds.append({"do": "serve", "prompts": asked, "count": count})
        return self

    def forget(self) -> VllmRun:
        """Have vLLM forget its own prefixes, so that they must come from a tier."""
        self._rounds.append({"do": "forget"})
        return self

    def reset(self) -> VllmRun:
        """Have vLLM and the connector forget everything."""
        self._rounds.append({"do": "reset"})
        return self

    def metrics(self) -> VllmRun:
        """Have vLLM's count of preemptions and the connector's metrics read."""
        self._rounds.append({"do": "metrics"})
        return self

    def start(self) -> Ended:
        """Run it, however it ends. ``TimeoutExpired`` when it hangs."""
        asked = {
            "model": str(self.model or model_folder("smollm2-135m")),
            "options": self.options,
            "engine": {
                "block_size": BLOCK_TOKENS,
                "max_model_len": 1024,
                "max_num_seqs": 4,
                **self.engine,
            },
            "zeros": self.zeros,
            "policy": self.policy,
            "rounds": self._rounds,
        }
        return run_vllm(PROGRAM, asked, processes=self.processes, run_s=self.run_s)

    def rounds(self) -> list[dict[str, Any]]:
        """Run it; return what each round came to. ``AssertionError`` unless it ended well."""
        return self.start().rounds()

    def served(self) -> list[Served]:
        """Run it; return its rounds of prompts. ``AssertionError`` where one could not forget."""
        return self.start().served()


def run_vllm(
    program: Path, asked: dict[str, Any], *, processes: bool = False, run_s: float = RUN_S
) -> Ended:
    """Give one of our programs its orders in vLLM's environment. ``TimeoutExpired`` if it hangs."""
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(processes)),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [str(peer("vllm") / "bin" / "python"), str(program)],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=run_s,
        env=environment,
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def prompts(
    rng: random.Random, *, families: int, members: int, shared: int = 200, own: int = 40
) -> list[Prompt]:
    """Return families of prompts whose members share their first tokens."""

    def some(count: int) -> list[int]:
        return [rng.randrange(3, _VOCABULARY) for _ in range(count)]

    return [
        Prompt(first + some(own))
        for first in (some(shared) for _ in range(families))
        for _ in range(members)
    ]


def whole_chunks(tokens: int) -> int:
    """Return the tokens of a prompt that a tier can give: whole chunks, one token left over."""
    return (tokens - 1) // CHUNK_TOKENS * CHUNK_TOKENS
