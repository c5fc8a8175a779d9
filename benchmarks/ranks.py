"""Memory per rank and speed of several ranks: gloo processes with one thread each.

The script prints three tables. The first has the bytes of a rank on several meshes: activation stores, parameters and
AdamW state. The second has the peak memory of a rank over growing lengths, with chunks and with plain Ulysses. Plain
Ulysses has the full sequence in one chunk. The third has tokens/s of one and of two processes on the same tokens, in
alternation.

    python benchmarks/ranks.py --length 32768 --runs 5
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _alternation import alternate, median, write_json
from _ranks import Job
from _resident import MALLOC, reset_peak, status
from _variants import Setup, build, tokens
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import trunkline

_MIB = 2**20
MESHES: dict[str, dict[str, int]] = {
    "1 process": {}, "dp 2": {"dp": 2}, "sp 2": {"sp": 2}, "cp 2": {"cp": 2}, "sp 2, cp 2": {"sp": 2, "cp": 2},
    "dp 2, sp 2": {"dp": 2, "sp": 2}, "sp 4": {"sp": 4},
}  # fmt: skip
_models: dict[str, nn.Module] = {}
_meshes: dict[str, DeviceMesh] = {}


def _model(setup: dict[str, Any], parallel_dims: dict[str, int], chunk_size: int) -> nn.Module:
    """Return the streamed model on a mesh of this job; build it only once."""
    key = repr((setup, parallel_dims))
    if key not in _models:
        _models.clear()
        model = build(Setup(**setup), "fp32")
        if parallel_dims:
            _meshes[key] = trunkline.init_mesh(**parallel_dims, device_type="cpu")
            trunkline.shard(model, _meshes[key])
        _models[key] = model
    return trunkline.stream(_models[key], chunk_size=chunk_size, mesh=_meshes.get(key))


def serve(
    what: str, setup: dict[str, Any], parallel_dims: dict[str, int], chunk_size: int, length: int
) -> dict[str, Any]:
    """Run a task on this rank."""
    model = _model(setup, parallel_dims, chunk_size)
    if what == "warm up":
        model.zero_grad()
    replica = 0 if not parallel_dims else _meshes[repr((setup, parallel_dims))]["dp"].get_local_rank()
    ids_BS = tokens(Setup(**setup), length).roll(replica, 1)
    trunkline.stats(model)
    reset_peak()
    resident, start = status("VmRSS"), time.perf_counter()
    model(input_ids=ids_BS, labels=ids_BS).loss.backward()
    seconds, peak = time.perf_counter() - start, status("VmHWM") - resident
    meters = trunkline.stats(model)
    comm = meters.lanes.get("comm")
    answer: dict[str, Any] = {
        "seconds": seconds, "peak": peak, "stores": meters.peaks["device"],
        "sent": 0 if comm is None else comm.moved, "exposed": 0.0 if comm is None else comm.exposed,
    }  # fmt: skip
    if what == "bytes":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer.step()
        states = [x for state in optimizer.state.values() for x in state.values()]
        answer |= {"parameters": _bytes(model.parameters()), "optimizer": _bytes(states)}
    model.zero_grad()
    return answer


def _bytes(tensors: Any) -> int:
    here = (x.to_local() if isinstance(x, DTensor) else x for x in tensors if isinstance(x, Tensor))
    return sum(x.nbytes for x in here)


def held(setup: Setup, length: int, chunk_size: int, console: Console) -> dict[str, Any]:
    """Measure the bytes of a rank on each mesh."""
    found: dict[str, Any] = {}
    for name, parallel_dims in MESHES.items():
        world = 1
        for degree in parallel_dims.values():
            world *= degree
        job = Job(world, 1, serve)
        answers = job.do(
            what="bytes",
            setup=dataclasses.asdict(setup),
            parallel_dims=parallel_dims,
            chunk_size=chunk_size,
            length=length,
        )
        job.close()
        found[name] = {part: max(each[part] for each in answers) for part in ("stores", "parameters", "optimizer")}
    table = Table(header_style="bold", title=f"memory of one rank, {length:,} tokens (ratio to one process)")
    for column in ("mesh", "stores MiB", "parameters MiB", "AdamW MiB"):
        table.add_column(column, justify="right")
    for name, each in found.items():
        cells = (f"{each[part] / _MIB:.2f} ({each[part] / found['1 process'][part]:.3f})" for part in each)
        table.add_row(name, *cells)
    console.print(table)
    return found


def speed(setup: Setup, length: int, chunk_size: int, runs: int, console: Console) -> tuple[dict[str, Any], float]:
    """Time a step with one process and with two processes, on the same tokens."""
    task: dict[str, Any] = {"setup": dataclasses.asdict(setup), "chunk_size": chunk_size}
    jobs = {name: (Job(1 if not MESHES[name] else 2, 1, serve), MESHES[name]) for name in ("1 process", "sp 2", "cp 2")}
    last: dict[str, list[dict[str, Any]]] = {}

    def once(name: str, tokens: int = length) -> float:
        job, parallel_dims = jobs[name]
        last[name] = job.do(what="step", parallel_dims=parallel_dims, length=tokens, **task)
        return max(each["seconds"] for each in last[name])

    for name in jobs:
        once(name, 4 * chunk_size)
    seconds = alternate({name: lambda name=name: once(name) for name in jobs}, runs,
                        lambda text: console.print(text, style="dim"))  # fmt: skip
    for job, _ in jobs.values():
        job.close()
    table = Table(header_style="bold", title=f"{length:,} tokens, one thread per process, medians of {runs} rounds")
    for column in ("mesh", "tokens/s", "speedup", "range over rounds", "sent MiB", "exposed"):
        table.add_column(column, justify="right")
    times = {name: median(seconds["1 process"]) / median(samples) for name, samples in seconds.items()}
    for name, samples in seconds.items():
        paired = [a / b for a, b in zip(seconds["1 process"], samples, strict=True)]
        comm = max(last[name], key=lambda each: each["exposed"])
        table.add_row(
            name, f"{length / median(samples):,.0f}", f"{times[name]:.2f}", f"{min(paired):.2f} … {max(paired):.2f}",
            f"{comm['sent'] / _MIB:.0f}", f"{comm['exposed'] / comm['seconds']:.1%}",
        )  # fmt: skip
    console.print(table)
    return seconds, min(times["sp 2"], times["cp 2"])


def growing(setup: Setup, lengths: Sequence[int], chunk_size: int, console: Console) -> dict[int, dict[str, int]]:
    """Measure the peak memory of a rank over growing lengths, with chunks and with plain Ulysses."""
    found: dict[int, dict[str, int]] = {}
    task: dict[str, Any] = {"setup": dataclasses.asdict(setup), "parallel_dims": {"sp": 2}}
    os.environ.update(MALLOC)  # slow; only for the processes of this function, which are not timed
    for length in lengths:
        found[length] = {}
        for name, size in (("chunks", chunk_size), ("whole", length)):
            job = Job(2, 1, serve)
            job.do(what="warm up", chunk_size=chunk_size, length=256, **task)
            found[length][name] = max(
                each["peak"] for each in job.do(what="step", chunk_size=size, length=length, **task)
            )
            job.close()
    table = Table(
        header_style="bold", title=f"peak MiB of a rank, above the loaded model, sp 2, chunks of {chunk_size:,}"
    )
    for column in ("tokens", "Trunkline", "plain Ulysses", "ratio"):
        table.add_column(column, justify="right")
    for name in MALLOC:
        del os.environ[name]
    for length, each in found.items():
        ratio = each["chunks"] / each["whole"]
        table.add_row(f"{length:,}", f"{each['chunks'] / _MIB:.0f}", f"{each['whole'] / _MIB:.0f}", f"{ratio:.2f}")
    console.print(table)
    return found


def draw(found: dict[int, dict[str, int]], path: Path) -> None:
    """Draw the peak memory of a rank over the length."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    lengths = list(found)
    for name, label, colour in (("whole", "plain Ulysses", "tab:orange"), ("chunks", "Trunkline", "tab:blue")):
        values = [found[length][name] / _MIB for length in lengths]
        axes.plot(lengths, values, "o-", color=colour)
        axes.annotate(label, (lengths[-1], values[-1]), xytext=(6, 0), textcoords="offset points", color=colour,
                      va="center")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.set_xlabel("tokens in the sequence, shared by two ranks")
    axes.set_ylabel("peak MiB of a rank, above the loaded model")
    axes.set_xlim(right=lengths[-1] * 1.6)
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    figure.savefig(path, dpi=150)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 if two processes are less than 1.8 times as fast as one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=32_768, help="tokens of the timed steps")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2_048, 4_096, 8_192, 16_384],
                        help="sequence lengths for the peak memory")  # fmt: skip
    parser.add_argument("--layers", type=int, default=1, help="number of layers of the timed steps")
    parser.add_argument("--vocab", type=int, default=512, help="size of the vocabulary")
    parser.add_argument("--chunk-size", type=int, default=4_096, help="tokens per chunk of the timed steps")
    parser.add_argument("--runs", type=int, default=5, help="rounds to measure; 0 skips the timing")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out" / "ranks.json",
                        help="JSON file to write; the PNG gets the same name")  # fmt: skip
    given = parser.parse_args(arguments)
    setup = Setup(given.layers, given.vocab, given.chunk_size, 1)
    deep = dataclasses.replace(setup, layers=4)
    console = Console()
    content: dict[str, Any] = {"held": held(deep, 2_048, 256, console)}
    content["growing"] = growing(deep, given.lengths, 512, console)
    times = 1.8
    if given.runs:
        content["seconds"], times = speed(setup, given.length, given.chunk_size, given.runs, console)
    write_json(given.out, content)
    draw(content["growing"], given.out.with_suffix(".png"))
    console.print(f"wrote {given.out} and {given.out.with_suffix('.png')}")
    return int(times < 1.8)


if __name__ == "__main__":
    sys.exit(main())
