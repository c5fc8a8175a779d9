"""Claims of the FPDT talk and paper (arXiv 2408.16978), estimated: one table a letter.

No such machine is needed: the real engine runs on tensors without contents, and a simulated clock takes the time of
every operator from a hardware profile. Assumptions are printed above the tables; nothing is tuned for a row.

    python benchmarks/claims.py                 # everything
    python benchmarks/claims.py --only a e      # some letters; the others keep what an earlier run found
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path

import _claims_limits
import _claims_peers
import _claims_talk
from _alternation import write_json
from _claims import ASSUMED, Answer, markdown
from rich.console import Console
from rich.table import Table

LETTERS: dict[str, Callable[[Path], Answer]] = {
    "a": _claims_talk.few_devices,
    "b": _claims_talk.one_device,
    "c": _claims_talk.eight_devices,
    "d": _claims_talk.spikes,
    "e": _claims_limits.sweet_spots,
    "f": _claims_peers.peers,
    "g": _claims_limits.trainable,
}


def drawn(answer: Answer) -> Table:
    table = Table(title=f"{answer.letter}. {answer.title}", title_justify="left", header_style="bold",
                  caption="\n".join([*(f"assumed: {text}" for text in answer.assumed), *answer.notes]) or None,
                  caption_justify="left")  # fmt: skip
    for number, name in enumerate(answer.columns):
        table.add_column(name, justify="right" if number else "left")
    for row in answer.rows:
        table.add_row(*row)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=LETTERS, default=list(LETTERS), metavar="LETTER",
                        help="letters to estimate; the tables of the others are those of the last run")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out", help="folder for files and figures")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    console = Console()
    if not console.is_terminal:
        console.width = 200
    for text in ASSUMED:
        console.print(f"assumed: {text}", highlight=False)
    answers = []
    for letter, estimate in LETTERS.items():
        # A file for each letter, so that two may be estimated at the same time.
        path = given.out / f"claims-{letter}.json"
        if letter in given.only:
            begin = time.perf_counter()
            with console.status(f"estimating {letter}"):
                answer = estimate(given.out)
            write_json(path, {"seconds": time.perf_counter() - begin, "answer": dataclasses.asdict(answer)})
        elif path.is_file():
            answer = Answer(**json.loads(path.read_text())["answer"])
        else:
            continue
        answers.append(answer)
        if letter in given.only:
            console.print(drawn(answer))
    text = "\n".join([*(f"- {text}" for text in ASSUMED), "", *map(markdown, answers)])
    (given.out / "claims.md").write_text(text)
    console.print(f"wrote {given.out / 'claims.md'}, claims-*.json and figures beside it")


if __name__ == "__main__":
    main()
