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

from trunkline.attention.groups import HeadGroupsCore
from trunkline.gradients import differentiate
from trunkline.run import Run


def attend(run: Run, layer: int, core: HeadGroupsCore) -> None:
    """The first half of a layer, and all its attention; the layer's inputs stay."""
    inputs = zip(run.chunks, run.inputs[layer].read(run.rising), strict=True)
    calls = (partial(run.project, layer, x_BCE, chunk) for chunk, x_BCE in inputs)
    for rows, projections in zip(run.rows, run.ranks.side_by_side(calls), strict=True):
        core.project(rows, *projections)
    core.attend()


def before_backward(run: Run, layer: int, core: HeadGroupsCore) -> None:
    """Have the outputs that the replay of the second half takes: those kept, or computed again."""
    if not core.keep_attention:
        attend(run, layer, core)


def after_backward(run: Run, layer: int, core: HeadGroupsCore) -> None:
    """Gradients of attention and of the first half, once those of the second half are there."""
    if core.differentiate():
        _first_half(run, layer, core)
    run.inputs[layer].clear()


def _first_half(run: Run, layer: int, core: HeadGroupsCore) -> None:
    """Gradients of the projections, and of what comes before them, added to those of the second half."""
    assert run.dy is not None
    assert run.lowest is not None
    parameters = run.layer_parameters[layer]
    live = run.decoder.live(parameters)
    with_input = layer > run.lowest
    dy = iter(run.dy.read(run.falling, take=True)) if with_input else None

    def replay(i: int, x_BCE: Tensor) -> tuple[Tensor, list[Tensor]]:
        x_BCE = x_BCE.detach().requires_grad_(with_input)
        with torch.enable_grad():
            *projections, _ = run.project(layer, x_BCE, run.chunks[i])
        return x_BCE, projections

    falling = zip(run.falling, run.inputs[layer].read(run.falling, take=True), strict=True)
    replays = run.ranks.ahead(partial(replay, i, x_BCE) for i, x_BCE in falling)
    for i in run.falling:
        x_BCE, projections = next(replays)
        wanted = [*live, x_BCE] if with_input else live
        gradients = core.gradients(run.rows[i])
        pairs = [(x, dx) for x, dx in zip(projections, gradients, strict=True) if x.requires_grad]
        grads = differentiate([x for x, _ in pairs], wanted, [dx for _, dx in pairs])
        if dy is not None:
            dx_BCE = grads.pop()
            assert dx_BCE is not None
            run.dy.stash(i, next(dy) + dx_BCE)
        run.sums.add(parameters, grads)
