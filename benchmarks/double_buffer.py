"""Overlap of fetches and compute: times of both for one chunk, and the effect of double buffering on a step.

The first table shows the sweet spot of the FPDT talk. The time to fetch a chunk's keys and values from disk is linear
in the chunk size. The time of attention between two chunks is quadratic in it. Compute hides the fetch if the chunk is
at least as large as the size at which both times are equal.

The second table shows a training step with 1, 2 and 3 buffers, and one with everything resident ("off"). The device
budget is the smallest that fits all three, and all other activations are on disk. The system reads recently written
files from its page cache. So the benchmark measures the file system and not the disk, unless the stores are larger than
the memory.

    python benchmarks/double_buffer.py --length 32768 --runs 5 --offload-dir /some/folder
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from _alternation import median, write_json
from _steps import exposed_share, measure_steps, smallest_budget
from _variants import Setup, build
from rich.console import Console
from rich.table import Table

from trunkline.attention.kernels import resolve
from trunkline.offload.lanes.thread import ThreadLanes
from trunkline.offload.storage import ScratchFile, StorageBlock

CHUNKS = (256, 512, 1_024, 2_048, 4_096, 8_192)
BUFFERS = (1, 2, 3)
OFF = "off"
EXPOSED_TARGET = 0.03


def seconds_of(work: Callable[[], Any], repeats: int) -> float:
    """Return the median seconds of a function."""
    samples = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        samples.append(time.perf_counter() - start)
    return median(samples[1:])


def one_chunk(setup: Setup, chunk: int, folder: Path, repeats: int = 7) -> dict[str, float]:
    """Measure the fetch of a chunk's keys and values, and attention between two chunks, forward and backward."""
    q = torch.randn(1, setup.heads, chunk, setup.head_dim)
    k, v = (torch.randn(1, setup.kv_heads, chunk, setup.head_dim) for _ in range(2))
    kernel, scale = resolve(q.device, q.dtype, setup.head_dim, setup.head_dim), setup.head_dim**-0.5
    file, lanes = ScratchFile(folder, 2 * (k.nbytes + 512)), ThreadLanes()
    blocks = [StorageBlock(file, "disk", at, k.nbytes) for at in (0, k.nbytes + 512)]
    stashes = [lanes.stash(x, block) for x, block in zip((k, v), blocks, strict=True)]
    into = [torch.empty_like(x) for x in (k, v)]

    def fetch() -> None:
        moves = [lanes.fetch(*each) for each in zip(blocks, into, stashes, strict=True)]
        for move in moves:
            lanes.finish(move)

    o, lse = kernel.forward(q, k, v, causal=False, scale=scale)
    return {
        "fetch": seconds_of(fetch, repeats),
        "forward": seconds_of(lambda: kernel.forward(q, k, v, causal=False, scale=scale), repeats),
        "backward": seconds_of(lambda: kernel.backward(o, q, k, v, o, lse, causal=False, scale=scale), repeats),
    }


