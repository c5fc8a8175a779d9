"""The engine: layer by layer, chunk by chunk, forward sweeps up and backward sweeps down.

It runs any `Decoder`, and knows nothing of where one comes from. A forward owns what it keeps (`StepState`) until its
backward; several may be outstanding. The two loops of the design are `forward_sweep` and `backward_sweep`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from trunkline.attention.core import Core
from trunkline.attention.head_groups import HeadGroupsCore
from trunkline.attention.mask import AttentionSpan
from trunkline.attention.scoring import Scoring
from trunkline.chunking import Chunk, split
from trunkline.config import StreamConfig
from trunkline.engine import head_group_sweeps, recompute
from trunkline.engine import loss as head
from trunkline.engine.batch import Batch
from trunkline.engine.decoder import Decoder
from trunkline.engine.grads import depends_on, differentiate
from trunkline.engine.memory_layout import BytesPerToken, choose
from trunkline.engine.ranks import Ranks, padded_length
from trunkline.engine.replay import ReplayContext
from trunkline.engine.step import CoreCall, StepState
from trunkline.offload.stores import Stores, Tiers


def forward_sweep(run: StepState, layer: int, *, differentiate: bool) -> None:
    """One layer over all chunks, upwards. Where its inputs are not kept for backward they are freed as it goes."""
    layout = run.layout
    core = run.core(layer, keep=frozenset(run.config.keep) if differentiate else frozenset())
    if isinstance(core, HeadGroupsCore):
        head_group_sweeps.attend(run, layer, core)
    attend: CoreCall = core.forward if isinstance(core, Core) else core.kept_output
    known = None if isinstance(core, Core) else core.load_kept_output
    kept = differentiate and layout.position(layer) == 0
    outputs = run.sequence(layout.input(layer + 1))

    def one(chunk: Chunk, x_BCE: Tensor) -> None:
        run.report("forward", layer, chunk.index, len(run.chunks))
        outputs.stash(chunk.index, run.apply(layer, x_BCE, chunk, attend, known))

    run.for_each_chunk(layer, one, take=not kept)
    core.end_forward()
    run.cores.append(core if differentiate else None)
    run.inputs.append(outputs)


def backward_sweep(run: StepState, layer: int, factor: Tensor | None) -> None:
    """One layer over all chunks, downwards: each chunk is replayed and differentiated by plain autograd."""
    core, dy = run.cores[layer], run.dy
    assert core is not None
    assert dy is not None
    assert run.lowest_layer is not None
    parameters = run.layer_parameters[layer]
    live = run.decoder.graph_params(parameters)
    in_halves = isinstance(core, HeadGroupsCore)
    if isinstance(core, HeadGroupsCore):
        head_group_sweeps.before_backward(run, layer, core)
    keys_values = recompute.project_kv(run, layer, core)
    with_input = layer > run.lowest_layer
    in_window = isinstance(core, Core) and core.drops_passed_kv
    inputs = run.inputs[layer].read(run.descending, take=not in_halves and not in_window)

    def replay(i: int) -> tuple[Tensor, Tensor]:
        run.report("backward", layer, i, len(run.chunks))
        next(keys_values)
        x_BCE = inputs.next().detach().requires_grad_(with_input)
        if in_window:  # no longer read by `project_kv` either
            run.inputs[layer].drop(i)
        with torch.enable_grad():
            return x_BCE, run.apply(layer, x_BCE, run.chunks[i], core.replay, core.load_output)

    def finish(i: int, dy_BCE: Tensor, x_BCE: Tensor, y_BCE: Tensor) -> None:
        wanted = [*live, x_BCE] if with_input else live
        grads = differentiate([y_BCE], wanted, [dy_BCE if factor is None else run.scaled(dy_BCE, factor)])
        if with_input:
            dx_BCE = grads.pop()  # None where attention alone leads to the input, and passes no gradient on (halves)
            dy.stash(i, torch.zeros_like(x_BCE) if dx_BCE is None else dx_BCE)
        run.sums.add(parameters, grads)

    replays = run.ranks.pipeline(partial(replay, i) for i in run.descending)
    for i, dy_BCE in zip(run.descending, dy.read(run.descending, take=True), strict=True):
        finish(i, dy_BCE, *next(replays))
    inputs.release()
    if isinstance(core, HeadGroupsCore):
        head_group_sweeps.after_backward(run, layer, core)
    run.cores[layer] = None


def embed_forward(run: StepState, *, differentiate: bool) -> None:
    """The input of layer 0 for all chunks; finds the lowest layer that backward must reach."""
    outputs = run.sequence(run.layout.input(0))
    for chunk in run.chunks:
        run.report("embed", -1, chunk.index, len(run.chunks))
        run.replay.seed(-1, chunk.index)
        # One chunk with gradients on tells whether anything in the embedding is trained.
        with torch.set_grad_enabled(differentiate and chunk.index == 0):
            x_BCE = run.decoder.embed(run.batch, chunk)
        if differentiate and chunk.index == 0:
            run.lowest_layer = lowest_layer(run, x_BCE)
        outputs.stash(chunk.index, x_BCE.detach())
    run.inputs.append(outputs)


def lowest_layer(run: StepState, x_BCE: Tensor) -> int | None:
    """The lowest layer that backward must reach, given an output of the embedding; see `StepState.lowest_layer`."""
    if depends_on(x_BCE, run.decoder.graph_params(run.other_parameters)):
        return -1
    return min((i for i, parameters in enumerate(run.layer_parameters) if parameters), default=None)


def embed_backward(run: StepState) -> None:
    """The embedding, differentiated chunk by chunk."""
    dy = run.dy
    assert dy is not None
    parameters = run.other_parameters
    live = run.decoder.graph_params(parameters)
    for i, dy_BCE in zip(run.descending, dy.read(run.descending, take=True), strict=True):
        run.report("backward", -1, i, len(run.chunks))
        run.replay.seed(-1, i)
        with torch.enable_grad():
            x_BCE = run.decoder.embed(run.batch, run.chunks[i])
        run.sums.add(parameters, differentiate([x_BCE], live, [dy_BCE]))


def place(run: StepState, *, differentiate: bool) -> None:
    """Find out from one token how large everything will be, and give it its tier before the first sweep."""
    token, tiers = Chunk(0, 0, 1), run.stores.tiers
    x_BCE = probe_token(run, differentiate=differentiate)
    if tiers.fixed_placement is not None:
        run.head_groups, placement = tiers.fixed_placement
        run.stores = Stores(tiers, placement)
        return
    # Of one row: replicas have other batches, and must all look into the layers, or none.
    key = x_BCE.dtype, run.replay.compute_dtype(x_BCE.dtype)
    if key not in tiers.bytes_per_token:
        tiers.bytes_per_token[key] = bytes_per_token_of(run, x_BCE, token)
    widths = tiers.bytes_per_token[key].times(len(run.batch.input_ids_BS))
    chunk_size = len(run.chunks[0]) * run.ranks.size
    live_chunks = [run.live_chunks(layer) for layer in range(run.decoder.num_layers)]
    layout, placement = choose(
        run.layout, widths, run.chunks, run.rows, tiers, live_chunks=live_chunks, chunk_size=chunk_size
    )
    run.ranks.require_same((layout.head_groups, placement.places), "what rests where")
    run.head_groups = layout.head_groups
    run.stores = Stores(tiers, placement)


def probe_token(run: StepState, *, differentiate: bool) -> Tensor:
    """The input of layer 0 for one token; it tells how far down backward must reach."""
    with torch.set_grad_enabled(differentiate):
        x_BCE = run.decoder.embed(run.batch.first_row, Chunk(0, 0, 1))
    if differentiate:
        run.lowest_layer = lowest_layer(run, x_BCE)
    return x_BCE.detach()


def bytes_per_token_of(run: StepState, x_BCE: Tensor, token: Chunk) -> BytesPerToken:
    """How large everything is for one token of one row, with attention that gives zeros."""
    hidden, layers, num_kv_heads = x_BCE.nbytes, [], 0
    for layer in range(run.decoder.num_layers):
        calls: list[tuple[Tensor, Tensor, Tensor, Scoring]] = []

        def attend(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, calls: list[Any] = calls) -> Tensor:
            calls.append((q, k, v, scoring))
            return q.new_zeros(*q.shape[:3], v.shape[3])

        with run.decoder.unsharded(layer):
            hidden = max(hidden, run.decoder.layer(layer, x_BCE, run.batch.first_row, token, attend).nbytes)
        *tensors, scoring = calls[0]
        q, k, v = (run.ranks.local_heads(x) for x in tensors)
        layers.append(BytesPerToken.of_attention(q, k, v, run.config.attn_kernel, scoring.softcap))
        num_kv_heads = math.gcd(num_kv_heads, k.shape[1])
    return BytesPerToken(hidden, layers, num_kv_heads)


def begin(
    decoder: Decoder,
    config: StreamConfig,
    batch: Batch,
    conditions: ReplayContext,
    tiers: Tiers,
    ranks: Ranks,
    reaches: Sequence[AttentionSpan],
) -> tuple[StepState, bool]:
    """A forward pass before its first sweep: everything has its place.

    Args:
        decoder: the model, with what is in no layer present.
        config: settings.
        batch: what the forward is about.
        conditions: under which it runs, and its replay.
        tiers: of the model.
        ranks: that share the sequence.
        reaches: of each layer's attention.

    Returns:
        The run, and whether it can be differentiated.
    """
    device = batch.input_ids_BS.device
    layer_parameters = [[p for p in layer if p.requires_grad] for layer in decoder.layer_parameters]
    other_parameters = [p for p in decoder.other_parameters if p.requires_grad]
    differentiate = torch.is_grad_enabled() and batch.targets is not None
    differentiate = differentiate and bool(other_parameters or any(layer_parameters))
    chunks = split(*(padded_length(n, ranks.chunk_multiple) for n in (batch.seq_len, config.chunk_tokens(device))))
    own, rows = [ranks.local_tokens(chunk) for chunk in chunks], [ranks.query_rows(chunk) for chunk in chunks]
    everything = [*decoder.other_parameters, *(p for layer in decoder.layer_parameters for p in layer)]
    reread = [*everything, batch.input_ids_BS, batch.position_ids] if differentiate else []
    watched = [(x, x._version) for x in reread if x is not None]
    run = StepState(decoder, config, batch, conditions, ranks, own, rows, layer_parameters, other_parameters, watched,
              reaches, Stores(tiers))  # fmt: skip
    with run.replay.restored(), decoder.streamed_attention(), torch.no_grad():
        if tiers.limited:
            place(run, differentiate=differentiate)
    return run, differentiate


def forward(run: StepState, *, differentiate: bool) -> None:
    """All layers of a forward pass; the last entry of its `inputs` is the final hidden state then.

    Args:
        run: from `begin`.
        differentiate: whether there may be a backward.
    """
    decoder = run.decoder
    with run.replay.restored(), decoder.streamed_attention(), torch.no_grad(), run.stores.close_on_error():
        embed_forward(run, differentiate=differentiate)
        for layer in range(decoder.num_layers):
            again = run.lowest_layer is not None and layer >= run.lowest_layer
            following = layer + 1 if layer + 1 < decoder.num_layers else None
            with decoder.unsharded(layer, following=following, again=again):
                forward_sweep(run, layer, differentiate=again)
        run.stores.flush_all()
    # What a forward itself writes to, as PEFT does to experts that it adapts, says nothing about others.
    run.versions = [(x, version) for x, version in run.versions if x._version == version]


def last_logits(run: StepState, count: int) -> Tensor:
    """Logits of the last `count` positions, (B, count, V)."""
    ends = list(itertools.accumulate(len(chunk) * run.ranks.size for chunk in run.chunks))
    wanted = [i for i, end in enumerate(ends) if end > run.batch.seq_len - count]
    with run.replay.restored(), run.decoder.streamed_attention(), torch.no_grad(), run.stores.close_on_error():
        tail = torch.cat([run.ranks.gather_tokens(x_BCE) for x_BCE in run.inputs[-1].read(wanted)], dim=1)
        run.stores.close()
        padding = ends[-1] - run.batch.seq_len
        tail = tail[:, tail.shape[1] - padding - count : tail.shape[1] - padding]
        return run.decoder.head(tail)


def loss(run: StepState, *, differentiate: bool) -> Tensor:
    """Mean cross-entropy over the targets of a run, as a node that autograd can go backward from.

    Returns:
        0-dim, fp32 (fp64 for a model in fp64).
    """
    batch, decoder = run.batch, run.decoder
    assert batch.targets is not None
    assert batch.num_targets is not None
    run.dy = run.sequence("dy") if run.lowest_layer is not None else None
    hidden = run.inputs.pop()
    narrow = run.replay.compute_dtype(hidden.dtype)
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    shape = len(batch.input_ids_BS), decoder.vocab_size, narrow
    tile_tokens = head.tile_tokens(run.config.logits_bytes, *shape, device=batch.input_ids_BS.device)
    # transformers' norms compute in fp32 in fp64 models too: only what plain autograd feeds them rounds alike.
    early = dtype == torch.float64
    divisor = batch.num_targets if batch.divisor is None else batch.divisor
    run.divisor = None if early else divisor
    with run.replay.restored(), decoder.streamed_attention(), torch.no_grad(), run.stores.close_on_error():
        total = head.sweep(
            decoder.head,
            hidden,
            batch.targets,
            head.cut(run.chunks, tile_tokens),
            parameters=run.other_parameters,
            live=decoder.graph_params(run.other_parameters),
            hidden_grads=run.dy,
            sums=run.sums if differentiate else None,
            divisor=divisor if early else None,
            before_tile=partial(run.report, "head", -1),
        )
        run.stores.flush_all()
        if not differentiate:
            run.stores.close()
        value = (run.ranks.all_reduce(total) / batch.num_targets).to(dtype)
    if not differentiate:
        return value
    anchor = torch.zeros((), requires_grad=True)
    result: Tensor = _StreamedLoss.apply(anchor, value, run)  # type: ignore[no-untyped-call]
    return result


def scores(run: StepState) -> Tensor:
    """How well each token of a run is predicted by those before it.

    Returns:
        (2, B, S), fp32: log probability of the token after each, and whether it was the likeliest; 0 without a target.
    """
    batch, decoder, found = run.batch, run.decoder, []
    assert batch.targets is not None
    shape = len(batch.input_ids_BS), decoder.vocab_size, run.replay.compute_dtype(run.inputs[-1].dtype)
    tile_tokens = head.tile_tokens(run.config.logits_bytes, *shape, device=batch.input_ids_BS.device)
    with run.replay.restored(), decoder.streamed_attention(), torch.no_grad(), run.stores.close_on_error():
        chunks = zip(run.chunks, run.inputs.pop().read(range(len(run.chunks)), take=True), strict=True)
        for chunk, x_BCE in chunks:
            tiles = head.cut([chunk], tile_tokens)
            before = partial(run.report, "head", -1, chunk.index, len(run.chunks))
            own = head.scores(decoder.head, x_BCE, batch.targets_of(chunk), tiles, before_tile=before)
            found.append(run.ranks.gather_tokens(own.permute(1, 2, 0)))
        run.stores.close()
    return torch.cat(found, dim=1)[:, : batch.seq_len].permute(2, 0, 1)


def backward(run: StepState, grad_output: Tensor) -> None:
    """Gradients of all trained parameters into their `.grad`.

    Args:
        run: a forward pass with its loss.
        grad_output: d objective / d loss, 0-dim.
    """
    decoder = run.decoder
    if any(x._version != version for x, version in run.versions):
        raise RuntimeError(
            "a parameter, input_ids or position_ids has been modified by an inplace operation since this forward: call "
            "backward() before optimizer.step(), and do not reuse the input's buffer until then."
        )
    factor = grad_output if run.divisor is None else grad_output / run.divisor.to(grad_output.dtype)
    run.sums.scale_(factor)
    layout = run.layout
    with (
        run.replay.restored(), decoder.streamed_attention(), torch.no_grad(), run.stores.close_on_error(),
        decoder.unsharded(None),
    ):  # fmt: skip
        groups = list(layout.groups())
        for group, below in itertools.zip_longest(groups, groups[1:]):
            recompute.regenerate(run, group)
            for layer in reversed(group):
                first = None if below is None else below.start  # the next that is wanted, by a replay or a sweep
                with decoder.unsharded(layer, following=layer - 1 if layer > group.start else first):
                    backward_sweep(run, layer, factor if layer == decoder.num_layers - 1 else None)
                run.sums.deliver(_owned(run, layer), decoder.reduce_grads)
        if run.lowest_layer == -1:
            embed_backward(run)
        run.stores.close()
    delivered = {p for layer in layout.trained for p in _owned(run, layer)}
    everything = dict.fromkeys([*run.other_parameters, *(p for layer in run.layer_parameters for p in layer)])
    run.sums.deliver([p for p in everything if p not in delivered], decoder.reduce_grads)


def _owned(run: StepState, layer: int) -> list[Parameter]:
    """Parameters of a layer that no layer below it and nothing else shares: their sums are complete once it is done."""
    later = set(run.other_parameters).union(*run.layer_parameters[:layer])
    return [p for p in run.layer_parameters[layer] if p not in later]


class _StreamedLoss(torch.autograd.Function):
    """The loss of a run. Its backward is the engine's, and frees the run."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, run: StepState) -> Tensor:
        ctx.run = run
        return value.clone()  # not a view: callers may scale the loss in place (transformers' Trainer does)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[None, None, None]:
        run, ctx.run = ctx.run, None
        if run is None:
            raise RuntimeError(
                "Trying to backward through a streamed forward a second time: what it kept is freed in the first "
                "backward, with retain_graph=True too. Run the forward again."
            )
        with run.ranks.guard():
            backward(run, grad_output)
        return None, None, None
