"""A Hugging Face decoder-only model in the pieces that sweeps run, without a table of families.

Every piece is the model's own `forward`. With its layers replaced by recorders it yields the input of layer 0 (scaled,
dropped out, however the model does it) and the arguments of each layer (positions, rotary embeddings, flags); with its
layers replaced by an injector of the final hidden state it is the head (final norm, logit scale, soft cap). The layers
run unmodified; their attention call reaches `attention_hook` through transformers' `AttentionInterface`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from transformers import AttentionInterface, PreTrainedModel
from typing_extensions import override

from trunkline.attention.scoring import Scoring
from trunkline.chunking import Chunk
from trunkline.engine.batch import Batch
from trunkline.engine.decoder import Attend, Decoder, ParameterStore
from trunkline.engine.replay import autocast_type
from trunkline.hf.compile import is_compiled, room_for_graphs
from trunkline.hf.introspect import UnsupportedModelError, find_layers, parameters_outside

# Name under which layers find our attention. It has no mask function on purpose: transformers then builds no mask at
# all. Padding masks never get that far: `hf.inputs` turns them into targets and lengths.
ATTENTION = "trunkline"

# Arguments of an attention call that mean nothing here: positions are already in q and k, and caches are off.
_IGNORED_ARGUMENTS = {"position_ids", "cache_position", "use_cache", "output_attentions", "position_embeddings"}
_CACHE_ARGUMENTS = ("cache", "past_key_values", "past_key_value", "layer_past")


@dataclass(slots=True)
class _AttentionCall:
    """The running layer call: the function that handles its attention calls, and their number so far."""

    attend: Attend
    count: int = 0


_current: ContextVar[_AttentionCall | None] = ContextVar("trunkline_layer_call", default=None)


def attention_hook(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,  # read from the model's mask, beforehand
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Hand a layer's attention call to the engine; signature of transformers' attention functions.

    C is this rank's tokens of a chunk. Under autocast q, k and v are cast to its dtype, except in fp64.

    Args:
        module: attention module of the layer.
        query: q (B, H, C, D), after rotary embeddings.
        key: k (B, K, C, D).
        value: v (B, K, C, D); its D may differ from that of q and k.
        attention_mask: must be None: the engine knows documents and windows.
        scaling: factor of the scores; None is 1 / sqrt(D).
        dropout: must be 0.
        sliding_window: ignored: `probe.attention_spans` reads windows from the model's mask functions.
        is_causal: must be True; None means the module's own `is_causal`, or True where it has none.
        softcap: soft cap of the scores; None for none.
        s_aux: attention sinks (H,); None for none.
        kwargs: other arguments. All are refused but a few that mean nothing here, unless they are None or False.

    Returns:
        Output (B, C, H, D), with the D of v, and None for attention weights.

    Raises:
        UnsupportedModelError: the model's attention cannot be streamed.
        ValueError: attention dropout is on.
        RuntimeError: the call comes from outside a streamed forward.
    """
    call = _current.get()
    if call is None:
        raise RuntimeError(f"attention implementation {ATTENTION!r} was called outside a streamed forward.")
    name = type(module).__name__
    if dropout > 0:
        raise ValueError(
            f"attention dropout is {dropout} in {name}: it is not supported in training, because the weights it acts "
            "on never exist as a whole. Load the model without it: from_pretrained(path, attention_dropout=0.0), or "
            "attn_pdrop=0.0 for GPT-2; in a recipe model.overrides.attention_dropout 0."
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal or attention_mask is not None:
        raise UnsupportedModelError(f"{name} does not attend causally to earlier tokens, which cannot be streamed.")
    for argument, given in kwargs.items():
        if argument not in _IGNORED_ARGUMENTS and given is not None and given is not False:
            raise UnsupportedModelError(f"{name} calls its attention with {argument!r}, which cannot be streamed yet.")
    call.count += 1
    device = autocast_type(query.device)
    if torch.is_autocast_enabled(device) and query.dtype != torch.float64:
        # As autocast has SDPA do: rotary embeddings leave q and k in fp32, v comes in the autocast dtype.
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
    with torch.autocast(device, enabled=False):  # kernels decide themselves in which dtype they compute
        scale = scaling if scaling is not None else query.shape[-1] ** -0.5
        o_BHCD = call.attend(query, key, value, Scoring(scale, softcap, s_aux))
    return o_BHCD.transpose(1, 2), None


AttentionInterface.register(ATTENTION, attention_hook)


class _Stop(BaseException):
    """Exception that leaves the model's forward, or a layer, once the needed arguments are recorded."""


class PositionCache:
    """Stand-in for a cache, for layers that take the positions of their tokens from one; it holds nothing.

    Args:
        positions: position ids (1, C) or (B, C).
    """

    def __init__(self, positions: Tensor) -> None:
        self._positions = positions

    def get_seq_length(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the offset of the positions (C,) from 0 … C-1.

        Raises:
            ValueError: the rows have different positions.
        """
        if len(self._positions) > 1 and not bool((self._positions == self._positions[:1]).all()):
            raise ValueError(
                "rows have other positions than each other, and this model's layers take one for all rows: pack "
                "documents in one row at a time."
            )
        return self._positions[0] - torch.arange(self._positions.shape[1], device=self._positions.device)

    def update(self, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return keys and values as they are."""
        return k, v


@dataclass(frozen=True, slots=True)
class LayerArguments:
    """Arguments with which a model calls one of its layers."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def hidden(self) -> Tensor:
        """Hidden state among the arguments, (B, C, E)."""
        x_BCE: Tensor = self.args[0] if self.args else self.kwargs["hidden_states"]
        return x_BCE

    def replaced(self, layer: nn.Module, x_BCE: Tensor, cache: PositionCache | None = None) -> LayerArguments:
        """Return the arguments with another hidden state, and with a stand-in for the layer's cache if there is one."""
        kwargs = self.kwargs if cache is None else {**self.kwargs, cache_argument(layer): cache}
        if self.args:
            return LayerArguments((x_BCE, *self.args[1:]), kwargs)
        return LayerArguments((), {**kwargs, "hidden_states": x_BCE})


class _LayerRecorder(nn.Module):
    """Stand-in for a layer: it has the layer's attributes, and its forward hands the arguments to the decoder."""

    def __init__(self, layer: nn.Module, decoder: HuggingFaceDecoder) -> None:
        super().__init__()
        # Past nn.Module's own bookkeeping, so that the layer is not registered a second time.
        object.__setattr__(self, "_layer", layer)
        self._decoder = decoder

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "_layer"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor]:
        x_BCE = self._decoder.on_layer_call(LayerArguments(args, kwargs))
        return (x_BCE,) if self._decoder.returns_tuple else x_BCE


def cache_argument(layer: nn.Module) -> str:
    """Return the name of a layer's cache argument; empty where it has none."""
    known = inspect.signature(layer.forward).parameters
    return next((name for name in _CACHE_ARGUMENTS if name in known), "")


def hidden_state(output: Any) -> Tensor:
    """Return the hidden state in a layer's output: the output itself, or the first entry of a tuple."""
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


class HuggingFaceDecoder(Decoder):
    """The `Decoder` of a transformers causal language model.

    Args:
        model: the model, unmodified.
        sharding: sharding of its parameters over ranks; None on a single rank.

    Attributes:
        layers: decoder layers of the model.
        vocab_size: size of the vocabulary, as the config says; the embedding may have more rows.
        returns_tuple: whether a layer returns its hidden state in a tuple; known once one has run.
        needs_position_cache: indices of layers that ask a cache for their positions; `probe.verify` fills it.
        on_layer_call: function that recorders call at present, in place of the layers.
        own_forward: forward that was set on this model before; None where it has its class's.
        lock: held while the model runs in chunks, since its configs and its list of layers are changed meanwhile.

    Raises:
        UnsupportedModelError: see `find_layers`.
    """

    def __init__(self, model: PreTrainedModel, sharding: ParameterStore | None = None) -> None:
        self.model = model
        self.sharding = sharding
        self._forward: Callable[..., Any] = model.forward
        self.own_forward: Callable[..., Any] | None = model.__dict__.get("forward")
        self._compiled: list[nn.Module] = []
        self.layers = find_layers(model)
        self.num_layers = len(self.layers)
        self.returns_tuple = False
        self.needs_position_cache: set[int] = set()
        self.on_layer_call: Callable[[LayerArguments], Tensor] = _unexpected_call
        self._records: list[LayerArguments] | None = None  # of the chunk that goes through all layers
        self._recorders: dict[str, nn.Module] = {
            name: _LayerRecorder(layer, self) for name, layer in self.layers.named_children()
        }
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self._configs = list({id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values())
        self.lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        """Return all but the lock: a copy of the model has its own."""
        return {name: value for name, value in self.__dict__.items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, lock=threading.RLock())

    # -- parameters ----------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Device on which the model computes; with CPU offload its parameters rest elsewhere."""
        own: torch.device = self.model.get_input_embeddings().weight.device
        return own if self.sharding is None else self.sharding.device

    @property
    @override
    def is_sharded(self) -> bool:
        return self.sharding is not None

    @property
    @override
    def layer_parameters(self) -> list[list[Parameter]]:
        if self.sharding is not None:
            return self.sharding.layer_parameters
        return [list(layer.parameters()) for layer in self.layers]

    @property
    @override
    def other_parameters(self) -> list[Parameter]:
        if self.sharding is not None:
            return self.sharding.other_parameters
        return parameters_outside(self.model, self.layers)

    @override
    def begin(self) -> None:
        if any(is_compiled(layer) for layer in self.layers):
            _keep_attention_out_of_graphs()
        if self.sharding is not None:
            self.sharding.begin()

    @override
    def unsharded(
        self, layer: int | None, *, following: int | None = None, again: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        if self.sharding is None:
            return contextlib.nullcontext()
        return self.sharding.unsharded(layer, following=following, again=again)

    @override
    def graph_params(self, parameters: Sequence[Parameter]) -> list[Tensor]:
        return list(parameters) if self.sharding is None else self.sharding.graph_params(parameters)

    @override
    def reduce_grads(self, parameters: Sequence[Parameter], totals: Sequence[Tensor | None]) -> list[Tensor | None]:
        if self.sharding is not None:
            return self.sharding.reduce_grads(parameters, totals)
        pairs = zip(parameters, totals, strict=True)
        return [None if total is None else total.to(parameter.dtype) for parameter, total in pairs]

    # -- compilation ---------------------------------------------------------------------------------------------------

    def compile(self) -> None:
        """Let torch.compile compile each layer at its first call; skip layers that are compiled already."""
        for layer in self.layers:
            if not is_compiled(layer):
                layer.compile()
                self._compiled.append(layer)

    def uncompile(self) -> None:
        """Undo `compile`; layers that were compiled before it stay so."""
        for layer in self._compiled:
            layer._compiled_call_impl = None
        self._compiled.clear()

    # -- pieces of the model -------------------------------------------------------------------------------------------

    @override
    @contextlib.contextmanager
    def streamed_attention(self, implementation: str = ATTENTION) -> Iterator[None]:
        """Route attention through Trunkline, or another `implementation`, and hold `lock`; restore configs on exit."""
        with self.lock, room_for_graphs(self.layers):
            before = [config._attn_implementation for config in self._configs]
            try:
                for config in self._configs:
                    config._attn_implementation = implementation
                yield
            finally:
                for config, implementation in zip(self._configs, before, strict=True):
                    config._attn_implementation = implementation

    @override
    def embed(self, batch: Batch, chunk: Chunk) -> Tensor:
        return self.record(0, batch.positions(chunk), input_ids=batch.ids(chunk)).hidden

    @override
    def layer(self, index: int, x_BCE: Tensor, batch: Batch, chunk: Chunk, attend: Attend) -> Tensor:
        layer, positions = self.layers[index], batch.positions(chunk)
        # Recorded again for each chunk: kept for all, the rotary embeddings of 2M tokens would take 1 GiB.
        if self._records is None:
            recorded = self.record(index, positions, inputs_embeds=x_BCE.detach())
        else:
            recorded = self._records[index]
        cache = PositionCache(positions) if index in self.needs_position_cache else None
        arguments = recorded.replaced(layer, x_BCE, cache)
        call = _AttentionCall(attend)
        token = _current.set(call)
        try:
            y = layer(*arguments.args, **arguments.kwargs)
        finally:
            _current.reset(token)
        if call.count != 1:
            raise UnsupportedModelError(
                f"{type(layer).__name__} of {type(self.model).__name__} called transformers' attention interface "
                f"{call.count} times instead of once: its attention cannot be streamed."
            )
        self.returns_tuple = isinstance(y, tuple)
        return hidden_state(y)

    @override
    @contextlib.contextmanager
    def recorded_layers(self, batch: Batch, chunk: Chunk) -> Iterator[Tensor]:
        # One recording serves all layers: of a single token each recording takes as long as a layer does.
        self._records = self.record_up_to(self.num_layers - 1, batch.positions(chunk), input_ids=batch.ids(chunk))
        try:
            yield self._records[0].hidden
        finally:
            self._records = None

    @override
    def project_qkv(
        self, index: int, x_BCE: Tensor, batch: Batch, chunk: Chunk
    ) -> tuple[Tensor, Tensor, Tensor, Scoring]:
        calls: list[tuple[Tensor, Tensor, Tensor, Scoring]] = []

        def stop(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
            calls.append((q, k, v, scoring))
            raise _Stop  # leaves the layer at its attention call, so that its MLP is not computed

        with contextlib.suppress(_Stop):
            self.layer(index, x_BCE, batch, chunk, stop)
        return calls[0]

    @override
    def head(self, x_BTE: Tensor) -> Tensor:
        positions = torch.arange(x_BTE.shape[1], device=x_BTE.device)[None]
        with self._layers_replaced(lambda _: x_BTE):
            output = self._forward(
                inputs_embeds=x_BTE.detach(), position_ids=positions, use_cache=False, return_dict=True
            )
        logits_BTV: Tensor = output.logits
        return logits_BTV

    def logits(self, ids_BS: Tensor) -> Tensor:
        """Return the logits (B, S, V) that the model itself computes, unstreamed. If sharded, all ranks call it."""
        with contextlib.nullcontext() if self.sharding is None else self.sharding.hooks_resumed():
            logits_BSV: Tensor = self.model(input_ids=ids_BS, use_cache=False, return_dict=True).logits
        return logits_BSV

    def record(self, index: int, positions: Tensor, **inputs: Tensor) -> LayerArguments:
        """Record the arguments of layer `index` for one chunk, given as `input_ids` or `inputs_embeds`.

        No layer runs: the recorded hidden state is the input of layer 0. The other arguments are the layer's own.
        """
        return self.record_up_to(index, positions, **inputs)[index]

    def record_up_to(self, index: int, positions: Tensor, **inputs: Tensor) -> list[LayerArguments]:
        """Record the arguments of layers 0 … `index`, as `record` does; each returns its input as its output."""
        records: list[LayerArguments] = []

        def record(arguments: LayerArguments) -> Tensor:
            records.append(arguments)
            if len(records) == index + 1:
                raise _Stop
            return records[-1].hidden

        with self._layers_replaced(record), contextlib.suppress(_Stop):
            self._forward(**inputs, position_ids=positions, use_cache=False, return_dict=True)
        return records

    @contextlib.contextmanager
    def _layers_replaced(self, on_layer_call: Callable[[LayerArguments], Tensor]) -> Iterator[None]:
        """Put recorders in the place of the layers for the duration of a `with`."""
        layers, self.on_layer_call, self.layers._modules = self.layers._modules, on_layer_call, self._recorders
        try:
            yield
        finally:
            self.on_layer_call, self.layers._modules = _unexpected_call, layers


@functools.cache
def _keep_attention_out_of_graphs() -> None:
    """Make torch.compile leave a layer's graph at its attention, instead of tracing into the core."""
    disable: Any = torch.compiler.disable
    AttentionInterface.register(ATTENTION, disable(attention_hook))


def _unexpected_call(arguments: LayerArguments) -> Tensor:
    raise AssertionError("a layer recorder was called outside a recording")
