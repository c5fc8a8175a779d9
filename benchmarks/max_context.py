"""Longest context within the same memory: Hugging Face checkpointing, checkpointing with a tiled loss, Trunkline.

Every trial runs in its own process. It loads the model, warms up, and then runs one step that may take `--mib` more
memory than before. The operating system limits the memory of the process, and the script also measures the peak of the
resident set.

A binary search finds the longest context of each checkpointing variant. Trunkline has its activations on disk, and runs
16 and 8 times these lengths. At the longest context of a variant, both are also timed in alternation in one process.
This process uses malloc's defaults. In the trials, malloc returns memory at once, which costs time.

    python benchmarks/max_context.py --mib 256 --offload-dir /some/folder
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _alternation import alternate, median, write_json
from _resident import answered, in_own_process, reset_peak, status
from _variants import Setup, build, tokens
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import trunkline

CHECKPOINTING, TILED, OURS = "checkpointing", "checkpointing, loss tiled", "Trunkline"
_LOSS_TILE = 128
_MIB = 2**20


def _tiled_loss(model: Any, ids_BS: Tensor) -> Tensor:
    """Compute the mean cross-entropy in tiles of 128 tokens; recompute the logits in backward."""
    x_BSE = model.model(input_ids=ids_BS, use_cache=False).last_hidden_state
    targets_BS = F.pad(ids_BS[:, 1:], (0, 1), value=-100)

    def tile(x_BTE: Tensor, targets_BT: Tensor) -> Tensor:
        return F.cross_entropy(model.lm_head(x_BTE).flatten(0, 1).float(), targets_BT.flatten(), reduction="sum")

    parts = zip(x_BSE.split(_LOSS_TILE, 1), targets_BS.split(_LOSS_TILE, 1), strict=True)
    losses = [checkpoint(tile, *part, use_reentrant=False) for part in parts]
    return torch.stack(losses).sum() / (ids_BS.shape[1] - 1)


def _stepper(setup: Setup, way: str, settings: dict[str, Any]) -> Callable[[Tensor], float]:
    """Build a model, and return a function that runs a step and returns its seconds."""
    torch.set_num_threads(setup.threads)
    model: Any = build(setup, "fp32")
    if way == OURS:
        trunkline.stream(model, **settings)
    else:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()

    def step(ids_BS: Tensor) -> float:
        start = time.perf_counter()
        loss = _tiled_loss(model, ids_BS) if way == TILED else model(input_ids=ids_BS, labels=ids_BS).loss
        loss.backward()
        seconds = time.perf_counter() - start
        model.zero_grad(set_to_none=True)
        return seconds

    step(tokens(setup, 256))
    return step


def _trial(setup: Setup, way: str, length: int, limit: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Run a step in this process; return its seconds, and its peak above the resident set before it."""
    step = _stepper(setup, way, settings)
    idle = status("VmRSS")
    resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + limit, resource.RLIM_INFINITY))
    reset_peak()
    try:
        seconds = step(tokens(setup, length))
    except (RuntimeError, MemoryError, OSError) as error:
        if "memory" not in str(error).lower():
            raise
        return {"failed": "out of memory"}
    peak = status("VmHWM") - idle
    return {"seconds": seconds, "peak": peak} if peak <= limit else {"failed": "over the limit", "peak": peak}


class Trials:
    """Trials, each in its own process, with their results."""

    def __init__(self, setup: Setup, limit: int, settings: dict[str, Any], tell: Callable[[str], None]) -> None:
        self._fixed = {"limit": limit, "settings": settings}
        self._setup, self._tell = setup, tell
        self.found: dict[str, dict[int, dict[str, Any]]] = {CHECKPOINTING: {}, TILED: {}, OURS: {}}

    def run(self, way: str, length: int) -> dict[str, Any]:
        """Run a trial, and store its result."""
        setup = {"layers": self._setup.layers, "vocab_size": self._setup.vocab_size, "heads": self._setup.heads,
                 "kv_heads": self._setup.kv_heads, "chunk_size": "auto", "threads": self._setup.threads}  # fmt: skip
        task = {"setup": setup, "way": way, "length": length, **self._fixed}
        result = in_own_process(__file__, task)
        self.found[way][length] = result
        said = result.get("failed") or f"{result['peak'] / _MIB:.0f} MiB, {result['seconds']:.1f} s"
        self._tell(f"{way}, {length:,} tokens: {said}")
        return result

    def reach(self, way: str, start: int) -> int:
        """Search for the longest length that runs, with a precision of 5%."""
        good, bad = 0, start
        while "failed" not in self.run(way, bad):
            good, bad = bad, 2 * bad
        while bad - good > max(good // 20, 32):
            middle = (good + bad) // 2
            if "failed" in self.run(way, middle):
                bad = middle
            else:
                good = middle
        return good


def _timed(
    setup: Setup, way: str, length: int, runs: int, settings: dict[str, Any], tell: Callable[[str], None]
) -> dict[str, list[float]]:
    """Time steps of Trunkline and of another variant in alternation."""
    ids_BS, steps = tokens(setup, length), {name: _stepper(setup, name, settings) for name in (OURS, way)}
    for step in steps.values():
        step(ids_BS)
    return alternate({name: (lambda step=step: step(ids_BS)) for name, step in steps.items()}, runs, tell)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--mib", type=int, default=256, help="memory that a step may take, in MiB above the loaded model"
    )
    parser.add_argument("--layers", type=int, default=2, help="number of layers")
    parser.add_argument("--vocab", type=int, default=32_000, help="size of the vocabulary")
    parser.add_argument("--chunk-size", type=int, default=1_024, help="tokens per chunk")
    parser.add_argument("--runs", type=int, default=5, help="rounds of the timing")
    parser.add_argument("--offload-dir", default=str(Path(__file__).parent),
                        help="folder for the scratch file, on a disk and not in memory")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out" / "max_context.json",
                        help="JSON file to write")  # fmt: skip
    given = parser.parse_args(arguments)
    setup = Setup(given.layers, given.vocab, "auto", torch.get_num_threads(), heads=2, kv_heads=2)
    # At 640 tokens the loss then has three tiles instead of five. Each tile adds a gradient of the full unembedding.
    settings = {
        "chunk_size": given.chunk_size,
        "device_budget": "48MiB",
        "offload_dir": given.offload_dir,
        "logits_budget": "112MiB",
    }
    console = Console()
    tell: Callable[[str], None] = lambda text: console.print(text, style="dim")  # noqa: E731
    trials = Trials(setup, given.mib * _MIB, settings, tell)
    timed: dict[str, dict[str, list[float]]] = {}
    table = Table(header_style="bold", title=f"step within {given.mib} MiB above the loaded model")
    for column in ("variant", "longest", "Trunkline", "its peak", "time / variant"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    missed = False
    for way, times in ((CHECKPOINTING, 16), (TILED, 8)):
        reach = trials.reach(way, 512)
        ours = trials.run(OURS, times * reach)
        done = "failed" not in ours and "failed" not in trials.run(OURS, reach)
        timed[way] = _timed(setup, way, reach, given.runs, settings, tell)
        ratio = median(timed[way][OURS]) / median(timed[way][way])
        missed |= not done or ratio > 1
        table.add_row(way, f"{reach:,}", f"{times} x {reach:,}", f"{ours['peak'] / _MIB:.0f} MiB" if done else "failed",
                      f"{ratio:.3f}")  # fmt: skip
    console.print(table)
    write_json(given.out, {"mib": given.mib, "settings": settings, "trials": trials.found, "seconds": timed})
    console.print(f"wrote {given.out}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(0 if answered(_trial) else main())
