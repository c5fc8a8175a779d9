"""Final norm, unembedding and cross-entropy in tiles: logits of the whole sequence never exist.

The gradient of a tile is computed with the tile, while its logits are there, as part of the *sum* of token losses. The
division by the number of tokens waits until backward, where the sums are fp32: normalised here, 86% of the gradients of
an fp16 model would underflow at a million tokens. A tile without a target is not computed at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from trunkline.chunking import Chunk
from trunkline.engine.grads import GradientSums, differentiate
from trunkline.offload.chunked_sequence import ChunkedSequence

IGNORE = -100  # transformers' label of a token that counts for nothing

AUTO_BYTES = 64 * 2**20
# A tile reads the unembedding twice and adds to its gradient: 12 bytes a weight for 6 operations a weight and token. An
# accelerator that does 250 operations a byte (H100) is held up by that below 500 tokens, a CPU never.
AUTO_TOKENS = 1_024


@dataclass(frozen=True, slots=True)
class Tile:
    """Tokens `start … stop - 1` of the sequence, within chunk `chunk`."""

    chunk: Chunk
    start: int
    stop: int

    @property
    def within(self) -> slice:
        """Where the tile is in its chunk."""
        before = self.chunk.start
        if self.chunk.gap is not None and self.start >= self.chunk.gap[1]:
            before += self.chunk.gap[1] - self.chunk.gap[0]
        return slice(self.start - before, self.stop - before)


def cut(chunks: Sequence[Chunk], tile_tokens: int) -> list[Tile]:
    """Cut chunks into tiles of at most `tile_tokens` tokens of a row."""
    return [
        Tile(chunk, at, min(at + tile_tokens, stop))
        for chunk in chunks
        for start, stop in chunk.ranges
        for at in range(start, stop, tile_tokens)
    ]


def tile_tokens(
    logits_budget: int | None, batch_size: int, vocab_size: int, dtype: torch.dtype, *, device: torch.device
) -> int:
    """Tokens of a row in a tile, so that its logits and all that is computed from them take `logits_budget`.

    That is logits and their gradient in `dtype`, and an fp32 (or fp64) copy and its softmax. None is what is best on
    the device.
    """
    wide = torch.promote_types(dtype, torch.float32)
    token_bytes = vocab_size * 2 * (wide.itemsize + dtype.itemsize)
    automatic = max(AUTO_BYTES, 0 if device.type == "cpu" else AUTO_TOKENS * token_bytes)
    tokens = (automatic if logits_budget is None else logits_budget) // (batch_size * token_bytes)
    if dtype == torch.float16:
        # A weight's gradient is formed in fp16 within a tile, from unnormalised terms: it must stay below 65,504.
        tokens = min(tokens, 256 // batch_size)
    return max(1, tokens)


def tile_loss(
    logits_BTV: Tensor, targets_BT: Tensor, *, gradient: bool, ignored: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Sum of the cross-entropies of a tile, and its gradient.

    Args:
        logits_BTV: in the model's dtype.
        targets_BT: token ids; -100 counts for nothing.
        gradient: whether the gradient is wanted.
        ignored: whether any target may be -100; it saves a pass over the tile where none is.

    Returns:
        The sum, fp32 (fp64 for fp64 logits), 0-dim; and d sum / d logits in the dtype of the logits, or None.
    """
    dtype = logits_BTV.dtype
    wide = torch.promote_types(dtype, torch.float32)
    logits_BTV = logits_BTV.to(wide)
    grad_BTV = torch.softmax(logits_BTV, dim=-1)
    ignored_BT1 = (targets_BT == IGNORE)[..., None]
    index_BT1 = targets_BT.clamp_min(0)[..., None]
    # The largest logit and its probability give the log-sum-exp without a second pass of exponentials.
    lse_BT1 = logits_BTV.amax(-1, keepdim=True) - grad_BTV.amax(-1, keepdim=True).log_()
    total = (lse_BT1 - logits_BTV.gather(-1, index_BT1)).masked_fill_(ignored_BT1, 0).sum()
    if not gradient:
        return total, None
    grad_BTV.scatter_add_(-1, index_BT1, torch.full_like(index_BT1, -1, dtype=wide))
    if ignored:
        grad_BTV.masked_fill_(ignored_BT1, 0)
    return total, grad_BTV.to(dtype)


def _used(targets: Tensor) -> tuple[Tensor, Tensor]:
    """Which places have a target in some row, and which in all: (S,) each, or (S-1,), on the CPU."""
    if targets.device.type == "meta":  # no contents: as if there were a target everywhere
        everywhere = torch.ones(targets.shape[1], dtype=torch.bool)
        return everywhere, everywhere
    has = targets != IGNORE
    used, full = torch.stack([has.any(0), has.all(0)]).cpu()
    return used, full


