"""Ranks of a device mesh, and the checks that all of them were given matching inputs."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from typing_extensions import override

from trunkline.distributed import failure
from trunkline.distributed.comm import Comm, gather_small
from trunkline.distributed.mesh import SEQUENCE_AXES, flatten_axes, parallel_dims_of
from trunkline.distributed.sequence_parallel import MeshCoordinate, SequenceComms, SequenceParallelRanks
from trunkline.engine.batch import Batch
from trunkline.engine.ranks import Agreement
from trunkline.offload.lanes.base import LaneTraffic


class MeshRanks(SequenceParallelRanks):
    """Ranks of a device mesh.

    Args:
        mesh: mesh from `init_mesh`.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        parallel_dims, traffic = parallel_dims_of(mesh), LaneTraffic()

        def comm(axes: DeviceMesh) -> Comm | None:
            return Comm(axes.get_group(), traffic) if axes.size() > 1 else None

        index = dict(zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), strict=True))
        coordinate = MeshCoordinate(index["dp"], index["cp"], index["sp"])
        comms = SequenceComms(comm(mesh["sp"]), comm(mesh["cp"]), comm(flatten_axes(mesh, SEQUENCE_AXES)))
        super().__init__(parallel_dims, coordinate, comms, traffic, mesh.device_type)
        self.name = "-".join(f"{axis}{i}of{mesh[axis].size()}" for axis, i in index.items() if mesh[axis].size() > 1)

    def __deepcopy__(self, memo: dict[int, Any]) -> MeshRanks:
        return self  # copies of a model run on the same ranks

    @override
    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        with self._interleaver.scope(), failure.guard():
            yield

    @override
    def require_same(self, value: object, name: str) -> None:
        hashes = gather_small(torch.tensor([_hash(repr(value))], device=self.mesh.device_type)).flatten().tolist()
        for replica in self._replicas:
            if len({hashes[rank] for rank in replica}) > 1:
                raise ValueError(
                    f"{name} differs between {_names(replica)}, which share a sequence but have other room (on their "
                    "disks, perhaps): set all budgets, disk_budget too, to amounts that every rank has."
                )

    @override
    def require_same_weights(self, model: nn.Module) -> None:
        if not any(isinstance(p, DTensor) for p in model.parameters()):
            require_same_weights(cast(PreTrainedModel, model), self.mesh)

    @override
    def agree(self, read: Callable[[], tuple[Batch, str]], seed: int) -> tuple[Batch, Agreement]:
        batch: Batch | None = None
        error: ValueError | None = None
        call = CallSummary()
        with failure.guard():
            try:
                batch, kind = read()
                call = CallSummary.of(batch, kind, seed)
            except ValueError as refused:
                error = refused
                failure.publish_refusal(refused)
            # A rank that refuses takes part, too: the others would wait for it in their first collective.
            rows = gather_small(torch.tensor(call, device=self.mesh.device_type)).tolist()
        failure.begin_epoch()  # after the gather: all ranks have left the forward before, and its failures are over
        if error is not None:
            raise error
        assert batch is not None
        calls = [CallSummary(*row) for row in rows]
        self._compare(calls)
        num_targets = [calls[replica[0]].num_targets for replica in self._replicas]
        total = torch.tensor(max(sum(num_targets), 1), device=batch.input_ids_BS.device)
        first_of_replica = self._replicas[self.coordinate.dp][0]
        return batch, Agreement(calls[first_of_replica].seed, total if len(num_targets) > 1 else None)

    @property
    def _replicas(self) -> list[list[int]]:
        """Global ranks of each data-parallel replica."""
        return self.mesh.mesh.flatten(1).tolist()

    def _compare(self, calls: list[CallSummary]) -> None:
        """Raise the same error on all ranks if one refuses its arguments, or if their calls differ."""
        refused = [rank for rank, call in enumerate(calls) if not call.valid]
        if refused:
            raise ValueError(
                f"rank {refused[0]} refused its arguments ({failure.refusal_of(refused[0])}): all ranks stop this "
                "forward."
            )
        kinds = [call.kind for call in calls]
        if len(set(kinds)) > 1:
            raise ValueError(
                f"rank {_index_of_odd(kinds)} calls the model in another way than the others: all ranks must call it "
                "with labels or all without, all with gradients or all without, with the same num_items_in_batch, and "
                "with the same settings of stream()."
            )
        for replica in self._replicas:
            inputs = [calls[rank].inputs for rank in replica]
            if len(set(inputs)) > 1:
                raise ValueError(
                    f"rank {replica[_index_of_odd(inputs)]} was given other tokens, positions, documents or labels "
                    f"than the ranks it shares a sequence with ({_names(replica)}): every rank of a group passes the "
                    "same global input_ids, and takes its part itself. Only dp replicas get different data; shuffle "
                    "with one seed a replica."
                )


