"""The engine: layer by layer, chunk by chunk, forward sweeps up and backward sweeps down.

It runs any `Decoder`, and knows nothing of where one comes from. A forward owns what it keeps (`Run`) until its
backward; several may be outstanding. The two loops of the design are `forward_sweep` and `backward_sweep`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from trunkline import head
from trunkline.attention.core import Core
from trunkline.chunking import Chunk, split
from trunkline.conditions import Conditions
from trunkline.config import Progress, StreamConfig
from trunkline.gradients import GradientSums, differentiate, reaches
from trunkline.sequence import ChunkedSequence

Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # q, k, v, scale -> output, all (B, heads, C, D)


@dataclass(frozen=True, slots=True)
class Batch:
    """What a forward is about.

    Attributes:
        input_ids_BS: token ids.
        positions: position ids, (1, S) or (B, S).
        targets_BS: the token that each position is to predict, or -100; None for logits only.
        num_targets: what the sum of token losses is divided by, 0-dim.
    """

    input_ids_BS: Tensor
    positions: Tensor
    targets_BS: Tensor | None = None
    num_targets: Tensor | None = None


class Decoder(Protocol):
    """A decoder-only model in the pieces that a sweep needs."""

    num_layers: int
    vocab_size: int

    @property
    def layer_parameters(self) -> list[list[Parameter]]:
        """Parameters of each layer, as the model stands now."""
        ...

    @property
    def other_parameters(self) -> list[Parameter]:
        """All other parameters."""
        ...

    def engaged(self) -> AbstractContextManager[None]:
        """What must be in place while sweeps run."""
        ...

    def embed(self, batch: Batch, chunk: Chunk) -> Tensor:
        """The input of layer 0, (B, C, E)."""
        ...

    def layer(self, index: int, x_BCE: Tensor, batch: Batch, chunk: Chunk, attend: Attend) -> Tensor:
        """A decoder layer on one chunk, its attention call handed to `attend`."""
        ...

    def keys_values(self, index: int, x_BCE: Tensor, batch: Batch, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Keys and values (B, K, C, D) of a layer for one chunk, without what follows them in the layer."""
        ...

    def head(self, x_BTE: Tensor) -> Tensor:
        """Final hidden states to logits (B, T, V)."""
        ...


@dataclass(slots=True)
class Run:
    """One forward pass and what it keeps for its backward."""

    decoder: Decoder
    config: StreamConfig
    batch: Batch
    conditions: Conditions
    chunks: list[Chunk]
    layer_parameters: list[list[Parameter]]  # those that are trained, as the model stood at the forward
    other_parameters: list[Parameter]
    watched: list[tuple[Tensor, int]]  # what the replay reads again, with its version at the forward
    inputs: list[ChunkedSequence] = field(default_factory=list)  # of each layer; after the last, the final hidden state
    cores: list[Core | None] = field(default_factory=list)
    sums: GradientSums = field(default_factory=GradientSums)
    dy: ChunkedSequence | None = None  # gradient of the residual stream, at the layer that backward has reached
    lowest: int | None = None  # layer that backward must reach, -1 the embedding; None where only the head is trained
    divisor: Tensor | None = None  # what backward divides the head's sums by; None where the head has done it

    def report(self, part: Literal["embed", "forward", "head", "backward"], layer: int, chunk: int, total: int) -> None:
        """Tell the user where the step is."""
        if self.config.progress is not None:
            self.config.progress(Progress(part, layer, self.decoder.num_layers, chunk, total))


def forward_sweep(run: Run, layer: int, *, differentiate: bool) -> None:
    """One layer over all chunks, upwards. Where nothing is to be differentiated its inputs are freed as it goes."""
    keep = run.config.keep if differentiate else frozenset()
    core = Core(run.chunks, kernel=run.config.kernel, keep_attention="attention" in keep, keep_kv="kv" in keep)
    inputs, outputs = run.inputs[layer], ChunkedSequence(len(run.chunks))
    for chunk in run.chunks:
        run.report("forward", layer, chunk.index, len(run.chunks))
        x_BCE = inputs.fetch(chunk.index) if differentiate else inputs.take(chunk.index)
        run.conditions.seed(layer, chunk.index)
        y_BCE = run.decoder.layer(layer, x_BCE, run.batch, chunk, partial(core.forward, chunk))
        outputs.stash(chunk.index, y_BCE)
    core.end_forward()
    run.cores.append(core if differentiate else None)
    run.inputs.append(outputs)


