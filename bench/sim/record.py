"""Keep what ``kvtier sim --json`` printed: a row of bench/results/sim.jsonl per result.

    kvtier sim TRACE --json | python bench/sim/record.py [NOTE...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.lib.report import write_row


def main() -> None:
    for result in json.load(sys.stdin)["results"]:
        trace = Path(result.pop("trace")).name
        write_row("sim", {"trace": trace, "note": " ".join(sys.argv[1:]), **result})


if __name__ == "__main__":
    main()
