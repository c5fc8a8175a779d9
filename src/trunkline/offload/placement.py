"""Which chunk of which store rests in which tier: decided before the first sweep, from sizes alone.

All that a step keeps is known beforehand, so nothing is moved to make room and nothing can run full on the way. Stores
are placed in the order of their requests and chunk by chunk from the first, into the first tier with room: the keys and
values of early chunks, which every later chunk reads, are the last to leave the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trunkline.offload.allocator import RangeAllocator
from trunkline.units import OFFLOAD_TIERS, TierName, format_bytes


@dataclass(frozen=True, slots=True)
class StoreRequest:
    """Stores that are placed together, chunk by chunk: all in the device, or each beyond it.

    Attributes:
        names: of the stores.
        sizes: bytes of each chunk, for each store; 0 where a store never has that chunk.
        group: requests of one group are read and written one at a time: their moves share buffers.
        forward: buffers on the device that these moves take during the forward, for each store.
        backward: the same, during the backward.
        kept: whether they hold anything between the forward and its backward, while other runs may go on.
        stays: whether they may rest on the device at all.
        resident_only: names of those that are not used for the chunks that have no room on the device.
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
        """Bytes of the buffers in which its chunks are under way."""
        return getattr(self, phase) * sum(max(sizes) for sizes in self.sizes)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class FitHints:
    """What the messages say of the settings that led to the requests.

    Attributes:
        device: the setting that is the device's room.
        smaller: what makes the chunks under way smaller.
        less: what there is less to keep with.
    """

    device: str = "device_budget"
    smaller: str = "a smaller chunk_size"
    less: str = "a shorter input"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where everything rests.

    Attributes:
        places: for each store and chunk the tier, and the offset within the run's range of it (0 on the device); no
            tier where it is not used.
        sizes: for each store and chunk its bytes.
        transient: most bytes on the device while the run goes on, beside those kept, with what is under way.
        kept: bytes on the device between forward and backward.
        offloaded: bytes of the range that the run needs in each tier beyond the device.
        largest: bytes of the largest chunk of all that may move.
    """

    places: Mapping[str, Sequence[tuple[TierName | None, int]]]
    sizes: Mapping[str, Sequence[int]]
    transient: int
    persistent: int
    offloaded: Mapping[TierName, int]
    largest: int

    def num_on_device(self, name: str) -> int:
        """How many chunks of a store, from the first, rest on the device."""
        beyond = (i for i, (tier, _) in enumerate(self.places[name]) if tier != "device")
        return next(beyond, len(self.places[name]))


def place(
    requests: Sequence[StoreRequest],
    room: Mapping[TierName, int | None],
    *,
    reserved: int = 0,
    advice: FitHints = FitHints(),
) -> Placement:
    """Place stores.

    Args:
        requests: in the order in which they may choose, those that are kept after all others.
        room: bytes left in each tier; None is no limit on the device, and no such tier elsewhere.
        reserved: bytes of the device's room that other runs take while they go on, one run at a time.
        advice: for the messages.

    Raises:
        ValueError: they do not fit, or the device has no room for what is under way.
    """
    device = room["device"]
    assert device is not None
    # As many of the first requests as fit altogether are never under way, and need no buffers.
    most = next((i for i, request in enumerate(requests) if not request.allow_resident), len(requests))
    for staying in reversed(range(most + 1)):
        transit = _in_flight_bytes(requests[staying:])
        live = transit + sum(request.nbytes for request in requests[:staying] if not request.persistent)
        persistent = sum(request.nbytes for request in requests[:staying] if request.persistent)
        if max(live, reserved) + persistent <= device:
            return _greedy(requests, room, transit, reserved, advice)
    raise ValueError(
        f"{advice.device} leaves {format_bytes(device)}, but the chunks under way take {format_bytes(transit)}: use "
        f"{advice.smaller}, or raise {advice.device}."
    )


def _in_flight_bytes(requests: Sequence[StoreRequest]) -> int:
    most = {"forward": 0, "backward": 0}
    for phase in most:
        groups: dict[str, int] = {}
        for request in requests:
            groups[request.group] = max(groups.get(request.group, 0), request.in_flight_bytes(phase))
        most[phase] = sum(groups.values())
    return max(most.values())


def _greedy(
    requests: Sequence[StoreRequest], room: Mapping[TierName, int | None], transit: int, reserved: int, advice: FitHints
) -> Placement:
    live, persistent, missing, device = transit, 0, 0, room["device"]
    assert device is not None
    beyond: dict[TierName, int] = dict.fromkeys(OFFLOAD_TIERS, 0)
    places: dict[str, list[tuple[TierName | None, int]]] = {name: [] for request in requests for name in request.names}
    for request in requests:
        allow_resident = request.allow_resident
        for sizes in zip(*request.sizes, strict=True):
            more = live if request.persistent else live + sum(sizes)
            allow_resident = (
                allow_resident
                and max(more, reserved) + persistent + (sum(sizes) if request.persistent else 0) <= device
            )
            live += sum(sizes) if allow_resident and not request.persistent else 0
            persistent += sum(sizes) if allow_resident and request.persistent else 0
            for name, size in zip(request.names, sizes, strict=True):
                if allow_resident or size == 0 or name in request.resident_only:
                    places[name].append(("device" if allow_resident or size == 0 else None, 0))
                    continue
                size = RangeAllocator.rounded(size)
                tier = next((tier for tier in beyond if beyond[tier] + size <= (room[tier] or 0)), None)
                if tier is None:
                    missing += size
                    continue
                places[name].append((tier, beyond[tier]))
                beyond[tier] += size
    if missing:
        raise ValueError(_does_not_fit(sum(beyond.values()) + missing, missing, room, advice))
    moved = [request for request in requests if request.names != request.resident_only]
    largest = max((size for request in moved for sizes in request.sizes for size in sizes), default=0)
    all_sizes = {name: sizes for r in requests for name, sizes in zip(r.names, r.sizes, strict=True)}
    return Placement(
        places, all_sizes, live, persistent, {tier: total for tier, total in beyond.items() if total}, largest
    )


def _does_not_fit(wanted: int, missing: int, room: Mapping[TierName, int | None], advice: FitHints) -> str:
    tiers = [tier for tier in OFFLOAD_TIERS if room[tier] is not None]
    leave = " and ".join(f"{tier}_budget leaves {format_bytes(room[tier] or 0)}" for tier in tiers)
    budgets = " or ".join([advice.device, *(f"{tier}_budget" for tier in tiers)])
    folder = "" if "disk" in tiers else ", set offload_dir to a folder"
    return (
        f"a step does not fit: {advice.device} has no room for {format_bytes(wanted)} of it, and "
        f"{leave or 'there is no other tier'}: raise {budgets} by {format_bytes(missing)}{folder}, or "
        f"use {advice.less}."
    )
