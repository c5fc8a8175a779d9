"""Attention by matrix products: any dtype, any device, with a soft cap; the oracle of the tests and the fallback."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from trunkline.attention.kernel_base import Kernel
from trunkline.attention.online_softmax import merge_


class MathKernel(Kernel):
    """Matrix products, tiled over keys: scores of one tile, (B, H, C, `tile`), are in memory at a time.

    Args:
        tile: keys in a tile.
        softcap: c; scaled scores s become c · tanh(s / c). None leaves them.
    """

    name = "math"
    bottom_right = True

    def __init__(self, tile: int = 1024, *, softcap: float | None = None) -> None:
        self.tile = tile
        self.softcap = softcap

    @override
    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.promote_types(dtype, torch.float32)

    def _tiles(self, q: Tensor, k: Tensor, causal: bool) -> list[tuple[slice, Tensor | None]]:
        """Return key tiles with their masks (C, tile), True where a query must not see a key; None without a mask."""
        num_queries, num_keys = q.shape[2], k.shape[2]
        offset = num_keys - num_queries  # position of query 0 among the keys
        tiles: list[tuple[slice, Tensor | None]] = []
        for start in range(0, num_keys, self.tile):
            stop = min(start + self.tile, num_keys)
            mask = None
            if causal and stop > offset + 1:
                positions = torch.arange(num_queries, device=q.device)[:, None] + offset
                mask = torch.arange(start, stop, device=q.device)[None, :] > positions
            tiles.append((slice(start, stop), mask))
        return tiles

    def _scores(self, q_grouped: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        scores = (q_grouped @ k.transpose(-1, -2)) * scale
        if self.softcap is not None:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        if mask is not None:
            groups = scores.shape[2] // mask.shape[0]
            scores.masked_fill_(mask.repeat(groups, 1), float("-inf"))
        return scores

    @override
    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        q_grouped = _group(q, k)
        o: Tensor | None = None
        lse: Tensor | None = None
        for at, mask in self._tiles(q, k, causal):
            scores = self._scores(q_grouped, k[:, :, at], mask, scale)
            # A row that this tile masks entirely gets a finite floor, so that its weight in the merge is exactly 0.
            part_lse = torch.logsumexp(scores, dim=-1).clamp_min_(torch.finfo(scores.dtype).min / 2)
            part = torch.exp_(scores.sub_(part_lse[..., None])) @ v[:, :, at]
            o, lse = (part, part_lse) if o is None or lse is None else merge_(o, lse, part, part_lse)
        assert o is not None
        assert lse is not None
        return o.reshape(*q.shape[:3], v.shape[-1]), lse.reshape(q.shape[:3])

    @override
    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_grouped, do_grouped = _group(q, k), _group(do, k)
        delta = _group((do * o).sum(-1, keepdim=True), k)
        lse_grouped = _group(lse[..., None], k)
        dq = torch.zeros_like(q_grouped)
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        for at, mask in self._tiles(q, k, causal):
            scores = self._scores(q_grouped, k[:, :, at], mask, scale)
            factor: Tensor | float = scale
            if self.softcap is not None:  # derivative of the cap, 1 - tanh²; masked scores have weight 0
                factor = (scores / self.softcap).nan_to_num_(neginf=0.0).square_().neg_().add_(1).mul_(scale)
            p = torch.exp_(scores.sub_(lse_grouped))
            dv[:, :, at] = p.transpose(-1, -2) @ do_grouped
            ds = p.mul_((do_grouped @ v[:, :, at].transpose(-1, -2)).sub_(delta)).mul_(factor)
            dq += ds @ k[:, :, at]
            dk[:, :, at] = ds.transpose(-1, -2) @ q_grouped
        return dq.reshape(q.shape), dk, dv


def _group(x: Tensor, k: Tensor) -> Tensor:
    """Concatenate the rows of the query heads that share a key/value head: (B, H, C, D) to (B, K, H/K * C, D)."""
    return x.reshape(k.shape[0], k.shape[1], -1, x.shape[-1])
