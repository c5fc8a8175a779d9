"""A Hugging Face decoder-only model in the pieces that a sweep needs, without a table of families.

Every piece is the model's own `forward`. With its layers replaced by recorders it yields the input of layer 0 (scaled,
dropped out, however the model does it) and the arguments it calls each layer with (positions, rotary embeddings,
flags); with its layers replaced by an injector of the final hidden state it is the head (final norm, logit scale, soft
cap). The layers run unmodified; their attention call lands in `_attention` through transformers' `AttentionInterface`.
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

from trunkline.attention.scoring import Scoring
from trunkline.chunking import Chunk
from trunkline.engine.batch import Batch
from trunkline.engine.decoder import Attend, ParameterStore
from trunkline.engine.replay import autocast_type
from trunkline.hf.compile import is_compiled, room_for_graphs
from trunkline.hf.introspect import UnsupportedModelError, find_layers, parameters_outside

# The name under which layers find our attention. It has no mask function on purpose: transformers then builds no mask
# at all. Padding masks never get that far, since `streaming` turns them into labels and lengths.
ATTENTION = "trunkline"

# Arguments of an attention call that carry nothing for us: positions are already in q and k, and the caches are off.
_WITHOUT_MEANING = {"position_ids", "cache_position", "use_cache", "output_attentions", "position_embeddings"}


@dataclass(slots=True)
class _AttentionCall:
    """The layer call under way: where its attention goes, and how often it went there."""

    attend: Attend
    count: int = 0


_current: ContextVar[_AttentionCall | None] = ContextVar("trunkline_layer_call", default=None)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,  # asked of the model's mask, beforehand
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention of a layer, with transformers' signature: q (B, H, C, D) to output (B, C, H, D)."""
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
        if argument not in _WITHOUT_MEANING and given is not None and given is not False:
            raise UnsupportedModelError(f"{name} calls its attention with {argument!r}, which cannot be streamed yet.")
    call.count += 1
    device = autocast_type(query.device)
    if torch.is_autocast_enabled(device) and query.dtype != torch.float64:
        # As autocast has SDPA do: rotary embeddings leave q and k in fp32, v comes in the autocast dtype.
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
    with torch.autocast(device, enabled=False):  # kernels say themselves what they compute in
        scale = scaling if scaling is not None else query.shape[-1] ** -0.5
        o_BHCD = call.attend(query, key, value, Scoring(scale, softcap, s_aux))
    return o_BHCD.transpose(1, 2), None


AttentionInterface.register(ATTENTION, _attention)


class _Stop(BaseException):
    """Leaves the model's forward, or a layer, at the point where all that was wanted is known."""


