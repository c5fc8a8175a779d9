"""Placement: the tier of every chunk of every store, chosen before the first sweep, from sizes alone.

All bytes that a step keeps are known beforehand. So no chunk is ever evicted to make room, and no tier can run full
midway. Stores are placed in the order of their requests, chunk by chunk from the first, into the first tier with room:
keys and values of early chunks, which every later chunk reads, are the last to leave the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trunkline.offload.allocator import RangeAllocator
from trunkline.units import OFFLOAD_TIERS, TierName, format_bytes


@dataclass(frozen=True, slots=True)
class StoreRequest:
    """Request to place stores together: for each chunk index all of them are on the device, or all offloaded.

    Attributes:
        names: names of the stores.
        sizes: this rank's bytes of each chunk, for each store; 0 where a store never has that chunk.
        group: requests of one group are read and written one at a time, so that they share buffers for moves.
        forward: chunks of each store in use or in flight on the device at a time during forward, if the store is
            offloaded.
        backward: the same during backward.
        persistent: whether the stores live from forward to backward, while other steps may run; if not, they are
            transient, within one step.
        allow_resident: whether chunks may rest on the device at all.
        resident_only: names of stores that only hold chunks on the device: a chunk that is offloaded has no place in
            them.
    """

    names: tuple[str, ...]
    sizes: tuple[tuple[int, ...], ...]
    group: str
    forward: int
    backward: int
    persistent: bool
    allow_resident: bool = True
    resident_only: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all chunks."""
        return sum(size for sizes in self.sizes for size in sizes)

    def in_flight_bytes(self, phase: str) -> int:
        """Return the bytes of the buffers that moves need in a phase, `forward` or `backward`."""
        return getattr(self, phase) * sum(max(sizes) for sizes in self.sizes)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class FitHints:
    """Fixes to name when a step does not fit.

    Attributes:
        device: settings that limit the device tier.
        smaller: settings that make chunks in flight smaller.
        less: settings with which there is less to keep.
    """

    device: str = "device_budget"
    smaller: str = "a smaller chunk_size"
    less: str = "a shorter input"


@dataclass(frozen=True, slots=True)
class Placement:
    """Tiers of all chunks of a step on this rank, and the bytes to reserve for them.

    Attributes:
        places: for each store, for each chunk: (tier, offset within the step's range of that tier). The offset is 0 on
            the device; the tier is None where the store is not used for that chunk.
        sizes: for each store, bytes of each chunk.
        transient: most bytes on the device during the step beside the persistent ones, chunks in flight included.
        persistent: bytes on the device between forward and backward.
        offloaded: bytes of the step's range in each tier beyond the device that is used.
        largest: bytes of the largest chunk of any store that may be offloaded.
    """

    places: Mapping[str, Sequence[tuple[TierName | None, int]]]
    sizes: Mapping[str, Sequence[int]]
    transient: int
    persistent: int
    offloaded: Mapping[TierName, int]
    largest: int

    def num_on_device(self, name: str) -> int:
        """Return how many chunks of a store, counted from the first, rest on the device."""
        offloaded = (i for i, (tier, _) in enumerate(self.places[name]) if tier != "device")
        return next(offloaded, len(self.places[name]))


def place(
    requests: Sequence[StoreRequest],
    room: Mapping[TierName, int | None],
    *,
    reserved: int = 0,
    hints: FitHints = FitHints(),
) -> Placement:
    """Choose a tier for every chunk.

    Args:
        requests: in order of priority: earlier ones stay on the device first. Persistent requests come last.
        room: this rank's unreserved bytes of each tier. The device must have a limit; None for another tier means that
            there is no such tier.
        reserved: transient bytes of the device that other outstanding steps need. Steps run one at a time, so that
            all of them share one such reserve.
        hints: fixes for the messages.

    Returns:
        The placement. In each request the chunks on the device are the first ones.

    Raises:
        ValueError: the stores do not fit, or the device has no room for the chunks in flight.
    """
    device = room["device"]
    assert device is not None
    # Chunks that rest on the device need no buffers for moves, and fewer buffers leave more room to rest there. Find
    # the most requests, from the first, that fit as a whole beside the buffers of all others.
    most = next((i for i, request in enumerate(requests) if not request.allow_resident), len(requests))
    for num_whole in reversed(range(most + 1)):
        in_flight = _in_flight_bytes(requests[num_whole:])
        transient = in_flight + sum(request.nbytes for request in requests[:num_whole] if not request.persistent)
        persistent = sum(request.nbytes for request in requests[:num_whole] if request.persistent)
        if max(transient, reserved) + persistent <= device:
            return _place_in_order(requests, room, in_flight, reserved, hints)
    raise ValueError(
        f"{hints.device} leaves {format_bytes(device)}, but the chunks in flight take {format_bytes(in_flight)}: use "
        f"{hints.smaller}, or raise {hints.device}."
    )


