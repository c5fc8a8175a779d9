"""Sweeps of a layer in two halves, around attention that is computed one group of heads after another.

The first half of the layer, up to its attention call, runs for all chunks; then all attention; then the whole layer
again, with the outputs in the place of attention. Backward goes the other way: gradients of the second half, of
attention, of the first half. Each half is a replay of the whole layer, differentiated by plain autograd:
`sweeps.backward_sweep` goes through the second half, because the core's output passes no gradient on.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from trunkline.attention.head_groups import HeadGroupsCore
from trunkline.chunking import Chunk
from trunkline.engine.grads import differentiate
from trunkline.engine.step import StepState


def compute_attention(state: StepState, layer: int, core: HeadGroupsCore) -> None:
    """Run the first half of a layer over all chunks, then all its attention; the layer's inputs stay stored."""
    inputs = state.read_inputs(layer)

    def project(chunk: Chunk) -> None:
        core.project(state.rows[chunk.index], *state.project_qkv(layer, inputs.next(), chunk))

    state.ranks.interleave(partial(project, chunk) for chunk in state.chunks)
    inputs.release()
    core.compute_attention()


def before_backward(state: StepState, layer: int, core: HeadGroupsCore) -> None:
    """Recompute attention for the replay of the second half; do nothing if its outputs were kept."""
    if not core.keep_attention:
        compute_attention(state, layer, core)


def after_backward(state: StepState, layer: int, core: HeadGroupsCore) -> None:
    """Differentiate attention, then the first half of the layer, and drop the layer's inputs.

    Call it after the second half is differentiated: it adds to the gradients in `state.dy` and `state.grad_sums`. It
    differentiates nothing if nothing before attention is trained.
    """
    if core.differentiate():
        _first_half(state, layer, core)
    state.inputs[layer].clear()


def _first_half(state: StepState, layer: int, core: HeadGroupsCore) -> None:
    """Differentiate the projections and what comes before them, and add to the gradients of the second half."""
    assert state.dy is not None
    assert state.lowest_layer is not None
    parameters = state.layer_parameters[layer]
    graph_params = state.decoder.graph_params(parameters)
    with_input = layer > state.lowest_layer
    inputs = state.inputs[layer].read(state.descending, take=True)
    dy = state.dy.read(state.descending, take=True) if with_input else None

    def replay(i: int) -> tuple[Tensor, list[Tensor | None]]:
        x_BCE = inputs.next().detach().requires_grad_(with_input)
        with torch.enable_grad():
            *qkv, scoring = state.project_qkv(layer, x_BCE, state.chunks[i])
        return x_BCE, [*qkv, scoring.sinks]

    def finish(i: int, x_BCE: Tensor, outputs: list[Tensor | None]) -> None:
        gradients = zip(outputs, core.gradients(state.rows[i]), strict=True)
        pairs = [(x, dx.to(x.dtype)) for x, dx in gradients if x is not None and x.requires_grad and dx is not None]
        if not pairs:  # only sinks are trained, and their gradient comes with the last chunk
            return
        wanted = [*graph_params, x_BCE] if with_input else graph_params
        grads = differentiate([x for x, _ in pairs], wanted, [dx for _, dx in pairs])
        if dy is not None:
            dx_BCE = grads.pop()
            assert dx_BCE is not None
            assert state.dy is not None
            state.dy.stash(i, dy.next() + dx_BCE)
        state.grad_sums.add(parameters, grads)

    replays = state.ranks.pipeline(partial(replay, i) for i in state.descending)
    for i in state.descending:
        finish(i, *next(replays))
    inputs.release()
    if dy is not None:
        dy.release()