def backward_sweep(run: Run, layer: int) -> None:
    """One layer over all chunks, downwards: each chunk is replayed and differentiated by plain autograd."""
    core, inputs, dy = run.cores[layer], run.inputs[layer], run.dy
    assert core is not None
    assert dy is not None
    assert run.lowest is not None
    parameters = run.layer_parameters[layer]
    if core.needs_kv_pass:
        keys_values_pass(run, layer, core)
    for chunk in reversed(run.chunks):
        run.report("backward", layer, chunk.index, len(run.chunks))
        x_BCE = inputs.take(chunk.index).detach().requires_grad_(layer > run.lowest)
        wanted = [*parameters, x_BCE] if x_BCE.requires_grad else parameters
        run.conditions.seed(layer, chunk.index)
        with torch.enable_grad():
            y_BCE = run.decoder.layer(layer, x_BCE, run.batch, chunk, partial(core.replay, chunk))
        grads = differentiate(y_BCE, wanted, dy.take(chunk.index))
        if x_BCE.requires_grad:
            dx_BCE = grads.pop()
            assert dx_BCE is not None
            dy.stash(chunk.index, dx_BCE)
        run.sums.add(parameters, grads)
    run.cores[layer] = None


def keys_values_pass(run: Run, layer: int, core: Core) -> None:
    """Compute again the keys/values that were not kept; those of the last chunk come with its replay."""
    for chunk in run.chunks[:-1]:
        run.report("backward", layer, chunk.index, len(run.chunks))
        run.conditions.seed(layer, chunk.index)
        core.put(chunk, *run.decoder.keys_values(layer, run.inputs[layer].fetch(chunk.index), run.batch, chunk))


def embed_forward(run: Run, *, differentiate: bool) -> None:
    """The input of layer 0 for all chunks; finds the lowest layer that backward must reach."""
    outputs = ChunkedSequence(len(run.chunks))
    for chunk in run.chunks:
        run.report("embed", -1, chunk.index, len(run.chunks))
        run.conditions.seed(-1, chunk.index)
        # One chunk with gradients on tells whether anything in the embedding is trained.
        with torch.set_grad_enabled(differentiate and chunk.index == 0):
            x_BCE = run.decoder.embed(run.batch, chunk)
        if reaches(x_BCE, run.other_parameters):
            run.lowest = -1
        outputs.stash(chunk.index, x_BCE.detach())
    if differentiate and run.lowest is None:
        run.lowest = min((i for i, parameters in enumerate(run.layer_parameters) if parameters), default=None)
    run.inputs.append(outputs)


def embed_backward(run: Run) -> None:
    """The embedding, differentiated chunk by chunk."""
    dy = run.dy
    assert dy is not None
    parameters = run.other_parameters
    for chunk in reversed(run.chunks):
        run.report("backward", -1, chunk.index, len(run.chunks))
        run.conditions.seed(-1, chunk.index)
        with torch.enable_grad():
            x_BCE = run.decoder.embed(run.batch, chunk)
        run.sums.add(parameters, differentiate(x_BCE, parameters, dy.take(chunk.index)))


def forward(decoder: Decoder, config: StreamConfig, batch: Batch, module: torch.nn.Module) -> tuple[Run, bool]:
    """All layers of a forward pass, up to the final hidden state.

    Args:
        decoder: the model.
        config: settings.
        batch: what the forward is about.
        module: the module whose training flag must hold until backward.

    Returns:
        The run, its last entry of `inputs` being the final hidden state, and whether it can be differentiated.
    """
    device = batch.input_ids_BS.device
    layer_parameters = [[p for p in layer if p.requires_grad] for layer in decoder.layer_parameters]
    other_parameters = [p for p in decoder.other_parameters if p.requires_grad]
    differentiate = torch.is_grad_enabled() and batch.targets_BS is not None
    differentiate = differentiate and bool(other_parameters or any(layer_parameters))
    chunks = split(batch.input_ids_BS.shape[1], config.chunk_tokens(device))
    reread = [*module.parameters(), batch.input_ids_BS, batch.positions] if differentiate else []
    watched = [(x, x._version) for x in reread]
    run = Run(decoder, config, batch, Conditions(module, device), chunks, layer_parameters, other_parameters, watched)
    with run.conditions.restored(), decoder.engaged(), torch.no_grad():
        embed_forward(run, differentiate=differentiate)
        for layer in range(decoder.num_layers):
            forward_sweep(run, layer, differentiate=run.lowest is not None and layer >= run.lowest)
    return run, differentiate


