"""Attention strategies `streamed` and `head_groups`, with keys and values on disk.

Both run with the same device_budget: the smallest budget that fits both. Everything else goes to disk. `streamed`
fetches keys and values once for every later chunk. `head_groups` moves everything a fixed number of times, and computes
projections twice.

    python benchmarks/strategies.py --lengths 16384 65536 --chunk-size 1024 --offload-dir /some/folder
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
    parser.add_argument("--lengths", type=int, nargs="+", default=[16_384, 65_536], help="sequence lengths")
    parser.add_argument("--layers", type=int, default=1, help="number of layers")
    parser.add_argument("--vocab", type=int, default=1_024, help="size of the vocabulary")
    parser.add_argument("--heads", type=int, default=4, help="number of query heads")
    parser.add_argument("--kv-heads", type=int, default=4, help="number of key/value heads")
    parser.add_argument("--chunk-size", type=int, default=1_024, help="tokens per chunk")
    parser.add_argument("--runs", type=int, default=3, help="rounds to measure")
    parser.add_argument("--offload-dir", type=Path, default=Path(__file__).parent,
                        help="folder for scratch files")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out" / "strategies.json",
                        help="JSON file to write")  # fmt: skip
    given = parser.parse_args(arguments)
    setup = Setup(given.layers, given.vocab, given.chunk_size, torch.get_num_threads(), heads=given.heads,
                  kv_heads=given.kv_heads)  # fmt: skip
    console = Console()
    table = Table(header_style="bold")
    for column in ("tokens", "strategy", "seconds", "ratio", "exposed", "GiB moved", "device MiB", "disk MiB"):
        table.add_column(column, justify="left" if column == "strategy" else "right")
    everything: dict[str, Any] = {}
    for length in given.lengths:
        base, offload_dir = build(setup, "fp32"), str(given.offload_dir)
        common = {"chunk_size": given.chunk_size, "offload_dir": offload_dir}
        budget = max(smallest_budget(base, length, attn_strategy=strategy, **common) for strategy in STRATEGIES)
        variants = {
            name: {"attn_strategy": name, "device_budget": budget, "offload_dir": offload_dir} for name in STRATEGIES
        }
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
