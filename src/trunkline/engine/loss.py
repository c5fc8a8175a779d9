"""Loss and logits: final norm, unembedding and cross-entropy in tiles, so that logits of the sequence never exist.

The gradient of a tile is computed with the tile, while its logits are there, as part of the *sum* of token losses. The
division by the number of tokens waits until backward, where the sums are fp32: normalised in the tile, 86% of the
gradients of an fp16 model would underflow at a million tokens. A tile without a target is not computed at all.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from trunkline.chunking import Chunk
from trunkline.engine.batch import IGNORE
from trunkline.engine.grads import differentiate
from trunkline.engine.step import StepState
from trunkline.engine.sweeps import backward

AUTO_BYTES = 64 * 2**20
# A tile reads the unembedding twice and adds to its gradient: 12 bytes a weight for 6 operations a weight and token. An
# accelerator that does 250 operations a byte (H100) is held up by that below 500 tokens, a CPU never.
AUTO_TOKENS = 1_024


@dataclass(frozen=True, slots=True)
class Tile:
    """Tokens `start … stop - 1` of the whole sequence, all of them this rank's and within one chunk."""

    chunk: Chunk
    start: int
    stop: int

    @property
    def within(self) -> slice:
        """Places of the tile's tokens among this rank's tokens of the chunk."""
        before = self.chunk.start
        if self.chunk.gap is not None and self.start >= self.chunk.gap[1]:
            before += self.chunk.gap[1] - self.chunk.gap[0]
        return slice(self.start - before, self.stop - before)


def cut_tiles(chunks: Sequence[Chunk], tile_tokens: int) -> list[Tile]:
    """Cut this rank's tokens of chunks into tiles of at most `tile_tokens` consecutive tokens of a row."""
    return [
        Tile(chunk, at, min(at + tile_tokens, stop))
        for chunk in chunks
        for start, stop in chunk.ranges
        for at in range(start, stop, tile_tokens)
    ]