def last_logits(run: Run, count: int) -> Tensor:
    """Logits of the last `count` positions, (B, count, V)."""
    hidden = run.inputs[-1]
    tail: list[Tensor] = []
    for chunk in reversed(run.chunks):
        if count <= 0:
            break
        tail.insert(0, hidden.take(chunk.index)[:, -count:])
        count -= tail[0].shape[1]
    with run.conditions.restored(), run.decoder.engaged(), torch.no_grad():
        return run.decoder.head(torch.cat(tail, dim=1))


def loss(run: Run, *, differentiate: bool) -> Tensor:
    """Mean cross-entropy over the targets of a run, as a node that autograd can go backward from.

    Returns:
        0-dim, fp32 (fp64 for a model in fp64).
    """
    batch, decoder = run.batch, run.decoder
    assert batch.targets_BS is not None
    assert batch.num_targets is not None
    run.dy = ChunkedSequence(len(run.chunks)) if run.lowest is not None else None
    hidden = run.inputs.pop()
    narrow = run.conditions.compute_dtype(hidden.fetch(0))
    dtype = torch.promote_types(hidden.fetch(0).dtype, torch.float32)
    shape = len(batch.input_ids_BS), decoder.vocab_size, narrow
    tile_tokens = head.tile_tokens(run.config.head_bytes, *shape, device=batch.input_ids_BS.device)
    # transformers' norms compute in fp32 in fp64 models too: only what plain autograd feeds them rounds alike.
    early = dtype == torch.float64
    run.divisor = None if early else batch.num_targets
    with run.conditions.restored(), decoder.engaged(), torch.no_grad():
        total = head.sweep(
            decoder.head,
            hidden,
            batch.targets_BS,
            head.cut(run.chunks, tile_tokens),
            parameters=run.other_parameters,
            hidden_grads=run.dy,
            sums=run.sums if differentiate else None,
            divisor=batch.num_targets if early else None,
            before_tile=partial(run.report, "head", -1),
        )
    value = (total / batch.num_targets).to(dtype)
    if not differentiate:
        return value
    anchor = torch.zeros((), requires_grad=True)
    result: Tensor = _Loss.apply(anchor, value, run)  # type: ignore[no-untyped-call]
    return result


def backward(run: Run, grad_output: Tensor) -> None:
    """Gradients of all trained parameters into their `.grad`.

    Args:
        run: a forward pass with its loss.
        grad_output: d objective / d loss, 0-dim.
    """
    decoder = run.decoder
    if any(x._version != version for x, version in run.watched):
        raise RuntimeError(
            "a parameter, input_ids or position_ids has been modified by an inplace operation since this forward: call "
            "backward() before optimizer.step(), and do not reuse the input's buffer until then."
        )
    factor = grad_output if run.divisor is None else grad_output / run.divisor.to(grad_output.dtype)
    run.sums.scale_(factor)
    with run.conditions.restored(), decoder.engaged(), torch.no_grad():
        if run.dy is not None and run.lowest is not None:
            for chunk in run.chunks:
                dy_BCE = run.dy.take(chunk.index)
                run.dy.stash(chunk.index, (dy_BCE.to(factor.dtype) * factor).to(dy_BCE.dtype))
            for layer in reversed(range(max(run.lowest, 0), decoder.num_layers)):
                backward_sweep(run, layer)
                run.sums.deliver(_owned(run, layer))
            if run.lowest == -1:
                embed_backward(run)
    run.sums.deliver(run.sums.parameters)


def _owned(run: Run, layer: int) -> list[Parameter]:
    """Parameters of a layer that no layer below it and nothing else shares: their sums are complete once it is done."""
    later = set(run.other_parameters).union(*run.layer_parameters[:layer])
    return [p for p in run.layer_parameters[layer] if p not in later]


class _Loss(torch.autograd.Function):
    """The loss of a run. Its backward is the engine's, and frees the run."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, run: Run) -> Tensor:
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
        backward(run, grad_output)
        return None, None, None
