"""The core: attention of one layer over all its chunks, and its gradient.

Chunk i of the queries attends to keys and values of chunks 0 … i (`trunkline.attention.loop`). The backward takes
chunks in descending order: when chunk i is reached, every later chunk has added its share of dk_i and dv_i to the fp32
sums, so that dq_i, dk_i, dv_i are complete as they are returned (FPDT, arXiv 2408.16978, section 4, with the loops
exchanged: queries outside, keys inside).

Keys, values and the sums of their gradients are *resident* for the first chunks: one buffer on the device each, so that
many earlier keys are one view. As many chunks are resident as the device budget has room for; all of them without a
budget. The others are *streamed*: a tensor each, in any tier, and one kernel call a chunk, while the next chunk is
fetched. With a sliding window every chunk is streamed, so that chunks which no later query sees can be dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trunkline.attention.kernel_base import Kernel
from trunkline.attention.kernels import resolve
from trunkline.attention.kv_gather import KeyValueGather
from trunkline.attention.kv_spans import GradScatter, KVSpan, KVSpans
from trunkline.attention.kv_store import KVPair, KVStore
from trunkline.attention.loop import GradSum, attend_spans, differentiate_spans
from trunkline.attention.mask import CAUSAL, Range, RowMask
from trunkline.attention.schedule import ChunkSchedule
from trunkline.attention.scoring import Scoring, sinks_gradient
from trunkline.chunking import Chunk
from trunkline.offload.chunked_sequence import ChunkedSequence, Reader
from trunkline.offload.stores import Stores


@dataclass(frozen=True, slots=True)
class CoreStores:
    """Names of a core's stores.

    Attributes:
        k: keys.
        v: values.
        o: outputs.
        lse: log-sum-exps.
        dk: sums of the gradients of keys.
        dv: sums of the gradients of values.
        working_k: keys of the layer that runs now, where `k` outlives it; empty if `k` serves for both.
        working_v: values of the layer that runs now, likewise.
    """

    k: str
    v: str
    o: str
    lse: str
    dk: str = "dk"
    dv: str = "dv"
    working_k: str = ""
    working_v: str = ""

    @property
    def working_set(self) -> tuple[str, str, str, str]:
        """Stores that the layer that runs now needs for every chunk: keys, values, and the sums of their gradients."""
        return self.working_k or self.k, self.working_v or self.v, self.dk, self.dv


def schedule_of(chunks: list[Chunk], row_masks: Sequence[RowMask], gather: KeyValueGather | None) -> ChunkSchedule:
    """Build the schedule of a layer; see `Core` for the arguments."""
    return ChunkSchedule(chunks, row_masks, *((0, 1) if gather is None else (gather.rank, gather.size)))


class Core:
    """Attention of one layer over the chunks of one forward pass, and its backward.

    Args:
        chunks: this rank's query rows of each chunk, numbered from 0 on this rank; its keys are those of the same
            tokens. Without `gather` they are all tokens.
        kernel: a kernel's name, or `auto`.
        keep_attention: keep the output and log-sum-exp of every chunk for the backward sweep; else backward computes
            attention again.
        keep_kv: keep keys and values for the backward sweep; else backward computes them again.
        stores: stores of the step. They count all tensors of the core, and hold the streamed ones.
        store_names: names of the stores.
        gather: gathers the parts of keys and values that ranks hold; None where this rank has all of them.
        row_masks: mask of each row of the batch, or one for all rows.
        drop_passed_kv: drop keys and values once no later chunk sees them (sliding windows); False makes them resident
            like any other.
        outputs: two sequences for outputs and log-sum-exps; None makes them, in the stores `o` and `lse`.
    """

    def __init__(
        self,
        chunks: list[Chunk],
        *,
        kernel: str,
        keep_attention: bool,
        keep_kv: bool,
        stores: Stores,
        store_names: CoreStores,
        gather: KeyValueGather | None = None,
        row_masks: Sequence[RowMask] = CAUSAL,
        drop_passed_kv: bool = True,
        outputs: tuple[ChunkedSequence, ChunkedSequence] | None = None,
    ) -> None:
        self.chunks = chunks
        self.keep_attention = keep_attention
        self.keep_kv = keep_kv
        self._kernel_name = kernel
        self._gather = gather
        self._schedule = schedule_of(chunks, row_masks, gather)
        self.drops_passed_kv = drop_passed_kv and self._schedule.has_window
        self._kernel: Kernel | None = None
        self._kv_complete = False  # every key that the backward sweep needs is in `_kv`
        self._keeps_replayed_kv = False  # keys are kept from a replay of the forward, which did not keep them
        # With budgets, kept keys and values leave the buffers, which serve the layers that follow.
        self._saves_resident = bool(store_names.working_k) and stores.placement is not None
        self.num_resident = 0 if self.drops_passed_kv else stores.num_resident(store_names.working_set, len(chunks))
        slots = self._schedule.num_live_chunks if self.drops_passed_kv else None
        kv_slots = None if store_names.working_k else slots  # kept for each layer, every chunk has a slot of its own
        names = store_names
        self._kv = KVStore(chunks, self.num_resident, stores, (names.k, names.v), kv_slots)  # in the kernel's dtype
        self._spans = KVSpans(chunks, self._kv, self.num_resident, self._schedule, gather)
        self._dkv = KVStore(chunks, self.num_resident, stores, (names.dk, names.dv), slots)  # fp32 or wider
        self._kept = outputs or tuple(ChunkedSequence(len(chunks), stores, name) for name in (names.o, names.lse))
        self._kept_readers: tuple[Reader, ...] = ()
        # Outputs (and log-sum-exps) that were loaded before their queries arrived: of the running chunks.
        self._loaded: deque[tuple[Tensor, ...]] = deque()

    def needs_kv_recompute(self, chunk: Chunk) -> bool:
        """Return True if a chunk's keys and values must be computed again before the replay of a later chunk.

        False if they are there already, or if no later chunk sees them: then the chunk's own replay computes them.
        """
        return not self._kv_complete and self._schedule.is_used_after(chunk, chunk.index)

    def first_needed_chunk(self, chunk: Chunk) -> int:
        """Return the index of the first chunk whose keys and values must be there when `chunk` is replayed.

        Over ranks this includes the keys of the next replay, which are gathered ahead.
        """
        following = self._before(chunk)
        if self._gather is not None and following is not None:  # its first span is gathered ahead
            return self._schedule.earlier(following).start
        return self._schedule.earlier(chunk).start

    @property
    def nbytes(self) -> int:
        """Bytes that this rank holds now, in any tier: outputs and log-sum-exps, k and v, and sums of dk and dv."""
        return sum(x.nbytes for x in self._kept) + self._kv.nbytes + self._dkv.nbytes

    # -- forward sweep -------------------------------------------------------------------------------------------------

    def forward(self, chunk: Chunk, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """Compute the attention of one chunk, in a forward sweep (chunks in ascending order).

        The output and log-sum-exp are stored, too, if attention is kept.

        Args:
            chunk: this rank's rows of the chunk.
            q: queries (B, H, C, D) of these rows and of this rank's heads.
            k: keys (B, K, C, D) of the same tokens; stored for the chunks that follow.
            v: values (B, K, C, D); their D may be another.
            scoring: scale, soft cap, and sinks of this rank's heads.

        Returns:
            The output (B, H, C, D) in the dtype of `q`.
        """
        if chunk.index == 0:
            self._kv.read_streamed(j for each in self.chunks for j in self._spans.streamed_earlier(each))
        if self._kv_complete:  # the replay of a checkpoint group: kept keys and values have been restored
            own = self._to_kernel_dtype(k, v, scoring.softcap)
        else:
            own = self.append_kv(chunk, k, v, scoring.softcap)
        following = None if chunk is self.chunks[-1] else self.chunks[chunk.index + 1]
        o, lse = attend_spans(*self._loop_inputs(chunk, q, own, following), scoring=scoring)
        o = o.to(q.dtype)
        if self.drops_passed_kv and not self.keep_kv:
            self._kv.drop(self._schedule.last_used_by(chunk))
        if self.keep_attention:
            for sequence, x in zip(self._kept, (o, lse), strict=True):
                sequence.stash(chunk.index, x)
        return o

    def keep_for_backward(self) -> None:
        """Keep outputs, keys and values from now on, for the backward sweep."""
        self._keeps_replayed_kv = not self.keep_kv
        self.keep_attention = self.keep_kv = True

    def end_forward(self) -> None:
        """End the forward sweep: drop keys and values that are not kept; free the buffers of saved ones."""
        self._kv.end_reading()
        self._kv_complete = self.keep_kv and not self._saves_resident
        if not self.keep_kv:
            self._kv.clear()
        elif self._saves_resident:
            self._kv.clear_buffers()

    def restore_kv(self) -> bool:
        """Bring kept keys and values back into the buffers; return False if they must be computed again."""
        if self.keep_kv and not self._kv_complete:
            self._kv.restore_resident()
            self._kv_complete = True
        return self._kv_complete

    def append_kv(self, chunk: Chunk, k: Tensor, v: Tensor, softcap: float | None) -> KVPair:
        """Store keys and values of a chunk, for it and later chunks; return them in the kernel's dtype.

        Args:
            chunk: this rank's rows of the chunk.
            k: keys (B, K, C, D).
            v: values (B, K, C, D).
            softcap: soft cap of the scores, for the choice of the kernel at the core's first call; None for none.
        """
        own = self._to_kernel_dtype(k, v, softcap)
        self._kv.put(chunk, own)
        if self._saves_resident and self.keep_kv:
            self._kv.save_resident(chunk, own)
        return own

    def load_kept_output(self, chunk: Chunk) -> Tensor:
        """Load the output that `kept_output` will return (chunks in ascending order), before its queries are there."""
        if chunk.index == 0:
            self._kept_readers = (self._kept[0].read(range(len(self.chunks))),)
        self._loaded.append((self._kept_readers[0].next(),))
        return self._loaded[-1][0]

    def kept_output(self, chunk: Chunk, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """Return the kept output (B, H, C, D) of a chunk, in a replay of the forward sweep; compute no attention.

        Store the chunk's keys and values if the forward did not keep them. Call `load_kept_output` first.
        """
        if self._keeps_replayed_kv and self._saves_resident and chunk.index < self.num_resident:
            self._kv.save_resident(chunk, self._to_kernel_dtype(k, v, scoring.softcap))
        elif self._keeps_replayed_kv:
            self.append_kv(chunk, k, v, scoring.softcap)
        (o,) = self._loaded.popleft()
        if chunk is self.chunks[-1]:
            self._kept_readers[0].release()
            self._kept_readers = ()
        return o

    # -- backward sweep ------------------------------------------------------------------------------------------------

    def load_output(self, chunk: Chunk) -> Tensor | None:
        """Load the output that `replay` will return, before its queries are there, and remove it from its store.

        Chunks come in descending order. Return None, and load nothing, if attention was not kept.
        """
        if not self.keep_attention:
            return None
        if chunk is self.chunks[-1]:
            descending = range(len(self.chunks) - 1, -1, -1)
            self._kept_readers = tuple(sequence.read(descending, take=True) for sequence in self._kept)
        self._loaded.append(tuple(reader.next() for reader in self._kept_readers))
        return self._loaded[-1][0]

    def replay(self, chunk: Chunk, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """Return the attention of one chunk as a node of the autograd graph (chunks in descending order).

        The output is the kept one, or computed again. The node's backward adds to the gradients of earlier keys and
        returns the complete ones of this chunk. Call `load_output` first.
        """
        o: Tensor = _ReplayAttention.apply(q, k, v, scoring.sinks, self, chunk, scoring)  # type: ignore[no-untyped-call]
        return o

    def gradient(
        self, chunk: Chunk, do: Tensor, q: Tensor, o: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute dq, dk, dv of one chunk (chunks in descending order); keys of all chunks must be resident.

        Returns:
            dq (B, H, C, D), dk and dv (B, K, C, D) with the shares of all later chunks. dk and dv may be views of the
            buffers, which are freed after chunk 0.
        """
        assert self.num_resident == len(self.chunks), "keys and values of all chunks must be resident"
        return self._gradient(chunk, do, q, self._kv.view(chunk.start, chunk.stop), o, lse, scale)

    def _begin_backward(self, *, differentiated: bool) -> None:
        """Announce the reads of the whole sweep, before the last chunk is replayed."""
        descending = self.chunks[::-1]
        passes = (not self.keep_attention) + differentiated  # over a chunk's keys: attention again, and its gradient
        self._kv.read_streamed(
            j for each in descending for _ in range(passes) for j in self._spans.streamed_earlier(each)
        )
        if differentiated:
            seen = ((each, j) for each in descending for j in (*self._spans.streamed_earlier(each), each.index))
            # A sum is read only where a later chunk (one that was before in this order) has started it.
            started = (j for each, j in seen if j >= self.num_resident and self._schedule.is_used_after(each, j))
            self._dkv.read_streamed(started, take=True)

    def _output(
        self, chunk: Chunk, q: Tensor, own: KVPair, scoring: Scoring, *, differentiated: bool
    ) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp of a chunk in the backward sweep: kept, or computed again."""
        if not self.keep_attention:
            # Spans are read next for this chunk's gradient, if there is one; else for the chunk before.
            following = chunk if differentiated else self._before(chunk)
            o, lse = attend_spans(*self._loop_inputs(chunk, q, own, following), scoring=scoring)
            return o.to(q.dtype), lse
        o, lse = self._loaded.popleft()
        return o, lse

    def _before(self, chunk: Chunk) -> Chunk | None:
        return self.chunks[chunk.index - 1] if chunk.index else None

    def _end_backward(self) -> None:
        for reader in self._kept_readers:
            reader.release()
        self._kv.clear()
        self._dkv.clear()

    # -- one chunk -----------------------------------------------------------------------------------------------------

    def _to_kernel_dtype(self, k: Tensor, v: Tensor, softcap: float | None) -> KVPair:
        """Cast keys and values to the kernel's dtype; the first call chooses the kernel."""
        if self._kernel is None:
            shape = k.shape[-1], v.shape[-1]
            self._kernel = resolve(k.device, k.dtype, *shape, self._kernel_name, softcap=softcap)
        dtype = self._kernel.compute_dtype(k.dtype)
        return k.to(dtype), v.to(dtype)

    def _loop_inputs(
        self, chunk: Chunk, q: Tensor, own: KVPair, following: Chunk | None
    ) -> tuple[Tensor, Iterator[KVSpan], Kernel, Sequence[Range], Sequence[RowMask]]:
        """Return the inputs of the attention loop: queries, spans, kernel, query positions, row masks.

        The spans of chunk `following` are fetched ahead.
        """
        assert self._kernel is not None
        spans = self._spans.of_chunk(chunk, q, own, following, self._kernel)
        return q.to(own[0].dtype), spans, self._kernel, self._schedule.queries(chunk), self._schedule.row_masks

    def _gradient(
        self, chunk: Chunk, do: Tensor, q: Tensor, own: KVPair, o: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute dq, dk, dv of one chunk, and add its shares to the sums of earlier keys; end backward at chunk 0."""
        kernel = self._kernel
        assert kernel is not None
        do, q, o = (x.to(own[0].dtype) for x in (do, q, o))
        if len(self.chunks) == 1 == self.num_resident and self._gather is None and self._schedule.is_causal:
            gradients = kernel.backward(do, q, *own, o, lse, causal=True, scale=scale)  # nothing to add up
            self._end_backward()
            return gradients
        self._dkv.zero_buffers(own, lse.dtype)
        scatter = None if self._gather is None else GradScatter(self._gather)
        dq = GradSum(q, lse.dtype)
        sums: KVPair | None = None
        spans = self._spans.of_chunk(chunk, q, own, self._before(chunk), kernel, backward=True)
        queries, row_masks = self._schedule.queries(chunk), self._schedule.row_masks
        for span, pair in differentiate_spans(
            do, q, o, lse, spans, kernel, queries=queries, row_masks=row_masks, scale=scale, dq=dq
        ):
            for own_span, shares in [(span, pair)] if scatter is None else scatter.send(span, pair):
                sums = self._add_gradients(chunk, own_span, shares)
        for own_span, shares in () if scatter is None else scatter.rest():
            sums = self._add_gradients(chunk, own_span, shares)
        # The chunk's own keys come last, so that `sums` are theirs now, unless they are slices of the buffers.
        if chunk.index < self.num_resident:
            sums = self._dkv.view(chunk.start, chunk.stop)
        if self.drops_passed_kv and chunk.index:
            self._kv.drop([chunk.index - 1])  # the chunk before takes its own keys from its replay
        if chunk.index == 0:  # the last chunk of a backward sweep
            self._end_backward()
        assert sums is not None
        return dq.value, *sums

    def _add_gradients(self, chunk: Chunk, span: KVSpan, gradients: KVPair) -> KVPair:
        """Add one query chunk's gradients of a span's keys and values to their running sums; return the sums."""
        if span.resident is not None:
            sums = self._dkv.view(*span.resident)
            for total, x in zip(sums, gradients, strict=True):
                total += x
            return sums
        assert span.streamed is not None
        if self._schedule.is_used_after(chunk, span.streamed.index):  # a later chunk has started the sums
            total_k, total_v = self._dkv.next_streamed()
            gradients = total_k.add_(gradients[0]), total_v.add_(gradients[1])
        if span.streamed is not chunk:  # the sums of the chunk's own keys are complete: they are returned, not stored
            self._dkv.put(span.streamed, gradients)
        return gradients


class _ReplayAttention(torch.autograd.Function):
    """Attention of one chunk in the backward sweep.

    Forward returns the output, kept or computed again. Backward is the core's.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, core: Core, chunk: Chunk, scoring: Scoring
    ) -> Tensor:
        streamed = chunk.index >= core.num_resident
        differentiated = any(ctx.needs_input_grad[:4])
        if chunk is core.chunks[-1]:
            core._begin_backward(differentiated=differentiated)
        if not streamed and not core._kv_complete and not core.needs_kv_recompute(chunk):
            core._kv.put(chunk, core._to_kernel_dtype(k, v, scoring.softcap))
        own = core._to_kernel_dtype(k, v, scoring.softcap) if streamed else core._kv.view(chunk.start, chunk.stop)
        o, lse = core._output(chunk, q, own, scoring, differentiated=differentiated)
        # Resident keys are still in the buffers at this node's backward: saving views of them would hold the buffers.
        ctx.save_for_backward(q, o, lse, *(own if streamed else ()))
        ctx.core, ctx.chunk, ctx.scoring = core, chunk, scoring.detached
        ctx.dtypes = q.dtype, k.dtype, v.dtype
        if chunk.index == 0 and not differentiated:  # nothing before attention is trained: there will be no backward
            core._end_backward()
        return o.view_as(o)  # autograd marks what is returned: the kept tensor itself must stay a plain one

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, o, lse, *own = ctx.saved_tensors
        own = own or ctx.core._kv.view(ctx.chunk.start, ctx.chunk.stop)
        gradients = ctx.core._gradient(ctx.chunk, do, q, tuple(own), o, lse, ctx.scoring.scale)
        sinks = ctx.scoring.sinks
        dsinks = None if sinks is None else sinks_gradient(do, o, lse, sinks).to(sinks.dtype)
        return *(x.to(dtype) for x, dtype in zip(gradients, ctx.dtypes, strict=True)), dsinks, None, None, None
