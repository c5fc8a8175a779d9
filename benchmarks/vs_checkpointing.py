"""Trunkline against Hugging Face, with and without gradient checkpointing: time, memory, and shares of the time.

All variants have the same weights and tokens, and alternate in one process. Absolute seconds mean little on a shared
machine. The result is the ratio to checkpointing within each round. README.md in this folder describes the method.

    python benchmarks/vs_checkpointing.py --lengths 8192 16384 --dtypes fp32 --runs 5
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import _memory
import torch
from _kernels import Bare, Call, Recorder
from _report import Display, draw, draw_memory
from _results import Cell, Results
from _variants import BASELINE, DTYPES, KEEPS, VARIANTS, Setup, Step, build, check_same, prepare, step, tokens

WARM_UP_TOKENS = 1_024


class Bench:
    """Measurement of cells; a cell is one length and dtype with all variants.

    Args:
        setup: setup that all cells share.
        variants: variants to run.
        bare: Trunkline variants whose kernel calls also run alone.
        runs: number of rounds per cell.
        measures: any of `memory`, `parts` and `time`.
        results: file of the samples.
        display: display of the results.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        variants: Sequence[str],
        bare: Sequence[str],
        runs: int,
        measures: Sequence[str],
        results: Results,
        display: Display,
    ) -> None:
        self.setup, self.variants, self.bare, self.runs = setup, variants, bare, runs
        self.measures, self.results, self.display = measures, results, display
        self._dtype: str | None = None
        self._models: dict[str, torch.nn.Module] = {}

    def run(self, length: int, dtype: str) -> None:
        """Measure the missing parts of a cell, cheapest first."""
        cell = self.results.cell(length, dtype)
        if "memory" in self.measures:
            self._memory(cell)
        # A variant that ran out of memory in its own process would also kill this process.
        alive = [variant for variant in self.variants if "failed" not in cell.memory.get(variant, {})]
        bare = [variant for variant in self.bare if variant in alive] if "time" in self.measures else []
        names = [*alive, *(f"bare:{variant}" for variant in bare)]
        missing = self.runs - len(cell.rounds_with(*names)) if "time" in self.measures else 0
        calls = self._parts(cell, alive, bare if missing > 0 else [])
        if missing > 0:
            self._rounds(cell, alive, {f"bare:{v}": Bare(calls[v]) for v in bare}, missing)
        self.display.finished(cell)

    def _memory(self, cell: Cell) -> None:
        for variant in self.variants:
            if variant in cell.memory:
                continue
            self.display.doing(cell, f"memory of {variant}")
            found = _memory.measure(self.setup, variant, cell.length, cell.dtype)
            cell.memory[variant] = found
            self.results.save()
            said = found.get("failed") or f"{found['extra_peak'] / 2**20:,.0f} MiB, {found['step_seconds']:.1f} s"
            self.display.measured(cell, f"memory of {variant}: {said}")

    def _parts(self, cell: Cell, variants: Sequence[str], bare: Sequence[str]) -> dict[str, list[Call]]:
        """Record a step of each variant that has no recorded step, or whose calls are to run alone."""
        wanted = [v for v in variants if "parts" in self.measures and v not in cell.parts]
        calls: dict[str, list[Call]] = {}
        for variant in variants:
            if variant not in wanted and variant not in bare:
                continue
            self.display.doing(cell, f"recording a step of {variant}")
            model, ids_BS = self._model(cell.dtype, variant), tokens(self.setup, cell.length)
            with Recorder() as recorder:
                done = step(model, ids_BS)
            cell.parts[variant] = {"seconds": done.seconds, **recorder.seconds, "counts": recorder.counts}
            calls[variant] = recorder.calls if variant in bare else []
            self.results.save()
            share = {kind: f"{seconds / done.seconds:.1%}" for kind, seconds in recorder.seconds.items()}
            self.display.measured(cell, f"recorded {variant}, {done.seconds:.2f} s: {share}")
        return calls

    def _rounds(self, cell: Cell, variants: Sequence[str], bare: dict[str, Bare], missing: int) -> None:
        ids_BS = tokens(self.setup, cell.length)
        runs: dict[str, Callable[[], Step]] = {v: partial(step, self._model(cell.dtype, v), ids_BS) for v in variants}
        names = [*variants, *bare]
        for _ in range(missing):
            shift = len(cell.rounds) % len(names)
            order = names[shift:] + names[:shift]
            seconds: dict[str, float] = {}
            done: dict[str, Step] = {}
            for name in order:
                self.display.doing(cell, f"round {len(cell.rounds) + 1}: {name}")
                if name in bare:
                    seconds[name] = bare[name].run()["total"]
                else:
                    done[name] = runs[name]()
                    seconds[name] = done[name].seconds
                cores = f" on {done[name].cores:.1f} cores" if name in done else ""
                self.display.measured(cell, f"round {len(cell.rounds) + 1}: {name} {seconds[name]:.2f} s{cores}")
            for name, result in done.items():
                check_same(name, result, done.get(BASELINE, result), cell.dtype)
            cell.rounds.append(
                {
                    "ended": datetime.now(UTC).isoformat(timespec="seconds"),
                    "order": order,
                    "seconds": seconds,
                    "cores": {name: result.cores for name, result in done.items()},
                    "loss": {name: result.loss for name, result in done.items()},
                }
            )
            self.results.save()

    def _model(self, dtype: str, variant: str) -> torch.nn.Module:
        """Return the warmed-up model of a variant; only models of one dtype are in memory at a time."""
        if self._dtype != dtype:
            self._dtype, self._models = dtype, {}
        if variant not in self._models:
            self._models[variant] = prepare(build(self.setup, dtype), variant, self.setup)
            step(self._models[variant], tokens(self.setup, WARM_UP_TOKENS))
        return self._models[variant]


