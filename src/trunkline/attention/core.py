"""The core: attention of one layer over all its chunks, and its gradient, by query chunks.

Chunk i of the queries meets keys/values 0 … i, in kernel calls as long as is fast; partial outputs are merged in fp32.
Backward goes through the chunks in falling order, so that when chunk i is reached every later chunk has already left
its share of dk_i and dv_i in the fp32 accumulators, and dq_i, dk_i, dv_i come back complete (FPDT, arXiv 2408.16978,
section 4, with the loops turned inside out: queries outside, keys inside).

Keys, values and their accumulators of the first chunks rest on the device, as one buffer each, so that many earlier
keys are one view of it: as many chunks as the device has room for, all of them where there is no budget (*resident*).
Those of the other chunks are *streamed*: one kernel call a chunk, while the next is fetched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trunkline.attention.kernels import MAX_ELEMENTS, Kernel, resolve
from trunkline.attention.merge import Merged
from trunkline.attention.pairs import Pair, Pairs
from trunkline.attention.rectangles import Gathered, Rectangle, Returns
from trunkline.chunking import Chunk, spans
from trunkline.ranks import KeyValueGather
from trunkline.sequence import ChunkedSequence, Reader
from trunkline.tiers.stores import Stores

# Most keys that one backward call takes: its scratch (dk and dv of so many) does not grow with the sequence. Longer
# spans are no faster: from 2,048 queries by 8,192 keys up, kernels reach what they ever reach.
SPAN = 16_384


@dataclass(frozen=True, slots=True)
class Names:
    """The stores of a core: keys, values, outputs, log-sum-exps, gradients of keys and values.

    `live_k` and `live_v` are those of the layer under way, where `k` and `v` are kept for each layer.
    """

    k: str
    v: str
    o: str
    lse: str
    dk: str = "dk"
    dv: str = "dv"
    live_k: str = ""
    live_v: str = ""

    @property
    def live(self) -> tuple[str, str, str, str]:
        """What a layer under way goes through once for every chunk."""
        return self.live_k or self.k, self.live_v or self.v, self.dk, self.dv


class Core:
    """Attention of one layer over the chunks of one forward pass.

    Args:
        chunks: the chunks of the sequence.
        kernel: a kernel's name, or `auto`.
        keep_attention: keep output and log-sum-exp of every chunk for the backward sweep.
        keep_kv: keep keys and values for the backward sweep.
        stores: where what is kept rests.
        names: of the stores.
        gather: brings together keys and values that ranks hold in parts: then `chunks` are this rank's rows of each
            chunk, both queries and keys, in their own numbering.
    """

    def __init__(
        self,
        chunks: list[Chunk],
        *,
        kernel: str,
        keep_attention: bool,
        keep_kv: bool,
        stores: Stores,
        names: Names,
        gather: KeyValueGather | None = None,
    ) -> None:
        self.chunks = chunks
        self.keep_attention = keep_attention
        self.keep_kv = keep_kv
        self._kernel_name = kernel
        self._gather = gather
        self._gathered: Gathered | None = None
        self._kernel: Kernel | None = None
        self._kv_complete = False  # what a backward sweep needs of keys and values is where it will look
        self._capturing = False  # they are taken from a replay, since the forward did not keep them
        # Within budgets, keys and values that are kept leave the buffers to the layers that follow.
        self._separate = bool(names.live_k) and stores.placement is not None
        self.num_resident = stores.num_resident(names.live, len(chunks))
        self._kv = Pairs(chunks, self.num_resident, stores, (names.k, names.v))  # in the kernel's dtype
        self._dkv = Pairs(chunks, self.num_resident, stores, (names.dk, names.dv))  # fp32 or wider
        self._kept = tuple(ChunkedSequence(len(chunks), stores, name) for name in (names.o, names.lse))
        self._kept_readers: tuple[Reader, ...] = ()
        self._known: deque[tuple[Tensor, ...]] = deque()  # outputs (and log-sum-exps) of chunks that are under way

    @property
    def needs_kv_pass(self) -> bool:
        """Whether keys/values of the earlier chunks must be computed again before the backward sweep."""
        return not self._kv_complete and len(self.chunks) > 1

    @property
    def nbytes(self) -> int:
        """Bytes held now: outputs and log-sum-exps, keys and values, and their gradients' sums."""
        return sum(x.nbytes for x in self._kept) + self._kv.nbytes + self._dkv.nbytes

    # -- the sweeps ----------------------------------------------------------------------------------------------------

    def forward(self, chunk: Chunk, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attention of one chunk in the forward sweep (chunks in rising order).

        Args:
            chunk: which.
            q: its queries (B, H, C, D).
            k: its keys (B, K, C, D); kept for the chunks that follow.
            v: its values.
            scale: factor of the scores.

        Returns:
            The output (B, H, C, D) in the dtype of `q`.
        """
        o, lse = self.attend(chunk, q, k, v, scale)
        if self.keep_attention:
            for sequence, x in zip(self._kept, (o, lse), strict=True):
                sequence.stash(chunk.index, x)
        return o

    def attend(self, chunk: Chunk, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Output (B, H, C, D) and log-sum-exp (B, H, C, fp32 or wider) of one chunk, keeping neither; see `forward`."""
        if chunk.index == 0:
            later = range(self.num_resident, len(self.chunks))
            self._kv.read_later(j for i in later for j in range(self.num_resident, i))
        own = self._own(k, v) if self._kv_complete else self.put(chunk, k, v)
        following = None if chunk is self.chunks[-1] else self.chunks[chunk.index + 1]
        return self._attend(chunk, q, own, scale, following)

    def keep_all(self) -> None:
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

    def restore(self) -> bool:
        """Have keys and values that were kept back in the buffers; False where they were not kept."""
        if self.keep_kv and not self._kv_complete:
            self._kv.restore()
            self._kv_complete = True
        return self._kv_complete

    def put(self, chunk: Chunk, k: Tensor, v: Tensor) -> Pair:
        """Keep keys/values of a chunk, for it and the chunks that come after it; gives them in the kernel's dtype."""
        own = self._own(k, v)
        self._kv.put(chunk, own)
        if self._separate and self.keep_kv:
            self._kv.save(chunk, own)
        return own

    def recalled(self, chunk: Chunk) -> Tensor:
        """The output that `recall` will give (chunks in rising order), before its queries are there."""
        if chunk.index == 0:
            self._kept_readers = (self._kept[0].read(range(len(self.chunks))),)
        self._known.append((self._kept_readers[0].next(),))
        return self._known[-1][0]

    def recall(self, chunk: Chunk, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """The output that was kept, in a replay of the forward sweep; keys and values are kept if they were not.

        `recalled` comes before it.
        """
        if self._capturing and self._separate and chunk.index < self.num_resident:
            self._kv.save(chunk, self._own(k, v))
        elif self._capturing:
            self.put(chunk, k, v)
        (o,) = self._known.popleft()
        if chunk is self.chunks[-1]:
            self._kept_readers[0].done()
            self._kept_readers = ()
        return o

    def known(self, chunk: Chunk) -> Tensor | None:
        """The output that `replay` will give, before its queries are there; None where it was not kept."""
        if not self.keep_attention:
            return None
        if chunk is self.chunks[-1]:
            falling = range(len(self.chunks) - 1, -1, -1)
            self._kept_readers = tuple(sequence.read(falling, take=True) for sequence in self._kept)
        self._known.append(tuple(reader.next() for reader in self._kept_readers))
        return self._known[-1][0]

    def replay(self, chunk: Chunk, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attention of one chunk in the backward sweep (chunks in falling order), as a node of the autograd graph.

        `known` comes before it.
        """
        o: Tensor = _Replay.apply(q, k, v, self, chunk, scale)  # type: ignore[no-untyped-call]
        return o

    def gradient(
        self, chunk: Chunk, do: Tensor, q: Tensor, o: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k, v of one chunk (chunks in falling order), whose keys/values are all in the buffers."""
        assert self.num_resident == len(self.chunks), "keys and values of all chunks must be resident"
        return self._gradient(chunk, do, q, self._kv.span(chunk.start, chunk.stop), o, lse, scale)

    def _begin_backward(self, k: Tensor, v: Tensor, *, differentiated: bool) -> None:
        """Before the last chunk's replay, given its keys and values: say what will be read in which order."""
        first, falling = self.num_resident, range(len(self.chunks) - 1, -1, -1)
        if not self._kv_complete and first == len(self.chunks):
            self._kv.put(self.chunks[-1], self._own(k, v))
        times = (not self.keep_attention) + differentiated  # to compute a chunk's attention again, and its gradient
        self._kv.read_later(j for i in falling for _ in range(times) for j in range(first, i))
        if differentiated:
            self._dkv.read_later((j for i in falling[1:] for j in range(first, i + 1)), take=True)

    def _kept_output(
        self, chunk: Chunk, q: Tensor, own: Pair, scale: float, *, differentiated: bool
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of a chunk in the backward sweep."""
        if not self.keep_attention:
            return self._attend(chunk, q, own, scale, chunk if differentiated else self._before(chunk))
        o, lse = self._known.popleft()
        return o, lse

    def _before(self, chunk: Chunk) -> Chunk | None:
        return self.chunks[chunk.index - 1] if chunk.index else None

    def _end_backward(self) -> None:
        for reader in self._kept_readers:
            reader.done()
        self._kv.clear()
        self._dkv.clear()

    # -- the two directions of one chunk -------------------------------------------------------------------------------

    def _own(self, k: Tensor, v: Tensor) -> Pair:
        if self._kernel is None:
            self._kernel = resolve(k.device, k.dtype, k.shape[-1], v.shape[-1], self._kernel_name)
        dtype = self._kernel.compute_dtype(k.dtype)
        return k.to(dtype), v.to(dtype)

    def _attend(
        self, chunk: Chunk, q: Tensor, own: Pair, scale: float, following: Chunk | None
    ) -> tuple[Tensor, Tensor]:
        assert self._kernel is not None
        q_compute = q.to(own[0].dtype)
        merged = Merged(q.shape[2])
        for met in self._rectangles(chunk, q, own, None, following):
            part = self._kernel.forward(met.take(q_compute), met.k, met.v, causal=met.causal, scale=scale)
            merged.add(met.rows, *part)
        o, lse = merged.result()
        return o.to(q.dtype), lse

    def _gradient(
        self, chunk: Chunk, do: Tensor, q: Tensor, own: Pair, o: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        kernel = self._kernel
        assert kernel is not None
        do, q, o = (x.to(own[0].dtype) for x in (do, q, o))
        if len(self.chunks) == 1 == self.num_resident and self._gather is None:
            gradients = kernel.backward(do, q, *own, o, lse, causal=True, scale=scale)
            self._end_backward()
            return gradients
        self._dkv.begin_sums(own, lse.dtype)
        returns = None if self._gather is None else Returns(self._gather, lse.dtype)
        dq: Tensor | None = None
        sums: Pair | None = None
        for met in self._rectangles(chunk, q, own, SPAN, self._before(chunk)):
            q_part, o_part, lse_part = met.take(q), met.take(o), met.take(lse).contiguous()
            part, *pair = kernel.backward(
                met.take(do), q_part, met.k, met.v, o_part, lse_part, causal=met.causal, scale=scale
            )
            if dq is None and met.rows is None:
                dq = part.to(lse.dtype)
            else:
                dq = torch.zeros_like(q, dtype=lse.dtype) if dq is None else dq
                met.take(dq).add_(part)
            for to, (dk, dv) in [(met, pair)] if returns is None else returns.add(met, (pair[0], pair[1])):
                sums = self._add(chunk, to, dk, dv, lse.dtype)
        for to, (dk, dv) in () if returns is None else returns.rest():
            sums = self._add(chunk, to, dk, dv, lse.dtype)
        assert dq is not None
        if chunk.index < self.num_resident:
            sums = self._dkv.span(chunk.start, chunk.stop)
        if chunk.index == 0:  # the last of a backward sweep
            self._end_backward()
        assert sums is not None
        return dq, *sums

    def _add(self, chunk: Chunk, met: Rectangle, dk: Tensor, dv: Tensor, dtype: torch.dtype) -> Pair:
        """Add one chunk's share of the gradients of the keys and values it met; gives their sums."""
        if met.span is not None:
            total_k, total_v = self._dkv.span(*met.span)
            total_k += dk
            total_v += dv
            return total_k, total_v
        if chunk is self.chunks[-1]:
            sums = dk.to(dtype), dv.to(dtype)
        else:
            total_k, total_v = self._dkv.next_later()
            sums = total_k.add_(dk), total_v.add_(dv)
        if met.streamed is not chunk:
            assert met.streamed is not None
            self._dkv.put(met.streamed, sums)
        return sums

    def _rectangles(
        self, chunk: Chunk, q: Tensor, own: Pair, longest: int | None, following: Chunk | None
    ) -> Iterator[Rectangle]:
        """What one chunk of queries meets, one kernel call each, its own keys last.

        `longest` is the most keys in a call, `following` the chunk that this will be called for next.
        """
        assert self._kernel is not None
        if self._gather is not None:
            yield from self._gathered_rectangles(chunk, q, own, following)
            return
        earlier, start = self._spans(chunk, q, longest), chunk.start
        if chunk.index < self.num_resident and earlier and self._kernel.bottom_right:
            *earlier, (start, _) = earlier
        yield from self._earlier(chunk, earlier)
        yield self._last(chunk, own, start)

    def _gathered_rectangles(self, chunk: Chunk, q: Tensor, own: Pair, following: Chunk | None) -> Iterator[Rectangle]:
        """The same where ranks hold keys in parts; what is gathered does not grow with the sequence."""
        assert self._kernel is not None
        assert self._gather is not None
        longest = max(1, SPAN // self._gather.size)
        if self._gathered is None:
            self._gathered = Gathered(self._gather, bottom_right=self._kernel.bottom_right)

        def earlier(chunk: Chunk) -> Iterator[Rectangle]:
            return self._earlier(chunk, self._spans(chunk, q, longest))

        yield from self._gathered.of_chunk(chunk, self._last(chunk, own, chunk.start), earlier, following)

    def _last(self, chunk: Chunk, own: Pair, start: int) -> Rectangle:
        """The rectangle of a chunk's own keys, and of those before them from `start` on."""
        if chunk.index < self.num_resident:
            return Rectangle(*self._kv.span(start, chunk.stop), causal=True, span=(start, chunk.stop))
        return Rectangle(*own, causal=True, streamed=chunk)

    def _spans(self, chunk: Chunk, q: Tensor, longest: int | None) -> list[tuple[int, int]]:
        """The spans of the buffers that are before a chunk."""
        size = 1 if self._gather is None else self._gather.size
        # H heads: dk may be expanded.
        limit = MAX_ELEMENTS // (q.shape[0] * q.shape[1] * q.shape[3] * size) - len(chunk)
        if limit <= 0:
            raise ValueError(
                f"one chunk of {len(chunk):,} tokens has too many elements for a kernel (2^31): use a smaller "
                "chunk_size or a smaller batch."
            )
        tokens = chunk.start if chunk.index < self.num_resident else self._kv.tokens
        return spans(tokens, min(limit, longest or limit))

    def _earlier(self, chunk: Chunk, within: list[tuple[int, int]]) -> Iterator[Rectangle]:
        """The rectangles of earlier keys: of spans of the buffers, and of the chunks that are streamed."""
        for span in within:
            yield Rectangle(*self._kv.span(*span), causal=False, span=span)
        for streamed in self.chunks[self.num_resident : chunk.index]:
            yield Rectangle(*self._kv.next_later(), causal=False, streamed=streamed)


class _Replay(torch.autograd.Function):
    """Attention of one chunk: forward hands out what was kept (or computes it again), backward is the core's."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, core: Core, chunk: Chunk, scale: float) -> Tensor:
        streamed = chunk.index >= core.num_resident
        differentiated = any(ctx.needs_input_grad[:3])
        if chunk is core.chunks[-1]:
            core._begin_backward(k, v, differentiated=differentiated)
        own = core._own(k, v) if streamed else core._kv.span(chunk.start, chunk.stop)
        o, lse = core._kept_output(chunk, q, own, scale, differentiated=differentiated)
        # Keys and values in the buffers are still there in backward.
        ctx.save_for_backward(q, o, lse, *(own if streamed else ()))
        ctx.core, ctx.chunk, ctx.scale = core, chunk, scale
        ctx.dtypes = q.dtype, k.dtype, v.dtype
        if chunk.index == 0 and not differentiated:  # nothing before attention is trained: there will be no backward
            core._end_backward()
        return o.view_as(o)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, o, lse, *own = ctx.saved_tensors
        own = own or ctx.core._kv.span(ctx.chunk.start, ctx.chunk.stop)
        gradients = ctx.core._gradient(ctx.chunk, do, q, tuple(own), o, lse, ctx.scale)
        return *(x.to(dtype) for x, dtype in zip(gradients, ctx.dtypes, strict=True)), None, None, None
