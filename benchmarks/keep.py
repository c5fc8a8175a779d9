"""Memory and time of each `keep` and `checkpoint_every`: bytes per token and seconds of a step.

Everything is resident. The bytes are the engine's own count: the peak of the activation stores on the device. The table
compares them with the formula in docs/how-it-works.md. Seconds are medians of alternating rounds, and are shown as
ratios to the default.

    python benchmarks/keep.py --length 16384 --runs 5
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from _alternation import alternate, median, write_json
from _variants import KEEPS, Setup, build, prepare, step, tokens
from rich.console import Console
from rich.table import Table

import trunkline

EVERY = (1, 2, 4, 8)
DEFAULT = "attention, 1"


@dataclass(frozen=True, slots=True)
class Candidate:
    """Combination of `keep` and `checkpoint_every`."""

    keep: str
    every: int

    @property
    def name(self) -> str:
        """Name of the combination in the table."""
        return f"{self.keep}, {self.every}"

    def bytes_per_token(self, setup: Setup, itemsize: int = 4) -> float:
        """Return the bytes per token of the formula.

        Kept activations: inputs of every g-th layer; outputs and log-sum-exps; keys and values. Live activations: all
        others of one group of g layers; keys, values and their fp32 gradients of one layer; the gradient of the
        residual stream.
        """
        layers, every = setup.layers, self.every
        hidden = setup.hidden_size * itemsize
        output = setup.heads * (setup.head_dim * itemsize + 4)
        kv = 2 * setup.kv_heads * setup.head_dim * itemsize
        kept = KEEPS[self.keep]
        total = hidden * (-(-layers // every) + min(every, layers) - 1)
        total += output * (layers if "attention" in kept else every - 1)
        total += kv * (layers if "kv" in kept else every)
        return total + 2 * setup.kv_heads * setup.head_dim * 4 + hidden


def measure(setup: Setup, choices: Sequence[Candidate], length: int, runs: int, tell: Callable[[str], None]) -> dict:
    """Measure the peak bytes per token, and the seconds of every round."""
    ids_BS = tokens(setup, length)
    base = build(setup, "fp32")
    models = {c.name: prepare(base, c.keep, setup, checkpoint_every=c.every) for c in choices}
    peaks = {}
    for name, model in models.items():
        step(model, tokens(setup, 1_024))
        trunkline.stats(model)
        step(model, ids_BS)
        peaks[name] = trunkline.stats(model).peaks["device"] / length
        tell(f"{name}: {peaks[name] / 1024:.2f} KiB per token")
    steps = {name: (lambda model=model: step(model, ids_BS).seconds) for name, model in models.items()}
    return {"bytes_per_token": peaks, "seconds": alternate(steps, runs, tell) if runs else {}}


def table(setup: Setup, choices: Sequence[Candidate], found: dict) -> Table:
    """Return the table of all combinations, with ratios to the formula and to the default."""
    drawn = Table(header_style="bold")
    for column in (
        "keep",
        "checkpoint_every",
        "KiB per token",
        "formula",
        "measured / formula",
        "seconds",
        "time / default",
    ):
        drawn.add_column(column, justify="left" if column == "keep" else "right")
    for choice in choices:
        measured, expected = found["bytes_per_token"][choice.name], choice.bytes_per_token(setup)
        seconds = found["seconds"].get(choice.name)
        drawn.add_row(
            "{" + ", ".join(KEEPS[choice.keep]) + "}", str(choice.every), f"{measured / 1024:.2f}",
            f"{expected / 1024:.2f}", f"{measured / expected:.3f}", f"{median(seconds):.2f}" if seconds else "",
            f"{median(seconds) / median(found['seconds'][DEFAULT]):.3f}" if seconds else "",
        )  # fmt: skip
    return drawn


def draw(choices: Sequence[Candidate], found: dict, path: Path, subtitle: str) -> None:
    """Draw time over bytes per token, one line for each `keep`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for keep in KEEPS:
        points = [c for c in choices if c.keep == keep]
        x = [found["bytes_per_token"][c.name] / 1024 for c in points]
        y = [median(found["seconds"][c.name]) / median(found["seconds"][DEFAULT]) for c in points]
        axes.plot(x, y, marker="o", label="keep={" + ", ".join(KEEPS[keep]) + "}")
        for choice, at in zip(points, zip(x, y, strict=True), strict=True):
            axes.annotate(str(choice.every), at, textcoords="offset points", xytext=(5, 5), fontsize=8)
    axes.set(xlabel="KiB per token, peak of all stores", ylabel="time of a step / default")
    axes.set_title(f"Memory and time of each keep (numbers: checkpoint_every)\n{subtitle}", fontsize=10)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=16_384, help="tokens in the sequence")
    parser.add_argument("--layers", type=int, default=8, help="number of layers")
    parser.add_argument("--vocab", type=int, default=1_024, help="size of the vocabulary")
    parser.add_argument("--chunk-size", type=int, default=2_048, help="tokens per chunk")
    parser.add_argument("--runs", type=int, default=5, help="rounds to measure; 0 measures only bytes")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out" / "keep.json",
                        help="JSON file to write; the PNG gets the same name")  # fmt: skip
    given = parser.parse_args(arguments)
    setup = Setup(given.layers, given.vocab, given.chunk_size, torch.get_num_threads())
    choices = [Candidate(keep, every) for keep, every in itertools.product(KEEPS, EVERY)]
    console = Console()
    found = measure(setup, choices, given.length, given.runs, lambda text: console.print(text, style="dim"))
    console.print(table(setup, choices, found))
    formula = {choice.name: choice.bytes_per_token(setup) for choice in choices}
    write_json(given.out, {"length": given.length, "layers": given.layers, "formula": formula, **found})
    if given.runs:
        subtitle = f"{given.length:,} tokens, {given.layers} layers, E=256, H=4, K=2, D=64, fp32, CPU"
        draw(choices, found, given.out.with_suffix(".png"), subtitle)
    console.print(f"wrote {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
