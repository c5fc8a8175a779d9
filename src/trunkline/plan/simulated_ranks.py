"""Simulated ranks of an estimate: traffic and collective timing of one rank."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from trunkline.attention.kv_gather import Pending
from trunkline.distributed.comm import CollectiveKind, Collectives
from trunkline.distributed.mesh import ParallelDims
from trunkline.distributed.sequence_parallel import MeshCoordinate, SequenceComms, SequenceParallelRanks
from trunkline.offload.lanes.base import LaneTraffic
from trunkline.offload.lanes.sim_clock import QueuedWork, SimClock
from trunkline.plan.hardware import CollectiveFigures, Hardware, NoFigures

_LABELS = {"all_to_all": "heads", "all_gather": "gather", "reduce_scatter": "scatter", "all_reduce": "reduce"}
COMM = "comm"  # lane of the collectives, and their queue of the clock


@dataclass(frozen=True, slots=True)
class CollectiveLink:
    """Link between ranks, which their collectives share.

    Attributes:
        size: number of ranks.
        collective: latency in seconds and bandwidth of a rank in bytes/s; None for collectives that take no time.
        clock: clock of the simulated rank; None without one.
    """

    size: int
    collective: CollectiveFigures | None
    clock: SimClock | None

    def send(self, nbytes: int, label: str) -> QueuedWork | None:
        """Queue a collective in which the rank sends `nbytes` bytes; return None where it takes no time."""
        if self.clock is None or self.collective is None:
            return None
        seconds = self.collective.latency + nbytes / self.collective.bandwidth
        return self.clock.submit(COMM, seconds, lane=COMM, label=label)

    def wait(self, transfer: QueuedWork | None) -> None:
        """Make compute wait for a collective from `send`; do nothing for None."""
        if transfer is not None and self.clock is not None:
            self.clock.wait(transfer)


def collective_link(size: int, span: int, hardware: Hardware | None, clock: SimClock | None) -> CollectiveLink:
    """Choose the link of a group of ranks: within a node, or between nodes.

    Args:
        size: ranks of the group; a single rank sends nothing and needs no figures.
        span: neighbouring ranks that the group is spread over: the link is within a node if they fit into one.
        hardware: profile; None for collectives that take no time.
        clock: clock of the simulated rank; None without one.

    Raises:
        NoFigures: a ValueError: the profile has no figures of such a link.
    """
    if hardware is None or size == 1:
        return CollectiveLink(size, None, clock)
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
    return CollectiveLink(size, collective, clock)


@dataclass(slots=True)
class SimulatedPending(Pending[Tensor]):
    """A collective's output, whose transfer is simulated."""

    tensor: Tensor
    sent: Tensor | None  # the input: its memory is in use until the transfer is over
    transfer: QueuedWork | None
    link: CollectiveLink

    @override
    def wait(self) -> Tensor:
        self.link.wait(self.transfer)
        self.sent = self.transfer = None
        return self.tensor


class SimulatedComm(Collectives):
    """Collectives of simulated ranks, seen from the first one.

    Args:
        link: link of the ranks.
        traffic: counter of the bytes that this rank sends.
    """

    def __init__(self, link: CollectiveLink, traffic: LaneTraffic) -> None:
        super().__init__(link.size, 0, traffic)
        self._link = link

    @override
    def _start(self, kind: CollectiveKind, out: Tensor, sent: Tensor, nbytes: int) -> SimulatedPending:
        return SimulatedPending(out, sent, self._link.send(nbytes, _LABELS[kind]), self._link)


class SimulatedRanks(SequenceParallelRanks):
    """Simulated first rank of the ranks that share a sequence; checks of agreement always pass.

    Args:
        parallel_dims: degrees of the mesh.
        hardware: hardware that they run on; None for collectives that take no time.
        clock: clock of the first rank.
    """

    def __init__(self, parallel_dims: ParallelDims, hardware: Hardware | None, clock: SimClock | None) -> None:
        traffic = LaneTraffic()

        def comm(size: int, span: int) -> SimulatedComm | None:
            return SimulatedComm(collective_link(size, span, hardware, clock), traffic) if size > 1 else None

        sp, cp, tp = parallel_dims.sp, parallel_dims.cp, parallel_dims.tp
        comms = SequenceComms(comm(sp, tp * sp), comm(cp, tp * sp * cp), comm(sp * cp, tp * sp * cp))
        super().__init__(parallel_dims, MeshCoordinate(), comms, traffic, "cpu")

    @override
    def guard(self) -> contextlib.AbstractContextManager[None]:
        return self._interleaver.scope()
