"""The core by head groups: where a layer's keys and values do not fit on the device, those of a few heads do.

Streamed chunk by chunk, every chunk of queries has all earlier keys fetched again: traffic grows with the square of the
sequence. Here the heads are cut into groups that do not meet each other, and each group goes through all its chunks
with its keys and values resident: everything moves in and out a fixed number of times. The price is that the layer is
run in two halves, projections first and the rest after, so that projections are computed twice.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trunkline.attention.core import Core, CoreStores
from trunkline.attention.kv_gather import KeyValueGather
from trunkline.attention.mask import PLAIN, RowMask
from trunkline.attention.scoring import Scoring, sinks_gradient
from trunkline.chunking import Chunk
from trunkline.offload.chunked_sequence import ChunkedSequence, Reader
from trunkline.offload.stores import Stores


@dataclass(frozen=True, slots=True)
class HeadGroupStores:
    """The stores of one group of heads: queries, keys, values, output's gradients, outputs, log-sum-exps."""

    q: str
    k: str
    v: str
    do: str
    o: str
    lse: str


class HeadGroupsCore:
    """Attention of one layer over the chunks of one forward pass, head group by head group.

    In the forward: `project` for every chunk, `attend`, then `kept_output` for every chunk. In the backward `replay`
    for every chunk, `differentiate`, then `gradients` for every chunk; before that, where outputs were not kept, the
    first two.

    Args:
        chunks: the chunks of the sequence.
        kernel: a kernel's name, or `auto`.
        keep_attention: keep outputs and log-sum-exps for the backward.
        stores: where everything rests.
       store_names: of the stores of each group.
       inner_names: of the stores in which one group's keys, values and their gradients are resident.
        gather: of keys and values that ranks hold in parts.
        row_masks: what tokens see, of each row of the batch, or one for all rows.
    """

    def __init__(
        self,
        chunks: list[Chunk],
        *,
        kernel: str,
        keep_attention: bool,
        stores: Stores,
        store_names: list[HeadGroupStores],
        inner_names: CoreStores,
        gather: KeyValueGather | None = None,
        row_masks: Sequence[RowMask] = PLAIN,
    ) -> None:
        self.chunks = chunks
        self.keep_attention = keep_attention
        self._kernel = kernel
        self._stores = stores
        self._inner = inner_names
        self._gather = gather
        self._scoring = Scoring(0.0)
        self._row_masks = row_masks
        self._dsinks: Tensor | None = None
        count = len(chunks)
        kinds = [field.name for field in dataclasses.fields(HeadGroupStores)]
        self._groups = [
            {kind: ChunkedSequence(count, stores, getattr(group, kind)) for kind in kinds} for group in store_names
        ]
        self._readers: list[Reader] = []
        self._known: deque[Tensor] = deque()  # outputs of chunks that are under way

    # -- forward -------------------------------------------------------------------------------------------------------

    def project(self, chunk: Chunk, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> None:
        """Store a chunk's queries (B, H, C, D), keys and values (B, K, C, D)."""
        self._scoring = scoring.detached
        self._stash(chunk, ("q", "k", "v"), (q, k, v))

    def attend(self) -> None:
        """All attention of the layer. Queries, keys and values are let go."""
        rising = range(len(self.chunks))
        for number, group in enumerate(self._groups):
            core = self._core()
            for chunk, q, k, v in self._read(group, ("q", "k", "v"), rising, take=True):
                scoring = self._scoring.of_heads(self._heads(number, q.shape[1]))
                o, lse = core.attend(chunk, q, k, v, scoring)
                group["o"].stash(chunk.index, o)
                group["lse"].stash(chunk.index, lse)
            core.end_forward()

    def load_kept_output(self, chunk: Chunk) -> Tensor:
        """The output (B, H, C, D) that `kept_output` will give, chunks in rising order; kept if it is to be kept."""
        if chunk.index == 0:
            self._read_outputs(range(len(self.chunks)), take=not self.keep_attention)
        self._known.append(self._next_output())
        return self._known[-1]

    def kept_output(self, chunk: Chunk, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """The output of a chunk. `load_kept_output` comes before it."""
        o = self._known.popleft()
        if chunk is self.chunks[-1]:
            self._end_reading()
        return o

    def keep_for_backward(self) -> None:
        """Keep from now on what the backward will need."""
        self.keep_attention = True

    def end_forward(self) -> None:
        """Let go of what the backward will not find here."""
        if not self.keep_attention:
            for group in self._groups:
                group["lse"].clear()

    # -- backward ------------------------------------------------------------------------------------------------------

    def load_output(self, chunk: Chunk) -> Tensor:
        """The output that `replay` will give, before its queries are there."""
        if chunk is self.chunks[-1]:
            self._read_outputs(range(len(self.chunks) - 1, -1, -1), take=False)
        self._known.append(self._next_output())
        return self._known[-1]

    def replay(self, chunk: Chunk, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """The output of a chunk (chunks in falling order), as a node that takes its gradient and passes none on.

        `load_output` comes before it.
        """
        o: Tensor = _DeferGradient.apply(q, k, v, scoring.sinks, self, chunk, scoring)  # type: ignore[no-untyped-call]
        return o

    def differentiate(self) -> bool:
        """All gradients of the layer's attention, in place of queries, keys and values; False if none are wanted."""
        if not any(group["do"].nbytes for group in self._groups):  # nothing before attention is trained
            self.clear()
            return False
        rising, falling = range(len(self.chunks)), range(len(self.chunks) - 1, -1, -1)
        dsinks = []
        for number, group in enumerate(self._groups):
            dsinks += self._differentiate(number, group, rising, falling)
        if dsinks:
            groups = [[x for n, x in dsinks if n == number] for number in range(len(self._groups))]
            self._dsinks = torch.cat([torch.stack(each).sum(0) for each in groups])
        return True

    def _differentiate(
        self, number: int, group: dict[str, ChunkedSequence], rising: range, falling: range
    ) -> list[tuple[int, Tensor]]:
        """Of one group, whose sums are gone afterwards: gradients of the last chunk are views of them."""
        dsinks = []
        core = self._core()
        for chunk, k, v in self._read(group, ("k", "v"), rising, take=True):
            core.append_kv(chunk, k, v)
        for chunk, q, do, o, lse in self._read(group, ("q", "do", "o", "lse"), falling, take=True):
            gradients = core.gradient(chunk, do, q, o, lse, self._scoring.scale)
            sinks = self._scoring.of_heads(self._heads(number, q.shape[1])).sinks
            if sinks is not None:
                dsinks.append((number, sinks_gradient(do, o, lse, sinks)))
            for kind, gradient in zip(("q", "k", "v"), gradients, strict=True):
                group[kind].stash(chunk.index, gradient.to(q.dtype, copy=True))  # not a view of the sums
        return dsinks

    def clear(self) -> None:
        """Hold nothing any longer."""
        for group in self._groups:
            for sequence in group.values():
                sequence.clear()

    def gradients(self, chunk: Chunk) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Gradients of a chunk's queries, keys, values (chunks in falling order), and with the last those of sinks."""
        if chunk is self.chunks[-1]:
            falling = range(len(self.chunks) - 1, -1, -1)
            self._readers = [g[kind].read(falling, take=True) for kind in ("q", "k", "v") for g in self._groups]
        tensors = [reader.next() for reader in self._readers]
        count = len(self._groups)
        dq, dk, dv = (torch.cat(tensors[i : i + count], 1) for i in range(0, 3 * count, count))
        if chunk.index == 0:
            self._end_reading()
        return dq, dk, dv, self._dsinks if chunk.index == 0 else None

    # -- stores --------------------------------------------------------------------------------------------------------

    def _core(self) -> Core:
        return Core(
            self.chunks,
            kernel=self._kernel,
            keep_attention=False,
            keep_kv=False,
            stores=self._stores,
            store_names=self._inner,
            gather=self._gather,
            row_masks=self._row_masks,
            softcap=self._scoring.softcap,
            drop_passed_kv=False,
        )

    @staticmethod
    def _heads(number: int, count: int) -> slice:
        """The query heads of a group of so many."""
        return slice(number * count, (number + 1) * count)

    def _stash(self, chunk: Chunk, kinds: Iterable[str], tensors: Iterable[Tensor]) -> None:
        for kind, x in zip(kinds, tensors, strict=True):
            for group, part in zip(self._groups, x.detach().tensor_split(len(self._groups), 1), strict=True):
                # Of its own: a view would keep the other groups' heads in memory.
                group[kind].stash(chunk.index, part.clone(memory_format=torch.contiguous_format))

    def _read(
        self, group: dict[str, ChunkedSequence], kinds: Iterable[str], order: range, *, take: bool
    ) -> Iterable[tuple[Any, ...]]:
        readers = (group[kind].read(order, take=take) for kind in kinds)
        return zip((self.chunks[i] for i in order), *readers, strict=True)

    def _read_outputs(self, order: range, *, take: bool) -> None:
        self._readers = [group["o"].read(order, take=take) for group in self._groups]

    def _next_output(self) -> Tensor:
        return torch.cat([reader.next() for reader in self._readers], 1)

    def _end_reading(self) -> None:
        for reader in self._readers:
            reader.release()
        self._readers = []


class _DeferGradient(torch.autograd.Function):
    """Hands out a chunk's output, and takes its gradient for later."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, core: HeadGroupsCore, chunk: Chunk,
        scoring: Scoring,
    ) -> Tensor:  # fmt: skip
        core._scoring = scoring.detached
        core._stash(chunk, ("q", "k", "v"), (q, k, v))
        ctx.core, ctx.chunk = core, chunk
        o = core._known.popleft()
        if chunk.index == 0:
            core._end_reading()
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[None, ...]:
        ctx.core._stash(ctx.chunk, ("do",), (do,))
        return None, None, None, None, None, None, None
