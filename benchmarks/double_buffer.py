"""Fetch behind compute: seconds of both for one chunk, and the effect of double buffering on a step.

The first table is the sweet spot of the FPDT talk: keys and values of a chunk come from disk in time linear in the
chunk, attention of one chunk to another takes time quadratic in it; where the lines cross, the fetch hides. The second
is a training step with all stores beyond the device's smallest budget on disk, with 1, 2 and 3 buffers, and with
everything resident ("off"). Files that were just written are read from the system's cache: it is the path through the
file system that is measured, not the disk behind it, unless the stores are larger than the machine's memory.

    python benchmarks/double_buffer.py --length 32768 --runs 5 --disk /some/folder
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
    """Measure the fetch of a chunk's keys and values, and attention from one chunk to another, forward and backward."""
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
    """Measure steps with each number of buffers, all within the budget of the largest number, and resident ones."""
    base, disk = build(setup, "fp32"), str(folder)
    needed = {
        str(n): smallest_budget(base, length, chunk_size=setup.chunk_size, prefetch=n, offload_dir=disk)
        for n in BUFFERS
    }
    budget = max(needed.values())
    variants = {name: {"prefetch": int(name), "device_budget": budget, "offload_dir": disk} for name in needed}
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
    """Draw the sweet spot and the steps."""
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
    """Run the benchmark; the exit status is 1 where more than 3% of a step with two buffers is exposed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=32_768, help="tokens in the sequence")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=1_024)
    parser.add_argument("--chunk-size", type=int, default=4_096, help="of the steps; the default is that of a CPU")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--disk", type=Path, default=Path(__file__).parent, help="folder for scratch files")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out" / "double_buffer.json")
    given = parser.parse_args(arguments)
    setup = Setup(given.layers, given.vocab, given.chunk_size, torch.get_num_threads())
    console = Console()
    tell: Callable[[str], None] = lambda text: console.print(text, style="dim")  # noqa: E731
    chunks = {chunk: one_chunk(setup, chunk, given.disk) for chunk in CHUNKS}
    found = steps(setup, given.length, given.runs, given.disk, tell)
    for drawn in tables(chunks, found):
        console.print(drawn)
    write_json(given.out, {"length": given.length, "layers": given.layers, "chunk_size": given.chunk_size,
                           "chunks": {str(chunk): each for chunk, each in chunks.items()}, **found})  # fmt: skip
    subtitle = f"{given.length:,} tokens, layers: {given.layers}, E=256, H=4, K=2, D=64, fp32, CPU, disk behind it"
    draw(chunks, found, given.out.with_suffix(".png"), subtitle)
    console.print(f"wrote {given.out} and {given.out.with_suffix('.png')}")
    return int(exposed_share(found, "2") > EXPOSED_TARGET)


if __name__ == "__main__":
    sys.exit(main())
