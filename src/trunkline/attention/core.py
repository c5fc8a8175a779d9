"""The core: attention of one layer over all its chunks, and its gradient, by query chunks.

Chunk i of the queries meets keys/values 0 … i, in kernel calls as long as is fast; partial outputs are merged in fp32.
Backward goes through the chunks in falling order, so that when chunk i is reached every later chunk has already left
its share of dk_i and dv_i in the fp32 accumulators, and dq_i, dk_i, dv_i come back complete (FPDT, arXiv 2408.16978,
section 4, with the loops turned inside out: queries outside, keys inside).

Keys, values and their accumulators of the first chunks rest on the device, as one buffer each, so that many earlier
keys are one view of it: as many chunks as the device has room for, all of them where there is no budget (*resident*).
Those of the other chunks are *streamed*: one kernel call a chunk, while the next is fetched. With a window every chunk
is, so that those that no later query sees can be let go.

What queries see of the keys before them (`trunkline.attention.mask`) says which chunks they meet at all, and in
which calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trunkline.attention import block_call
from trunkline.attention.grad_sum import GradSum
from trunkline.attention.kernels import Kernel, resolve
from trunkline.attention.kv_gather import KeyValueGather
from trunkline.attention.kv_spans import GradScatter, KVSpan, KVSpans
from trunkline.attention.kv_store import KVPair, KVStore
from trunkline.attention.mask import PLAIN, MaskBlock, RowMask
from trunkline.attention.online_softmax import OnlineSoftmax, joined_rows
from trunkline.attention.schedule import ChunkSchedule
from trunkline.attention.scoring import Scoring, sinks_gradient, with_sinks
from trunkline.chunking import Chunk
from trunkline.offload.chunked_sequence import ChunkedSequence, Reader
from trunkline.offload.stores import Stores


@dataclass(frozen=True, slots=True)
class CoreStores:
    """The stores of a core: keys, values, outputs, log-sum-exps, gradients of keys and values.

    `working_k` and `working_v` are those of the layer under way, where `k` and `v` are kept for each layer.
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
        """What a layer under way goes through once for every chunk."""
        return self.working_k or self.k, self.working_v or self.v, self.dk, self.dv


def schedule_of(chunks: list[Chunk], row_masks: Sequence[RowMask], gather: KeyValueGather | None) -> ChunkSchedule:
    """Which of these rows' chunks meet; see `Core`."""
    return ChunkSchedule(chunks, row_masks, *((0, 1) if gather is None else (gather.rank, gather.size)))


