"""Sweeps of a layer in two halves, around attention that goes head group by head group (`HeadGroupsCore`).

The first half of the layer, up to its attention call, runs for all chunks; then all attention; then the layer again,
with the outputs in the place of attention. Backward is the same the other way round: gradients of the second half, of
attention, and of the first half; both halves are replays of the whole layer, differentiated by plain autograd.
"""

from __future__ import annotations

from functools import partial

import torch

from trunkline.attention.groups import HeadGroupsCore
from trunkline.gradients import differentiate
from trunkline.run import Run


def attend(run: Run, layer: int, core: HeadGroupsCore) -> None:
    """The first half of a layer, and all its attention; the layer's inputs stay."""
    for chunk, x_BCE in zip(run.chunks, run.inputs[layer].read(run.rising), strict=True):
        run.conditions.seed(layer, chunk.index)
        core.project(chunk, *run.decoder.projections(layer, x_BCE, run.batch, chunk))
    core.attend()


def backward_sweep(run: Run, layer: int, core: HeadGroupsCore, factor: torch.Tensor | None) -> None:
    """See `engine.backward_sweep`."""
    if not core.keep_attention:
        attend(run, layer, core)
    _second_half(run, layer, core, factor)
    if core.differentiate():
        _first_half(run, layer, core)
    run.inputs[layer].clear()


def _second_half(run: Run, layer: int, core: HeadGroupsCore, factor: torch.Tensor | None) -> None:
    """Gradients of all that comes after attention, and around it."""
    assert run.dy is not None
    assert run.lowest is not None
    parameters = run.layer_parameters[layer]
    inputs, dy = run.inputs[layer].read(run.falling), run.dy.read(run.falling, take=True)
    for i, x_BCE, dy_BCE in zip(run.falling, inputs, dy, strict=True):
        run.report("backward", layer, i, len(run.chunks))
        x_BCE = x_BCE.detach().requires_grad_(layer > run.lowest)
        wanted = [*parameters, x_BCE] if x_BCE.requires_grad else parameters
        run.conditions.seed(layer, i)
        with torch.enable_grad():
            y_BCE = run.decoder.layer(layer, x_BCE, run.batch, run.chunks[i], partial(core.replay, run.chunks[i]))
        grads = differentiate([y_BCE], wanted, [dy_BCE if factor is None else run.scaled(dy_BCE, factor)])
        if x_BCE.requires_grad:
            dx_BCE = grads.pop()
            run.dy.stash(i, torch.zeros_like(x_BCE) if dx_BCE is None else dx_BCE)
        run.sums.add(parameters, grads)


def _first_half(run: Run, layer: int, core: HeadGroupsCore) -> None:
    """Gradients of the projections, and of what comes before them, added to those of the second half."""
    assert run.dy is not None
    assert run.lowest is not None
    parameters = run.layer_parameters[layer]
    with_input = layer > run.lowest
    dy = iter(run.dy.read(run.falling, take=True)) if with_input else None
    for i, x_BCE in zip(run.falling, run.inputs[layer].read(run.falling, take=True), strict=True):
        x_BCE = x_BCE.detach().requires_grad_(with_input)
        wanted = [*parameters, x_BCE] if with_input else parameters
        run.conditions.seed(layer, i)
        with torch.enable_grad():
            *projections, _ = run.decoder.projections(layer, x_BCE, run.batch, run.chunks[i])
        gradients = core.gradients(run.chunks[i])
        pairs = [(x, dx) for x, dx in zip(projections, gradients, strict=True) if x.requires_grad]
        grads = differentiate([x for x, _ in pairs], wanted, [dx for _, dx in pairs])
        if dy is not None:
            dx_BCE = grads.pop()
            assert dx_BCE is not None
            run.dy.stash(i, next(dy) + dx_BCE)
        run.sums.add(parameters, grads)