def cost(length: int, dtype: str) -> float:
    """Estimate the relative cost of a cell, to run cheap cells first."""
    slow = dtype == "bf16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return float(length) ** 2 * (5 if slow else 1)


def _chunk_size(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--lengths", type=int, nargs="+", default=[8_192, 16_384, 32_768, 65_536], help="sequence lengths in tokens")
    add("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="dtypes of the model")
    add("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="variants to run")
    add("--bare", nargs="*", choices=KEEPS, default=["attention"], help="variants whose kernel calls also run alone")
    add("--measure", nargs="+", choices=("memory", "parts", "time"), default=["memory", "parts", "time"],
        help="measurements to make; parts are the shares of attention and matrix products")  # fmt: skip
    add("--runs", type=int, default=5, help="rounds per cell (default 5)")
    add("--layers", type=int, default=4, help="number of layers")
    add("--vocab", type=int, default=8_192, help="size of the vocabulary")
    add("--chunk-size", type=_chunk_size, default="auto", help="tokens per chunk, or auto")
    add("--threads", type=int, default=torch.get_num_threads(), help="threads of PyTorch")
    add("--out", type=Path, default=Path(__file__).parent / "out" / "vs_checkpointing.json",
        help="JSON file to write; the PNG gets the same name")  # fmt: skip
    add("--merge", action="store_true", help="add missing measurements to the file of --out")
    given = parser.parse_args(arguments)
    for name in ("runs", "layers", "vocab", "threads"):
        if getattr(given, name) < 1:
            parser.error(f"--{name} {getattr(given, name)}: give a positive number")
    if min(given.lengths) < 2:
        parser.error(f"--lengths {min(given.lengths)}: a sequence needs 2 tokens for a loss")
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 2 if --merge gets a file of another setup."""
    given = _arguments(arguments)
    torch.set_num_threads(given.threads)
    setup = Setup(given.layers, given.vocab, given.chunk_size, given.threads)
    try:
        results = Results(given.out, setup, merge=given.merge)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    machine = results.fixed["machine"]
    subtitle = (
        f"Llama, L={setup.layers}, E={setup.hidden_size}, H={setup.heads}, K={setup.kv_heads}, "
        f"D={setup.head_dim}, V={setup.vocab_size:,}; {setup.threads} threads of {machine['processor']}"
    )
    cells = sorted(((length, dtype) for length in given.lengths for dtype in given.dtypes), key=lambda x: cost(*x))
    try:
        with Display(results) as display:
            bare = [variant for variant in given.bare if variant in given.variants]
            bench = Bench(setup, variants=given.variants, bare=bare, runs=given.runs, measures=given.measure,
                          results=results, display=display)  # fmt: skip
            for cell in cells:
                bench.run(*cell)
                draw(results.rows(), given.out.with_suffix(".png"), subtitle)
            for dtype in given.dtypes:
                memory: dict[str, dict[int, float]] = {}
                for length in given.lengths:
                    for variant, found in results.cell(length, dtype).memory.items():
                        if "failed" not in found:
                            memory.setdefault(variant, {})[length] = found["extra_peak"]
                if memory:
                    draw_memory(memory, given.out.with_name(f"{given.out.stem}-memory-{dtype}.png"), subtitle)
    except KeyboardInterrupt:
        print(f"interrupted; {given.out} has all measurements so far; continue with --merge", file=sys.stderr)
        return 130
    print(f"wrote {given.out} and {given.out.with_suffix('.png')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
