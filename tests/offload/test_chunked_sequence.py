"""Chunked sequences: chunks are read as they were stored, in any tier, and their bytes are counted."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from adversary import AdversaryBackend
from hypothesis import given, settings
from hypothesis import strategies as st

from trunkline.offload.backends import CpuBackend
from trunkline.offload.chunked_sequence import ChunkedSequence, dense, prefetch_more, read_next
from trunkline.offload.lanes.base import Lanes, Move
from trunkline.offload.lanes.thread import ThreadLanes
from trunkline.offload.placement import StoreRequest
from trunkline.offload.storage import HostSlab, StorageBlock
from trunkline.offload.stores import Backend, Stores, Tiers, resident_stores

CHUNK = 64 * 4  # bytes


def opened(backend: Backend, num_on_device: int, num_on_host: int, num_chunks: int, prefetch: int) -> Stores:
    """Stores with one named "x", which may have so many chunks on the device and the host."""
    reading, writing = prefetch + 1, max(prefetch - 1, 1)
    request = StoreRequest(("x",), ((CHUNK,) * num_chunks,), "x", reading + writing, 0, True)
    room = 0 if num_on_device >= num_chunks else request.in_flight_bytes("forward")
    budgets = {"device": num_on_device * CHUNK + room, "host": num_on_host * 512, "disk": 2**20}
    tiers = Tiers(budgets, backend, prefetch)
    return Stores(tiers, tiers.place([request]))


def chunk(number: int) -> torch.Tensor:
    return torch.full((1, 8, 8), float(number))


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 20), st.integers(0, 7), st.integers(0, 3), st.integers(1, 4), st.integers(0, 2**16),
    st.lists(st.integers(0, 19), max_size=12), st.booleans(),
)  # fmt: skip
def test_chunks_are_read_in_any_order(
    count: int, on_device: int, on_host: int, prefetch: int, seed: int, order: list[int], falling: bool
) -> None:
    """Chunks are read in any order, several times; then taken, while new ones use the slots that become free."""
    stores = opened(AdversaryBackend(seed), on_device, on_host, count, prefetch)
    sequence = ChunkedSequence(count, stores, "x")
    for i in range(count):
        sequence.stash(i, chunk(i))
    assert sequence.nbytes == count * CHUNK
    assert sequence.dtype == torch.float32
    order = [i % count for i in order]
    assert [float(x[0, 0, 0]) for x in sequence.read(order)] == order
    order = list(range(count))[:: -1 if falling else 1]
    for i, x in zip(order, sequence.read(order, take=True), strict=True):
        assert bool((x == i).all())
        sequence.stash(i, x + 100)
    order.reverse()
    assert [float(x[0, 7, 7]) for x in sequence.read(order, take=True)] == [i + 100 for i in order]
    stores.flush_all()
    assert sequence.nbytes == 0
    assert {budget.held for budget in stores.tiers.budgets.values()} == {0}
    for budget in stores.tiers.budgets.values():
        assert budget.budget is not None
        assert budget.peak <= budget.budget


def test_prefetch_stops_at_a_chunk_that_was_taken_and_is_not_stashed_again() -> None:
    stores = opened(AdversaryBackend(0), 0, 20, 20, 4)
    sequence = ChunkedSequence(20, stores, "x")
    for i in range(20):
        sequence.stash(i, chunk(i))
    order = [18, 19] * 4
    for step, (i, x) in enumerate(zip(order, sequence.read(order, take=True), strict=True)):
        assert float(x[0, 0, 0]) == i + 10 * (step // 2)
        sequence.stash(i, x + 10)
    assert stores.lanes.traffic["fetch"].moved == 8 * CHUNK


@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_prefetch_bounds_the_bytes_on_the_device(prefetch: int, tmp_path: Path) -> None:
    stores = opened(CpuBackend(tmp_path), 0, 0, 12, prefetch)
    device, disk = stores.tiers.budgets["device"], stores.tiers.budgets["disk"]
    sequence = ChunkedSequence(12, stores, "x")
    for i in range(12):
        sequence.stash(i, chunk(i))
    assert device.peak == max(prefetch - 1, 1) * CHUNK
    assert disk.held == 12 * CHUNK
    stores.flush_all()
    assert device.held == 0
    device.peak = 0
    for _ in sequence.read(range(12), take=True):
        pass
    assert device.peak == (prefetch + 1) * CHUNK  # the chunk before is let go when the next is taken
    traffic = stores.lanes.traffic
    assert traffic["stash"].moved == traffic["fetch"].moved == 12 * CHUNK
    assert all(lane.busy > 0 for lane in traffic.values())


def test_keys_and_values_are_fetched_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetches are issued in the order of use, and while chunks on the device are read, which need no buffer."""
    count, on_device, prefetch = 20, 4, 3
    request = StoreRequest(("k", "v"), ((CHUNK,) * count,) * 2, "x", prefetch + 1 + prefetch - 1, 0, True)
    budgets = {"device": 2 * on_device * CHUNK + request.in_flight_bytes("forward"), "host": None, "disk": 2**20}
    tiers = Tiers(budgets, CpuBackend(tmp_path), prefetch)
    stores = Stores(tiers, tiers.place([request]))
    sequences = [ChunkedSequence(count, stores, name) for name in ("k", "v")]
    for i in range(count):
        for sequence in sequences:
            sequence.stash(i, chunk(i))
    sent: list[tuple[int, int]] = []  # of which sequence, which chunk
    fetch = stores.lanes.fetch

    def recorded(block: StorageBlock, *rest: Any) -> Move:
        sent.append(next((at, s._blocks.index(block)) for at, s in enumerate(sequences) if block in s._blocks))
        return fetch(block, *rest)

    monkeypatch.setattr(stores.lanes, "fetch", recorded)
    readers = [sequence.read(range(count)) for sequence in sequences]
    prefetch_more(readers)
    assert sent == [(0, 4), (1, 4), (0, 5), (1, 5)]  # one is in use, and two are under way
    for i in range(count):
        assert [float(x[0, 0, 0]) for x in read_next(readers)] == [i, i]
        ahead = range(4, min(max(i + prefetch, 4 + prefetch - 1), count))
        assert sent == [(at, number) for number in ahead for at in (0, 1)]
    for reader in readers:
        reader.release()
    assert tiers.budgets["device"].peak <= budgets["device"]


