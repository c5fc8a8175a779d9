"""Measurements of this machine: one function for each kind of work, timed until the clock can be trusted."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.cuda import Event, Stream

from trunkline.attention.kernel_base import Kernel
from trunkline.offload.storage import ScratchFile, StorageBlock

_LEAST_SECONDS = 0.06  # of a figure's repetitions together
_REPETITIONS = 6
_LAUNCHES = 200


def timed(work: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of one call of `work`: the least of six averages, since other programs only add to a time.

    `torch.utils.benchmark.Timer` does not fit: `blocked_autorange` takes a single sample of slow work, and `timeit`
    runs the work twice more before each sample.
    """
    work()
    start = _now(device)
    work()
    calls = max(1, int(_LEAST_SECONDS / _REPETITIONS / max(_now(device) - start, 1e-7)))
    seconds = []
    for _ in range(_REPETITIONS):
        start = _now(device)
        for _ in range(calls):
            work()
        seconds.append((_now(device) - start) / calls)
    return min(seconds)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def matmul(device: torch.device, dtype: torch.dtype, m: int, n: int, k: int) -> float:
    """Return FLOP/s of a product as linear layers have it: (m, k) by the transpose of (n, k)."""
    a, b = (torch.randn(rows, k, device=device, dtype=dtype) for rows in (m, n))
    return 2 * m * n * k / timed(partial(F.linear, a, b), device)