def steps(setup: Setup, length: int, runs: int, folder: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    """Measure steps with each number of buffers, all with the same device budget, and resident steps."""
    base, offload_dir = build(setup, "fp32"), str(folder)
    needed = {
        str(n): smallest_budget(base, length, chunk_size=setup.chunk_size, prefetch=n, offload_dir=offload_dir)
        for n in BUFFERS
    }
    budget = max(needed.values())
    variants = {name: {"prefetch": int(name), "device_budget": budget, "offload_dir": offload_dir} for name in needed}
    return {
        "budget": budget,
        "smallest": needed,
        **measure_steps(setup, base, length, runs, {OFF: {}, **variants}, tell),
    }


def tables(chunks: dict[int, dict[str, float]], found: dict[str, Any]) -> list[Table]:
    """Return both tables."""
    first = Table(title="one chunk", header_style="bold")
    for column in ("tokens", "fetch ms", "attention forward ms", "backward ms", "fetch / forward"):
        first.add_column(column, justify="right")
    for chunk, each in chunks.items():
        first.add_row(f"{chunk:,}", *(f"{each[k] * 1e3:.2f}" for k in ("fetch", "forward", "backward")),
                      f"{each['fetch'] / each['forward']:.2f}")  # fmt: skip
    second = Table(title="one step", header_style="bold")
    for column in ("buffers", "seconds", "time / off", "exposed", "GiB moved", "MiB device", "MiB disk"):
        second.add_column(column, justify="right")
    for name, seconds in found["seconds"].items():
        exposed = exposed_share(found, name)
        peaks = found["peaks"][name]
        second.add_row(
            name, f"{median(seconds):.2f}", f"{median(seconds) / median(found['seconds'][OFF]):.3f}",
            "" if name == OFF else f"{exposed:.2%}", f"{found['moved'][name] / 2**30:.2f}",
            f"{peaks['device'] / 2**20:.1f}", f"{peaks['disk'] / 2**20:.1f}",
        )  # fmt: skip
    return [first, second]


def draw(chunks: dict[int, dict[str, float]], found: dict[str, Any], path: Path, subtitle: str) -> None:
    """Draw the times of one chunk, and the exposed share of each step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for what, label in (("fetch", "fetch of K and V"), ("forward", "attention forward"), ("backward", "backward")):
        left.loglog(list(chunks), [each[what] * 1e3 for each in chunks.values()], marker="o", label=label, base=2)
    left.set(xlabel="tokens in a chunk", ylabel="milliseconds", title="One chunk")
    left.grid(alpha=0.3)
    left.legend()
    names = [name for name in found["seconds"] if name != OFF]
    bars = right.bar(names, [100 * exposed_share(found, name) for name in names], color="tab:red", width=0.5)
    off = median(found["seconds"][OFF])
    right.bar_label(bars, [f"step {median(found['seconds'][name]) / off:.2f} x resident" for name in names], fontsize=8)
    right.axhline(100 * EXPOSED_TARGET, color="#555555", linestyle="--", linewidth=1)
    right.set(xlabel="buffers (prefetch)", ylabel="exposed, % of the step", title="One step")
    figure.suptitle(subtitle, fontsize=10)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 if more than 3% of a step with two buffers is exposed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=32_768, help="tokens in the sequence")
    parser.add_argument("--layers", type=int, default=2, help="number of layers")
    parser.add_argument("--vocab", type=int, default=1_024, help="size of the vocabulary")
    parser.add_argument("--chunk-size", type=int, default=4_096, help="tokens per chunk of the steps")
    parser.add_argument("--runs", type=int, default=5, help="rounds to measure")
    parser.add_argument("--offload-dir", type=Path, default=Path(__file__).parent,
                        help="folder for scratch files")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out" / "double_buffer.json",
                        help="JSON file to write; the PNG gets the same name")  # fmt: skip
    given = parser.parse_args(arguments)
    setup = Setup(given.layers, given.vocab, given.chunk_size, torch.get_num_threads())
    console = Console()
    tell: Callable[[str], None] = lambda text: console.print(text, style="dim")  # noqa: E731
    chunks = {chunk: one_chunk(setup, chunk, given.offload_dir) for chunk in CHUNKS}
    found = steps(setup, given.length, given.runs, given.offload_dir, tell)
    for drawn in tables(chunks, found):
        console.print(drawn)
    write_json(given.out, {"length": given.length, "layers": given.layers, "chunk_size": given.chunk_size,
                           "chunks": {str(chunk): each for chunk, each in chunks.items()}, **found})  # fmt: skip
    subtitle = f"{given.length:,} tokens, layers: {given.layers}, E=256, H=4, K=2, D=64, fp32, CPU with disk"
    draw(chunks, found, given.out.with_suffix(".png"), subtitle)
    console.print(f"wrote {given.out} and {given.out.with_suffix('.png')}")
    return int(exposed_share(found, "2") > EXPOSED_TARGET)


if __name__ == "__main__":
    sys.exit(main())
