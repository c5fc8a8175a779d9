"""The sweeps: layer by layer, chunk by chunk, forward sweeps ascending and backward sweeps descending.

They run any `Decoder`, and know nothing of Hugging Face. `forward_sweep` and `backward_sweep` are the two loops of
docs/how-it-works.md; `forward` and `backward` call them for every layer.
"""

from __future__ import annotations

import itertools
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from trunkline.attention.core import Core
from trunkline.attention.head_groups import HeadGroupsCore
from trunkline.engine import head_group_sweeps, recompute
from trunkline.engine.grads import depends_on, differentiate
from trunkline.engine.step import CoreCall, StepState


def forward_sweep(state: StepState, layer: int, *, keep_for_backward: bool) -> None:
    """Run one layer over all chunks, ascending.

    Invariant: when chunk i is run, the core holds keys and values of chunks 0 … i-1, or with a window of the chunks
    among them that it sees. The layer's attention call appends those of chunk i. (Head groups differ: see
    `head_group_sweeps`.)

    Args:
        state: step; its `inputs` get the layer's output, and its `cores` the layer's core.
        layer: index of the layer.
        keep_for_backward: whether the layer has a backward: keep its core with the activations of `StreamConfig.keep`,
            and its input if it is the first of `checkpoint_every` layers. Otherwise nothing of the layer is kept.
    """
    layout = state.layout
    core = state.new_core(layer, keep=frozenset(state.config.keep) if keep_for_backward else frozenset())
    if isinstance(core, HeadGroupsCore):
        # All attention comes first, group of heads by group of heads; the sweep below runs the rest of the layer.
        head_group_sweeps.compute_attention(state, layer, core)
    core_call: CoreCall = core.forward if isinstance(core, Core) else core.kept_output
    load_output = None if isinstance(core, Core) else core.load_kept_output
    # Inputs that backward recomputes (checkpoint_every), or never reads, are freed as the sweep passes them.
    inputs = state.read_inputs(layer, take=not layout.keeps_input(layer))
    outputs = state.sequence(layout.input(layer + 1))
    # Over ranks, a chunk that waits in an exchange lets the next one compute: always in the same order on all ranks.
    state.ranks.interleave(state.chunk_runs(layer, inputs, outputs, core_call, load_output))
    inputs.release()
    core.end_forward()
    state.cores.append(core if keep_for_backward else None)
    state.inputs.append(outputs)


def backward_sweep(state: StepState, layer: int, factor: Tensor | None) -> None:
    """Replay one layer and differentiate it, chunk by chunk, descending.

    Invariant: when chunk i is reached, every later chunk has added its share to the sums of dk_i and dv_i. So one
    autograd pass of chunk i, through the layer's own code, returns the complete gradient of its input, and the chunk's
    share of the parameters' gradients.

    Args:
        state: step. Its `dy` holds the gradient of the layer's output, and afterwards that of its input, or nothing if
            no lower layer or embedding is trained. Its `grad_sums` get the gradients of the layer's parameters.
        layer: index of the layer. Its input and core are dropped.
        factor: factor of `dy`, 0-dim: d objective / d loss, over the number of targets. None where `dy` has it already,
            in all layers but the last.
    """
    core, dy = state.cores[layer], state.dy
    assert core is not None
    assert dy is not None
    assert state.lowest_layer is not None
    parameters = state.layer_parameters[layer]
    graph_params = state.decoder.graph_params(parameters)
    if isinstance(core, HeadGroupsCore):
        head_group_sweeps.before_backward(state, layer, core)
    kv_ready = recompute.kv_before_replay(state, layer, core)
    with_input = layer > state.lowest_layer
    # Inputs are read twice where head groups replay the first half of the layer again, or a window recomputes K/V.
    in_window = isinstance(core, Core) and core.drops_passed_kv
    inputs = state.inputs[layer].read(state.descending, take=isinstance(core, Core) and not in_window)

    def replay(i: int) -> tuple[Tensor, Tensor]:
        state.report("backward", layer, i, len(state.chunks))
        next(kv_ready)
        x_BCE = inputs.next().detach().requires_grad_(with_input)
        if in_window:  # `kv_ready` has read it by now, too
            state.inputs[layer].drop(i)
        with torch.enable_grad():
            attend = state.begin_layer(layer, state.chunks[i], core.replay, core.load_output)
            return x_BCE, state.decoder.layer(layer, x_BCE, state.batch, state.chunks[i], attend)

    # Over ranks, the next chunk's replay goes on while this chunk's gradients wait in an exchange.
    replays = state.ranks.pipeline(partial(replay, i) for i in state.descending)
    for i, dy_BCE in zip(state.descending, dy.read(state.descending, take=True), strict=True):
        x_BCE, y_BCE = next(replays)
        if factor is not None:  # in the dtype of the loss, rounded once
            dy_BCE = (dy_BCE.to(factor.dtype) * factor).to(dy_BCE.dtype)
        grads = differentiate([y_BCE], [*graph_params, x_BCE] if with_input else graph_params, [dy_BCE])
        # None, too, where only attention reaches the input, and head groups defer its gradient.
        dx_BCE = grads.pop() if with_input else None
        if with_input:
            dy.stash(i, torch.zeros_like(x_BCE) if dx_BCE is None else dx_BCE)
        state.grad_sums.add(parameters, grads)
        # Free them before the next chunk is replayed: budgets count no second one, and `dx_BCE` may be offloaded.
        del x_BCE, y_BCE, dy_BCE, dx_BCE, grads
    inputs.release()
    if isinstance(core, HeadGroupsCore):
        head_group_sweeps.after_backward(state, layer, core)
    state.cores[layer] = None


