"""How fast this machine is: one function for each kind of work, timed until the clock can be trusted.

Every figure is the best of several repetitions: whatever else the machine does only adds to a time.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trunkline.attention.kernels import Kernel
from trunkline.offload.storage import ScratchFile, StorageBlock

_LEAST_SECONDS = 0.06  # of a figure's repetitions together
_REPETITIONS = 6


def timed(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a piece of work: the least of some repetitions, each of as many calls as a clock can tell."""
    work()
    start = _now(device)
    work()
    once = max(_now(device) - start, 1e-7)
    calls = max(1, int(_LEAST_SECONDS / _REPETITIONS / once))
    found = []
    for _ in range(_REPETITIONS):
        start = _now(device)
        for _ in range(calls):
            work()
        found.append((_now(device) - start) / calls)
    return min(found)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def matmul(device: torch.device, dtype: torch.dtype, m: int, n: int, k: int) -> float:
    """FLOP/s of a product as linear layers have it: (m, k) by the transpose of (n, k)."""
    a = torch.randn(m, k, device=device, dtype=dtype)
    b = torch.randn(n, k, device=device, dtype=dtype)
    return 2 * m * n * k / timed(lambda: F.linear(a, b), device)


def memory(device: torch.device, kind: str, nbytes: int) -> float:
    """Bytes/s that an operation reads and writes, which touches so many."""
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
    """FLOP/s of attention forward and backward, as hardware profiles count them."""
    heads = 4
    q, k, v = (torch.randn(1, heads, n, head_dim, device=device, dtype=dtype) for n in (queries, keys, keys))
    scale = head_dim**-0.5
    o, lse = kernel.forward(q, k, v, causal=causal, scale=scale)
    do = torch.randn_like(o)
    pairs = heads * (queries * keys - (queries * (queries - 1) // 2 if causal else 0))
    forward = timed(lambda: kernel.forward(q, k, v, causal=causal, scale=scale), device)
    backward = timed(lambda: kernel.backward(do, q, k, v, o, lse, causal=causal, scale=scale), device)
    return 4 * head_dim * pairs / forward, 10 * head_dim * pairs / backward


def link(device: torch.device, nbytes: int) -> dict[str, float]:
    """Bytes/s between pinned host memory and a CUDA device, one way and both at once."""
    host = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]  # type: ignore[no-untyped-call]

    def both() -> None:
        with torch.cuda.stream(streams[0]):
            there[0].copy_(host[0], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            host[1].copy_(there[1], non_blocking=True)

    together = nbytes / timed(both, device)
    return {
        "to_device": nbytes / timed(lambda: there[0].copy_(host[0], non_blocking=True), device),
        "to_host": nbytes / timed(lambda: host[1].copy_(there[1], non_blocking=True), device),
        "both_to_device": together,
        "both_to_host": together,
    }


class Mover:
    """Reads and writes a scratch file in threads, as lanes do, until it is told to stop.

    Args:
        folder: of the file.
        nbytes: of a block.
    """

    def __init__(self, folder: Path, nbytes: int) -> None:
        self._file = ScratchFile(folder, 8 * nbytes)
        self._file.reserve(0, 8 * nbytes)
        self._blocks = [StorageBlock(self._file, "disk", i * nbytes, nbytes) for i in range(8)]
        self._data = {name: torch.zeros(nbytes, dtype=torch.uint8) for name in ("read", "write")}
        for block in self._blocks:
            self._file.write(block, self._data["write"])

    def run(self, directions: tuple[str, ...], work: Callable[[], Any] | None, seconds: float) -> dict[str, float]:
        """Bytes/s of each direction while `work` is done over and over; and under `work` how often a second."""
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
            if work is None:
                time.sleep(0.01)
            else:
                work()
                count += 1
        took = time.perf_counter() - start
        stop.set()
        for thread in threads:
            thread.join()
        return {direction: nbytes / took for direction, nbytes in moved.items()} | {"work": count / took}


def collective(group: Any, device: torch.device, nbytes: int) -> dict[str, float]:
    """Bus bandwidth in bytes/s of an all-to-all of a rank's bytes, and seconds of the smallest one."""
    import torch.distributed as dist

    size = dist.get_world_size(group)

    def seconds(count: int) -> float:
        x = torch.zeros(size, max(count // size, 1), dtype=torch.uint8, device=device)
        out: Tensor = torch.empty_like(x)
        found = []
        for _ in range(5):
            dist.barrier(group)
            start = _now(device)
            dist.all_to_all_single(out, x, group=group)
            found.append(_now(device) - start)
        return statistics.median(found)

    latency = seconds(size)
    return {"bandwidth": nbytes * (size - 1) / size / max(seconds(nbytes) - latency, 1e-9), "latency": latency}
