"""Tiers of a streamed model, and the stores that one step keeps in them."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from trunkline.offload.lanes.base import Lanes, Move
from trunkline.offload.placement import FitHints, Placement, StoreRequest, place
from trunkline.offload.stats import Stats, TierBudget, take_stats
from trunkline.offload.storage import ScratchFile, Storage, StorageBlock
from trunkline.units import TierName

IN_FLIGHT = "in flight"  # kind of a tensor that is in no store: it is being moved, or a reader has handed it out
TierObserver = Callable[[TierName, str, int], None]  # tier, kind of store, bytes added (negative: removed)


class Backend(Protocol):
    """Factory of lanes and storages for one kind of machine."""

    def lanes(self) -> Lanes:
        """Create lanes."""
        ...

    def storage(self, tier: TierName, nbytes: int) -> Storage:
        """Create the storage of `nbytes` bytes for a tier beyond the device (host or disk).

        Raises:
            TierError: host memory cannot be pinned.
            ValueError: the scratch file cannot be created.
        """
        ...


@dataclass(slots=True)
class Reservation:
    """Bytes that one step reserves and holds on this rank.

    It is kept apart from `Stores`, so that it can be released after they were garbage-collected.

    Attributes:
        held: bytes held now, by tier.
        persistent: bytes reserved until the release, by tier.
        transient: bytes reserved on the device beside these; steps run one at a time and share them.
        starts: offset of the step's range in each storage.
    """

    held: Counter[TierName] = field(default_factory=Counter)
    persistent: dict[TierName, int] = field(default_factory=dict)
    transient: int = 0
    starts: dict[TierName, int] = field(default_factory=dict)


class Tiers:
    """Budgets and storages of all tiers of a model on this rank. Lanes and storages are created at their first use.

    Args:
        budgets: this rank's bytes of each tier; None is no limit for the device, and no such tier otherwise.
        backend: creates lanes and storages; None where the device alone is used.
        prefetch: chunks of one offloaded store on the device at a time, in use or in flight.

    Attributes:
        budgets: bytes held, peak and limit of each tier.
        bytes_per_token: cache of the bytes that the engine measured, by the dtypes of a step.
        observer: called with every change of bytes held; None for no observer.
        fixed_placement: number of head groups and placement that every step uses, set by a simulation; None places
            each step anew.
    """

    def __init__(self, budgets: Mapping[TierName, int | None], backend: Backend | None, prefetch: int) -> None:
        self.budgets = {tier: TierBudget(tier, budget) for tier, budget in budgets.items()}
        self.prefetch = prefetch
        self.bytes_per_token: dict[Hashable, Any] = {}
        self.observer: TierObserver | None = None
        self.fixed_placement: tuple[int, Placement] | None = None
        self._backend = backend
        self._lanes: Lanes | None = None
        self._storages: dict[TierName, Storage] = {}
        self._reservations: list[Reservation] = []  # of steps that are outstanding: running, or between their passes
        # Reservations of steps that were garbage-collected without a backward. A finalizer may run in any thread, a
        # lane's included, at any line: there, waiting for lanes would deadlock and changing counters would race. So it
        # only appends here (atomic), and the next call in compute's thread releases them.
        self._abandoned: deque[Reservation] = deque()

    @property
    def limited(self) -> bool:
        """True if the device has a budget, so that chunks may be offloaded."""
        return self.budgets["device"].budget is not None

    @property
    def lanes(self) -> Lanes:
        """Lanes of the model, created at the first use."""
        if self._lanes is None:
            assert self._backend is not None
            self._lanes = self._backend.lanes()
        return self._lanes

    def place(self, requests: Sequence[StoreRequest], hints: FitHints | None = None, *, headroom: int = 0) -> Placement:
        """Place the stores of a step beside those of outstanding steps; reserve nothing. The device must be limited.

        Args:
            requests: requests for the stores, in order of priority.
            hints: fixes for the messages; None for the default ones.
            headroom: transient bytes of the device to leave to later steps.

        Returns:
            The placement, for `Stores`.

        Raises:
            ValueError: the stores do not fit.
        """
        room = {tier: self.unreserved_bytes(tier) for tier in self.budgets}
        for tier in room:
            if tier in self._storages:  # a step's range in a storage is contiguous
                room[tier] = min(room[tier] or 0, self._storages[tier].ranges.largest_free)
        reserved = max([headroom, *(reservation.transient for reservation in self._reservations)])
        try:
            return place(requests, room, reserved=reserved, hints=hints or FitHints())
        except ValueError as error:
            if not self._reservations:
                raise
            raise ValueError(
                f"{error} ({len(self._reservations)} earlier forwards still hold activations for their backward, or "
                "keys and values for their cache; losses that are kept and not used do so, too: evaluate under "
                "torch.no_grad().)"
            ) from None

    def unreserved_bytes(self, tier: TierName) -> int | None:
        """Return the bytes of a tier that no outstanding step reserves or holds; None if unlimited.

        Reserved transient bytes do not count: outstanding steps run one at a time and share them.
        """
        self.release_abandoned()
        budget = self.budgets[tier].budget
        taken = sum(max(r.persistent.get(tier, 0), r.held[tier]) for r in self._reservations)
        return None if budget is None else budget - taken

    def reserve(self, placement: Placement, reservation: Reservation) -> None:
        """Reserve the bytes of a placement, until `release`; allocate its range in each storage.

        The first reservation in a tier creates its storage. After an error nothing is reserved.

        Args:
            placement: from `place`, with no other reservation in between.
            reservation: a new reservation, which is filled in.

        Raises:
            TierError: the disk has no room, or host memory cannot be pinned.
            ValueError: the scratch file cannot be created.
        """
        self._reservations.append(reservation)
        try:
            for tier, total in placement.offloaded.items():
                storage = self.storage(tier)
                reservation.starts[tier] = start = storage.ranges.allocate(total)
                if isinstance(storage, ScratchFile):
                    storage.preallocate(start, total)
                    self.lanes.prepare(placement.largest)
        except BaseException:
            self.release(reservation)
            raise
        reservation.transient = placement.transient
        reservation.persistent = {"device": placement.persistent, **placement.offloaded}

    def release(self, reservation: Reservation) -> None:
        """Release a reservation and the bytes still held: none after a complete backward, some after an error.

        Later steps may use its ranges of the storages from now on.
        """
        if self._lanes is not None:
            self._lanes.drain()  # pending moves must not spoil ranges that another step may take next
        for tier, nbytes in reservation.held.items():
            self.budgets[tier].release(nbytes)
        reservation.held.clear()
        for tier, start in reservation.starts.items():
            self._storages[tier].ranges.free(start)
        self._reservations = [other for other in self._reservations if other is not reservation]

    def abandon(self, reservation: Reservation) -> None:
        """Queue a reservation to be released later. Safe in a finalizer, in any thread."""
        self._abandoned.append(reservation)

    def release_abandoned(self) -> None:
        """Release the reservations that `abandon` queued. Call it in compute's thread."""
        while self._abandoned:
            self.release(self._abandoned.popleft())

    def stats(self) -> Stats:
        """Return this rank's peaks and traffic since the last call, and reset them."""
        self.release_abandoned()
        return take_stats(self.budgets, self._lanes)

    def storage(self, tier: TierName) -> Storage:
        """Return the storage of a tier beyond the device; create it, at the tier's whole budget, if there is none.

        Raises:
            TierError: host memory cannot be pinned.
            ValueError: the scratch file cannot be created.
        """
        if tier not in self._storages:
            budget = self.budgets[tier].budget
            assert budget is not None
            assert self._backend is not None
            self._storages[tier] = self._backend.storage(tier, budget)
        return self._storages[tier]


