"""Memory of a step over growing lengths, at fixed budgets: activations over budget go to disk.

Each length runs in its own process. The process first runs a short step with the same settings. The result is the peak
of the resident set during one step, minus the resident set before it.

    python benchmarks/flat_memory.py --lengths 32768 262144 --offload-dir /some/folder
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _alternation import write_json
from _resident import answered, in_own_process, reset_peak, status
from _variants import Setup, build, step, tokens
from rich.console import Console
from rich.table import Table

import trunkline

_MIB = 2**20


def _trial(setup: Setup, length: int, settings: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(setup.threads)
    model = build(setup, "fp32")
    trunkline.stream(model, **settings)
    step(model, tokens(setup, 4 * settings["chunk_size"]))
    ids_BS = tokens(setup, length)
    trunkline.stats(model)
    idle = status("VmRSS")
    reset_peak()
    done = step(model, ids_BS, keep_grads=True)
    meters = trunkline.stats(model)
    exposed = sum(traffic.exposed for traffic in meters.lanes.values())
    return {"peak": status("VmHWM") - idle, "seconds": done.seconds, "exposed": exposed, "tiers": meters.peaks,
            "moved": meters.moved}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 if memory grows by more than 5%."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[32_768, 65_536, 131_072, 262_144],
                        help="sequence lengths")  # fmt: skip
    parser.add_argument("--layers", type=int, default=1, help="number of layers")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size")
    parser.add_argument("--chunk-size", type=int, default=2_048, help="tokens per chunk")
    parser.add_argument("--device-budget", default="24MiB", help="budget of activations on the device")
    parser.add_argument("--attn-strategy", default="auto", choices=("auto", "resident", "head_groups", "streamed"),
                        help="attn_strategy of trunkline.stream")  # fmt: skip
    parser.add_argument("--offload-dir", default=str(Path(__file__).parent),
                        help="folder for the scratch file, on a disk and not in memory")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out" / "flat_memory.json",
                        help="JSON file to write")  # fmt: skip
    given = parser.parse_args(arguments)
    setup = Setup(given.layers, 1_024, given.chunk_size, torch.get_num_threads(), hidden_size=given.hidden, heads=2,
                  kv_heads=1, head_dim=32, intermediate_size=2 * given.hidden)  # fmt: skip
    settings = {"chunk_size": given.chunk_size, "device_budget": given.device_budget, "offload_dir": given.offload_dir,
                "attn_strategy": given.attn_strategy}  # fmt: skip
    console = Console()
    table = Table(
        header_style="bold", title=f"{given.layers} layer, device_budget {given.device_budget}, disk for the rest"
    )
    for column in ("tokens", "peak MiB", "ratio", "device MiB", "disk MiB", "GiB moved", "exposed", "seconds"):
        table.add_column(column, justify="right")
    found: dict[int, dict[str, Any]] = {}
    for length in given.lengths:
        task = {"setup": dataclasses.asdict(setup), "length": length, "settings": settings}
        found[length] = each = in_own_process(__file__, task)
        console.print(f"{length:,} tokens: {each['peak'] / _MIB:.1f} MiB, {each['seconds']:.0f} s", style="dim")
        table.add_row(
            f"{length:,}", f"{each['peak'] / _MIB:.1f}", f"{each['peak'] / found[given.lengths[0]]['peak']:.3f}",
            f"{each['tiers']['device'] / _MIB:.1f}", f"{each['tiers']['disk'] / _MIB:.1f}",
            f"{each['moved'] / 2**30:.2f}", f"{each['exposed'] / each['seconds']:.1%}", f"{each['seconds']:.0f}",
        )  # fmt: skip
    console.print(table)
    write_json(given.out, {"settings": settings, "lengths": found})
    console.print(f"wrote {given.out}")
    peaks = [each["peak"] for each in found.values()]
    return int(max(peaks) > 1.05 * peaks[0])


if __name__ == "__main__":
    sys.exit(0 if answered(_trial) else main())