def memory(device: torch.device, kind: str, nbytes: int) -> float:
    """Return bytes/s, read and written together, of an fp32 operation that device memory bounds.

    Args:
        device: device to measure.
        kind: `copy`, `pointwise`, `transcendental` or `reduction`.
        nbytes: bytes that the operation reads and writes together; a reduction reads half as many.
    """
    count = max(nbytes // 4 // (3 if kind == "pointwise" else 2), 256)
    x = torch.rand(count, device=device)
    y = torch.rand(count, device=device) if kind == "pointwise" else x
    works: dict[str, tuple[Callable[[], Any], int]] = {
        "copy": (x.clone, 2),
        "pointwise": (lambda: x * y, 3),
        "transcendental": (lambda: F.silu(x), 2),
        "reduction": (lambda: x.view(-1, 256).sum(-1) if count % 256 == 0 else x.sum(), 1),
    }
    work, passes = works[kind]
    return passes * count * 4 / timed(work, device)


def attention(
    device: torch.device, kernel: Kernel, dtype: torch.dtype, head_dim: int, queries: int, keys: int, *, causal: bool
) -> tuple[float, float]:
    """Return FLOP/s of attention, (forward, backward), of one row with four heads; `Hardware` says how FLOPs count."""
    heads, scale = 4, head_dim**-0.5
    q, k, v = (torch.randn(1, heads, n, head_dim, device=device, dtype=dtype) for n in (queries, keys, keys))
    o, lse = kernel.forward(q, k, v, causal=causal, scale=scale)
    do = torch.randn_like(o)
    pairs = heads * (queries * keys - (queries * (queries - 1) // 2 if causal else 0))
    forward = timed(lambda: kernel.forward(q, k, v, causal=causal, scale=scale), device)
    backward = timed(lambda: kernel.backward(do, q, k, v, o, lse, causal=causal, scale=scale), device)
    return 4 * head_dim * pairs / forward, 10 * head_dim * pairs / backward


def link(device: torch.device, nbytes: int = 256 * 2**20, copies: int = 4) -> dict[str, float]:
    """Return bytes/s between pinned host memory and a CUDA device, on two streams as the lanes do.

    Args:
        device: a CUDA device.
        nbytes: bytes of each copy; a power of two, which pinned memory is rounded up to.
        copies: copies of each measurement.

    Returns:
        Bytes/s under `to_device`, `to_host`, `both_to_device` and `both_to_host`, in this order; see `LinkFigures`.
    """
    host = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    into, out = (there[0], host[0]), (host[1], there[1])  # target and source

    def rates(*pairs: tuple[torch.Tensor, torch.Tensor]) -> list[float]:
        torch.cuda.synchronize(device)
        streams: list[Stream] = [Stream(device) for _ in pairs]  # type: ignore[no-untyped-call]
        event: Callable[[], Event] = partial(Event, enable_timing=True)
        marks = [(event(), event()) for _ in pairs]
        for stream, (begin, _) in zip(streams, marks, strict=True):
            begin.record(stream)
        for _ in range(copies):  # in turns, so that the second does not start when the first is nearly over
            for stream, (target, source) in zip(streams, pairs, strict=True):
                with torch.cuda.stream(stream):
                    target.copy_(source, non_blocking=True)
        for stream, (_, end) in zip(streams, marks, strict=True):
            end.record(stream)
        torch.cuda.synchronize(device)
        return [copies * nbytes / (begin.elapsed_time(end) / 1e3) for begin, end in marks]

    rates(into, out)  # the first copy of a pair of buffers is slower
    both = rates(into, out)
    return {"to_device": rates(into)[0], "to_host": rates(out)[0], "both_to_device": both[0], "both_to_host": both[1]}


class DiskMover:
    """Reads and writes of a scratch file in threads, as lanes do them.

    Args:
        folder: folder of the file.
        nbytes: bytes of each of its eight blocks.
    """

    def __init__(self, folder: Path, nbytes: int) -> None:
        self._file = ScratchFile(folder, 8 * nbytes)
        self._file.preallocate(0, 8 * nbytes)
        self._blocks = [StorageBlock(self._file, "disk", i * nbytes, nbytes) for i in range(8)]
        self._data = {name: torch.zeros(nbytes, dtype=torch.uint8) for name in ("read", "write")}
        for block in self._blocks:
            self._file.write(block, self._data["write"])

    def run(self, directions: tuple[str, ...], work: Callable[[], Any], seconds: float) -> dict[str, float]:
        """Read and write in threads while `work` is repeated.

        Args:
            directions: any of `read` and `write`, which run at the same time.
            work: work of the calling thread.
            seconds: duration.

        Returns:
            Bytes/s of each direction, by its name; under `work` the calls of `work` a second.
        """
        stop, moved = threading.Event(), dict.fromkeys(directions, 0)

        def carry(direction: str) -> None:
            blocks = self._blocks[:4] if direction == "read" else self._blocks[4:]
            call = getattr(self._file, direction)
            while not stop.is_set():
                for block in blocks:
                    call(block, self._data[direction])
                    moved[direction] += block.capacity

        threads = [threading.Thread(target=carry, args=(direction,)) for direction in directions]
        start, count = time.perf_counter(), 0
        for thread in threads:
            thread.start()
        while time.perf_counter() - start < seconds:
            work()
            count += 1
        took = time.perf_counter() - start
        stop.set()
        for thread in threads:
            thread.join()
        return {direction: nbytes / took for direction, nbytes in moved.items()} | {"work": count / took}


def collective(group: Any, device: torch.device, nbytes: int) -> dict[str, float]:
    """Measure an all-to-all; all ranks of the group call this.

    Args:
        group: process group.
        device: device of this rank.
        nbytes: bytes of each rank's input.

    Returns:
        Under `bandwidth` the bus bandwidth of a rank in bytes/s, under `latency` the seconds of the smallest one.
    """
    size = dist.get_world_size(group)

    def seconds(count: int) -> float:
        x = torch.zeros(size, max(count // size, 1), dtype=torch.uint8, device=device)
        out = torch.empty_like(x)
        times = []
        for _ in range(5):
            dist.barrier(group)
            start = _now(device)
            dist.all_to_all_single(out, x, group=group)
            times.append(_now(device) - start)
        return statistics.median(times)

    latency = seconds(size)
    return {"bandwidth": nbytes * (size - 1) / size / max(seconds(nbytes) - latency, 1e-9), "latency": latency}


def kernel_seconds(device: torch.device) -> float:
    """Return the least seconds of an operator on a device, from the start of one to the start of the next.

    On a CPU the time of the host to issue it is included.
    """
    x, y = torch.zeros(2, 256, device=device)
    work = partial(x.add_, y)
    return (
        timed(work, device) if device.type == "cpu" else min(_back_to_back(work, device) for _ in range(_REPETITIONS))
    )


def _back_to_back(work: Callable[[], Any], device: torch.device) -> float:
    """Return seconds of a kernel without the host, which is slower: large products hold the device up meanwhile."""
    start, end = (Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    a = torch.ones(4_096, 4_096, device=device)
    products = 4
    while True:
        for _ in range(products):
            torch.mm(a, a)
        start.record()
        for _ in range(_LAUNCHES):
            work()
        held_up = not start.query()  # type: ignore[no-untyped-call]
        end.record()
        end.synchronize()
        if held_up:
            return float(start.elapsed_time(end)) / 1e3 / _LAUNCHES
        products *= 2
