"""Setup of a step: cuts the sequence into chunks, finds the trained layers, and places stores in tiers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from trunkline.attention.mask import AttentionSpan
from trunkline.attention.scoring import Scoring
from trunkline.chunking import Chunk, split
from trunkline.config import StreamConfig
from trunkline.engine.batch import Batch
from trunkline.engine.decoder import Decoder
from trunkline.engine.memory_layout import BytesPerToken, choose_placement
from trunkline.engine.ranks import Ranks, padded_length
from trunkline.engine.replay import ReplayContext
from trunkline.engine.step import StepState
from trunkline.engine.sweeps import lowest_layer
from trunkline.offload.stores import Stores, Tiers

_TOKEN = Chunk(0, 0, 1)


def begin_step(
    decoder: Decoder,
    config: StreamConfig,
    batch: Batch,
    replay: ReplayContext,
    tiers: Tiers,
    ranks: Ranks,
    attention_spans: Sequence[AttentionSpan],
) -> tuple[StepState, bool]:
    """Prepare a forward pass: cut the sequence into chunks, and with a `device_budget` place all stores in tiers.

    Args:
        decoder: model whose parameters outside the layers are unsharded.
        config: settings.
        batch: input of the forward: the whole sequence, the same on all ranks that share it.
        replay: random state, autocast and kernel choice of the forward.
        tiers: budgets of the model.
        ranks: ranks that share the sequence.
        attention_spans: for each layer, how far back it attends.

    Returns:
        State of the step, and whether it can be differentiated: gradients are on, there are targets, and something is
        trained.

    Raises:
        ValueError: the stores do not fit in the budgets, or ranks that share the sequence place them differently.
        TierError: the disk has no room, or host memory cannot be pinned.
    """
    device = batch.input_ids_BS.device
    layer_parameters = [[p for p in layer if p.requires_grad] for layer in decoder.layer_parameters]
    other_parameters = [p for p in decoder.other_parameters if p.requires_grad]
    differentiable = torch.is_grad_enabled() and batch.targets is not None
    differentiable = differentiable and bool(other_parameters or any(layer_parameters))
    # Chunks that every rank can cut evenly: the sequence is padded at its end, where no token attends to it.
    chunks = split(*(padded_length(n, ranks.chunk_multiple) for n in (batch.seq_len, config.chunk_tokens(device))))
    everything = [*decoder.other_parameters, *(p for layer in decoder.layer_parameters for p in layer)]
    read_again = [*everything, batch.input_ids_BS, batch.position_ids] if differentiable else []
    state = StepState(
        decoder=decoder,
        config=config,
        batch=batch,
        replay=replay,
        ranks=ranks,
        chunks=[ranks.local_tokens(chunk) for chunk in chunks],
        rows=[ranks.query_rows(chunk) for chunk in chunks],
        layer_parameters=layer_parameters,
        other_parameters=other_parameters,
        versions=[(x, x._version) for x in read_again if x is not None],
        attention_spans=attention_spans,
        stores=Stores(tiers),
    )
    with replay.restored(), decoder.streamed_attention(), torch.no_grad():
        if tiers.limited:
            _place_stores(state, differentiable=differentiable)
    return state, differentiable


def _place_stores(state: StepState, *, differentiable: bool) -> None:
    """Choose head groups and the tier of every chunk, from the measured bytes of one token; or take a fixed choice."""
    tiers = state.stores.tiers
    x_BCE = probe_token(state, differentiable=differentiable)
    if tiers.fixed_placement is not None:
        state.head_groups, placement = tiers.fixed_placement
        state.stores = Stores(tiers, placement)
        return
    # One row of the batch is measured: replicas have other batches, and must all run the layers, or none of them.
    key = x_BCE.dtype, state.replay.compute_dtype(x_BCE.dtype)
    if key not in tiers.bytes_per_token:
        tiers.bytes_per_token[key] = measure_token(state, x_BCE)
    layout, placement = choose_placement(
        state.layout,
        tiers.bytes_per_token[key].times(len(state.batch.input_ids_BS)),
        state.chunks,
        state.rows,
        tiers,
        live_chunks=[state.num_live_chunks(layer) for layer in range(state.decoder.num_layers)],
        chunk_size=len(state.chunks[0]) * state.ranks.size,
    )
    state.ranks.require_same((layout.head_groups, placement.places), "the placement of stores")
    state.head_groups = layout.head_groups
    state.stores = Stores(tiers, placement)


def probe_token(state: StepState, *, differentiable: bool) -> Tensor:
    """Return the input of layer 0 for the first token (1, 1, E); if differentiable, set `state.lowest_layer`."""
    with torch.set_grad_enabled(differentiable):
        x_BCE = state.decoder.embed(state.batch.first_row, _TOKEN)
    if differentiable:
        state.lowest_layer = lowest_layer(state, x_BCE)
    return x_BCE.detach()


def measure_token(state: StepState, x_BCE: Tensor) -> BytesPerToken:
    """Return the bytes of one token's activations on this rank, in one row of the batch.

    Args:
        state: step.
        x_BCE: input of layer 0 for one token; every layer is run on it, with attention that returns zeros.
    """
    hidden, layers, num_kv_heads = x_BCE.nbytes, [], 0
    for layer in range(state.decoder.num_layers):
        y_BCE, (*qkv, scoring) = _run_layer_on_token(state, layer, x_BCE)
        hidden = max(hidden, y_BCE.nbytes)
        q, k, v = (state.ranks.local_heads(x) for x in qkv)
        layers.append(BytesPerToken.of_attention(q, k, v, state.config.attn_kernel, scoring.softcap))
        num_kv_heads = math.gcd(num_kv_heads, k.shape[1])
    return BytesPerToken(hidden, layers, num_kv_heads)


def _run_layer_on_token(
    state: StepState, layer: int, x_BCE: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Scoring]]:
    """Return the output of a layer for one token, and the arguments of its attention call."""
    calls: list[tuple[Tensor, Tensor, Tensor, Scoring]] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        calls.append((q, k, v, scoring))
        return q.new_zeros(*q.shape[:3], v.shape[3])

    with state.decoder.unsharded(layer):
        y_BCE = state.decoder.layer(layer, x_BCE, state.batch.first_row, _TOKEN, attend)
    return y_BCE, calls[0]