def test_shape_strides_and_dtype_survive_the_disk(tmp_path: Path) -> None:
    """Shape, strides and dtype: kernels then do bitwise the same."""
    stores = opened(CpuBackend(tmp_path), 0, 0, 12, 2)
    sequence = ChunkedSequence(12, stores, "x")
    bf16 = torch.randn(1, 4, 2, 16).to(torch.bfloat16).transpose(1, 2)
    wide = torch.randn(8, 8)[:, ::2]
    fp64 = torch.randn(32).double()
    for i, x in enumerate((bf16, wide, fp64)):
        sequence.stash(i, x)
    for x, y in zip((bf16, wide, fp64), sequence.read(range(3)), strict=True):
        assert torch.equal(x, y)
        assert x.dtype == y.dtype
        assert y.stride() == (x.stride() if x is not wide else (4, 1))


def test_dense_copies_only_tensors_with_gaps() -> None:
    x = torch.randn(2, 3, 4, 5)
    for view in (x, x.transpose(1, 2), x.permute(3, 1, 0, 2), x[:1], x[:, :, :, None], torch.randn(1, 1, 5)):
        assert dense(view) is view
    for view in (x[:, :2], x[..., 1:], x[:, :1].expand(2, 3, 4, 5)):
        assert dense(view).is_contiguous()
        assert torch.equal(dense(view), view)


def test_garbage_collected_stores_release_their_reservation(tmp_path: Path) -> None:
    stores = opened(CpuBackend(tmp_path), 2, 0, 12, 2)
    tiers = stores.tiers
    sequence = ChunkedSequence(12, stores, "x")
    for i in range(12):
        sequence.stash(i, chunk(i))
    del stores, sequence
    tiers.stats()
    assert [budget.held for budget in tiers.budgets.values()] == [0, 0, 0]
    assert tiers.storage("disk").ranges.allocated == 0


def test_outstanding_steps_share_a_budget(tmp_path: Path) -> None:
    request = StoreRequest(("x",), ((CHUNK,) * 4,), "x", 1, 1, True)
    tiers = Tiers({"device": 6 * CHUNK, "host": None, "disk": 2_048}, CpuBackend(tmp_path), 1)
    first = Stores(tiers, tiers.place([request]))
    second = Stores(tiers, tiers.place([request]))
    assert first.blocks("x", 4) == [None] * 4
    assert [block is None for block in second.blocks("x", 4)] == [True, False, False, False]
    with pytest.raises(ValueError, match="a step does not fit"):
        tiers.place([request])
    second.close()
    tiers.place([request])


def test_without_budgets_nothing_moves() -> None:
    stores = resident_stores()
    sequence = ChunkedSequence(2, stores, "anything")
    xs = [chunk(i) for i in range(2)]
    for i in range(2):
        sequence.stash(i, xs[i])
    assert all(x is y for x, y in zip(xs, sequence.read(range(2)), strict=True))
    assert stores.tiers._lanes is None
    assert stores.tiers.budgets["device"].held == 2 * CHUNK


def test_error_in_a_lane_is_raised_in_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stores = opened(CpuBackend(tmp_path), 0, 0, 12, 2)
    sequence = ChunkedSequence(12, stores, "x")
    lanes: Lanes = stores.lanes
    assert lanes is stores.tiers.lanes
    monkeypatch.setattr("os.pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    sequence.stash(0, chunk(0))
    with pytest.raises(RuntimeError, match="No space left"):
        sequence.stash(1, chunk(1))


def test_fetch_waits_for_the_stash_of_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    slab, lanes, x = HostSlab(512), ThreadLanes(), torch.arange(16.0)
    may_write, write = threading.Event(), slab.write

    def write_late(block: StorageBlock, data: torch.Tensor) -> None:
        may_write.wait(10)
        write(block, data)

    monkeypatch.setattr(slab, "write", write_late)
    block, into = StorageBlock(slab, "host", 0, x.nbytes), torch.zeros(16)
    slab.memory.zero_()
    move = lanes.fetch(block, into, lanes.stash(x, block))
    time.sleep(0.05)
    may_write.set()
    lanes.finish(move)
    assert torch.equal(into, x)
