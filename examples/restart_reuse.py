"""What a restart costs: time to first token of a long prompt, computed and from disk.

Starts ``kvtier-serve`` with an empty disk tier, sends a long prompt, stops the server, starts a new
one on the same disk and sends the prompt again. Both requests are the first that their server gets.
Repeats with other prompts, prints the medians, and fails unless both answers are the same text.

With ``--codec``, what a lossy codec costs: a server with ``raw`` and one with each codec compute
many prompts and stop; then new ones on their disks answer all prompts in turn. Prints what each
disk holds, also against KV of 16 bits, how many answers and tokens are those of ``raw``, and the
times to first token; fails unless all servers find as much on their disks.

What would load more slowly than it is computed is computed, as it may be with so small a model on a
fast GPU. ``--gpu-time-worth 100`` has servers load all the same; with ``--codec`` they always do.

The disk tiers lie in a temporary folder; ``TMPDIR`` chooses the disk where that is memory.

    .venv/bin/python examples/restart_reuse.py
    .venv/bin/python examples/restart_reuse.py --repetitions 5 --json
    .venv/bin/python examples/restart_reuse.py --codec int8 int4
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from served import Answer, ask, get, make_prompt, serving

SEED = 1
RAW = "raw"
#: What a second of computing is worth in seconds of waiting, so that all that lies there is loaded.
LOAD_ALWAYS = 100.0


@dataclass(frozen=True)
class Repetition:
    """One prompt: computed by the first server, then asked of the one after the restart."""

    cold: Answer
    restarted: Answer

    @property
    def same_text(self) -> bool:
        """Whether the restart changed nothing that a client reads."""
        return self.cold.text == self.restarted.text


@dataclass(frozen=True)
class Restart:
    """One codec: what its disk holds, and its answers after the restart, prompt by prompt."""

    codec: str
    dtype: str
    disk_bytes: int
    answers: list[Answer]


def server_options(options: argparse.Namespace, codec: str = RAW) -> list[str]:
    """What servers are told beyond their port and disk."""
    worth = LOAD_ALWAYS if options.codec else options.gpu_time_worth
    told = ["--dram", options.dram, "--disk-bytes", options.disk_bytes, "--codec", codec]
    told += ["--dtype", options.dtype, "--gpu-time-worth", str(worth)]
    return told + (["--model", options.model] if options.model else [])


def repeat(options: argparse.Namespace, seed: int) -> Repetition:
    """Compute one prompt, restart, ask again; the disk starts empty."""
    prompt = make_prompt(options.prompt_tokens, seed)
    answers = []
    with tempfile.TemporaryDirectory(prefix="kvtier-restart-") as name:
        for _ in range(2):
            with serving(Path(name), server_options(options)) as port:
                answers.append(ask(port, prompt, options.max_tokens))
    return Repetition(*answers)


def repeat_all(options: argparse.Namespace) -> list[Repetition]:
    """Each repetition with a prompt of its own."""
    runs = []
    for number in range(options.repetitions):
        runs.append(repeat(options, SEED + number))
        told = f"cold {runs[-1].cold.ttft_s:.2f} s, restarted {runs[-1].restarted.ttft_s:.2f} s"
        print(f"prompt {number + 1} of {options.repetitions}: {told}", file=sys.stderr)
    return runs


def restart_each(options: argparse.Namespace) -> list[Restart]:
    """Compute all prompts with each codec, one server after the other; restart all, ask again."""
    prompts = [make_prompt(options.prompt_tokens, SEED + n) for n in range(options.prompts)]
    names = [RAW, *options.codec]
    with (
        tempfile.TemporaryDirectory(prefix="kvtier-restart-") as folder,
        contextlib.ExitStack() as stack,
    ):
        for codec in names:
            with serving(Path(folder) / codec, server_options(options, codec)) as port:
                for number, prompt in enumerate(prompts):
                    answer = ask(port, prompt, 1)
                    told = f"computed in {answer.ttft_s:.2f} s"
                    print(f"{codec}, prompt {number + 1}: {told}", file=sys.stderr)
        ports = {
            codec: stack.enter_context(
                serving(Path(folder) / codec, server_options(options, codec))
            )
            for codec in names
        }
        restarts = [
            Restart(codec, get(port, "/health")["dtype"], disk_bytes(port), [])
            for codec, port in ports.items()
        ]
        for number, prompt in enumerate(prompts):
            # Each in turn is the first, so that what else the machine does favours none.
            first = number % len(restarts)
            for restart in restarts[first:] + restarts[:first]:
                restart.answers.append(ask(ports[restart.codec], prompt, options.max_tokens))
    return restarts


def disk_bytes(port: int) -> int:
    """What a server's disk tier holds."""
    tiers = get(port, "/health")["tiers"]
    return next(int(tier["used_bytes"]) for tier in tiers if tier["name"] == "disk")


def summarize(runs: list[Repetition]) -> dict[str, Any]:
    """The medians and what stands behind them, as plain values."""
    cold = statistics.median(run.cold.ttft_s for run in runs)
    restarted = statistics.median(run.restarted.ttft_s for run in runs)
    return {
        "ttft_cold_s": round(cold, 4),
        "ttft_after_restart_s": round(restarted, 4),
        "ratio": round(cold / restarted, 2),
        "same_text": all(run.same_text for run in runs),
        "machine": f"{platform.machine()}, {platform.platform()}",
        "repetitions": [asdict(run) for run in runs],
    }


