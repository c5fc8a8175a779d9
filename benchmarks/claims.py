"""Estimates for the claims of the FPDT talk and paper (arXiv 2408.16978), one table per letter.

The machines are simulated. The real engine runs on tensors without data, and a simulated clock takes the time of every
operator from a hardware profile. The script prints the assumptions above the tables. No setting is tuned for one row.

    python benchmarks/claims.py                 # all letters
    python benchmarks/claims.py --only a e      # some letters; the other tables come from the last run
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
    """Return the table of a letter for the terminal."""
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
                        help="letters to estimate; the other tables come from the last run (default: all)")  # fmt: skip
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "out", help="folder for JSON, Markdown and figures"
    )
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    console = Console()
    if not console.is_terminal:
        console.width = 200
    for text in ASSUMED:
        console.print(f"assumed: {text}", highlight=False)
    answers = []
    for letter, estimate in LETTERS.items():
        # Each letter has its own file, so that two runs can estimate different letters at the same time.
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
    console.print(f"wrote {given.out / 'claims.md'}, and claims-*.json and figures in the same folder")


if __name__ == "__main__":
    main()
