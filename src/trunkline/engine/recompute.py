"""Recomputation in backward: keys and values of a layer, and the inputs of a group of layers."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from functools import partial

from trunkline.attention.core import Core
from trunkline.attention.head_groups import HeadGroupsCore
from trunkline.chunking import Chunk
from trunkline.engine import head_group_sweeps
from trunkline.engine.step import CoreCall, StepState
from trunkline.offload.chunked_sequence import ChunkedSequence


def kv_before_replay(state: StepState, layer: int, core: Core | HeadGroupsCore) -> Iterator[None]:
    """Put the keys and values of a layer where its backward sweep reads them: kept ones, or recomputed ones.

    Do nothing for head groups, which read theirs from their own stores.

    Returns:
        Iterator that the sweep advances once before it replays each chunk, descending. With a window, this recomputes
        the keys and values that the replay needs; without, all of them are there when this function returns, and the
        iterator does nothing.
    """
    if isinstance(core, HeadGroupsCore) or core.restore_kv():
        return itertools.repeat(None)
    chunks = [chunk for chunk in state.chunks if core.needs_kv_recompute(state.rows[chunk.index])]
    if core.drops_passed_kv:
        return _kv_just_in_time(state, layer, core, chunks[::-1])
    if chunks:
        inputs = state.inputs[layer].read([chunk.index for chunk in chunks])

        def project(chunk: Chunk) -> None:
            state.report("backward", layer, len(state.chunks) - 1, len(state.chunks))  # no chunk is done yet
            core.append_kv(state.rows[chunk.index], *state.project_kv(layer, inputs.next(), chunk))

        state.ranks.interleave(partial(project, chunk) for chunk in chunks)
        inputs.release()
    return itertools.repeat(None)


def _kv_just_in_time(state: StepState, layer: int, core: Core, chunks: list[Chunk]) -> Iterator[None]:
    """Recompute keys and values lazily, last chunk first, just before the replay that needs them.

    Advance this generator once before each chunk of the backward sweep. With a sliding window the core drops keys and
    values after their last use, so that it never holds more chunks than one chunk of queries sees.
    """
    inputs, upcoming = state.inputs[layer].read([chunk.index for chunk in chunks]), deque(chunks)
    for i in state.descending:
        while upcoming and upcoming[0].index >= core.first_needed_chunk(state.rows[i]):
            chunk = upcoming.popleft()
            core.append_kv(state.rows[chunk.index], *state.project_kv(layer, inputs.next(), chunk))
        if not upcoming:
            inputs.release()
        yield


def inputs_of_group(state: StepState, group: range) -> None:
    """Recompute the inputs of a group of layers, of which only the first is kept (`checkpoint_every`).

    Do nothing for a group of one layer. Where attention was kept no attention is computed: the kept output takes its
    place. Where it was not, these are forward sweeps. Either way the inputs, keys and values, outputs and log-sum-exps
    stay until their layer's backward is done.

    Args:
        state: step in its backward.
        group: layers of the group, from `MemoryLayout.layer_groups`; all but the last are run.
    """
    for layer in group[:-1]:
        with state.decoder.unsharded(layer, following=layer + 1, again=True):
            state.inputs[layer + 1] = _outputs_of_layer(state, layer, group)
    state.stores.flush_all()


def _outputs_of_layer(state: StepState, layer: int, group: range) -> ChunkedSequence:
    """Replay a layer without gradients, and return its outputs; its core keeps all that its backward sweep needs."""
    core = state.cores[layer]
    assert core is not None
    if isinstance(core, Core) and not core.keep_attention:
        core.restore_kv()
        core_call: CoreCall = core.forward
        load_output = None
    else:
        if isinstance(core, HeadGroupsCore) and not core.keep_attention:
            head_group_sweeps.compute_attention(state, layer, core)
        core_call, load_output = core.kept_output, core.load_kept_output
    core.keep_for_backward()
    inputs, outputs = state.read_inputs(layer), state.sequence(state.layout.input(layer + 1))
    state.ranks.interleave(state.chunk_runs(layer, inputs, outputs, core_call, load_output, backward_of=group[-1]))
    inputs.release()
    core.end_forward()
    return outputs