class Stores:
    """Stores of one step, and its reservation in the tiers, until they are closed or garbage-collected.

    Args:
        tiers: tiers of the model.
        placement: placement of the stores, which is reserved; None leaves every chunk on the device.

    Raises:
        TierError: the disk has no room, or host memory cannot be pinned.
        ValueError: the scratch file cannot be created.
    """

    def __init__(self, tiers: Tiers, placement: Placement | None = None) -> None:
        self.tiers = tiers
        self.placement = placement
        self.prefetch = tiers.prefetch
        self._reservation = Reservation()
        self._pending: defaultdict[str, deque[Move]] = defaultdict(deque)  # stashes not yet flushed, by kind of store
        if placement is not None:
            tiers.reserve(placement, self._reservation)
        # It refers to the reservation, not to the stores, which it would keep alive otherwise.
        self._finalizer = weakref.finalize(self, tiers.abandon, self._reservation)
        self._finalizer.atexit = False

    def close(self) -> None:
        """Release everything the step holds; later changes are not counted. A second call does nothing."""
        if self._finalizer.detach() is not None:
            self.tiers.release(self._reservation)

    def limit_transient(self, nbytes: int) -> None:
        """Reserve at most `nbytes` of transient device memory from now on: the step is over, and its data stays."""
        self._reservation.transient = min(self._reservation.transient, nbytes)

    @contextlib.contextmanager
    def close_on_error(self) -> Iterator[None]:
        """Close the stores if the body raises."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    @property
    def held(self) -> dict[TierName, int]:
        """Bytes held now in each tier that holds any."""
        return {tier: nbytes for tier, nbytes in self._reservation.held.items() if nbytes}

    @property
    def lanes(self) -> Lanes:
        """Lanes of the model."""
        return self.tiers.lanes

    def blocks(self, name: str, num_chunks: int) -> list[StorageBlock | None]:
        """Return the block of each chunk of a store; None for chunks on the device, or without a place."""
        if self.placement is None:
            return [None] * num_chunks
        places, sizes = self.placement.places[name], self.placement.sizes[name]
        starts, blocks = self._reservation.starts, list[StorageBlock | None]()
        for (tier, offset), size in zip(places, sizes, strict=True):
            if tier is None or tier == "device":
                blocks.append(None)
            else:
                blocks.append(StorageBlock(self.tiers.storage(tier), tier, starts[tier] + offset, size))
        return blocks

    def num_resident(self, names: Sequence[str], num_chunks: int) -> int:
        """Return how many chunks, counted from the first, rest on the device in all of these stores.

        Without a placement all `num_chunks` do. Names that the placement lacks are ignored; it must have one of them.
        """
        if self.placement is None:
            return num_chunks
        return min(self.placement.num_on_device(name) for name in names if name in self.placement.places)

    def stash(self, kind: str, x: Tensor, block: StorageBlock) -> Move:
        """Start to copy a dense tensor into its block.

        Args:
            kind: kind of the store. The last `prefetch - 1` tensors of a kind (at least one while it is copied) stay
                on the device; compute waits for older ones.
            x: the tensor; it stays on the device until it is flushed.
            block: its block.

        Returns:
            The move, after which the block can be fetched.

        Raises:
            ValueError: the tensor is larger than its block.
            TierError: an older move of this kind failed.
        """
        if x.nbytes > block.capacity:
            raise ValueError(
                f"a chunk has {x.nbytes:,} bytes and was to have {block.capacity:,}: this model computes in another "
                "shape or dtype than one token showed. Leave device_budget out."
            )
        self.flush(kind, max(self.prefetch - 2, 0))
        self.acquire("device", x.nbytes)
        self.acquire(block.tier, x.nbytes, kind)
        move = self.lanes.stash(x, block)
        self._pending[kind].append(move)
        if self.prefetch == 1:  # no double buffering: compute waits for every stash
            self.flush(kind)
        return move

    def flush(self, kind: str, max_pending: int = 0) -> None:
        """Make compute wait for stashes of a kind, oldest first, until `max_pending` are left; free their tensors.

        Raises:
            TierError: one of them failed.
        """
        moves = self._pending[kind]
        while len(moves) > max_pending:
            move = moves.popleft()
            self.lanes.finish(move)
            self.release("device", move.nbytes)

    def flush_all(self) -> None:
        """Make compute wait for all stashes; free their tensors on the device.

        Raises:
            TierError: one of them failed.
        """
        for kind in self._pending:
            self.flush(kind)

    def acquire(self, tier: TierName, nbytes: int, kind: str = IN_FLIGHT) -> None:
        """Count bytes as held in a tier; nothing is allocated. After `close` this does nothing.

        Args:
            tier: tier that holds them.
            nbytes: bytes.
            kind: kind of their store, for the observer.
        """
        if self._finalizer.alive:  # after `close` nothing is counted: the whole reservation was released
            self._reservation.held[tier] += nbytes
            self.tiers.budgets[tier].acquire(nbytes)
            if self.tiers.observer is not None:
                self.tiers.observer(tier, kind, nbytes)

    def release(self, tier: TierName, nbytes: int, kind: str = IN_FLIGHT) -> None:
        """Count bytes as no longer held; arguments as for `acquire`."""
        if self._finalizer.alive:
            self._reservation.held[tier] -= nbytes
            self.tiers.budgets[tier].release(nbytes)
            if self.tiers.observer is not None:
                self.tiers.observer(tier, kind, -nbytes)


def resident_stores() -> Stores:
    """Return stores that leave every chunk on the device."""
    return Stores(Tiers({"device": None}, None, prefetch=1))
