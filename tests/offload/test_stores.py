"""Units, budgets, allocator, placement and storages."""

from __future__ import annotations

import itertools
import os
import stat
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trunkline.offload.allocator import ALIGNMENT, RangeAllocator
from trunkline.offload.placement import StoreRequest, place
from trunkline.offload.stats import TierBudget
from trunkline.offload.storage import HostSlab, ScratchFile, StorageBlock, TierError
from trunkline.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("given_as", "nbytes"),
    [(0, 0), (7, 7), ("7", 7), ("24GiB", 24 * 2**30), ("24 GB", 24 * 10**9), ("1.5mib", 3 * 2**19), (None, None)],
)
def test_parse_bytes(given_as: int | str | None, nbytes: int | None) -> None:
    assert parse_bytes("x", given_as) == nbytes


@pytest.mark.parametrize("given_as", ["", "GiB", "-1", "0.5", "1.5B", -1, "24 gigs", True, 1.5, "1e9"])
def test_parse_bytes_refuses_other_text(given_as: object) -> None:
    with pytest.raises(ValueError, match="device_budget="):
        parse_bytes("device_budget", given_as)  # type: ignore[arg-type]


def test_format_bytes() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, 3 * 2**29, 5 * 2**40)] == [
        "0 B", "1023 B", "1.0 KiB", "1.5 GiB", "5.0 TiB",
    ]  # fmt: skip


def test_tier_budget_asserts_its_limit() -> None:
    budget = TierBudget("device", 10)
    budget.acquire(6)
    budget.acquire(4)
    budget.release(5)
    assert (budget.held, budget.peak) == (5, 10)
    with pytest.raises(AssertionError):
        budget.acquire(6)
    with pytest.raises(AssertionError):
        TierBudget("device").release(1)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5_000)), max_size=60))
def test_ranges_never_overlap_and_nothing_is_lost(actions: list[tuple[bool, int]]) -> None:
    ranges = RangeAllocator(40_000)
    taken: dict[int, int] = {}
    for allocate, number in actions:
        if allocate:
            try:
                start = ranges.allocate(number)
            except MemoryError:
                continue
            taken[start] = number
        elif taken:
            start = sorted(taken)[number % len(taken)]
            del taken[start]
            ranges.free(start)
        ordered = sorted(taken.items())
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(ordered))
        assert all(start % ALIGNMENT == 0 and start + n <= 40_000 for start, n in ordered)
        assert ranges.allocated == sum(RangeAllocator.round_up(n) for n in taken.values())
    for start in list(taken):
        ranges.free(start)
    assert ranges.allocate(40_000 // ALIGNMENT * ALIGNMENT) == 0  # one whole free range again


def test_ranges_take_the_smallest_that_fits() -> None:
    ranges = RangeAllocator(10 * ALIGNMENT)
    a, b, c, d = (ranges.allocate(n * ALIGNMENT) for n in (3, 1, 2, 1))
    ranges.free(a)
    ranges.free(c)
    assert ranges.allocate(2 * ALIGNMENT) == c
    assert ranges.allocate(ALIGNMENT) == a
    assert {b, d} == {3 * ALIGNMENT, 6 * ALIGNMENT}


sizes = st.lists(st.integers(1, 4_000), min_size=1, max_size=6)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(sizes, st.integers(1, 2), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=5),
    st.integers(0, 60_000),
    st.one_of(st.none(), st.integers(0, 40_000)),
    st.one_of(st.none(), st.integers(0, 60_000)),
    st.integers(0, 5),
    st.integers(0, 20_000),
)
def test_placements_keep_to_their_budgets(
    asked: list[tuple[list[int], int, int, int]], device: int, host: int | None, disk: int | None, num_live: int,
    reserved: int,
) -> None:  # fmt: skip
    requests = [
        StoreRequest(
            tuple(f"{i} {j}" for j in range(count)),
            (tuple(chunks),) * count,
            f"g{i % 2}",
            forward,
            backward,
            i >= num_live,
        )
        for i, (chunks, count, forward, backward) in enumerate(asked)
    ]
    try:
        room = {"device": device, "host": host, "disk": disk}
        placement = place(requests, room, reserved=min(reserved, device))
    except ValueError as error:
        assert "device_budget" in str(error)  # noqa: PT017
        return
    held = {"device": 0, "host": 0, "disk": 0}
    seen: dict[str, list[tuple[int, int]]] = {"host": [], "disk": []}
    for request in requests:
        for name, chunks in zip(request.names, request.sizes, strict=True):
            for (tier, offset), size in zip(placement.places[name], chunks, strict=True):
                held[tier] += size
                if tier != "device":
                    seen[tier].append((offset, offset + size))
        places = [[tier == "device" for tier, _ in placement.places[name]] for name in request.names]
        assert all(each == places[0] for each in places)  # together
        assert places[0] == sorted(places[0], reverse=True)  # the first chunks stay
    assert held["device"] <= placement.transient + placement.persistent
    assert max(placement.transient, min(reserved, device)) + placement.persistent <= device
    assert held["host"] <= placement.offloaded.get("host", 0) <= (host or 0)
    assert held["disk"] <= placement.offloaded.get("disk", 0) <= (disk or 0)
    for spans in seen.values():
        spans.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


