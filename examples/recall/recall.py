"""Train a small model in three ways to recall facts many chunks back, and plot its accuracy at every depth.

Train all three to 16,384 tokens; one of them to 1,024 only; one at 16,384 tokens from the first step:

    python examples/recall/recall.py
    python examples/recall/recall.py --variant full --length 1024
    python examples/recall/recall.py --variant full --first 16384 --steps 500
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import figure
import torch
import transformers
from models import VARIANTS, Learner, build
from rich.console import Console
from rich.table import Table
from task import CHANCE, NUM_KEYS, chunk_size_of, num_pairs
from training import Stage, evaluate, train

GROWTH = 4  # ratio of the lengths of two stages
STEPS = (700, 100, 40, 30)
PASSED = 40  # steps between two lines of progress


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the command line.

    Returns:
        Content of the JSON file.
    """
    given = _parser().parse_args(arguments)
    if given.threads:
        torch.set_num_threads(given.threads)
    stages = curriculum(given.first, given.length, given.steps)
    lengths = [stage.length for stage in stages] + ([given.length * GROWTH] if given.beyond else [])
    console = Console()
    results: dict[str, Any] = {}
    content = {"settings": _settings(given, stages), "machine": _machine(), "variants": results}
    given.out.mkdir(parents=True, exist_ok=True)
    for variant in given.variant or VARIANTS:
        console.print(f"[bold]{variant}[/]: {VARIANTS[variant]}")
        results[variant] = _run(variant, stages, lengths, given, console)
        (given.out / "recall.json").write_text(json.dumps(content, indent=1) + "\n")
    console.print(_table(results, given.widen))
    figure.draw(results, given.length, given.out / "recall.png")
    console.print(f"Written: {given.out / 'recall.json'} and {given.out / 'recall.png'}")
    return content


def curriculum(first: int, length: int, steps: Sequence[int]) -> list[Stage]:
    """Return stages from `first` to `length` tokens, each four times as long as the one before.

    Raises:
        ValueError: `length` is not `first` times a power of four, or there are fewer steps than stages.
    """
    lengths = [first]
    while lengths[-1] < length:
        lengths.append(lengths[-1] * GROWTH)
    if lengths[-1] != length:
        raise ValueError(f"--length {length}: give {first} (--first) times a power of {GROWTH}.")
    if len(steps) < len(lengths):
        raise ValueError(f"--steps {' '.join(map(str, steps))}: give {len(lengths)} numbers, of {lengths} tokens.")
    return [Stage(*each) for each in zip(lengths, steps, strict=False)]


def _run(
    variant: str, stages: Sequence[Stage], lengths: Sequence[int], given: argparse.Namespace, console: Console
) -> dict[str, Any]:
    learner = Learner(build(given.seed), variant, given.widen)
    total = sum(stage.steps for stage in stages)
    after_stages: list[dict[str, Any]] = []
    evaluations: list[dict[str, Any]] = []

    def tell(step: int, length: int, loss: float) -> None:
        if step % PASSED == 0 or step == total:
            console.print(f"  step {step} of {total}, {length:,} tokens: loss {loss:.3f}")

    def look(stage: Stage) -> None:
        found = evaluate(learner, stages[-1].length, max(1, given.sequences // 4))
        after_stages.append({"trained_to": stage.length, **found})
        console.print(f"  after {stage.length:,} tokens: {found['accuracy']:.1%} at {found['length']:,}")

    history = train(learner, stages, given.seed, tell, look)
    for length in lengths:
        sequences = -(-given.sequences * NUM_KEYS // num_pairs(length))
        if length > stages[-1].length:
            sequences = max(1, sequences // 4)  # attention of one takes 16 times as long
        evaluations.append(evaluate(learner, length, sequences))
        console.print(f"  {length:,} tokens: {evaluations[-1]['accuracy']:.1%} of {evaluations[-1]['questions']:,}")
    return {
        "evaluations": evaluations,
        "after_stages": after_stages,
        "losses": history.losses,
        "lengths": history.lengths,
        "seconds": history.seconds,
        "processor_seconds": history.processor_seconds,
    }


def _table(results: dict[str, Any], widen: int) -> Table:
    table = Table(title=f"Right answers (chance {CHANCE:.1%})", caption="worst depth of 16 in brackets")
    table.add_column("tokens", justify="right")
    table.add_column("chunk", justify="right")
    for variant in results:
        table.add_column(variant, justify="right")
    for rows in zip(*(result["evaluations"] for result in results.values()), strict=True):
        length = rows[0]["length"]
        cells = [f"{row['accuracy']:.1%} ({min(row['by_depth']):.1%})" for row in rows]
        table.add_row(f"{length:,}", f"{widen * chunk_size_of(length):,}", *cells)
    table.add_section()
    table.add_row("loss", "", *(f"{sum(r['losses'][-10:]) / len(r['losses'][-10:]):.3f}" for r in results.values()))
    table.add_row("minutes", "", *(f"{sum(result['seconds']) / 60:.1f}" for result in results.values()))
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", action="append", choices=list(VARIANTS), help="may be repeated; default: all")
    parser.add_argument("--first", type=int, default=256, help="tokens of the first stage (default: 256)")
    parser.add_argument("--length", type=int, default=16_384, help="tokens of the last stage (default: 16384)")
    parser.add_argument(
        "--steps", type=int, nargs="+", default=STEPS, help="steps of each stage, shortest sequences first"
    )
    parser.add_argument(
        "--widen", type=int, default=1, help="size of chunks as a multiple of the tokens of the questions"
    )
    parser.add_argument(
        "--sequences", type=int, default=16, help="sequences evaluated at each length, for 512 questions each"
    )
    parser.add_argument("--beyond", action="store_true", help="evaluate at four times the last length, too")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and sequences (default: 0)")
    parser.add_argument("--threads", type=int, help="threads of PyTorch; default: its own choice")
    parser.add_argument("--out", type=Path, default=Path("runs/recall"), help="folder (default: runs/recall)")
    return parser


def _settings(given: argparse.Namespace, stages: Sequence[Stage]) -> dict[str, Any]:
    return {
        "seed": given.seed,
        "stages": [
            {"length": stage.length, "chunk_size": given.widen * chunk_size_of(stage.length), "steps": stage.steps}
            for stage in stages
        ],
    }


def _machine() -> dict[str, Any]:
    return {
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


if __name__ == "__main__":
    main()