def embed_forward(state: StepState, *, differentiable: bool) -> None:
    """Compute the input of layer 0 for all chunks; if differentiable, set `state.lowest_layer`."""
    outputs = state.sequence(state.layout.input(0))
    for chunk in state.chunks:
        state.report("embed", -1, chunk.index, len(state.chunks))
        state.replay.seed(-1, chunk.index)
        # The graph of one chunk tells whether anything in the embedding is trained.
        with torch.set_grad_enabled(differentiable and chunk.index == 0):
            x_BCE = state.decoder.embed(state.batch, chunk)
        if differentiable and chunk.index == 0:
            state.lowest_layer = lowest_layer(state, x_BCE)
        outputs.stash(chunk.index, x_BCE.detach())
    state.inputs.append(outputs)


def lowest_layer(state: StepState, x_BCE: Tensor) -> int | None:
    """Return the lowest layer that backward must reach; -1 is the embedding, None means no layer.

    Args:
        state: step; its lists of trained parameters are read.
        x_BCE: output of the embedding, computed with gradients on.
    """
    if depends_on(x_BCE, state.decoder.graph_params(state.other_parameters)):
        return -1
    return min((i for i, parameters in enumerate(state.layer_parameters) if parameters), default=None)


def embed_backward(state: StepState) -> None:
    """Replay the embedding and differentiate it, chunk by chunk, descending; `state.dy` is empty afterwards."""
    dy = state.dy
    assert dy is not None
    parameters = state.other_parameters
    graph_params = state.decoder.graph_params(parameters)
    for i, dy_BCE in zip(state.descending, dy.read(state.descending, take=True), strict=True):
        state.report("backward", -1, i, len(state.chunks))
        state.replay.seed(-1, i)
        with torch.enable_grad():
            x_BCE = state.decoder.embed(state.batch, state.chunks[i])
        state.grad_sums.add(parameters, differentiate([x_BCE], graph_params, [dy_BCE]))


def forward(state: StepState, *, differentiable: bool) -> None:
    """Run the embedding and all layers. The last entry of `state.inputs` is then the final hidden state.

    Args:
        state: step, from `trunkline.engine.setup.begin_step`.
        differentiable: whether there may be a backward; if not, nothing is kept for it.
    """
    decoder = state.decoder
    with (
        state.replay.restored(),
        decoder.streamed_attention(),
        torch.no_grad(),
        state.stores.close_on_error(),
    ):
        embed_forward(state, differentiable=differentiable)
        for layer in range(decoder.num_layers):
            keep = state.lowest_layer is not None and layer >= state.lowest_layer
            following = layer + 1 if layer + 1 < decoder.num_layers else None
            with decoder.unsharded(layer, following=following, again=keep):
                forward_sweep(state, layer, keep_for_backward=keep)
        state.stores.flush_all()
    # A forward may write to parameters itself, as PEFT does to adapted experts: such a change is no user's.
    state.versions = [(x, version) for x, version in state.versions if x._version == version]


def backward(state: StepState, grad_output: Tensor) -> None:
    """Add the gradients of all trained parameters to their `.grad`, summed over ranks, and close the step.

    Under `no_sync` sharding keeps the gradients back, to be reduced with those of a later backward.

    Args:
        state: step whose loss has been computed by `loss.mean_loss`.
        grad_output: d objective / d loss, 0-dim.

    Raises:
        RuntimeError: a parameter or an input was modified in place since the forward.
    """
    decoder = state.decoder
    if any(x._version != version for x, version in state.versions):
        raise RuntimeError(
            "a parameter, input_ids or position_ids has been modified by an inplace operation since this forward: call "
            "backward() before optimizer.step(), and do not reuse the input's buffer until then."
        )
    factor = grad_output if state.divisor is None else grad_output / state.divisor.to(grad_output.dtype)
    state.grad_sums.scale_(factor)
    layout = state.layout
    with (
        state.replay.restored(),
        decoder.streamed_attention(),
        torch.no_grad(),
        state.stores.close_on_error(),
        decoder.unsharded(None),
    ):
        groups = list(layout.layer_groups())
        for group, group_below in itertools.zip_longest(groups, groups[1:]):
            recompute.inputs_of_group(state, group)
            for layer in reversed(group):
                # Parameters that are needed next are gathered meanwhile: of the layer below, or of the first replay.
                first_below = None if group_below is None else group_below.start
                with decoder.unsharded(layer, following=layer - 1 if layer > group.start else first_below):
                    backward_sweep(state, layer, factor if layer == decoder.num_layers - 1 else None)
                state.grad_sums.deliver(_complete_after(state, layer), decoder.reduce_grads)
        if state.lowest_layer == -1:
            embed_backward(state)
        state.stores.close()
    delivered = {p for layer in layout.trained for p in _complete_after(state, layer)}
    everything = dict.fromkeys([*state.other_parameters, *(p for layer in state.layer_parameters for p in layer)])
    state.grad_sums.deliver([p for p in everything if p not in delivered], decoder.reduce_grads)


def _complete_after(state: StepState, layer: int) -> list[Parameter]:
    """Return the trained parameters whose gradient a layer's backward completes.

    They are those of the layer that no lower layer shares, nor the embedding or head.
    """
    later = set(state.other_parameters).union(*state.layer_parameters[:layer])
    return [p for p in state.layer_parameters[layer] if p not in later]
