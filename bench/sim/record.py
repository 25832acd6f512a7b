"""Keep what ``kvtier sim --json`` prints: a row of bench/results/sim.jsonl per result, in a pipe.

    kvtier sim TRACE --json | python bench/sim/record.py [NOTE...]

The rest of the command line is kept as a note.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.lib.report import write_row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("note", nargs="*")
    note = " ".join(parser.parse_args().note)
    for result in json.load(sys.stdin)["results"]:
        trace = Path(result.pop("trace")).name
        write_row("sim", {"trace": trace, "note": note, **result})


if __name__ == "__main__":
    main()
