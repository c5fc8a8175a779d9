"""The core by head groups: for layers whose keys and values do not fit on the device, while those of a few heads do.

Streamed chunk by chunk, all earlier keys are fetched again for every chunk of queries: traffic grows with the square of
the sequence. Here the heads are cut into groups, which attention never mixes, and each group goes through all chunks
with its keys and values resident: every tensor moves in and out a fixed number of times. In return the layer runs in
two parts, projections first and the rest later, so that projections are computed twice in forward, and in backward.
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
from trunkline.attention.mask import CAUSAL, RowMask
from trunkline.attention.scoring import Scoring, sinks_gradient
from trunkline.chunking import Chunk
from trunkline.offload.chunked_sequence import ChunkedSequence, Reader
from trunkline.offload.stores import Stores


@dataclass(frozen=True, slots=True)
class HeadGroupStores:
    """Names of the stores of one head group: queries, keys, values, gradients of outputs, outputs, log-sum-exps.

    In backward the gradients of queries, keys and values take their places in `q`, `k` and `v`.
    """

    q: str
    k: str
    v: str
    do: str
    o: str
    lse: str


class HeadGroupsCore:
    """Attention of one layer over the chunks of one forward pass, head group by head group.

    Forward: `project` for every chunk, `compute_attention`, then `load_kept_output` and `kept_output` for every chunk.
    Backward: `load_output` and `replay` for every chunk, `differentiate`, then `gradients` for every chunk; if outputs
    were not kept, `project` and `compute_attention` first.

    Args:
        chunks: this rank's query rows of each chunk, numbered from 0 on this rank.
        kernel: a kernel's name, or `auto`.
        keep_attention: keep outputs and log-sum-exps for the backward.
        stores: stores of the step.
        store_names: names of each group's stores.
        inner_names: names of the stores in which one group's keys, values and their gradients are resident.
        gather: gathers the parts of keys and values that ranks hold; None where this rank has all of them.
        row_masks: mask of each row of the batch, or one for all rows.
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
        row_masks: Sequence[RowMask] = CAUSAL,
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
        self._loaded: deque[Tensor] = deque()  # outputs loaded before their queries arrived

    # -- forward -------------------------------------------------------------------------------------------------------

    def project(self, chunk: Chunk, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> None:
        """Store a chunk's queries (B, H, C, D), keys and values (B, K, C, D) for `compute_attention`."""
        self._scoring = scoring.detached
        self._stash(chunk, ("q", "k", "v"), (q, k, v))

    def compute_attention(self) -> None:
        """Compute all attention of the layer: store outputs and log-sum-exps, and drop queries, keys and values."""
        ascending = range(len(self.chunks))
        for number, group in enumerate(self._groups):
            core = self._core((group["o"], group["lse"]))
            for chunk, q, k, v in self._read(group, ("q", "k", "v"), ascending, take=True):
                core.forward(chunk, q, k, v, self._scoring.of_heads(self._heads(number, q.shape[1])))
            core.end_forward()

    def load_kept_output(self, chunk: Chunk) -> Tensor:
        """Load the output (B, H, C, D) that `kept_output` will return, chunks in ascending order.

        It leaves its store unless attention is kept for the backward.
        """
        if chunk.index == 0:
            self._read_outputs(range(len(self.chunks)), take=not self.keep_attention)
        self._loaded.append(self._next_output())
        return self._loaded[-1]

    def kept_output(self, chunk: Chunk, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """Return the output of a chunk. Call `load_kept_output` first."""
        o = self._loaded.popleft()
        if chunk is self.chunks[-1]:
            self._end_reading()
        return o

    def keep_for_backward(self) -> None:
        """Keep outputs and log-sum-exps from now on, for the backward."""
        self.keep_attention = True

    def end_forward(self) -> None:
        """End the forward: drop log-sum-exps unless attention is kept for the backward."""
        if not self.keep_attention:
            for group in self._groups:
                group["lse"].clear()

    # -- backward ------------------------------------------------------------------------------------------------------

    def load_output(self, chunk: Chunk) -> Tensor:
        """Load the output (B, H, C, D) that `replay` will return, chunks in descending order; its store keeps it."""
        if chunk is self.chunks[-1]:
            self._read_outputs(range(len(self.chunks) - 1, -1, -1), take=False)
        self._loaded.append(self._next_output())
        return self._loaded[-1]

    def replay(self, chunk: Chunk, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """Return the output of a chunk (chunks in descending order), as a node of the autograd graph.

        The node's backward stores the gradient for `differentiate` and passes none on. Call `load_output` first.
        """
        o: Tensor = _DeferGradient.apply(q, k, v, scoring.sinks, self, chunk, scoring)  # type: ignore[no-untyped-call]
        return o

    def differentiate(self) -> bool:
        """Compute all gradients of the layer's attention, which replace queries, keys and values in their stores.

        Returns:
            False if no gradient is needed; then all stores of the layer are empty.
        """
        if not any(group["do"].nbytes for group in self._groups):  # nothing before attention is trained
            self.clear()
            return False
        ascending = range(len(self.chunks))
        descending = ascending[::-1]
        dsinks = []
        for number, group in enumerate(self._groups):
            dsinks += self._differentiate(number, group, ascending, descending)
        if dsinks:
            groups = [[x for n, x in dsinks if n == number] for number in range(len(self._groups))]
            self._dsinks = torch.cat([torch.stack(each).sum(0) for each in groups])
        return True

    def _differentiate(
        self, number: int, group: dict[str, ChunkedSequence], ascending: range, descending: range
    ) -> list[tuple[int, Tensor]]:
        """Differentiate one group; return the shares of the gradient of its sinks, each with the group's number."""
        dsinks = []
        core = self._core()
        for chunk, k, v in self._read(group, ("k", "v"), ascending, take=True):
            core.append_kv(chunk, k, v, self._scoring.softcap)
        for chunk, q, do, o, lse in self._read(group, ("q", "do", "o", "lse"), descending, take=True):
            gradients = core.gradient(chunk, do, q, o, lse, self._scoring.scale)
            sinks = self._scoring.of_heads(self._heads(number, q.shape[1])).sinks
            if sinks is not None:
                dsinks.append((number, sinks_gradient(do, o, lse, sinks)))
            for kind, gradient in zip(("q", "k", "v"), gradients, strict=True):
                group[kind].stash(chunk.index, gradient.to(q.dtype, copy=True))  # a view would hold the sums
        return dsinks

    def clear(self) -> None:
        """Remove all chunks from all stores of the layer."""
        for group in self._groups:
            for sequence in group.values():
                sequence.clear()

    def gradients(self, chunk: Chunk) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the gradients of a chunk, and remove them from their stores (chunks in descending order).

        Returns:
            dq (B, H, C, D), dk and dv (B, K, C, D), and with chunk 0 the gradient of the sinks (H,), summed over
            chunks; None with other chunks, and without sinks.
        """
        if chunk is self.chunks[-1]:
            descending = range(len(self.chunks) - 1, -1, -1)
            self._readers = [g[kind].read(descending, take=True) for kind in ("q", "k", "v") for g in self._groups]
        tensors = [reader.next() for reader in self._readers]
        count = len(self._groups)
        dq, dk, dv = (torch.cat(tensors[i : i + count], 1) for i in range(0, 3 * count, count))
        if chunk.index == 0:
            self._end_reading()
        return dq, dk, dv, self._dsinks if chunk.index == 0 else None

    # -- stores --------------------------------------------------------------------------------------------------------

    def _core(self, outputs: tuple[ChunkedSequence, ChunkedSequence] | None = None) -> Core:
        """Make the attention of one group; with `outputs` it keeps outputs and log-sum-exps there."""
        return Core(
            self.chunks,
            kernel=self._kernel,
            keep_attention=outputs is not None,
            keep_kv=False,
            stores=self._stores,
            store_names=self._inner,
            gather=self._gather,
            row_masks=self._row_masks,
            drop_passed_kv=False,
            outputs=outputs,
        )

    @staticmethod
    def _heads(number: int, count: int) -> slice:
        """Return the query heads of a group, given its number and its count of heads."""
        return slice(number * count, (number + 1) * count)

    def _stash(self, chunk: Chunk, kinds: Iterable[str], tensors: Iterable[Tensor]) -> None:
        for kind, x in zip(kinds, tensors, strict=True):
            for group, part in zip(self._groups, x.detach().tensor_split(len(self._groups), 1), strict=True):
                # A copy: a view would keep the other groups' heads in memory.
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
    """Output of a chunk, loaded before. Backward stores its gradient for `differentiate`, and passes none on."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, core: HeadGroupsCore, chunk: Chunk,
        scoring: Scoring,
    ) -> Tensor:  # fmt: skip
        core._scoring = scoring.detached
        core._stash(chunk, ("q", "k", "v"), (q, k, v))
        ctx.core, ctx.chunk = core, chunk
        o = core._loaded.popleft()
        if chunk.index == 0:
            core._end_reading()
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[None, ...]:
        ctx.core._stash(ctx.chunk, ("do",), (do,))
        return None, None, None, None, None, None, None
