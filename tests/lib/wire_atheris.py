"""The wire's parser and links under atheris, which follows the code that each stream reaches.

``python -m tests.lib.wire_atheris FOLDER [libFuzzer's options]`` begins with the corpus, keeps what
it finds in the folder, and ends with an error at the first stream that breaks a promise.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["kvtier.wire", "kvtier.wire_link", "kvtier.wire_parser"]):
    from tests.lib.wire_corpus import CORPUS
    from tests.lib.wire_fuzz import check


def one(data: bytes) -> None:
    """Hold a stream against what has to hold of any; its cuts follow from its bytes."""
    check(data, random.Random(data))


def main() -> None:
    """Search for as long as the options say."""
    folder, options = Path(sys.argv[1]), sys.argv[2:]
    folder.mkdir(exist_ok=True)
    for number, data in enumerate(CORPUS):
        (folder / f"corpus {number}").write_bytes(data)
    atheris.Setup([sys.argv[0], *options, str(folder)], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
