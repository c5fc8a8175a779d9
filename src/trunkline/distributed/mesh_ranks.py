"""The ranks of a mesh that share a sequence, as the engine sees them (`trunkline.engine.ranks.Ranks`)."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from trunkline.distributed import failure
from trunkline.distributed.comm import Comm, gather_small
from trunkline.distributed.mesh import SEQUENCE, parallel_dims_of
from trunkline.distributed.sequence_parallel import MeshCoordinate, SequenceComms, SequenceParallelRanks
from trunkline.engine.batch import Batch
from trunkline.engine.ranks import Agreement
from trunkline.offload.lanes.base import LaneTraffic


class MeshRanks(SequenceParallelRanks):
    """See `trunkline.engine.ranks.Ranks`.

    Args:
        mesh: from `init_mesh`.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        parallel_dims, traffic = parallel_dims_of(mesh), LaneTraffic()

        def comm(axes: DeviceMesh) -> Comm | None:
            return Comm(axes.get_group(), traffic) if axes.size() > 1 else None

        coordinate = dict(zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), strict=True))
        here = MeshCoordinate(*(coordinate[axis] for axis in ("dp", "cp", "sp")))
        comms = SequenceComms(comm(mesh["sp"]), comm(mesh["cp"]), comm(flat(mesh, SEQUENCE)))
        super().__init__(parallel_dims, here, comms, traffic, mesh.device_type)
        self.name = "-".join(
            f"{axis}{i}of{mesh[axis].size()}" for axis, i in coordinate.items() if mesh[axis].size() > 1
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> MeshRanks:
        return self  # the job's ranks are those of every copy of a model

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """See `Ranks.guard`."""
        with self._interleaver.scope(), failure.guard():
            yield

    def require_same(self, what: object, name: str) -> None:
        """See `Ranks.require_same`."""
        found = gather_small(torch.tensor([_number(repr(what))], device=self.mesh.device_type)).flatten().tolist()
        for replica in self.mesh.mesh.flatten(1).tolist():
            if len({found[rank] for rank in replica}) > 1:
                raise ValueError(
                    f"{name} differs between {_names(replica)}, which share a sequence but have other room (on their "
                    "disks, perhaps): set all budgets, disk_budget too, to what every rank has."
                )

    def require_same_weights(self, model: nn.Module) -> None:
        """See `Ranks.require_same_weights`."""
        if not any(isinstance(p, DTensor) for p in model.parameters()):
            require_same_weights(cast(PreTrainedModel, model), self.mesh)

    # -- the contract --------------------------------------------------------------------------------------------------

    def agree(self, read: Callable[[], tuple[Batch, str]], seed: int) -> tuple[Batch, Agreement]:
        """See `Ranks.agree`."""
        batch: Batch | None = None
        kind = ""
        error: ValueError | None = None
        with failure.guard():
            try:
                batch, kind = read()
            except ValueError as refused:
                error = refused
                failure.explain(refused)
            rows: list[list[int]] = gather_small(self._said(batch, kind, seed)).tolist()
        failure.all_go_on()
        if error is not None:
            raise error
        assert batch is not None
        return batch, self._agreed(rows, batch)

    def _said(self, batch: Batch | None, kind: str, seed: int) -> Tensor:
        """What this rank says of its call, (5,): whether it is valid, its kind, its tokens, its seed, its targets."""
        device = self.mesh.device_type
        if batch is None:
            return torch.zeros(5, dtype=torch.long, device=device)
        tokens = fingerprint(batch)
        count = batch.num_targets if batch.targets is not None else None
        given = 0 if count is None or batch.targets is None else int((batch.targets != -100).sum())
        return torch.tensor([1, _number(kind), tokens, seed, given], device=device)

    def _agreed(self, rows: list[list[int]], batch: Batch) -> Agreement:
        refused = [rank for rank, row in enumerate(rows) if not row[0]]
        if refused:
            raise ValueError(
                f"rank {refused[0]} refused its arguments ({failure.explanation(refused[0])}): all ranks stop this "
                "forward."
            )
        if len({row[1] for row in rows}) > 1:
            odd = _odd([row[1] for row in rows])
            raise ValueError(
                f"rank {odd} calls the model in another way than the others: all ranks must call it with labels or all "
                "without, all with gradients or all without, with the same num_items_in_batch, and with the same "
                "settings of stream()."
            )
        members = self.mesh.mesh.flatten(1)
        for replica in members.tolist():
            tokens = [rows[rank][2] for rank in replica]
            if len(set(tokens)) > 1:
                odd = replica[_odd(tokens)]
                raise ValueError(
                    f"rank {odd} was given other tokens, positions, documents or labels than the ranks it shares a "
                    f"sequence with ({_names(replica)}): every rank of a group passes the same global input_ids, and "
                    "takes its part itself. Only dp replicas get different data; shuffle with one seed a replica."
                )
        own = members[self.coordinate.dp].tolist()
        replicas = [rows[replica[0]][4] for replica in members.tolist()]
        divisor = torch.tensor(max(sum(replicas), 1), device=batch.input_ids_BS.device)
        return Agreement(rows[own[0]][3], divisor if len(replicas) > 1 else None)


def flat(mesh: DeviceMesh, axes: tuple[str, ...]) -> DeviceMesh:
    """Several axes of a mesh as one, which the mesh remembers."""
    name = "_".join(axes)
    root: Any = mesh
    known = root._flatten_mapping if hasattr(root, "_flatten_mapping") else {}
    return known[name] if name in known else mesh[axes]._flatten(name)


def fingerprint(batch: Batch) -> int:
    """A number that other tokens, positions, labels or shapes do not have."""
    total = _number(repr(batch.documents))
    for x in (batch.input_ids_BS, batch.position_ids, batch.targets):
        if x is None:
            total = _mixed(total, 1)
            continue
        flat_x = x.reshape(-1).long()
        at = torch.arange(flat_x.numel(), device=x.device) * 0x1E3779B97F4A7C15
        at = (at ^ (at >> 29)) * 0x3F58476D1CE4E5B9  # integers wrap around
        total = _mixed(total, int((at * (flat_x + 1000)).sum()), *x.shape)
    return total


def _mixed(*numbers: int) -> int:
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _number(text: str) -> int:
    return _mixed(*text.encode())


def _odd(values: list[int]) -> int:
    """The place of the first that is not what most are."""
    usual = max(values, key=lambda value: (values.count(value), -values.index(value)))
    return next(i for i, value in enumerate(values) if value != usual)


def _names(ranks: list[int]) -> str:
    return "ranks " + ", ".join(map(str, ranks))


def require_same_weights(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Refuse ranks that hold different weights: nothing would notice afterwards.

    Raises:
        ValueError: on all ranks, naming one that differs.
    """
    if dist.get_world_size() == 1 or model.get_input_embeddings().weight.device.type == "meta":
        return
    kinds = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
    total = torch.zeros((), dtype=torch.long, device=model.get_input_embeddings().weight.device)
    for number, parameter in enumerate(model.parameters(), 1):
        bits = parameter.detach().view(kinds[parameter.dtype.itemsize])
        total = total * 31 + bits.sum(dtype=torch.long) + number * parameter.numel()
    with failure.guard():  # weights may still be on the host, where NCCL has no say
        found: list[int] = gather_small(total[None].to(mesh.device_type)).flatten().tolist()
        failure.all_go_on()
    usual = max(found, key=found.count)
    odd = [rank for rank, value in enumerate(found) if value != usual]
    if odd:
        raise ValueError(
            f"rank {odd[0]} holds other weights than the other ranks: load the same folder on every rank, or set the "
            "same seed (torch.manual_seed) before building the model."
        )
