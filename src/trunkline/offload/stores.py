"""The tiers of a streamed model, and the part of them that one run uses."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from trunkline.offload import stats
from trunkline.offload.lanes.base import Lanes, Move
from trunkline.offload.placement import FitHints, Placement, StoreRequest, place
from trunkline.offload.stats import Stats, TierBudget
from trunkline.offload.storage import ScratchFile, Storage, StorageBlock
from trunkline.units import TierName

IN_FLIGHT = "on its way"  # what is in no store at the moment
TierObserver = Callable[[TierName, str, int], None]  # tier, kind of store, bytes in (or out, where negative)


class Backend(Protocol):
    """What carries tensors out of the device on one kind of machine."""

    def lanes(self) -> Lanes:
        """New lanes."""
        ...

    def storage(self, tier: TierName, nbytes: int) -> Storage:
        """A new storage of a tier beyond the device."""
        ...


@dataclass(slots=True)
class Reservation:
    """What a run holds, apart from the run itself: it can be given back when the run is gone."""

    held: Counter[TierName] = field(default_factory=Counter)
    promised: dict[TierName, int] = field(default_factory=dict)  # between forward and backward
    transient: int = 0  # on the device, while the run goes on
    starts: dict[TierName, int] = field(default_factory=dict)  # of its range in each storage


class Tiers:
    """Budgets, accounts, and the storages beyond the device; opened when a run first needs them.

    Args:
        budgets: bytes of each tier; None is no limit on the device, and no such tier elsewhere.
        backend: makes lanes and storages; None where the device alone is used.
        prefetch: tensors of one store that are on their way or in use at a time.
    """

    def __init__(self, budgets: Mapping[TierName, int | None], backend: Backend | None, prefetch: int) -> None:
        self.budgets = {tier: TierBudget(tier, budget) for tier, budget in budgets.items()}
        self.prefetch = prefetch
        self.bytes_per_token: dict[Hashable, Any] = {}  # what runs of one kind were found to need, by whoever asks
        # Runs that were dropped without a backward. Their finalizers may run anywhere, in a lane's thread too, so they
        # only leave a note here.
        self.forgotten: deque[Reservation] = deque()
        self._runs: list[Reservation] = []
        # Of estimates: who is told of all that is held, and what was decided beforehand of head groups and places.
        self.observer: TierObserver | None = None
        self.fixed_placement: tuple[int, Placement] | None = None
        self._backend = backend
        self._lanes: Lanes | None = None
        self._storages: dict[TierName, Storage] = {}

    @property
    def limited(self) -> bool:
        """Whether anything may have to leave the device."""
        return self.budgets["device"].budget is not None

    @property
    def lanes(self) -> Lanes:
        """The lanes, made when first needed."""
        if self._lanes is None:
            assert self._backend is not None
            self._lanes = self._backend.lanes()
        return self._lanes

    def place(
        self, requests: Sequence[StoreRequest], advice: FitHints | None = None, *, headroom: int = 0
    ) -> Placement:
        """Place the stores of a run, beside those of runs still outstanding.

        Args:
            requests: for the stores.
            advice: for the messages.
            headroom: bytes of the device to leave free for later steps.

        Raises:
            ValueError: they do not fit.
        """
        room = {tier: self.unreserved_bytes(tier) for tier in self.budgets}
        for tier in room:
            if tier in self._storages:  # a run's range is one piece
                room[tier] = min(room[tier] or 0, self._storages[tier].ranges.largest)
        reserved = max((run.transient for run in self._runs), default=0)
        reserved = max(reserved, headroom)
        try:
            return place(requests, room, reserved=reserved, advice=advice or FitHints())
        except ValueError as error:
            if not self._runs:
                raise
            raise ValueError(
                f"{error} ({len(self._runs)} earlier forwards still hold what their backward needs or their cache "
                "keeps; losses that are kept and not used do so too: evaluate under torch.no_grad().)"
            ) from None

    def unreserved_bytes(self, tier: TierName) -> int | None:
        """Bytes of a tier that no run keeps, or holds now: what one that goes on may have; None is no limit."""
        self.release_abandoned()
        budget = self.budgets[tier].budget
        persistent = sum(max(run.promised.get(tier, 0), run.held[tier]) for run in self._runs)
        return None if budget is None else budget - persistent

    def reserve(self, placement: Placement, record: Reservation) -> None:
        """Take what a placement needs, for as long as the record is not given back.

        Raises:
            TierError: there is no room on the disk, or host memory cannot be pinned.
        """
        self._runs.append(record)
        try:
            for tier, total in placement.offloaded.items():
                storage = self.storage(tier)
                record.starts[tier] = start = storage.ranges.allocate(total)
                if isinstance(storage, ScratchFile):
                    storage.reserve(start, total)
                    self.lanes.prepare(placement.largest)
        except BaseException:
            self.give_back(record)
            raise
        record.transient = placement.transient
        record.promised = {"device": placement.persistent, **placement.offloaded}

    def give_back(self, record: Reservation) -> None:
        """Let go of what a run still holds: nothing after a whole backward, something after an error."""
        if self._lanes is not None:
            self._lanes.drain()
        for tier, nbytes in record.held.items():
            self.budgets[tier].release(nbytes)
        record.held.clear()
        for tier, start in record.starts.items():
            self._storages[tier].ranges.free(start)
        if any(run is record for run in self._runs):
            self._runs = [run for run in self._runs if run is not record]

    def release_abandoned(self) -> None:
        """Let go of what runs hold that nobody can reach any more."""
        while self.forgotten:
            self.give_back(self.forgotten.popleft())

    def stats(self) -> Stats:
        """What was held and moved since this was last asked."""
        self.release_abandoned()
        return stats.take(self.budgets, self._lanes)

    def storage(self, tier: TierName) -> Storage:
        """The storage of a tier beyond the device, made when first needed."""
        if tier not in self._storages:
            budget = self.budgets[tier].budget
            assert budget is not None
            assert self._backend is not None
            self._storages[tier] = self._backend.storage(tier, budget)
        return self._storages[tier]


def resident_stores() -> Stores:
    """Stores that leave everything on the device."""
    return Stores(Tiers({"device": None}, None, prefetch=1))


class Stores:
    """What one run holds in the tiers, until it is closed or forgotten.

    Args:
        tiers: of the model.
        placement: of the run's stores; None leaves everything on the device.

    Raises:
        TierError: there is no room on the disk, or host memory cannot be pinned.
    """

    def __init__(self, tiers: Tiers, placement: Placement | None = None) -> None:
        self.tiers = tiers
        self.placement = placement
        self.prefetch = tiers.prefetch
        self._record = Reservation()
        self._stashing: defaultdict[str, deque[Move]] = defaultdict(deque)
        if placement is not None:
            tiers.reserve(placement, self._record)
        self._finalizer = weakref.finalize(self, tiers.forgotten.append, self._record)
        self._finalizer.atexit = False

    def close(self) -> None:
        """Give back what the run still holds; from here on nothing is counted. Twice is once."""
        if self._finalizer.detach() is not None:
            self.tiers.give_back(self._record)

    def limit_transient(self, nbytes: int) -> None:
        """The run is over, and what it has kept stays: from now on it takes so many bytes of the device beside that."""
        self._record.transient = min(self._record.transient, nbytes)

    @contextlib.contextmanager
    def close_on_error(self) -> Iterator[None]:
        """Give everything back if what runs inside fails."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    @property
    def held(self) -> dict[TierName, int]:
        """Bytes held now in each tier, where there are any."""
        return {tier: nbytes for tier, nbytes in self._record.held.items() if nbytes}

    @property
    def lanes(self) -> Lanes:
        """Those of the model."""
        return self.tiers.lanes

    def blocks(self, name: str, num_chunks: int) -> list[StorageBlock | None]:
        """The block of each chunk of a store, None for those that rest on the device."""
        if self.placement is None:
            return [None] * num_chunks
        places, sizes = self.placement.places[name], self.placement.sizes[name]
        starts, blocks = self._record.starts, list[StorageBlock | None]()
        for (tier, offset), size in zip(places, sizes, strict=True):
            away = None if tier is None or tier == "device" else tier
            blocks.append(away and StorageBlock(self.tiers.storage(away), away, starts[away] + offset, size))
        return blocks

    def num_resident(self, names: Sequence[str], num_chunks: int) -> int:
        """How many chunks, from the first, rest on the device in all of these stores."""
        if self.placement is None:
            return num_chunks
        return min(self.placement.num_on_device(name) for name in names if name in self.placement.places)

    def stash(self, kind: str, x: Tensor, block: StorageBlock) -> Move:
        """Send a dense tensor to its block; so many of a kind are on their way at most as `prefetch` says."""
        if x.nbytes > block.capacity:
            raise ValueError(
                f"a chunk has {x.nbytes:,} bytes and was to have {block.capacity:,}: this model computes in another "
                "shape or dtype than one token showed. Leave device_budget out."
            )
        self.settle(kind, max(self.prefetch - 2, 0))
        self.acquire("device", x.nbytes)
        self.acquire(block.tier, x.nbytes, kind)
        move = self.lanes.stash(x, block)
        self._stashing[kind].append(move)
        if self.prefetch == 1:
            self.settle(kind)
        return move

    def settle(self, kind: str, remaining: int = 0) -> None:
        """Let go of tensors that have been copied out, but for so many of the latest."""
        moves = self._stashing[kind]
        while len(moves) > remaining:
            move = moves.popleft()
            self.lanes.finish(move)
            self.release("device", move.nbytes)

    def flush_all(self) -> None:
        """Let go of all tensors that have been copied out."""
        for kind in self._stashing:
            self.settle(kind)

    def acquire(self, tier: TierName, nbytes: int, kind: str = IN_FLIGHT) -> None:
        """Count bytes in.

        Args:
            tier: where.
            nbytes: how many.
            kind: of the store that they are in, for whoever wants to know.
        """
        if self._finalizer.alive:
            self._record.held[tier] += nbytes
            self.tiers.budgets[tier].acquire(nbytes)
            if self.tiers.observer is not None:
                self.tiers.observer(tier, kind, nbytes)

    def release(self, tier: TierName, nbytes: int, kind: str = IN_FLIGHT) -> None:
        """Count bytes out; see `acquire`."""
        if self._finalizer.alive:
            self._record.held[tier] -= nbytes
            self.tiers.budgets[tier].release(nbytes)
            if self.tiers.observer is not None:
                self.tiers.observer(tier, kind, -nbytes)