class CallSummary(NamedTuple):
    """Five integers that a rank sends to all ranks of the job before a forward; all 0 if it refuses its inputs."""

    valid: int = 0
    kind: int = 0  # hash of labels or none, gradients or none, settings
    inputs: int = 0  # hash of tokens, positions, documents and labels
    seed: int = 0
    num_targets: int = 0

    @staticmethod
    def of(batch: Batch, kind: str, seed: int) -> CallSummary:
        """Summarise a call of the model."""
        targets = None if batch.num_targets is None else batch.targets
        num_targets = 0 if targets is None else int((targets != -100).sum())
        return CallSummary(1, _hash(kind), fingerprint(batch), seed, num_targets)


def fingerprint(batch: Batch) -> int:
    """Hash tokens, positions, targets, documents and shapes of a batch. Only a checksum of each leaves the device."""
    total = _hash(repr(batch.documents))
    for x in (batch.input_ids_BS, batch.position_ids, batch.targets):
        if x is None:
            total = _hash_numbers(total, 1)
            continue
        flat_x = x.reshape(-1).long()
        # Each element is weighted by a mix of its index (splitmix64), so that swapped tokens change the sum.
        weight = torch.arange(flat_x.numel(), device=x.device) * 0x1E3779B97F4A7C15
        weight = (weight ^ (weight >> 29)) * 0x3F58476D1CE4E5B9  # integers wrap around
        total = _hash_numbers(total, int((weight * (flat_x + 1000)).sum()), *x.shape)
    return total


def _hash(text: str) -> int:
    return _hash_numbers(*text.encode())


def _hash_numbers(*numbers: int) -> int:
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # fits int64


def _index_of_odd(values: list[int]) -> int:
    """Return the index of the first value that differs from the most frequent one."""
    usual = max(values, key=lambda value: (values.count(value), -values.index(value)))
    return next(i for i, value in enumerate(values) if value != usual)


def _names(ranks: list[int]) -> str:
    return "ranks " + ", ".join(map(str, ranks))


def require_same_weights(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Refuse ranks of the job that hold different weights, which nothing would notice later.

    All ranks call it, before parameters are sharded. Checksums are compared. Weights on the `meta` device are not.

    Raises:
        ValueError: the weights differ; the text names a rank. All ranks raise.
    """
    if dist.get_world_size() == 1 or model.get_input_embeddings().weight.device.type == "meta":
        return
    int_of_size = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
    checksum = torch.zeros((), dtype=torch.long, device=model.get_input_embeddings().weight.device)
    for number, parameter in enumerate(model.parameters(), 1):
        bits = parameter.detach().view(int_of_size[parameter.dtype.itemsize])
        checksum = checksum * 31 + bits.sum(dtype=torch.long) + number * parameter.numel()
    with failure.guard():
        # Weights may still be on the host, and NCCL gathers on the device only.
        checksums: list[int] = gather_small(checksum[None].to(mesh.device_type)).flatten().tolist()
        failure.begin_epoch()
    usual = max(checksums, key=checksums.count)
    odd = [rank for rank, value in enumerate(checksums) if value != usual]
    if odd:
        raise ValueError(
            f"rank {odd[0]} holds other weights than the other ranks: load the same folder on every rank, or set the "
            "same seed (torch.manual_seed) before building the model."
        )
