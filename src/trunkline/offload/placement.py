"""Which chunk of which store rests in which tier: decided before the first sweep, from sizes alone.

All that a step keeps is known beforehand, so nothing is moved to make room and nothing can run full on the way. Stores
are placed in the order of their requests and chunk by chunk from the first, into the first tier with room: the keys and
values of early chunks, which every later chunk reads, are the last to leave the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trunkline.offload.allocator import RangeAllocator
from trunkline.units import BEYOND, TierName, in_units


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
    kept: bool
    stays: bool = True
    resident_only: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all chunks."""
        return sum(size for sizes in self.sizes for size in sizes)

    def transit(self, phase: str) -> int:
        """Bytes of the buffers in which its chunks are under way."""
        return getattr(self, phase) * sum(max(sizes) for sizes in self.sizes)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Advice:
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
        live: most bytes on the device while the run goes on, beside those kept, with what is under way.
        kept: bytes on the device between forward and backward.
        beyond: bytes of the range that the run needs in each tier beyond the device.
        largest: bytes of the largest chunk of all that may move.
    """

    places: Mapping[str, Sequence[tuple[TierName | None, int]]]
    sizes: Mapping[str, Sequence[int]]
    live: int
    kept: int
    beyond: Mapping[TierName, int]
    largest: int

    def on_device(self, name: str) -> int:
        """How many chunks of a store, from the first, rest on the device."""
        beyond = (i for i, (tier, _) in enumerate(self.places[name]) if tier != "device")
        return next(beyond, len(self.places[name]))


def place(
    requests: Sequence[StoreRequest],
    room: Mapping[TierName, int | None],
    *,
    reserved: int = 0,
    advice: Advice = Advice(),
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
    most = next((i for i, request in enumerate(requests) if not request.stays), len(requests))
    for staying in reversed(range(most + 1)):
        transit = _transit(requests[staying:])
        live = transit + sum(request.nbytes for request in requests[:staying] if not request.kept)
        kept = sum(request.nbytes for request in requests[:staying] if request.kept)
        if max(live, reserved) + kept <= device:
            return _greedy(requests, room, transit, reserved, advice)
    raise ValueError(
        f"{advice.device} leaves {in_units(device)}, but the chunks under way take {in_units(transit)}: use "
        f"{advice.smaller}, or raise {advice.device}."
    )


def _transit(requests: Sequence[StoreRequest]) -> int:
    most = {"forward": 0, "backward": 0}
    for phase in most:
        groups: dict[str, int] = {}
        for request in requests:
            groups[request.group] = max(groups.get(request.group, 0), request.transit(phase))
        most[phase] = sum(groups.values())
    return max(most.values())


def _greedy(
    requests: Sequence[StoreRequest], room: Mapping[TierName, int | None], transit: int, reserved: int, advice: Advice
) -> Placement:
    live, kept, missing, device = transit, 0, 0, room["device"]
    assert device is not None
    beyond: dict[TierName, int] = dict.fromkeys(BEYOND, 0)
    places: dict[str, list[tuple[TierName | None, int]]] = {name: [] for request in requests for name in request.names}
    for request in requests:
        stays = request.stays
        for sizes in zip(*request.sizes, strict=True):
            more = live if request.kept else live + sum(sizes)
            stays = stays and max(more, reserved) + kept + (sum(sizes) if request.kept else 0) <= device
            live += sum(sizes) if stays and not request.kept else 0
            kept += sum(sizes) if stays and request.kept else 0
            for name, size in zip(request.names, sizes, strict=True):
                if stays or size == 0 or name in request.resident_only:
                    places[name].append(("device" if stays or size == 0 else None, 0))
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
    return Placement(places, all_sizes, live, kept, {tier: total for tier, total in beyond.items() if total}, largest)


def _does_not_fit(wanted: int, missing: int, room: Mapping[TierName, int | None], advice: Advice) -> str:
    tiers = [tier for tier in BEYOND if room[tier] is not None]
    leave = " and ".join(f"{tier}_budget leaves {in_units(room[tier] or 0)}" for tier in tiers)
    budgets = " or ".join([advice.device, *(f"{tier}_budget" for tier in tiers)])
    folder = "" if "disk" in tiers else ", set offload_dir to a folder"
    return (
        f"a step does not fit: {advice.device} has no room for {in_units(wanted)} of it, and "
        f"{leave or 'there is no other tier'}: raise {budgets} by {in_units(missing)}{folder}, or use {advice.less}."
    )