def tokens_per_tile(
    logits_bytes: int | None, batch_size: int, vocab_size: int, dtype: torch.dtype, *, device: torch.device
) -> int:
    """Return how many tokens of a row a tile has: at least 1, and in fp16 at most 256 in all rows together.

    Args:
        logits_bytes: most bytes of a tile: logits and their gradient in `dtype`, an fp32 (or fp64) copy and its
            softmax. None chooses by device: 64 MiB, on an accelerator at least 1,024 tokens in all rows together.
        batch_size: rows.
        vocab_size: logits of a token.
        dtype: dtype of the logits.
        device: device of the logits.
    """
    wide = torch.promote_types(dtype, torch.float32)
    token_bytes = vocab_size * 2 * (wide.itemsize + dtype.itemsize)
    automatic = max(AUTO_BYTES, 0 if device.type == "cpu" else AUTO_TOKENS * token_bytes)
    tokens = (automatic if logits_bytes is None else logits_bytes) // (batch_size * token_bytes)
    if dtype == torch.float16:
        # A weight's gradient is formed in fp16 within a tile, from unnormalised terms: it must stay below 65,504.
        tokens = min(tokens, 256 // batch_size)
    return max(1, tokens)


def tile_loss(
    logits_BTV: Tensor, targets_BT: Tensor, *, gradient: bool, ignored: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Compute the sum of the cross-entropies of a tile, and its gradient.

    Args:
        logits_BTV: logits in the model's dtype.
        targets_BT: token ids; -100 is no target.
        gradient: whether the gradient is wanted.
        ignored: whether any target may be -100. False saves a pass over the gradient; it is for tiles without -100.

    Returns:
        The sum, 0-dim, fp32 (fp64 for fp64 logits); and d sum / d logits in the dtype of the logits, or None.
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


def mean_loss(state: StepState, *, differentiable: bool) -> Tensor:
    """Compute the loss of a step: the sum of token losses of all ranks that share the sequence, over `num_targets`.

    Args:
        state: step after `sweeps.forward`, with targets.
        differentiable: whether there may be a backward. If so, the gradients of the head are computed now, and the loss
            is a node that autograd can go backward from. If not, the step's stores are closed.

    Returns:
        The loss, 0-dim, fp32 (fp64 for an fp64 model), the same on all ranks that share the sequence.
    """
    batch, decoder = state.batch, state.decoder
    assert batch.targets is not None
    assert batch.num_targets is not None
    state.dy = state.sequence("dy") if state.lowest_layer is not None else None
    dtype = torch.promote_types(state.inputs[-1].dtype, torch.float32)
    # transformers' norms compute in fp32 in fp64 models, too: only gradients that are divided first round alike there.
    divide_now = dtype == torch.float64
    divisor = batch.num_targets if batch.divisor is None else batch.divisor
    state.divisor = None if divide_now else divisor
    with state.replay.restored(), decoder.streamed_attention(), torch.no_grad(), state.stores.close_on_error():
        total = loss_sweep(state, differentiable=differentiable, divisor=divisor if divide_now else None)
        state.stores.flush_all()
        if not differentiable:
            state.stores.close()
        value = (state.ranks.all_reduce(total) / batch.num_targets).to(dtype)
    if not differentiable:
        return value
    result: Tensor = _StreamedLoss.apply(torch.zeros((), requires_grad=True), value, state)  # type: ignore[no-untyped-call]
    return result


def loss_sweep(state: StepState, *, differentiable: bool, divisor: Tensor | None) -> Tensor:
    """Sum the losses of this rank's tokens, tile by tile; where asked for, with their gradients.

    Args:
        state: step; each chunk of its final hidden state is dropped as soon as it is done. If gradients are wanted,
            `grad_sums` gets d sum / d parameters, and `dy`, unless it is None, d sum / d hidden.
        differentiable: whether gradients are wanted.
        divisor: divisor of the gradients, 0-dim; None for the gradients of the sum.

    Returns:
        The sum, 0-dim, fp64. The tiles' own sums are fp32, or fp64 for an fp64 model.
    """
    batch, decoder, parameters = state.batch, state.decoder, state.other_parameters
    assert batch.targets is not None
    hidden, dy = state.inputs.pop(), state.dy
    graph_params = decoder.graph_params(parameters)
    tiles = cut_tiles(state.chunks, _tokens_per_tile(state, hidden.dtype))
    # The one host synchronisation of the head, before its sweep: which places have targets in some rows, and in all.
    used, full = _places_with_targets(batch.targets)
    total = torch.zeros((), dtype=torch.float64, device=batch.targets.device)
    reading = hidden.read(range(tiles[-1].chunk.index + 1), take=True)
    for number, tile in enumerate(tiles):
        state.report("head", -1, number, len(tiles))
        chunk = tile.chunk
        if tile.start == chunk.start:
            x_BCE = reading.next()
            dx_BCE = torch.zeros_like(x_BCE) if dy is not None else None
        # Without any target the first tile stands for all: then its gradients are zeros, as autograd's are.
        if used[tile.start : tile.stop].any() or (number == 0 and not used.any()):
            x_BTE = x_BCE[:, tile.within].detach().requires_grad_(dy is not None)
            with torch.set_grad_enabled(differentiable):
                logits_BTV = decoder.head(x_BTE)
            part, grad_BTV = tile_loss(
                logits_BTV.detach(),
                _targets_of(tile, batch.targets),
                gradient=logits_BTV.requires_grad,
                ignored=tile.stop > len(full) or not full[tile.start : tile.stop].all(),
            )
            total += part
            if grad_BTV is not None and differentiable:
                if divisor is not None:
                    grad_BTV.div_(divisor)
                wanted = [*graph_params, x_BTE] if dx_BCE is not None else graph_params
                grads = differentiate([logits_BTV], wanted, [grad_BTV])
                if dx_BCE is not None and (dx_BTE := grads.pop()) is not None:
                    dx_BCE[:, tile.within] = dx_BTE
                state.grad_sums.add(parameters, grads)
        if tile.stop == chunk.stop and dy is not None and dx_BCE is not None:
            dy.stash(chunk.index, dx_BCE)
    reading.release()
    return total


def last_logits(state: StepState, count: int) -> Tensor:
    """Compute the logits (B, count, V) of the last `count` positions, on every rank, and close the step's stores."""
    ends = list(itertools.accumulate(len(chunk) * state.ranks.size for chunk in state.chunks))
    wanted = [i for i, end in enumerate(ends) if end > state.batch.seq_len - count]
    with state.replay.restored(), state.decoder.streamed_attention(), torch.no_grad(), state.stores.close_on_error():
        tail = torch.cat([state.ranks.gather_tokens(x_BCE) for x_BCE in state.inputs[-1].read(wanted)], dim=1)
        state.stores.close()
        padding = ends[-1] - state.batch.seq_len
        tail = tail[:, tail.shape[1] - padding - count : tail.shape[1] - padding]
        return state.decoder.head(tail)


def token_scores(state: StepState) -> Tensor:
    """Compute the log probability of each target, and whether it is the likeliest token; close the step's stores.

    Returns:
        (2, B, S), fp32, of all ranks' tokens on every rank: log probabilities, and 1 where the target is the likeliest
        token; 0 without a target.
    """
    batch, decoder, scores = state.batch, state.decoder, []
    tile_tokens = _tokens_per_tile(state, state.inputs[-1].dtype)
    with state.replay.restored(), decoder.streamed_attention(), torch.no_grad(), state.stores.close_on_error():
        for chunk, x_BCE in zip(state.chunks, state.inputs.pop().read(state.ascending, take=True), strict=True):
            targets_BC, parts = batch.targets_of(chunk), []
            for tile in cut_tiles([chunk], tile_tokens):
                state.report("head", -1, chunk.index, len(state.chunks))
                parts.append(_score_tile(decoder.head(x_BCE[:, tile.within]), targets_BC[:, tile.within]))
            scores.append(state.ranks.gather_tokens(torch.cat(parts, dim=2).permute(1, 2, 0)))
        state.stores.close()
    return torch.cat(scores, dim=1)[:, : batch.seq_len].permute(2, 0, 1)


def _score_tile(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Return log probability of each target and whether it is the likeliest, (2, B, T), fp32; see `token_scores`."""
    logits_BTV = logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32))
    index_BT1 = targets_BT.clamp_min(0)[..., None]
    log_probs = logits_BTV.gather(-1, index_BT1)[..., 0] - logits_BTV.logsumexp(-1)
    is_greedy = logits_BTV.argmax(-1) == targets_BT
    return torch.stack([log_probs.float(), is_greedy.float()]) * (targets_BT != IGNORE)


def _tokens_per_tile(state: StepState, dtype: torch.dtype) -> int:
    """Return how many tokens of a row a tile of this step has, for hidden states of a dtype."""
    ids_BS = state.batch.input_ids_BS
    logits_dtype = state.replay.compute_dtype(dtype)
    return tokens_per_tile(
        state.config.logits_bytes, len(ids_BS), state.decoder.vocab_size, logits_dtype, device=ids_BS.device
    )


def _places_with_targets(targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return which places have a target in some row, and which in all rows: (S,) or (S-1,) each, on the CPU."""
    if targets.device.type == "meta":  # no contents: as if there were a target everywhere
        everywhere = torch.ones(targets.shape[1], dtype=torch.bool)
        return everywhere, everywhere
    has = targets != IGNORE
    used, full = torch.stack([has.any(0), has.all(0)]).cpu()
    return used, full


def _targets_of(tile: Tile, targets: Tensor) -> Tensor:
    """Return the targets of a tile, (B, T); the last position has none."""
    targets_BT = targets[:, tile.start : tile.stop]
    missing = tile.stop - tile.start - targets_BT.shape[1]
    return F.pad(targets_BT, (0, missing), value=IGNORE) if missing else targets_BT


class _StreamedLoss(torch.autograd.Function):
    """Autograd node of the loss of a step. Its backward runs the sweeps, which fill `.grad`, and frees the step.

    The model's parameters are not its inputs: autograd sees a leaf of its own, `anchor`, which gets no gradient.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, state: StepState) -> Tensor:
        ctx.state = state
        return value.clone()  # not a view: callers may scale the loss in place, as transformers' Trainer does

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[None, None, None]:
        state, ctx.state = ctx.state, None
        if state is None:
            raise RuntimeError(
                "Trying to backward through a streamed forward a second time: its activations are freed in the first "
                "backward, with retain_graph=True too. Run the forward again."
            )
        with state.ranks.guard():
            backward(state, grad_output)
        return None, None, None