def _in_flight_bytes(requests: Sequence[StoreRequest]) -> int:
    """Return the bytes of all buffers for moves, in the phase that needs more."""
    totals = []
    for phase in ("forward", "backward"):
        groups: dict[str, int] = {}
        for request in requests:
            groups[request.group] = max(groups.get(request.group, 0), request.in_flight_bytes(phase))
        totals.append(sum(groups.values()))
    return max(totals)


def _place_in_order(
    requests: Sequence[StoreRequest],
    room: Mapping[TierName, int | None],
    in_flight: int,
    reserved: int,
    hints: FitHints,
) -> Placement:
    # Invariant: max(transient, reserved) + persistent <= room["device"], after every chunk.
    transient, persistent, missing, device = in_flight, 0, 0, room["device"]
    assert device is not None
    offloaded: dict[TierName, int] = dict.fromkeys(OFFLOAD_TIERS, 0)
    places: dict[str, list[tuple[TierName | None, int]]] = {name: [] for request in requests for name in request.names}
    for request in requests:
        # Once a chunk has left the device all later ones of the request do: those on the device are the first ones.
        resident = request.allow_resident
        for sizes in zip(*request.sizes, strict=True):
            nbytes = sum(sizes)
            added = (0, nbytes) if request.persistent else (nbytes, 0)
            resident = resident and max(transient + added[0], reserved) + persistent + added[1] <= device
            if resident:
                transient, persistent = transient + added[0], persistent + added[1]
            for name, size in zip(request.names, sizes, strict=True):
                if resident or size == 0 or name in request.resident_only:
                    places[name].append(("device" if resident or size == 0 else None, 0))
                    continue
                # Rounded as the allocator does, so that blocks begin at multiples of its alignment within the range.
                size = RangeAllocator.round_up(size)
                tier = next((tier for tier in offloaded if offloaded[tier] + size <= (room[tier] or 0)), None)
                if tier is None:
                    missing += size
                    continue
                places[name].append((tier, offloaded[tier]))
                offloaded[tier] += size
    if missing:
        raise ValueError(_does_not_fit(sum(offloaded.values()) + missing, missing, room, hints))
    moved = [request for request in requests if request.names != request.resident_only]
    largest = max((size for request in moved for sizes in request.sizes for size in sizes), default=0)
    all_sizes = {name: sizes for r in requests for name, sizes in zip(r.names, r.sizes, strict=True)}
    used = {tier: total for tier, total in offloaded.items() if total}
    return Placement(places, all_sizes, transient, persistent, used, largest)


def _does_not_fit(wanted: int, missing: int, room: Mapping[TierName, int | None], hints: FitHints) -> str:
    tiers = [tier for tier in OFFLOAD_TIERS if room[tier] is not None]
    leave = " and ".join(f"{tier}_budget leaves {format_bytes(room[tier] or 0)}" for tier in tiers)
    budgets = " or ".join([hints.device, *(f"{tier}_budget" for tier in tiers)])
    folder = "" if "disk" in tiers else ", set offload_dir to a folder"
    return (
        f"a step does not fit: {hints.device} has no room for {format_bytes(wanted)} of it, and "
        f"{leave or 'there is no other tier'}: raise {budgets} by {format_bytes(missing)}{folder}, or use {hints.less}."
    )
