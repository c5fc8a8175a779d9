"""Longest context within the same memory: Hugging Face checkpointing, the same with a tiled loss, Trunkline.

Every trial is a process of its own: the model is loaded and warmed up, and then one step of so many tokens may take
`--mib` more than was resident (the kernel's limit on a process's data is set to that; the peak of the resident set is
measured as well). The reach of each way is found by doubling and then by halving the gap; Trunkline, whose stores go to
disk, is shown at 16 and 8 times the reach of the two others. Where both run they are then timed in alternation, in one
process whose malloc is as it is (that of the trials gives memory back at once, which costs time).

    python benchmarks/max_context.py --mib 256 --disk /some/folder
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
    """Compute the mean cross-entropy with logits of 128 tokens at a time, recomputed in backward."""
    x_BSE = model.model(input_ids=ids_BS, use_cache=False).last_hidden_state
    targets_BS = F.pad(ids_BS[:, 1:], (0, 1), value=-100)

    def tile(x_BTE: Tensor, targets_BT: Tensor) -> Tensor:
        return F.cross_entropy(model.lm_head(x_BTE).flatten(0, 1).float(), targets_BT.flatten(), reduction="sum")

    parts = zip(x_BSE.split(_LOSS_TILE, 1), targets_BS.split(_LOSS_TILE, 1), strict=True)
    losses = [checkpoint(tile, *part, use_reentrant=False) for part in parts]
    return torch.stack(losses).sum() / (ids_BS.shape[1] - 1)


def _stepper(setup: Setup, way: str, settings: dict[str, Any]) -> Callable[[Tensor], float]:
    """Return a model, and a function that runs a step and returns its seconds."""
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
    """Run a step in this process; return its seconds and the peak above the resident set before."""
    step = _stepper(setup, way, settings)
    idle = status("VmRSS")
    resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + limit, resource.RLIM_INFINITY))
    reset_peak()
    try:
        seconds = step(tokens(setup, length))
    except (RuntimeError, MemoryError, OSError) as error:
        if "memory" not in str(error).lower():
            raise
        return {"failed": "no memory left"}
    peak = status("VmHWM") - idle
    return {"seconds": seconds, "peak": peak} if peak <= limit else {"failed": "past the limit", "peak": peak}


class Trials:
    """Trials, each in its own process, none twice."""

    def __init__(self, setup: Setup, limit: int, settings: dict[str, Any], tell: Callable[[str], None]) -> None:
        self._fixed = {"limit": limit, "settings": settings}
        self._setup, self._tell = setup, tell
        self.found: dict[str, dict[int, dict[str, Any]]] = {CHECKPOINTING: {}, TILED: {}, OURS: {}}

    def run(self, way: str, length: int) -> dict[str, Any]:
        """Run a trial, or return its known result."""
        setup = {"layers": self._setup.layers, "vocab_size": self._setup.vocab_size, "heads": self._setup.heads,
                 "kv_heads": self._setup.kv_heads, "chunk_size": "auto", "threads": self._setup.threads}  # fmt: skip
        task = {"setup": setup, "way": way, "length": length, **self._fixed}
        result = in_own_process(__file__, task)
        self.found[way][length] = result
        said = result.get("failed") or f"{result['peak'] / _MIB:.0f} MiB, {result['seconds']:.1f} s"
        self._tell(f"{way}, {length:,} tokens: {said}")
        return result

    def reach(self, way: str, start: int) -> int:
        """Return the longest length that runs, within 5%."""
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
    """Measure steps of Trunkline and of another variant in alternation."""
    ids_BS, steps = tokens(setup, length), {name: _stepper(setup, name, settings) for name in (OURS, way)}
    for step in steps.values():
        step(ids_BS)
    return alternate({name: (lambda step=step: step(ids_BS)) for name, step in steps.items()}, runs, tell)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status is 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="memory above the loaded model")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--chunk-size", type=int, default=1_024)
    parser.add_argument("--runs", type=int, default=5, help="rounds where both run")
    parser.add_argument("--disk", default=str(Path(__file__).parent), help="folder for the scratch file; not in memory")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out" / "max_context.json")
    given = parser.parse_args(arguments)
    setup = Setup(given.layers, given.vocab, "auto", torch.get_num_threads(), heads=2, kv_heads=2)
    # Three tiles of the head at 640 tokens instead of five: each adds a gradient of the whole vocabulary.
    settings = {
        "chunk_size": given.chunk_size,
        "device_budget": "48MiB",
        "offload_dir": given.disk,
        "logits_budget": "112MiB",
    }
    console = Console()
    tell: Callable[[str], None] = lambda text: console.print(text, style="dim")  # noqa: E731
    trials = Trials(setup, given.mib * _MIB, settings, tell)
    timed: dict[str, dict[str, list[float]]] = {}
    table = Table(header_style="bold", title=f"within {given.mib} MiB above the loaded model")
    for column in ("", "reach", "times", "Trunkline there", "time / theirs, a token"):
        table.add_column(column, justify="left" if not column else "right")
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
