"""The core: attention of one layer over all its chunks, and its gradient, by query chunks.

Chunk i of the queries meets keys/values 0 … i at once, in kernel calls as long as is fast; partial outputs are merged
in fp32. Backward goes through the chunks in falling order, so that when chunk i is reached every later chunk has
already left its share of dk_i and dv_i in the fp32 accumulators, and dq_i, dk_i, dv_i come back complete (FPDT, arXiv
2408.16978, section 4, with the loops turned inside out: queries outside, keys inside).

Keys, values and their accumulators rest on the device, as one buffer each, so that earlier keys are one view of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trunkline.attention.kernels import MAX_ELEMENTS, Kernel, resolve
from trunkline.attention.merge import merge_
from trunkline.chunking import Chunk, spans

# Most keys that one backward call takes: its scratch (dk and dv of so many) does not grow with the sequence. Longer
# spans are no faster: from 2,048 queries by 8,192 keys up, kernels reach what they ever reach.
SPAN = 16_384


class Core:
    """Attention of one layer over the chunks of one forward pass.

    Args:
        chunks: the chunks of the sequence.
        kernel: a kernel's name, or `auto`.
        keep_attention: keep output and log-sum-exp of every chunk for the backward sweep.
        keep_kv: keep keys and values for the backward sweep.
    """

    def __init__(self, chunks: list[Chunk], *, kernel: str, keep_attention: bool, keep_kv: bool) -> None:
        self.chunks = chunks
        self.keep_attention = keep_attention
        self.keep_kv = keep_kv
        self._kernel_name = kernel
        self._kernel: Kernel | None = None
        self._outputs: list[tuple[Tensor, Tensor] | None] = [None] * len(chunks)
        self._k: Tensor | None = None  # (B, K, tokens, D), in the kernel's dtype
        self._v: Tensor | None = None
        self._dk: Tensor | None = None  # (B, K, tokens, D), fp32 or wider: the gradient that later queries left
        self._dv: Tensor | None = None

    @property
    def needs_kv_pass(self) -> bool:
        """Whether keys/values of the earlier chunks must be computed again before the backward sweep."""
        return self._k is None and len(self.chunks) > 1

    @property
    def nbytes(self) -> int:
        """Bytes held now: outputs and log-sum-exps, keys and values, and their gradients' sums."""
        tensors = [x for pair in self._outputs if pair is not None for x in pair]
        return sum(x.nbytes for x in (*tensors, self._k, self._v, self._dk, self._dv) if x is not None)

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
        self.put(chunk, k, v)
        o, lse = self._attend(chunk, q, scale)
        if self.keep_attention:
            self._outputs[chunk.index] = (o, lse)
        return o

    def end_forward(self) -> None:
        """Let go of what the backward sweep will not find here."""
        if not self.keep_kv:
            self._k = self._v = None

    def put(self, chunk: Chunk, k: Tensor, v: Tensor) -> None:
        """Keep keys/values of a chunk, for it and the chunks that come after it."""
        if self._kernel is None:
            self._kernel = resolve(k.device, k.dtype, k.shape[-1], v.shape[-1], self._kernel_name)
        k, v = (x.to(self._kernel.compute_dtype(x.dtype)) for x in (k, v))
        if len(self.chunks) == 1:
            self._k, self._v = k, v
            return
        if self._k is None or self._v is None:
            tokens = self.chunks[-1].stop
            self._k, self._v = (x.new_empty(*x.shape[:2], tokens, x.shape[3]) for x in (k, v))
        self._k[:, :, chunk.start : chunk.stop].copy_(k)
        self._v[:, :, chunk.start : chunk.stop].copy_(v)

    def replay(self, chunk: Chunk, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attention of one chunk in the backward sweep (chunks in falling order), as a node of the autograd graph."""
        o: Tensor = _Replay.apply(q, k, v, self, chunk, scale)  # type: ignore[no-untyped-call]
        return o

    # -- the two directions of one chunk -------------------------------------------------------------------------------

    def _state(self) -> tuple[Kernel, Tensor, Tensor]:
        assert self._kernel is not None
        assert self._k is not None
        assert self._v is not None
        return self._kernel, self._k, self._v

    def _attend(self, chunk: Chunk, q: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        kernel, k, v = self._state()
        q_compute = q.to(k.dtype)
        o: Tensor | None = None
        lse: Tensor | None = None
        for start, stop, causal in self._pieces(chunk, q, None):
            part, part_lse = kernel.forward(
                q_compute, k[:, :, start:stop], v[:, :, start:stop], causal=causal, scale=scale
            )
            o, lse = (part, part_lse) if o is None or lse is None else merge_(o.to(lse.dtype), lse, part, part_lse)
        assert o is not None
        assert lse is not None
        return o.to(q.dtype), lse

    def _gradient(
        self, chunk: Chunk, do: Tensor, q: Tensor, o: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        kernel, k, v = self._state()
        do, q, o = (x.to(k.dtype) for x in (do, q, o))
        dq: Tensor | None = None
        if len(self.chunks) == 1:
            dq, dk, dv = kernel.backward(do, q, k, v, o, lse, causal=True, scale=scale)
            self._k = self._v = None
            return dq, dk, dv
        if self._dk is None or self._dv is None:
            self._dk, self._dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (k, v))
        for start, stop, causal in self._pieces(chunk, q, SPAN):
            span_k, span_v = k[:, :, start:stop], v[:, :, start:stop]
            part, part_k, part_v = kernel.backward(do, q, span_k, span_v, o, lse, causal=causal, scale=scale)
            dq = part.to(lse.dtype) if dq is None else dq.add_(part)
            self._dk[:, :, start:stop] += part_k
            self._dv[:, :, start:stop] += part_v
        assert dq is not None
        dk, dv = (x[:, :, chunk.start : chunk.stop] for x in (self._dk, self._dv))
        if chunk.index == 0:  # the last of a backward sweep
            self._k = self._v = self._dk = self._dv = None
        return dq, dk, dv

    def _pieces(self, chunk: Chunk, q: Tensor, span: int | None) -> list[tuple[int, int, bool]]:
        """Which rectangles of keys one chunk of queries meets, as (start, stop, causal): one kernel call each."""
        kernel, k, _ = self._state()
        limit = MAX_ELEMENTS // (k.shape[0] * q.shape[1] * k.shape[3]) - len(chunk)  # H heads: dk may be expanded
        if limit <= 0:
            raise ValueError(
                f"one chunk of {len(chunk):,} tokens has too many elements for a kernel (2^31): use a smaller "
                "chunk_size or a smaller batch."
            )
        earlier = spans(chunk.start, min(limit, span or limit))
        if kernel.bottom_right and earlier:
            *earlier, (start, _) = earlier
            return [(*piece, False) for piece in earlier] + [(start, chunk.stop, True)]
        return [(*piece, False) for piece in earlier] + [(chunk.start, chunk.stop, True)]


class _Replay(torch.autograd.Function):
    """Attention of one chunk: forward hands out what was kept (or computes it again), backward is the core's."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, core: Core, chunk: Chunk, scale: float) -> Tensor:
        if chunk is core.chunks[-1] and not core.keep_kv:
            core.put(chunk, k, v)
        kept = core._outputs[chunk.index]
        core._outputs[chunk.index] = None
        o, lse = kept if kept is not None else core._attend(chunk, q, scale)
        ctx.save_for_backward(q, o, lse)
        ctx.core, ctx.chunk, ctx.scale = core, chunk, scale
        ctx.dtypes = q.dtype, k.dtype, v.dtype
        return o.view_as(o)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, o, lse = ctx.saved_tensors
        gradients = ctx.core._gradient(ctx.chunk, do, q, o, lse, ctx.scale)
        return *(x.to(dtype) for x, dtype in zip(gradients, ctx.dtypes, strict=True)), None, None, None