def compare(raw: Restart, other: Restart) -> dict[str, Any]:
    """How one codec did beside ``raw``."""
    pairs = list(zip(raw.answers, other.answers, strict=True))
    ratios = [theirs.ttft_s / ours.ttft_s for ours, theirs in pairs]
    cuts = statistics.quantiles(ratios, n=10, method="inclusive") if len(pairs) > 1 else ratios * 9
    tokens = sum(len(ours.tokens) for ours, _ in pairs)
    same = sum(
        left == right
        for ours, theirs in pairs
        for left, right in zip(ours.tokens, theirs.tokens, strict=False)
    )
    in_16_bits = raw.disk_bytes / (2 if raw.dtype == "float32" else 1)
    return {
        "codec": other.codec,
        "disk_bytes": other.disk_bytes,
        "raw_over_its": round(raw.disk_bytes / other.disk_bytes, 3),
        "in_16_bits_over_its": round(in_16_bits / other.disk_bytes, 3),
        "same_tokens": round(same / tokens, 4),
        "same_first_tokens": sum(ours.tokens[0] == theirs.tokens[0] for ours, theirs in pairs),
        "same_texts": sum(ours.text == theirs.text for ours, theirs in pairs),
        "ttft_s": round(statistics.median(theirs.ttft_s for _, theirs in pairs), 4),
        "ttft_over_raw": {f"p{at}0": round(cuts[at - 1], 3) for at in (2, 5, 8)},
        "same_tiers": all(ours.cached_by_tier == theirs.cached_by_tier for ours, theirs in pairs),
    }


def summarize_codecs(options: argparse.Namespace, restarts: list[Restart]) -> dict[str, Any]:
    """All codecs beside ``raw``, which stands first."""
    raw = restarts[0]
    return {
        "prompts": options.prompts,
        "prompt_tokens": statistics.median(answer.prompt_tokens for answer in raw.answers),
        "max_tokens": options.max_tokens,
        "dtype": raw.dtype,
        "disk_tokens": sum(answer.cached_by_tier["disk"] for answer in raw.answers),
        "codecs": [compare(raw, restart) for restart in restarts],
        "machine": f"{platform.machine()}, {platform.platform()}",
    }


def print_table(summary: dict[str, Any]) -> None:
    """Print the summary for people."""
    last = summary["repetitions"][-1]
    rows = [("cold", "ttft_cold_s", "cold"), ("after restart", "ttft_after_restart_s", "restarted")]
    print(f"{'':15}{'TTFT (median)':>15}   prompt tokens, of them cached by tier (last run)")
    for title, field, run in rows:
        tiers = {tier: count for tier, count in last[run]["cached_by_tier"].items() if count}
        print(f"{title:15}{summary[field]:>13.3f} s   {last[run]['prompt_tokens']}, {tiers or '-'}")
    print(f"{'ratio':15}{summary['ratio']:>14.1f}x   of {len(summary['repetitions'])} runs")
    print(f"{'same text':15}{'yes' if summary['same_text'] else 'NO':>15}")


def print_codecs(summary: dict[str, Any]) -> None:
    """Print the comparison for people."""
    count = summary["prompts"]
    print(
        f"{count} prompts of {summary['prompt_tokens']:.0f} tokens, {summary['dtype']}, restarted"
    )
    print(
        "          disk, MiB   raw/   16 bits/   same: tokens  firsts  texts   TTFT, of raw's p50"
    )
    for row in summary["codecs"]:
        print(
            f"{row['codec']:10}{row['disk_bytes'] / 2**20:>9.1f}{row['raw_over_its']:>7.2f}"
            f"{row['in_16_bits_over_its']:>11.2f}{row['same_tokens']:>15.1%}"
            f"{row['same_first_tokens']:>8}{row['same_texts']:>7}"
            f"{row['ttft_s']:>7.3f} s {row['ttft_over_raw']['p50']:.2f}"
        )


def main() -> int:
    """Measure; return 1 when a restart changed an answer, or a codec's disk lacked something."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="folder or GGUF file (the bundled model)")
    parser.add_argument(
        "--repetitions",
        type=int,
        default=3,
        choices=range(1, 101),
        metavar="1..100",
        help="prompts to measure (3)",
    )
    parser.add_argument("--codec", nargs="+", default=[], help="compare these with raw instead")
    parser.add_argument("--prompts", type=int, default=50, help="prompts with --codec (50)")
    parser.add_argument("--dtype", default="auto", help="of model and KV (auto)")
    parser.add_argument("--prompt-tokens", type=int, default=1800, help="about that many (1800)")
    parser.add_argument("--max-tokens", type=int, default=24, help="tokens to generate (24)")
    parser.add_argument("--dram", default="1GiB", help="size of the DRAM tier (1GiB)")
    parser.add_argument("--disk-bytes", default="8GiB", help="size of the disk tier (8GiB)")
    parser.add_argument("--gpu-time-worth", type=float, default=1.0, help="of the servers (1)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    options = parser.parse_args()
    if options.codec:
        summary = summarize_codecs(options, restart_each(options))
        well = all(row["same_tiers"] for row in summary["codecs"])
    else:
        summary = summarize(repeat_all(options))
        well = summary["same_text"]
    if options.json:
        print(json.dumps(summary, indent=2))
    elif options.codec:
        print_codecs(summary)
    else:
        print_table(summary)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
