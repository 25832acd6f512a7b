"""How near a reader's answers are to its own cold ones, and the table of all cells."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

#: Less than this is how float32 rounds.
_REST_MIN: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine said: tokens, of each step the likeliest ones with their log-probabilities.

    ``found`` tokens of the prompt were not computed, of which ``tier`` came from below HBM.
    """

    tokens: list[int]
    top: list[dict[int, float]]
    found: int
    tier: int

    @classmethod
    def read(cls, told: dict[str, Any]) -> Answer:
        """Read one as JSON gives it."""
        top = [{int(token): value for token, value in step.items()} for step in told["top"]]
        return cls(told["tokens"], top, told["found"], told["tier"])


def kl(truth: dict[int, float], other: dict[int, float]) -> float:
    """Return a lower bound of the KL divergence of two distributions, in nats.

    Of both the likeliest tokens are known. One that the other does not name is no likelier there
    than the least that it names, and tokens that neither names count as one.
    """
    least = min(other.values())
    total = math.fsum(
        math.exp(value) * (value - other.get(token, least)) for token, value in truth.items()
    )
    rest, other_rest = (
        max(1 - math.fsum(math.exp(each[token]) for token in known), _REST_MIN)
        for each, known in ((truth, truth.keys()), (other, truth.keys() & other.keys()))
    )
    return max(total + rest * math.log(rest / other_rest), 0.0)


def agreed(truth: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens come before the first that differs."""
    pairs = enumerate(zip(truth, other, strict=True))
    return next((index for index, (one, two) in pairs if one != two), len(truth))


def compare(cold: Sequence[Answer], answers: Sequence[Answer]) -> dict[str, Any]:
    """Return agreement and KL of a reader's answers with its cold ones.

    Distributions are compared as long as what they follow from is the same.
    """
    agreements, steps, firsts = [], [], []
    for truth, other in zip(cold, answers, strict=True):
        same = agreed(truth.tokens, other.tokens)
        agreements.append(same)
        compared = [
            kl(*pair) for pair in zip(truth.top[: same + 1], other.top[: same + 1], strict=True)
        ]
        firsts.append(compared[0])
        steps += compared
    count = sum(len(truth.tokens) for truth in cold)
    return {
        "agreement": sum(agreements) / count,
        "answers_alike": sum(
            same == len(truth.tokens) for same, truth in zip(agreements, cold, strict=True)
        ),
        "kl_first": math.fsum(firsts) / len(firsts),
        "kl_mean": math.fsum(steps) / len(steps),
        "kl_max": max(steps),
    }


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Return the cells as a table in Markdown, and the controls below it."""
    lines = [
        "| Codec | Writer (block) | Reader (block) | Hit | Tokens alike | Answers alike | KL |",
        "|---|---|---|---|---|---|---|",
    ]
    below = []
    for row in rows:
        names = [f"{row[role]} ({row[f'{role}_block']})" for role in ("writer", "reader")]
        hit = f"{row['hit_tokens']:,} of {row['stored_tokens']:,}"
        if row["found_tokens"] > row["hit_tokens"] and not row["control"]:
            hit += f", {row['found_tokens'] - row['hit_tokens']:,} in HBM by then"
        if row["control"]:
            below.append(f"Control, {names[1]} with another weights_id: {hit} tokens.")
            continue
        alike = f"{100 * row['agreement']:.1f} % | {row['answers_alike']} of {row['prompts']}"
        lines.append(
            f"| `{row['codec']}` | {' | '.join(names)} | {hit} | {alike} | {row['kl_mean']:.1e} |"
        )
    return "\n".join([*lines, "", *below])
