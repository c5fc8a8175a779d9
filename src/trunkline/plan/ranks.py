"""Ranks that are not there: what one of them would send, and when it would have what the others send."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from trunkline.distributed.mesh import ParallelDims
from trunkline.distributed.sequence_parallel import Groups, Place, SharedSequence
from trunkline.engine.batch import Batch
from trunkline.engine.ranks import Agreement
from trunkline.offload.lanes.base import LaneTraffic
from trunkline.offload.lanes.sim_clock import Clock, Job
from trunkline.plan.hardware import Collective, Hardware, NoFigures

COMM = "comm"  # the lane, and the queue of the clock


@dataclass(frozen=True, slots=True)
class Wire:
    """What collectives of some ranks cost.

    Attributes:
        size: ranks.
        collective: their speed.
        clock: that goes on; None where everything is over at once.
    """

    size: int
    collective: Collective | None
    clock: Clock | None

    def send(self, nbytes: int, label: str) -> Job | None:
        """Have a rank send so many bytes."""
        if self.clock is None or self.collective is None:
            return None
        seconds = self.collective.latency + nbytes / self.collective.bandwidth
        return self.clock.give(COMM, seconds, lane=COMM, label=label)

    def wait(self, job: Job | None) -> None:
        """Have compute go on after it."""
        if job is not None and self.clock is not None:
            self.clock.wait(job)


def wire(size: int, span: int, hardware: Hardware | None, clock: Clock | None) -> Wire:
    """The collectives of `size` ranks that lie among `span` neighbouring ones, within a node if these are.

    A rank alone sends nothing, and needs no figures.

    Raises:
        ValueError: the hardware's profile knows nothing of such collectives.
    """
    if hardware is None or size == 1:
        return Wire(size, None, clock)
    within = span <= hardware.devices_per_node
    collective = hardware.intra if within else hardware.inter
    if collective is None:
        scope, where = ("intra", "within a node") if within else ("inter", "between nodes")
        raise NoFigures(
            f"hardware profile {hardware.name!r} (devices_per_node {hardware.devices_per_node}) has no figures of "
            f"collectives {where}, which {span} ranks need: measure them with torchrun --nproc-per-node N -m trunkline "
            f"tune {'on one node' if within else 'on several nodes (or on one with as many ranks)'}, or give "
            f"{scope}.bandwidth and {scope}.latency in a profile of your own."
        )
    return Wire(size, collective, clock)


@dataclass(slots=True)
class SimulatedPending:
    """A tensor on its way."""

    tensor: Tensor
    sent: Tensor | None  # in use until then
    job: Job | None
    wire: Wire

    def wait(self) -> Tensor:
        """See `PendingTensor.wait`."""
        self.wire.wait(self.job)
        self.sent = self.job = None
        return self.tensor


class SimulatedComm:
    """See `trunkline.distributed.comm.Collectives`; seen from the first rank.

    Args:
        wire: of the ranks.
        traffic: receives the bytes that this rank sends.
    """

    rank = 0

    def __init__(self, wire: Wire, traffic: LaneTraffic) -> None:
        self.size = wire.size
        self._wire, self._traffic = wire, traffic

    def all_to_all(self, parts: Tensor) -> SimulatedPending:
        """See `Collectives.all_to_all`."""
        return self._pending(parts.new_empty(parts.shape), parts, parts.nbytes * (self.size - 1) // self.size, "heads")

    def all_gather(self, part: Tensor) -> SimulatedPending:
        """See `Collectives.all_gather`."""
        return self._pending(part.new_empty(self.size, *part.shape), part, part.nbytes * (self.size - 1), "gather")

    def reduce_scatter(self, parts: Tensor) -> SimulatedPending:
        """See `Collectives.reduce_scatter`."""
        return self._pending(
            parts.new_empty(parts.shape[1:]), parts, parts.nbytes * (self.size - 1) // self.size, "scatter"
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Collectives.all_reduce`."""
        return self._pending(x.clone(), x, 2 * x.nbytes * (self.size - 1) // self.size, "reduce").wait()

    def _pending(self, out: Tensor, sent: Tensor, nbytes: int, label: str) -> SimulatedPending:
        self._traffic.moved += nbytes
        return SimulatedPending(out, sent, self._wire.send(nbytes, label), self._wire)


class SimulatedRanks(SharedSequence):
    """The ranks of a mesh that share a sequence, none of them there; see `trunkline.engine.ranks.Ranks`.

    Args:
        parallel_dims: of the mesh.
        hardware: they run on; None for one on which everything is over at once.
        clock: of the first of them.
    """

    def __init__(self, parallel_dims: ParallelDims, hardware: Hardware | None, clock: Clock | None) -> None:
        traffic = LaneTraffic()

        def comm(size: int, span: int) -> SimulatedComm | None:
            return SimulatedComm(wire(size, span, hardware, clock), traffic) if size > 1 else None

        sp, cp, tp = parallel_dims.sp, parallel_dims.cp, parallel_dims.tp
        groups = Groups(comm(sp, tp * sp), comm(cp, tp * sp * cp), comm(sp * cp, tp * sp * cp))
        super().__init__(parallel_dims, Place(), groups, traffic, "cpu")

    @property
    def salt(self) -> int:
        """See `Ranks.salt`."""
        return 0

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """See `Ranks.guarded`."""
        with self._turns.scope():
            yield

    def begin(self, read: Callable[[], tuple[Batch, str]], seed: int) -> tuple[Batch, Agreement]:
        """See `Ranks.begin`: nobody differs."""
        return read()[0], Agreement(seed)

    def require_same(self, what: object, name: str) -> None:
        """See `Ranks.require_same`: they are."""

    def require_same_weights(self, model: nn.Module) -> None:
        """See `Ranks.require_same_weights`: they are."""