def test_earlier_requests_stay_on_the_device_and_need_no_buffers() -> None:
    first = StoreRequest(("k", "v"), ((100, 100), (100, 100)), "kv", 3, 3, False)
    second = StoreRequest(("x",), ((512, 512, 100),), "x", 2, 1, False)
    room = {"device": 400 + 2 * 512, "host": 600, "disk": 10_000}
    placement = place([first, second], room)
    assert placement.places["k"] == placement.places["v"] == [("device", 0)] * 2
    assert placement.places["x"] == [("host", 0), ("disk", 0), ("disk", 512)]
    everything = place([first, second], {**room, "device": 400 + 1124})
    assert {tier for places in everything.places.values() for tier, _ in places} == {"device"}


def test_placement_names_the_shortfall_and_the_fix() -> None:
    request = StoreRequest(("x",), ((1_000,) * 4,), "x", 2, 2, False)
    with pytest.raises(ValueError, match="use a smaller chunk_size, or raise device_budget"):
        place([request], {"device": 1_999, "host": None, "disk": 10**6})
    with pytest.raises(ValueError, match=r"has no room for 4\.0 KiB of it, .* disk_budget by 3\.0 KiB, or use"):
        place([request], {"device": 2_000, "host": 2_000, "disk": 1_023})
    with pytest.raises(
        ValueError, match=r"there is no other tier: raise device_budget by 4\.0 KiB, set offload_dir to a folder"
    ):
        place([request], {"device": 2_000, "host": None, "disk": None})


def test_scratch_file_leaves_no_file_behind(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path, 10_000)
    assert list(tmp_path.iterdir()) == []
    assert stat.S_IMODE(os.fstat(file._descriptor).st_mode) == 0o600
    block, other = StorageBlock(file, "disk", 512, 1_000), StorageBlock(file, "disk", 2_048, 10)
    data = torch.arange(1_000).to(torch.uint8)
    file.write(block, data)
    file.write(other, data[:10])
    into = torch.empty_like(data)
    file.read(block, into)
    assert torch.equal(into, data)
    descriptor = file._descriptor
    del file, block, other
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)


def test_corrupted_bytes_are_noticed(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path, 10_000)
    block, data = StorageBlock(file, "disk", 0, 100), torch.ones(100, dtype=torch.uint8)
    file.write(block, data)
    os.pwrite(file._descriptor, b"\0", 50)
    with pytest.raises(TierError, match=f"scratch file in {tmp_path} returned other bytes"):
        file.read(block, torch.empty_like(data))
    os.ftruncate(file._descriptor, 60)
    with pytest.raises(TierError, match="40 B too short"):
        file.read(block, torch.empty_like(data))


def test_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = ScratchFile(tmp_path, 10_000)

    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(TierError, match=r"writing 100 B to the scratch file in .* failed: No space left"):
        file.write(StorageBlock(file, "disk", 0, 100), torch.ones(100, dtype=torch.uint8))
    with pytest.raises(TierError, match=r"needs 16384.* and .* are free"):
        file.preallocate(0, 2**54)


def test_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"offload_dir=.*No such file or directory"):
        ScratchFile(tmp_path / "nowhere", 1)


def test_host_slab_returns_what_was_written() -> None:
    slab = HostSlab(1_000)
    block, data = StorageBlock(slab, "host", 512, 4), torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    slab.write(block, data)
    into = torch.empty_like(data)
    slab.read(block, into)
    assert torch.equal(into, data)


def test_requests_share_buffers_within_a_group_only() -> None:
    def requests(second_group: str) -> list[StoreRequest]:
        sizes = ((1_000,) * 4,)
        return [StoreRequest((name,), sizes, group, 2, 2, False) for name, group in (("x", "x"), ("y", second_group))]

    room = {"device": 3_999, "host": None, "disk": 10**6}
    assert place(requests("x"), room).transient <= 3_999
    with pytest.raises(ValueError, match=r"the chunks in flight take 3\.9 KiB"):
        place(requests("y"), room)