class Core:
    """Attention of one layer over the chunks of one forward pass.

    Args:
        chunks: the chunks of the sequence.
        kernel: a kernel's name, or `auto`.
        keep_attention: keep output and log-sum-exp of every chunk for the backward sweep.
        keep_kv: keep keys and values for the backward sweep.
        stores: where what is kept rests.
       store_names: of the stores.
        gather: brings together keys and values that ranks hold in parts: then `chunks` are this rank's rows of each
            chunk, both queries and keys, in their own numbering.
        row_masks: what tokens see, of each row of the batch, or one for all rows.
        softcap: of scores; None for none.
        drop_passed_kv: let go of keys and values that a window has passed; False has them resident like any.
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
        row_masks: Sequence[RowMask] = PLAIN,
        softcap: float | None = None,
        drop_passed_kv: bool = True,
    ) -> None:
        self.chunks = chunks
        self.keep_attention = keep_attention
        self.keep_kv = keep_kv
        self._kernel_name = kernel
        self._gather = gather
        self._softcap = softcap
        self._num_sights = len(row_masks)
        self._meetings = schedule_of(chunks, row_masks, gather)
        self.drops_passed_kv = drop_passed_kv and self._meetings.has_window
        self._kernel: Kernel | None = None
        self._kv_complete = False  # what a backward sweep needs of keys and values is where it will look
        self._capturing = False  # they are taken from a replay, since the forward did not keep them
        # Within budgets, keys and values that are kept leave the buffers to the layers that follow.
        self._separate = bool(store_names.working_k) and stores.placement is not None
        self.num_resident = 0 if self.drops_passed_kv else stores.num_resident(store_names.working_set, len(chunks))
        # As many chunks as one meets take turns in the places of the layer under way.
        turns = self._meetings.num_live_chunks if self.drops_passed_kv else None
        own = None if store_names.working_k else turns  # else they have places of their own, where all of them stay
        self._kv = KVStore(
            chunks, self.num_resident, stores, (store_names.k, store_names.v), own
        )  # in the kernel's dtype
        self._pieces = KVSpans(chunks, self._kv, self.num_resident, self._meetings, gather)
        self._dkv = KVStore(chunks, self.num_resident, stores, (store_names.dk, store_names.dv), turns)  # fp32 or wider
        self._kept = tuple(ChunkedSequence(len(chunks), stores, name) for name in (store_names.o, store_names.lse))
        self._kept_readers: tuple[Reader, ...] = ()
        self._known: deque[tuple[Tensor, ...]] = deque()  # outputs (and log-sum-exps) of chunks that are under way

    def needs_kv_recompute(self, chunk: Chunk) -> bool:
        """Whether keys/values of a chunk must be computed again before the backward sweep: a later one meets them."""
        return not self._kv_complete and self._meetings.is_met_after(chunk, chunk.index)

    def first_needed_chunk(self, chunk: Chunk) -> int:
        """The first chunk whose keys and values must be there when one is replayed in the backward sweep."""
        following = self._before(chunk)
        if self._gather is not None and following is not None:  # whose first are sent for beforehand
            return self._meetings.before(following).start
        return self._meetings.before(chunk).start

    @property
    def nbytes(self) -> int:
        """Bytes held now: outputs and log-sum-exps, keys and values, and their gradients' sums."""
        return sum(x.nbytes for x in self._kept) + self._kv.nbytes + self._dkv.nbytes

    # -- the sweeps ----------------------------------------------------------------------------------------------------

    def forward(self, chunk: Chunk, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """Attention of one chunk in the forward sweep (chunks in rising order).

        Args:
            chunk: which.
            q: its queries (B, H, C, D).
            k: its keys (B, K, C, D); kept for the chunks that follow.
            v: its values.
            scoring: how scores become weights.

        Returns:
            The output (B, H, C, D) in the dtype of `q`.
        """
        o, lse = self.attend(chunk, q, k, v, scoring)
        if self.keep_attention:
            for sequence, x in zip(self._kept, (o, lse), strict=True):
                sequence.stash(chunk.index, x)
        return o

    def attend(self, chunk: Chunk, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
        """Output (B, H, C, D) and log-sum-exp (B, H, C, fp32 or wider) of one chunk, keeping neither; see `forward`."""
        if chunk.index == 0:
            self._kv.read_later(j for each in self.chunks for j in self._pieces.streamed_before(each))
        self._softcap = scoring.softcap
        own = self._own(k, v) if self._kv_complete else self.append_kv(chunk, k, v)
        following = None if chunk is self.chunks[-1] else self.chunks[chunk.index + 1]
        attended = self._attend(chunk, q, own, scoring, following)
        if self.drops_passed_kv and not self.keep_kv:
            self._kv.drop(self._meetings.passed(chunk))
        return attended

    def keep_for_backward(self) -> None:
        """Keep from now on what the backward sweep will need."""
        self._capturing = not self.keep_kv
        self.keep_attention = self.keep_kv = True

    def end_forward(self) -> None:
        """Let go of what the backward sweep will not find here."""
        self._kv.end_reading()
        self._kv_complete = self.keep_kv and not self._separate
        if not self.keep_kv:
            self._kv.clear()
        elif self._separate:
            self._kv.clear_buffers()

    def restore_kv(self) -> bool:
        """Have keys and values that were kept back in the buffers; False where they were not kept."""
        if self.keep_kv and not self._kv_complete:
            self._kv.restore()
            self._kv_complete = True
        return self._kv_complete

    def append_kv(self, chunk: Chunk, k: Tensor, v: Tensor) -> KVPair:
        """Keep keys/values of a chunk, for it and the chunks that come after it; gives them in the kernel's dtype."""
        own = self._own(k, v)
        self._kv.put(chunk, own)
        if self._separate and self.keep_kv:
            self._kv.save(chunk, own)
        return own

    def load_kept_output(self, chunk: Chunk) -> Tensor:
        """The output that `kept_output` will give (chunks in rising order), before its queries are there."""
        if chunk.index == 0:
            self._kept_readers = (self._kept[0].read(range(len(self.chunks))),)
        self._known.append((self._kept_readers[0].next(),))
        return self._known[-1][0]

    def kept_output(self, chunk: Chunk, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """The output that was kept, in a replay of the forward sweep; keys and values are kept if they were not.

        `load_kept_output` comes before it.
        """
        self._softcap = scoring.softcap
        if self._capturing and self._separate and chunk.index < self.num_resident:
            self._kv.save(chunk, self._own(k, v))
        elif self._capturing:
            self.append_kv(chunk, k, v)
        (o,) = self._known.popleft()
        if chunk is self.chunks[-1]:
            self._kept_readers[0].release()
            self._kept_readers = ()
        return o

    def load_output(self, chunk: Chunk) -> Tensor | None:
        """The output that `replay` will give, before its queries are there; None where it was not kept."""
        if not self.keep_attention:
            return None
        if chunk is self.chunks[-1]:
            falling = range(len(self.chunks) - 1, -1, -1)
            self._kept_readers = tuple(sequence.read(falling, take=True) for sequence in self._kept)
        self._known.append(tuple(reader.next() for reader in self._kept_readers))
        return self._known[-1][0]

    def replay(self, chunk: Chunk, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """Attention of one chunk in the backward sweep (chunks in falling order), as a node of the autograd graph.

        `load_output` comes before it.
        """
        o: Tensor = _ReplayAttention.apply(q, k, v, scoring.sinks, self, chunk, scoring)  # type: ignore[no-untyped-call]
        return o

    def gradient(
        self, chunk: Chunk, do: Tensor, q: Tensor, o: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k, v of one chunk (chunks in falling order), whose keys/values are all in the buffers."""
        assert self.num_resident == len(self.chunks), "keys and values of all chunks must be resident"
        return self._gradient(chunk, do, q, self._kv.span(chunk.start, chunk.stop), o, lse, scale)

    def _begin_backward(self, *, differentiated: bool) -> None:
        """Before the last chunk's replay: say what will be read in which order."""
        falling = self.chunks[::-1]
        times = (not self.keep_attention) + differentiated  # to compute a chunk's attention again, and its gradient
        self._kv.read_later(j for each in falling for _ in range(times) for j in self._pieces.streamed_before(each))
        if differentiated:
            met = ((each, j) for each in falling for j in (*self._pieces.streamed_before(each), each.index))
            later = (j for each, j in met if j >= self.num_resident and self._meetings.is_met_after(each, j))
            self._dkv.read_later(later, take=True)

    def _kept_output(
        self, chunk: Chunk, q: Tensor, own: KVPair, scoring: Scoring, *, differentiated: bool
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of a chunk in the backward sweep."""
        if not self.keep_attention:
            return self._attend(chunk, q, own, scoring, chunk if differentiated else self._before(chunk))
        o, lse = self._known.popleft()
        return o, lse

    def _before(self, chunk: Chunk) -> Chunk | None:
        return self.chunks[chunk.index - 1] if chunk.index else None

    def _end_backward(self) -> None:
        for reader in self._kept_readers:
            reader.release()
        self._kv.clear()
        self._dkv.clear()

    # -- the two directions of one chunk -------------------------------------------------------------------------------

    def _own(self, k: Tensor, v: Tensor) -> KVPair:
        if self._kernel is None:
            shape = k.shape[-1], v.shape[-1]
            self._kernel = resolve(k.device, k.dtype, *shape, self._kernel_name, softcap=self._softcap)
        dtype = self._kernel.compute_dtype(k.dtype)
        return k.to(dtype), v.to(dtype)

    def _attend(
        self, chunk: Chunk, q: Tensor, own: KVPair, scoring: Scoring, following: Chunk | None
    ) -> tuple[Tensor, Tensor]:
        assert self._kernel is not None
        q_compute = q.to(own[0].dtype)
        merged = [OnlineSoftmax(q.shape[2]) for _ in range(self._num_sights)]
        for piece in self._pieces.of_chunk(chunk, q, own, following, self._kernel):
            for row, first, block in self._blocks(chunk, piece):
                given = block_call.of_row(row, q_compute, piece.k, piece.v)
                part = block_call.forward(self._kernel, block, *given, first=first, scale=scoring.scale)
                merged[row or 0].add(block.rows, *part)
        o, lse = joined_rows([each.result() for each in merged])
        if scoring.sinks is not None:
            o, lse = with_sinks(o, lse, scoring.sinks)
        return o.to(q.dtype), lse

    def _gradient(
        self, chunk: Chunk, do: Tensor, q: Tensor, own: KVPair, o: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        kernel = self._kernel
        assert kernel is not None
        do, q, o = (x.to(own[0].dtype) for x in (do, q, o))
        if len(self.chunks) == 1 == self.num_resident and self._gather is None and self._meetings.is_causal:
            gradients = kernel.backward(do, q, *own, o, lse, causal=True, scale=scale)
            self._end_backward()
            return gradients
        self._dkv.begin_sums(own, lse.dtype)
        returns = None if self._gather is None else GradScatter(self._gather)
        dq = GradSum(q, lse.dtype)
        sums: KVPair | None = None
        for piece in self._pieces.of_chunk(chunk, q, own, self._before(chunk), kernel, backward=True):
            dk, dv = GradSum(piece.k, lse.dtype), GradSum(piece.v, lse.dtype)
            for row, first, block in self._blocks(chunk, piece):
                given = block_call.of_row(row, do, q, piece.k, piece.v, o, lse)
                parts = block_call.backward(kernel, block, *given, first=first, scale=scale)
                keys = block.keys[0] - first, block.keys[1] - first
                for total, part, at in zip((dq, dk, dv), parts, (block.rows, keys, keys), strict=True):
                    total.add(part, row, *at)
            pair = dk.value, dv.value
            for to, shares in [(piece, pair)] if returns is None else returns.send(piece, pair):
                sums = self._add(chunk, to, shares)
        for to, shares in () if returns is None else returns.rest():
            sums = self._add(chunk, to, shares)
        if chunk.index < self.num_resident:
            sums = self._dkv.span(chunk.start, chunk.stop)
        if self.drops_passed_kv and chunk.index:
            self._kv.drop([chunk.index - 1])  # its own come with its replay
        if chunk.index == 0:  # the last of a backward sweep
            self._end_backward()
        assert sums is not None
        return dq.value, *sums

    def _add(self, chunk: Chunk, piece: KVSpan, gradients: KVPair) -> KVPair:
        """Add one chunk's share of the gradients of the keys and values of a piece; gives their sums."""
        if piece.span is not None:
            sums = self._dkv.span(*piece.span)
            for total, x in zip(sums, gradients, strict=True):
                total += x
            return sums
        assert piece.streamed is not None
        if self._meetings.is_met_after(chunk, piece.streamed.index):
            total_k, total_v = self._dkv.next_later()
            gradients = total_k.add_(gradients[0]), total_v.add_(gradients[1])
        if piece.streamed is not chunk:
            self._dkv.put(piece.streamed, gradients)
        return gradients

    def _blocks(self, chunk: Chunk, piece: KVSpan) -> Iterator[tuple[int | None, int, MaskBlock]]:
        """Kernel calls of a chunk over a piece: a row of the batch or None for all, where the keys begin, the block."""
        assert self._kernel is not None
        if piece.first is None:
            yield None, 0, MaskBlock((0, len(chunk)), (0, piece.k.shape[2]))
            return
        joined = self._kernel.bottom_right
        for row, block in self._meetings.blocks(chunk, piece.first, piece.k.shape[2], joined=joined):
            yield (None if self._num_sights == 1 else row), piece.first, block


class _ReplayAttention(torch.autograd.Function):
    """Attention of one chunk: forward hands out what was kept (or computes it again), backward is the core's."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, core: Core, chunk: Chunk, scoring: Scoring
    ) -> Tensor:
        core._softcap = scoring.softcap
        streamed = chunk.index >= core.num_resident
        differentiated = any(ctx.needs_input_grad[:4])
        if chunk is core.chunks[-1]:
            core._begin_backward(differentiated=differentiated)
        if not streamed and not core._kv_complete and not core.needs_kv_recompute(chunk):
            core._kv.put(chunk, core._own(k, v))
        own = core._own(k, v) if streamed else core._kv.span(chunk.start, chunk.stop)
        o, lse = core._kept_output(chunk, q, own, scoring, differentiated=differentiated)
        # Keys and values in the buffers are still there in backward.
        ctx.save_for_backward(q, o, lse, *(own if streamed else ()))
        ctx.core, ctx.chunk, ctx.scoring = core, chunk, scoring.detached
        ctx.dtypes = q.dtype, k.dtype, v.dtype
        if chunk.index == 0 and not differentiated:  # nothing before attention is trained: there will be no backward
            core._end_backward()
        return o.view_as(o)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, o, lse, *own = ctx.saved_tensors
        own = own or ctx.core._kv.span(ctx.chunk.start, ctx.chunk.stop)
        gradients = ctx.core._gradient(ctx.chunk, do, q, tuple(own), o, lse, ctx.scoring.scale)
        sinks = ctx.scoring.sinks
        dsinks = None if sinks is None else sinks_gradient(do, o, lse, sinks).to(sinks.dtype)
        return *(x.to(dtype) for x, dtype in zip(gradients, ctx.dtypes, strict=True)), dsinks, None, None, None
