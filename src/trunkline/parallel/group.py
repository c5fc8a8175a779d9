"""The ranks of a mesh that share a sequence, as the engine sees them (`trunkline.ranks.Ranks`)."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from trunkline.chunking import Chunk, zigzag
from trunkline.decoder import Batch
from trunkline.lanes import Traffic
from trunkline.parallel import alarm
from trunkline.parallel.comm import Comm, from_everyone
from trunkline.parallel.gather import Gather
from trunkline.parallel.mesh import SEQUENCE, degrees_of
from trunkline.parallel.turns import Turns
from trunkline.parallel.ulysses import Ulysses
from trunkline.ranks import Agreement, Alone, KeyValueGather, PendingTensors, T


class MeshRanks:
    """See `trunkline.ranks.Ranks`.

    Args:
        mesh: from `init_mesh`.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.degrees = degrees_of(mesh)
        self.traffic = Traffic()
        self.size = self.degrees.sp * self.degrees.cp
        # Rows over cp are cut in two slices a rank, which sp cuts again.
        self.granule = self.degrees.sp if self.degrees.cp == 1 else self.degrees.cp * math.lcm(2, self.degrees.sp)
        coordinate = dict(zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), strict=True))
        self._sp, self._cp, self._dp = coordinate["sp"], coordinate["cp"], coordinate["dp"]
        self._turns = Turns(mesh.device_type)
        self._order: Alone | Turns = self._turns if self.degrees.sp > 1 else Alone()
        self._ulysses = (
            Ulysses(Comm(mesh["sp"].get_group(), self.traffic), self._turns) if self.degrees.sp > 1 else None
        )
        self.gather: KeyValueGather | None = (
            Gather(Comm(mesh["cp"].get_group(), self.traffic)) if self.degrees.cp > 1 else None
        )
        self._sequence = Comm(flat(mesh, SEQUENCE).get_group(), self.traffic) if self.size > 1 else None

    def __deepcopy__(self, memo: dict[int, Any]) -> MeshRanks:
        return self  # the job's ranks are those of every copy of a model

    @property
    def salt(self) -> int:
        """See `Ranks.salt`."""
        return (self._dp * self.degrees.cp + self._cp) * self.degrees.sp + self._sp

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """See `Ranks.guarded`."""
        with self._turns.scope(), alarm.guarded():
            yield

    def own(self, chunk: Chunk) -> Chunk:
        """See `Ranks.own`."""
        return zigzag(chunk, self._cp, self.degrees.cp, self._sp, self.degrees.sp)

    def rows(self, chunk: Chunk) -> Chunk:
        """See `Ranks.rows`."""
        return Chunk(chunk.index, chunk.start // self.degrees.cp, chunk.stop // self.degrees.cp)

    def to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """See `Ranks.to_heads`."""
        return tensors if self._ulysses is None else self._ulysses.to_heads(*tensors)

    def start_to_tokens(self, o: Tensor) -> PendingTensors | None:
        """See `Ranks.start_to_tokens`."""
        return None if self._ulysses is None else self._ulysses.start_output(o)

    def to_tokens(self, o: Tensor, coming: PendingTensors | None = None) -> Tensor:
        """See `Ranks.to_tokens`."""
        return o if self._ulysses is None else self._ulysses.to_tokens(o, coming)

    def side_by_side(self, calls: Iterable[Callable[[], None]]) -> None:
        """See `Ranks.side_by_side`."""
        self._order.side_by_side(calls)

    def ahead(self, calls: Iterable[Callable[[], T]]) -> Iterator[T]:
        """See `Ranks.ahead`."""
        return self._order.ahead(calls)

    def own_heads(self, x: Tensor) -> Tensor:
        """See `Ranks.own_heads`."""
        if self._ulysses is None:
            return x
        own = self._ulysses.num_heads(x.shape[1])
        return x[:, :1].expand(-1, own, -1, -1)

    def head_range(self, num_heads: int) -> slice:
        """See `Ranks.head_range`."""
        own = num_heads // self.degrees.sp
        return slice(self._sp * own, (self._sp + 1) * own)

    def whole(self, x_BCE: Tensor) -> Tensor:
        """See `Ranks.whole`."""
        if self._sequence is None:
            return x_BCE
        parts = self._sequence.all_gather(x_BCE.contiguous()).wait()
        sp, cp = self.degrees.sp, self.degrees.cp
        chunk = Chunk(0, 0, self.size * x_BCE.shape[1])
        out = x_BCE.new_empty(x_BCE.shape[0], len(chunk), *x_BCE.shape[2:])
        for rank, part in enumerate(parts):
            ranges = zigzag(chunk, rank // sp, cp, rank % sp, sp).ranges
            for (start, stop), piece in zip(ranges, part.split([b - a for a, b in ranges], 1), strict=True):
                out[:, start:stop] = piece
        return out

    def require_same(self, what: object, name: str) -> None:
        """See `Ranks.require_same`."""
        found = from_everyone(torch.tensor([_number(repr(what))], device=self.mesh.device_type)).flatten().tolist()
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

    def total(self, x: Tensor) -> Tensor:
        """See `Ranks.total`."""
        return x if self._sequence is None else self._sequence.all_reduce(x)

    # -- the contract --------------------------------------------------------------------------------------------------

    def begin(self, read: Callable[[], tuple[Batch, str]], seed: int) -> tuple[Batch, Agreement]:
        """See `Ranks.begin`."""
        batch: Batch | None = None
        kind = ""
        error: ValueError | None = None
        with alarm.guarded():
            try:
                batch, kind = read()
            except ValueError as refused:
                error = refused
                alarm.explain(refused)
            rows: list[list[int]] = from_everyone(self._said(batch, kind, seed)).tolist()
        alarm.all_go_on()
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
                f"rank {refused[0]} refused its arguments ({alarm.explanation(refused[0])}): all ranks stop this "
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
        own = members[self._dp].tolist()
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
    with alarm.guarded():  # weights may still be on the host, where NCCL has no say
        found: list[int] = from_everyone(total[None].to(mesh.device_type)).flatten().tolist()
        alarm.all_go_on()
    usual = max(found, key=found.count)
    odd = [rank for rank, value in enumerate(found) if value != usual]
    if odd:
        raise ValueError(
            f"rank {odd[0]} holds other weights than the other ranks: load the same folder on every rank, or set the "
            "same seed (torch.manual_seed) before building the model."
        )
