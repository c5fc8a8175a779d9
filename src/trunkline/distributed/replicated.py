"""How ranks read a few tokens together, a decoded one mostly: each computes all of them, and attends to its own part.

Cutting one token is nothing. So every rank runs the layers on all new tokens; in attention it has its own heads (sp)
and, of what was read before, its own keys (cp), which stay where they are: what is exchanged is the output of the new
tokens, with its log-sum-exp, whatever the length of the context.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trunkline.attention.online_softmax import merge_
from trunkline.engine.ranks import PendingTensors, SingleRank

if TYPE_CHECKING:
    from trunkline.distributed.sequence_parallel import SharedSequence


class ReplicatedRanks(SingleRank):
    """See `trunkline.engine.ranks.Ranks`.

    Args:
        shared: the same ranks, as they cut what is long.
    """

    def __init__(self, shared: SharedSequence) -> None:
        self._shared = shared
        self.salt = shared.salt
        self.traffic = shared.traffic

    def to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """See `Ranks.to_heads`: nothing moves."""
        size, rank = self._shared.parallel_dims.sp, self._shared.place.sp
        return tuple(own_heads(x, rank, size) for x in tensors)

    def to_tokens(self, o: Tensor, coming: PendingTensors | None = None) -> Tensor:
        """See `Ranks.to_tokens`: outputs (B, own heads, T, D) of all ranks' heads."""
        heads = self._shared.groups.sp
        if heads is None:
            return o
        return torch.cat(list(heads.all_gather(o.contiguous()).wait()), dim=1)

    def own_heads(self, x: Tensor) -> Tensor:
        """See `Ranks.own_heads`."""
        return self._shared.own_heads(x)

    def head_range(self, num_heads: int) -> slice:
        """See `Ranks.head_range`."""
        return self._shared.head_range(num_heads)

    def merged(self, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Attention over the keys of all ranks, from that over each rank's own.

        Args:
            o: output (B, H, T, D).
            lse: its log-sum-exp (B, H, T), -inf where this rank has no keys; the first rank always has some.
        """
        rows = self._shared.groups.cp
        if rows is None:
            return o, lse
        packed = torch.cat([o.to(lse.dtype), lse[..., None]], -1).contiguous()
        first, *others = rows.all_gather(packed).wait()
        o, lse = first[..., :-1].contiguous(), first[..., -1]
        for other in others:
            o, lse = merge_(o, lse, other[..., :-1], other[..., -1])
        return o, lse


def own_heads(x: Tensor, rank: int, size: int) -> Tensor:
    """A rank's heads of (B, heads, T, D), some of them copies where that takes it: as `Ulysses.to_heads` has them."""
    copies = math.lcm(x.shape[1], size) // x.shape[1]
    x = x.repeat_interleave(copies, dim=1) if copies > 1 else x
    own = x.shape[1] // size
    return x[:, rank * own : (rank + 1) * own]
