"""Sweeps of a layer in two halves, around attention that goes head group by head group (`HeadGroupsCore`).

The first half of the layer, up to its attention call, runs for all chunks; then all attention; then the layer again,
with the outputs in the place of attention. Backward is the same the other way round: gradients of the second half, of
attention, and of the first half; both halves are replays of the whole layer, differentiated by plain autograd. The
engine's own loop goes through the second half, since the core keeps gradients from passing attention.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from trunkline.attention.head_groups import HeadGroupsCore
from trunkline.chunking import Chunk
from trunkline.engine.grads import differentiate
from trunkline.engine.step import StepState


def attend(run: StepState, layer: int, core: HeadGroupsCore) -> None:
    """The first half of a layer, and all its attention; the layer's inputs stay."""

    def one(chunk: Chunk, x_BCE: Tensor) -> None:
        core.project(run.rows[chunk.index], *run.project(layer, x_BCE, chunk))

    run.for_each_chunk(layer, one)
    core.attend()


def before_backward(run: StepState, layer: int, core: HeadGroupsCore) -> None:
    """Have the outputs that the replay of the second half takes: those kept, or computed again."""
    if not core.keep_attention:
        attend(run, layer, core)


def after_backward(run: StepState, layer: int, core: HeadGroupsCore) -> None:
    """Gradients of attention and of the first half, once those of the second half are there."""
    if core.differentiate():
        _first_half(run, layer, core)
    run.inputs[layer].clear()


def _first_half(run: StepState, layer: int, core: HeadGroupsCore) -> None:
    """Gradients of the projections, and of what comes before them, added to those of the second half."""
    assert run.dy is not None
    assert run.lowest_layer is not None
    parameters = run.layer_parameters[layer]
    live = run.decoder.graph_params(parameters)
    with_input = layer > run.lowest_layer
    inputs = run.inputs[layer].read(run.descending, take=True)
    dy = run.dy.read(run.descending, take=True) if with_input else None

    def replay(i: int) -> tuple[Tensor, list[Tensor | None]]:
        x_BCE = inputs.next().detach().requires_grad_(with_input)
        with torch.enable_grad():
            *projections, scoring = run.project(layer, x_BCE, run.chunks[i])
        return x_BCE, [*projections, scoring.sinks]

    def finish(i: int, x_BCE: Tensor, projections: list[Tensor | None]) -> None:
        given = zip(projections, core.gradients(run.rows[i]), strict=True)
        pairs = [(x, dx.to(x.dtype)) for x, dx in given if x is not None and x.requires_grad and dx is not None]
        if not pairs:  # sinks alone are trained, whose gradient comes with the last chunk
            return
        grads = differentiate([x for x, _ in pairs], [*live, x_BCE] if with_input else live, [dx for _, dx in pairs])
        if dy is not None:
            dx_BCE = grads.pop()
            assert dx_BCE is not None
            assert run.dy is not None
            run.dy.stash(i, dy.next() + dx_BCE)
        run.sums.add(parameters, grads)

    replays = run.ranks.pipeline(partial(replay, i) for i in run.descending)
    for i in run.descending:
        finish(i, *next(replays))
    inputs.release()
    if dy is not None:
        dy.release()
