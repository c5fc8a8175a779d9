"""Attention by head groups beside attention streamed chunk by chunk, where keys and values are on disk.

Both run within the same device_budget, the smaller of the two that either accepts, rounded up to what the other needs;
everything else goes to disk. Streamed, keys and values travel once for every later chunk; by head groups everything
travels a fixed number of times, and projections are computed twice.

    python benchmarks/strategies.py --lengths 16384 65536 --chunk-size 1024 --disk /some/folder
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _alternation import median, write_json
from _steps import exposed_share, measure_steps, smallest_budget
from _variants import Setup, build
from rich.console import Console
from rich.table import Table

STRATEGIES = ("streamed", "head_groups")
RESIDENT = "resident, no budget"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16_384, 65_536])
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--vocab", type=int, default=1_024)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--chunk-size", type=int, default=1_024)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--disk", type=Path, default=Path(__file__).parent, help="folder for scratch files")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out" / "strategies.json")
    given = parser.parse_args(arguments)
    setup = Setup(given.layers, given.vocab, given.chunk_size, torch.get_num_threads(), heads=given.heads,
                  kv_heads=given.kv_heads)  # fmt: skip
    console = Console()
    table = Table(header_style="bold")
    for column in ("tokens", "strategy", "seconds", "ratio", "exposed", "GiB moved", "device MiB", "disk MiB"):
        table.add_column(column, justify="left" if column == "strategy" else "right")
    everything: dict[str, Any] = {}
    for length in given.lengths:
        base, disk = build(setup, "fp32"), str(given.disk)
        common = {"chunk_size": given.chunk_size, "offload_dir": disk}
        budget = max(smallest_budget(base, length, attn_strategy=strategy, **common) for strategy in STRATEGIES)
        variants = {name: {"attn_strategy": name, "device_budget": budget, "offload_dir": disk} for name in STRATEGIES}
        found = measure_steps(setup, base, length, given.runs, {RESIDENT: {}, **variants},
                              lambda text: console.print(text, style="dim"))  # fmt: skip
        everything[str(length)] = {"budget": budget, **found}
        for name, seconds in found["seconds"].items():
            peaks = found["peaks"][name]
            table.add_row(
                f"{length:,}", name, f"{median(seconds):.2f}",
                f"{median(seconds) / median(found['seconds'][RESIDENT]):.3f}", f"{exposed_share(found, name):.1%}",
                f"{found['moved'][name] / 2**30:.2f}", f"{peaks['device'] / 2**20:.1f}", f"{peaks['disk'] / 2**20:.1f}",
            )  # fmt: skip
    console.print(table)
    write_json(given.out, {"lengths": everything, "heads": given.heads, "chunk_size": given.chunk_size})
    console.print(f"wrote {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
