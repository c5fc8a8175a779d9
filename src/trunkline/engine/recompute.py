"""What a backward computes again: keys and values of a layer, and inputs of a group of layers."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator

from torch import Tensor

from trunkline.attention.core import Core
from trunkline.attention.head_groups import HeadGroupsCore
from trunkline.chunking import Chunk
from trunkline.engine import head_group_sweeps
from trunkline.engine.step import CoreCall, StepState
from trunkline.offload.chunked_sequence import ChunkedSequence


def project_kv(run: StepState, layer: int, core: Core | HeadGroupsCore) -> Iterator[None]:
    """Have the keys and values that a backward sweep needs: those kept, or computed again where later chunks meet them.

    Returns:
        What is to be taken a step further before each chunk is replayed: with a window they are computed, and let go,
        as the sweep comes to them.
    """
    if isinstance(core, HeadGroupsCore) or core.restore_kv():
        return itertools.repeat(None)
    chunks = [chunk for chunk in run.chunks if core.needs_kv_recompute(run.rows[chunk.index])]

    def one(chunk: Chunk, x_BCE: Tensor) -> None:
        run.report("backward", layer, len(run.chunks) - 1, len(run.chunks))  # no progress yet
        core.append_kv(run.rows[chunk.index], *run.project_kv(layer, x_BCE, chunk))

    if core.drops_passed_kv:
        return _downwards(run, layer, core, chunks[::-1])
    if chunks:
        run.for_each_chunk(layer, one, chunks=chunks)
    return itertools.repeat(None)


def _downwards(run: StepState, layer: int, core: Core, chunks: list[Chunk]) -> Iterator[None]:
    """Those that each chunk meets and no later one has met, chunks in falling order."""
    inputs, coming = run.inputs[layer].read([chunk.index for chunk in chunks]), deque(chunks)
    for i in run.descending:
        while coming and coming[0].index >= core.first_needed_chunk(run.rows[i]):
            chunk = coming.popleft()
            core.append_kv(run.rows[chunk.index], *run.project_kv(layer, inputs.next(), chunk))
        if not coming:
            inputs.release()
        yield


def regenerate(run: StepState, group: range) -> None:
    """The inputs of a group of layers, of which the first alone was kept.

    Where attention was kept nothing attends again: its output stands in for it. Where not, these are forward sweeps,
    and what they compute is kept until the group is done.
    """
    for layer in group[:-1]:
        with run.decoder.unsharded(layer, following=layer + 1, again=True):
            run.inputs[layer + 1] = _forward_again(run, layer, group)
    run.stores.flush_all()


def _forward_again(run: StepState, layer: int, group: range) -> ChunkedSequence:
    """The outputs of a layer of a group, whose core keeps from now on all that its backward sweep will need."""
    core = run.cores[layer]
    assert core is not None
    if isinstance(core, Core) and not core.keep_attention:
        core.restore_kv()
        attend: CoreCall = core.forward
        known = None
    else:
        if isinstance(core, HeadGroupsCore) and not core.keep_attention:
            head_group_sweeps.attend(run, layer, core)
        attend, known = core.kept_output, core.load_kept_output
    core.keep_for_backward()
    outputs = run.sequence(run.layout.input(layer + 1))

    def one(chunk: Chunk, x_BCE: Tensor) -> None:
        run.report("backward", group[-1], len(run.chunks) - 1, len(run.chunks))  # no progress yet
        outputs.stash(chunk.index, run.apply(layer, x_BCE, chunk, attend, known))

    run.for_each_chunk(layer, one)
    core.end_forward()
    return outputs