class PositionCache:
    """Stands for a cache where a layer takes the positions of its tokens from one; it holds nothing.

    Args:
        positions: position ids (1, C) or (B, C).
    """

    def __init__(self, positions: Tensor) -> None:
        self._positions = positions

    def get_seq_length(self, *args: Any, **kwargs: Any) -> Tensor:
        """What makes positions of 0 … C - 1, (C,)."""
        if len(self._positions) > 1 and not bool((self._positions == self._positions[:1]).all()):
            raise ValueError(
                "rows have other positions than each other, and this model's layers take one for all rows: pack "
                "documents in one row at a time."
            )
        return self._positions[0] - torch.arange(self._positions.shape[1], device=self._positions.device)

    def update(self, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """What it is given."""
        return k, v


class _LayerRecorder(nn.Module):
    """Takes a layer's place: same attributes, but its forward is what the decoder wants done at the moment."""

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
        x_BCE = self._decoder.act(LayerArguments(args, kwargs))
        return (x_BCE,) if self._decoder.returns_tuple else x_BCE


@dataclass(frozen=True, slots=True)
class LayerArguments:
    """What a model calls one of its layers with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def hidden(self) -> Tensor:
        """The hidden state among them."""
        x_BCE: Tensor = self.args[0] if self.args else self.kwargs["hidden_states"]
        return x_BCE

    def call(self, layer: nn.Module, x_BCE: Tensor, offset: PositionCache | None = None) -> Any:
        """The layer, with another hidden state, and perhaps with what stands for a cache."""
        kwargs = self.kwargs if offset is None else {**self.kwargs, cache_name(layer): offset}
        if self.args:
            return layer(x_BCE, *self.args[1:], **kwargs)
        return layer(**{**kwargs, "hidden_states": x_BCE})


def cache_name(layer: nn.Module) -> str:
    """The argument of a layer that is a cache; none where it has none."""
    known = inspect.signature(layer.forward).parameters
    return next((name for name in ("cache", "past_key_values", "past_key_value", "layer_past") if name in known), "")


class HuggingFaceDecoder:
    """The `Decoder` that the engine runs, for a transformers causal language model.

    Args:
        model: the model, unmodified.
        sharding: how its parameters are spread over ranks; None where they are not.

    Raises:
        ValueError: its layers cannot be found.
    """

    def __init__(self, model: PreTrainedModel, sharding: ParameterStore | None = None) -> None:
        self.model = model
        self.sharding = sharding
        self._forward: Callable[..., Any] = model.forward
        self.own_forward: Callable[..., Any] | None = model.__dict__.get("forward")  # of this one model, not its class
        self._compiled: list[nn.Module] = []
        self.layers = find_layers(model)
        self.num_layers = len(self.layers)
        self.returns_tuple = False  # whether a layer returns its hidden state in a tuple: known once one has run
        self.needs_position_cache: set[int] = set()  # layers that ask a cache for their positions
        self.act: Callable[[LayerArguments], Tensor] = _nothing
        self._records: list[LayerArguments] | None = None  # of the chunk that goes through all layers
        self._stand_ins: dict[str, nn.Module] = {
            name: _LayerRecorder(layer, self) for name, layer in self.layers.named_children()
        }
        config = model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        found = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
        self._configs = list(found.values())
        self.lock = threading.RLock()  # held while the model runs in chunks

    def __getstate__(self) -> dict[str, Any]:
        """All but the lock: a copy of the model has its own."""
        return {name: value for name, value in self.__dict__.items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, lock=threading.RLock())

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        own: torch.device = self.model.get_input_embeddings().weight.device
        return own if self.sharding is None else self.sharding.device

    @property
    def is_sharded(self) -> bool:
        """See `Decoder.is_sharded`."""
        return self.sharding is not None

    @property
    def layer_parameters(self) -> list[list[Parameter]]:
        """Parameters of each layer, adapters included, as the model stands now."""
        if self.sharding is not None:
            return self.sharding.layer_parameters
        return [list(layer.parameters()) for layer in self.layers]

    @property
    def other_parameters(self) -> list[Parameter]:
        """All other parameters: embedding, final norm, unembedding."""
        if self.sharding is not None:
            return self.sharding.other_parameters
        return parameters_outside(self.model, self.layers)

    @contextlib.contextmanager
    def streamed_attention(self, implementation: str = ATTENTION) -> Iterator[None]:
        """Have attention calls land in ours; afterwards every config says what it said before."""
        with self.lock, room_for_graphs(self.layers):
            # The model's configs and list of layers are changed while it runs: one thread at a time.
            before = [config._attn_implementation for config in self._configs]
            try:
                for config in self._configs:
                    config._attn_implementation = implementation
                yield
            finally:
                for config, implementation in zip(self._configs, before, strict=True):
                    config._attn_implementation = implementation

    def compile(self) -> None:
        """Have layers compiled when they are first called."""
        for layer in self.layers:
            if not is_compiled(layer):
                layer.compile()
                self._compiled.append(layer)

    def uncompile(self) -> None:
        """Have those layers run as they are again."""
        for layer in self._compiled:
            layer._compiled_call_impl = None
        self._compiled.clear()

    def begin(self) -> None:
        """See `Decoder.begin`."""
        if any(is_compiled(layer) for layer in self.layers):
            _keep_out_of_graphs()
        if self.sharding is not None:
            self.sharding.begin()

    def unsharded(
        self, layer: int | None, *, following: int | None = None, again: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        """See `Decoder.present`."""
        if self.sharding is None:
            return contextlib.nullcontext()
        return self.sharding.unsharded(layer, following=following, again=again)

    def graph_params(self, parameters: Sequence[Parameter]) -> list[Tensor]:
        """See `Decoder.live`."""
        return list(parameters) if self.sharding is None else self.sharding.graph_params(parameters)

    def reduce_grads(self, parameters: Sequence[Parameter], totals: Sequence[Tensor | None]) -> list[Tensor | None]:
        """See `Decoder.reduce_grads`."""
        if self.sharding is not None:
            return self.sharding.reduce_grads(parameters, totals)
        pairs = zip(parameters, totals, strict=True)
        return [None if total is None else total.to(parameter.dtype) for parameter, total in pairs]

    def embed(self, batch: Batch, chunk: Chunk) -> Tensor:
        """See `Decoder.embed`."""
        return self.record(0, batch.positions(chunk), input_ids=batch.ids(chunk)).hidden

    def layer(self, index: int, x_BCE: Tensor, batch: Batch, chunk: Chunk, attend: Attend) -> Tensor:
        """See `Decoder.layer`."""
        # Recorded anew for each chunk: kept for all, the rotary embeddings of 2M tokens would take 1 GiB.
        positions = batch.positions(chunk)
        if self._records is None:
            arguments = self.record(index, positions, inputs_embeds=x_BCE.detach())
        else:
            arguments = self._records[index]
        call = _AttentionCall(attend)
        token = _current.set(call)
        try:
            y = arguments.call(
                self.layers[index], x_BCE, PositionCache(positions) if index in self.needs_position_cache else None
            )
        finally:
            _current.reset(token)
        if call.count != 1:
            raise UnsupportedModelError(
                f"{type(self.layers[index]).__name__} of {type(self.model).__name__} called transformers' attention "
                f"interface {call.count} times instead of once: its attention cannot be streamed."
            )
        self.returns_tuple = isinstance(y, tuple)
        return first(y)

    @contextlib.contextmanager
    def recorded_layers(self, batch: Batch, chunk: Chunk) -> Iterator[Tensor]:
        """See `Decoder.recorded_layers`: one recording for all layers, since each takes as long as a layer does."""
        positions = batch.positions(chunk)
        self._records = self.record_up_to(self.num_layers - 1, positions, input_ids=batch.ids(chunk))
        try:
            yield self._records[0].hidden
        finally:
            self._records = None

    def project_qkv(
        self, index: int, x_BCE: Tensor, batch: Batch, chunk: Chunk
    ) -> tuple[Tensor, Tensor, Tensor, Scoring]:
        """See `Decoder.project_qkv`: the layer is left at its attention call, so that nothing after it is paid for."""
        taken: list[tuple[Tensor, Tensor, Tensor, Scoring]] = []

        def stop(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
            taken.append((q, k, v, scoring))
            raise _Stop

        with contextlib.suppress(_Stop):
            self.layer(index, x_BCE, batch, chunk, stop)
        return taken[0]

    def logits(self, ids_BS: Tensor) -> Tensor:
        """The model's own logits (B, S, V), as if it were not streamed."""
        with contextlib.nullcontext() if self.sharding is None else self.sharding.hooks_resumed():
            logits_BSV: Tensor = self.model(input_ids=ids_BS, use_cache=False, return_dict=True).logits
        return logits_BSV

    def head(self, x_BTE: Tensor) -> Tensor:
        """See `Decoder.head`."""
        positions = torch.arange(x_BTE.shape[1], device=x_BTE.device)[None]
        with self._replaced(lambda _: x_BTE):
            output = self._forward(
                inputs_embeds=x_BTE.detach(), position_ids=positions, use_cache=False, return_dict=True
            )
        logits_BTV: Tensor = output.logits
        return logits_BTV

    def record(self, index: int, positions: Tensor, **inputs: Tensor) -> LayerArguments:
        """What the model calls layer `index` with, for one chunk given as `input_ids` or `inputs_embeds`."""
        return self.record_up_to(index, positions, **inputs)[index]

    def record_up_to(self, index: int, positions: Tensor, **inputs: Tensor) -> list[LayerArguments]:
        """The same of all layers up to that one; each is given what the one before it was."""
        records: list[LayerArguments] = []

        def act(arguments: LayerArguments) -> Tensor:
            records.append(arguments)
            if len(records) == index + 1:
                raise _Stop
            return records[-1].hidden

        with self._replaced(act), contextlib.suppress(_Stop):
            self._forward(**inputs, position_ids=positions, use_cache=False, return_dict=True)
        return records

    @contextlib.contextmanager
    def _replaced(self, act: Callable[[LayerArguments], Tensor]) -> Iterator[None]:
        layers, self.act, self.layers._modules = self.layers._modules, act, self._stand_ins
        try:
            yield
        finally:
            self.act, self.layers._modules = _nothing, layers


@functools.cache
def _keep_out_of_graphs() -> None:
    """Have torch.compile leave a layer's graph at its attention, rather than follow it into the core."""
    disable: Any = torch.compiler.disable
    AttentionInterface.register(ATTENTION, disable(_attention))


def _nothing(arguments: LayerArguments) -> Tensor:
    raise AssertionError("a stand-in was called outside a recording")


def first(y: Any) -> Tensor:
    """The hidden state that a layer returned, alone or in front of a tuple."""
    hidden: Tensor = y[0] if isinstance(y, tuple) else y
    return hidden