def _targets_of(tile: Tile, targets: Tensor) -> Tensor:
    """The targets of a tile, (B, T)."""
    targets_BT = targets[:, tile.start : tile.stop]
    missing = tile.stop - tile.start - targets_BT.shape[1]
    return F.pad(targets_BT, (0, missing), value=IGNORE) if missing else targets_BT


def sweep(
    logits_of: Callable[[Tensor], Tensor],
    hidden: ChunkedSequence,
    targets: Tensor,
    tiles: Sequence[Tile],
    *,
    parameters: Sequence[Parameter],
    live: Sequence[Tensor],
    hidden_grads: ChunkedSequence | None,
    sums: GradientSums | None,
    divisor: Tensor | None = None,
    before_tile: Callable[[int, int], None],
) -> Tensor:
    """Sum of the token losses of a sequence, tile by tile; where asked for, with its gradients.

    Args:
        logits_of: final hidden states (B, T, E) of a tile to logits (B, T, V): the model's own head.
        hidden: the final hidden states; each chunk is let go as soon as it is done.
        targets: the token that each position is to predict, or -100: (B, S), or (B, S-1) where the last predicts
            nothing.
        tiles: from `cut`.
        parameters: those that may get a gradient from the head.
        live: what stands for them in the graph.
        hidden_grads: receives d sum / d hidden; None where nothing below the head is trained.
        sums: receives d sum / d parameters; None where no gradient is wanted at all.
        divisor: what the gradients are divided by at once, 0-dim; None leaves them those of the sum.
        before_tile: called with each tile's number and their count.

    Returns:
        The sum, 0-dim, fp64 (the tiles' own sums are fp32, or fp64 for an fp64 model).
    """
    # The one host synchronisation of the head, before its sweep: which places have targets in some rows, and in all.
    used, full = _used(targets)
    total = torch.zeros((), dtype=torch.float64, device=targets.device)
    reading = hidden.read(range(tiles[-1].chunk.index + 1), take=True)
    for number, tile in enumerate(tiles):
        before_tile(number, len(tiles))
        chunk = tile.chunk
        if tile.start == chunk.start:
            x_BCE = reading.next()
            dx_BCE = torch.zeros_like(x_BCE) if hidden_grads is not None else None
        # Without any target the first tile stands for all: then its gradients are zeros, as autograd's are.
        if used[tile.start : tile.stop].any() or (number == 0 and not used.any()):
            x_BTE = x_BCE[:, tile.within].detach().requires_grad_(hidden_grads is not None)
            with torch.set_grad_enabled(sums is not None):
                logits_BTV = logits_of(x_BTE)
            part, grad_BTV = tile_loss(
                logits_BTV.detach(),
                _targets_of(tile, targets),
                gradient=logits_BTV.requires_grad,
                ignored=tile.stop > len(full) or not full[tile.start : tile.stop].all(),
            )
            total += part
            if grad_BTV is not None and sums is not None:
                if divisor is not None:
                    grad_BTV.div_(divisor)
                wanted = [*live, x_BTE] if dx_BCE is not None else list(live)
                grads = differentiate([logits_BTV], wanted, [grad_BTV])
                if dx_BCE is not None and (dx_BTE := grads.pop()) is not None:
                    dx_BCE[:, tile.within] = dx_BTE
                sums.add(parameters, grads)
        if tile.stop == chunk.stop and hidden_grads is not None and dx_BCE is not None:
            hidden_grads.stash(chunk.index, dx_BCE)
    reading.release()
    return total


def scores(
    logits_of: Callable[[Tensor], Tensor],
    x_BCE: Tensor,
    targets_BC: Tensor,
    tiles: Sequence[Tile],
    *,
    before_tile: Callable[[], None],
) -> Tensor:
    """How well each token of a chunk is predicted.

    Args:
        logits_of: see `sweep`.
        x_BCE: final hidden states of the chunk.
        targets_BC: the token that each is to predict, or -100.
        tiles: of this chunk.
        before_tile: called before each.

    Returns:
        (2, B, C), fp32: log probability of the target, and whether it is the likeliest; 0 without a target.
    """
    found = []
    for tile in tiles:
        before_tile()
        targets_BT = targets_BC[:, tile.within]
        logits_BTV = logits_of(x_BCE[:, tile.within])
        logits_BTV = logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32))
        index_BT1 = targets_BT.clamp_min(0)[..., None]
        log_probs = logits_BTV.gather(-1, index_BT1)[..., 0] - logits_BTV.logsumexp(-1)
        is_greedy = logits_BTV.argmax(-1) == targets_BT
        found.append(torch.stack([log_probs.float(), is_greedy.float()]) * (targets_BT != IGNORE))
    return torch.cat(found, dim=2)
