"""Attention by plain matrix products: any dtype, any device, with a soft cap; the oracle as well as the fallback."""

from __future__ import annotations

import torch
from torch import Tensor

from trunkline.attention.online_softmax import merge_


class MathKernel:
    """Plain matrix products, tiled over keys so that no score tile exceeds C x `tile` (any dtype, any device).

    Args:
        tile: keys in a tile.
        softcap: scores s become c · tanh(s / c); None leaves them.
    """

    name = "math"
    bottom_right = True

    def __init__(self, tile: int = 1024, *, softcap: float | None = None) -> None:
        self.tile = tile
        self.softcap = softcap

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """fp32, or fp64 as it is."""
        return torch.promote_types(dtype, torch.float32)

    def _tiles(self, q: Tensor, k: Tensor, causal: bool) -> list[tuple[slice, Tensor | None]]:
        """Key tiles with their masks (C, tile), True where a query may not look; None where all may."""
        num_queries, num_keys = q.shape[2], k.shape[2]
        offset = num_keys - num_queries  # the place of query 0 among the keys
        tiles: list[tuple[slice, Tensor | None]] = []
        for start in range(0, num_keys, self.tile):
            stop = min(start + self.tile, num_keys)
            mask = None
            if causal and stop > offset + 1:
                places = torch.arange(num_queries, device=q.device)[:, None] + offset
                mask = torch.arange(start, stop, device=q.device)[None, :] > places
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

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        q_grouped = _group(q, k)
        o: Tensor | None = None
        lse: Tensor | None = None
        for at, mask in self._tiles(q, k, causal):
            scores = self._scores(q_grouped, k[:, :, at], mask, scale)
            # A row that this tile masks altogether gets a finite floor: its weight in the merge is then exactly 0.
            part_lse = torch.logsumexp(scores, dim=-1).clamp_min_(torch.finfo(scores.dtype).min / 2)
            part = torch.exp_(scores.sub_(part_lse[..., None])) @ v[:, :, at]
            o, lse = (part, part_lse) if o is None or lse is None else merge_(o, lse, part, part_lse)
        assert o is not None
        assert lse is not None
        return o.reshape(*q.shape[:3], v.shape[-1]), lse.reshape(q.shape[:3])

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`."""
        q_grouped, do_grouped = _group(q, k), _group(do, k)
        delta = _group((do * o).sum(-1, keepdim=True), k)
        lse_grouped = _group(lse[..., None], k)
        dq = torch.zeros_like(q_grouped)
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        for at, mask in self._tiles(q, k, causal):
            scores = self._scores(q_grouped, k[:, :, at], mask, scale)
            factor: Tensor | float = scale
            if self.softcap is not None:  # the derivative of the cap, 1 - tanh²; where masked the weight is 0
                factor = (scores / self.softcap).nan_to_num_(neginf=0.0).square_().neg_().add_(1).mul_(scale)
            p = torch.exp_(scores.sub_(lse_grouped))
            dv[:, :, at] = p.transpose(-1, -2) @ do_grouped
            ds = p.mul_((do_grouped @ v[:, :, at].transpose(-1, -2)).sub_(delta)).mul_(factor)
            dq += ds @ k[:, :, at]
            dk[:, :, at] = ds.transpose(-1, -2) @ q_grouped
        return dq.reshape(q.shape), dk, dv


def _group(x: Tensor, k: Tensor) -> Tensor:
    """Rows of all query heads of one key/value head, one after another: (B, H, C, D) to (B, K, H/K C, D)."""
    return x.reshape(k.shape[0], k.shape[1], -1, x.shape[-1])
