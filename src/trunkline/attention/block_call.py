"""One kernel call for a block: its rows and keys are cut out, folded and turned as the kernel wants them.

A triangle that loses keys from the left is a causal one with both rows and keys in falling order: what keys mean to
attention does not depend on their order. So every kernel can do it.
"""

from __future__ import annotations

from torch import Tensor

from trunkline.attention.kernels import Kernel
from trunkline.attention.mask import MaskBlock, Range


def forward(
    kernel: Kernel, block: MaskBlock, q: Tensor, k: Tensor, v: Tensor, *, first: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of a block's rows over its keys.

    Args:
        kernel: computes it.
        block: which rows and keys.
        q: queries (B, H, C, D) of all rows.
        k: keys (B, K, T, D), among them the block's.
        v: values.
        first: place in the sequence of the first of them.
        scale: factor of the scores.

    Returns:
        Output (B, H, rows, D) and log-sum-exp (B, H, rows).
    """
    o, lse = kernel.forward(
        _rows(q, block), _keys(k, block, first), _keys(v, block, first), causal=block.shape != "full", scale=scale
    )
    return _back(o, block), _back(lse, block)


def backward(
    kernel: Kernel, block: MaskBlock, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *,
    first: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of a block's queries, keys and values; `o` and `lse` are those over all keys of all rows."""
    dq, dk, dv = kernel.backward(
        _rows(do, block), _rows(q, block), _keys(k, block, first), _keys(v, block, first), _rows(o, block),
        _rows(lse, block), causal=block.shape != "full", scale=scale,
    )  # fmt: skip
    return _back(dq, block), _back(dk, block), _back(dv, block)


def of_row(row: int | None, *tensors: Tensor) -> list[Tensor]:
    """Tensors of one row of a batch; None for all."""
    return [x if row is None else x[row : row + 1] for x in tensors]


def _rows(x: Tensor, block: MaskBlock) -> Tensor:
    return _forth(x, block, block.rows)


def _keys(x: Tensor, block: MaskBlock, first: int) -> Tensor:
    return _forth(x, block, (block.keys[0] - first, block.keys[1] - first))


def _forth(x: Tensor, block: MaskBlock, at: Range) -> Tensor:
    """(B, heads, T, …) to (B · pieces, heads, piece, …), in falling order for an upper triangle."""
    start, stop = at
    x = x if (start, stop) == (0, x.shape[2]) else x[:, :, start:stop]
    if block.fold:
        batch, heads, length, *rest = x.shape
        x = x.reshape(batch, heads, length // block.fold, block.fold, *rest).transpose(1, 2)
        x = x.reshape(-1, heads, block.fold, *rest)
    return x.flip(2) if block.shape == "upper" else x


def _back(x: Tensor, block: MaskBlock) -> Tensor:
    """The other way."""
    x = x.flip(2) if block.shape == "upper" else x
    if not block.fold:
        return x
    _, heads, piece, *rest = x.shape
    count = (block.rows[1] - block.rows[0]) // piece
    return x.reshape(-1, count, heads, piece, *rest).transpose(1, 2).reshape(-1, heads, count * piece, *rest)
