"""Probes of a model: it is streamed exactly, or refused by name.

`verify` runs every layer of a model on a few tokens, once as transformers does and once in two chunks through the
core, and compares: a layer that mixes tokens in another way than attention (a convolution, say) differs.
`attention_spans` asks the model's own mask functions how far back each layer attends, `check_length` its rotary
settings whether anything changes at a length.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.loss.loss_utils import ForCausalLMLoss

from trunkline.attention.core import Core, CoreStores
from trunkline.attention.mask import AttentionSpan
from trunkline.chunking import Chunk, split
from trunkline.engine.batch import Batch
from trunkline.hf.decoder import HuggingFaceDecoder, LayerArguments, PositionCache, cache_argument, hidden_state
from trunkline.hf.introspect import UnsupportedModelError
from trunkline.offload.stores import resident_stores

_PROBE_TOKENS = 8
_ATTEMPTS = 3  # a router of experts may break a near tie the other way; a model that mixes tokens differs each time
_FAR = 2**30
# Positions at which mask functions are evaluated.
_PLACES = torch.tensor([*range(9), *(2**n + i for n in range(4, 30) for i in (0, 1)), _FAR])
_MASK_PROBE = "trunkline_mask_probe"  # attention implementation that only serves to receive the model's mask functions


@dataclass(frozen=True, slots=True)
class _Mask:
    """Stand-in for a mask among the arguments of a layer."""

    sees: Callable[..., Any]  # batch row, head, query, key -> whether it sees it


AttentionInterface.register(_MASK_PROBE, lambda *args, **kwargs: None)
AttentionMaskInterface.register(_MASK_PROBE, lambda *args, mask_function, **kwargs: _Mask(mask_function))


def check_length(decoder: HuggingFaceDecoder, last_position: int) -> None:
    """Refuse a length at which the model has no positions, or other ones.

    Args:
        decoder: the model.
        last_position: largest position id of the batch.

    Raises:
        UnsupportedModelError: it is past the length from which rotary frequencies depend on the length of the input
            (`rope_type` dynamic or longrope).
        ValueError: the model has fewer learned positions.
    """
    name = type(decoder.model).__name__
    limit, rope_type = _most_tokens(decoder)
    if limit is None or last_position < limit:
        return
    if rope_type is not None:
        raise UnsupportedModelError(
            f"{name} has rope_type={rope_type!r}, whose frequencies depend on the length of the input beyond "
            f"{limit} tokens ({last_position + 1} were given): that cannot be streamed yet. Shorten the "
            "input, or set rope_type to 'yarn', 'linear' or 'llama3' in the config's rope_parameters."
        )
    raise ValueError(
        f"{name} has {limit} learned positions and was given {last_position + 1} tokens: shorten the input, or "
        f"build the model with max_position_embeddings of {last_position + 1} or more."
    )


def most_tokens(decoder: HuggingFaceDecoder) -> int | None:
    """Return the largest number of tokens that `check_length` accepts; None for any number."""
    return _most_tokens(decoder)[0]


def _most_tokens(decoder: HuggingFaceDecoder) -> tuple[int | None, str | None]:
    """Return the largest number of tokens of a model, and the `rope_type` that limits it, if one does."""
    config = decoder.model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for kind in (rope, *(r for r in rope.values() if isinstance(r, dict))):
        rope_type = kind.get("rope_type", kind.get("type"))
        if rope_type in ("dynamic", "longrope"):
            return kind.get("original_max_position_embeddings") or config.max_position_embeddings, rope_type
    return None if rope else getattr(config, "max_position_embeddings", None), None


def attention_spans(decoder: HuggingFaceDecoder) -> list[AttentionSpan]:
    """Return how far back each layer attends, according to the model's own mask functions.

    Args:
        decoder: model whose parameters outside the layers are unsharded.

    Returns:
        One span for each layer.

    Raises:
        UnsupportedModelError: a layer's mask is neither causal, nor a sliding window, nor attention chunks; or a layer
            gets several masks.
    """
    device, name = decoder.device, type(decoder.model).__name__
    ids = torch.zeros(1, 2, dtype=torch.long, device=device)
    positions = torch.arange(2, device=device)[None]
    given = {"input_ids": ids}
    if device.type == "meta":  # without one, transformers looks into the positions, which have no contents there
        given["attention_mask"] = torch.ones_like(ids)
    with decoder.streamed_attention(_MASK_PROBE), torch.no_grad(), random_state_restored(device):
        records = decoder.record_up_to(decoder.num_layers - 1, positions, **given)
    found: dict[int, AttentionSpan] = {}
    spans = []
    for arguments in records:
        masks = {id(x): x for x in _leaves([*arguments.args, *arguments.kwargs.values()]) if isinstance(x, _Mask)}
        if len(masks) > 1:
            raise UnsupportedModelError(
                f"{name} gives a layer {len(masks)} masks instead of one: it cannot be streamed."
            )
        for key, mask in masks.items():
            if key not in found:
                found[key] = _span_of(mask.sees, decoder)
            spans.append(found[key])
        if not masks:
            spans.append(AttentionSpan())
    return spans


def _span_of(sees: Callable[..., Any], decoder: HuggingFaceDecoder) -> AttentionSpan:
    """Return the attention span that a mask function describes, from its values at selected positions."""
    device = decoder.device if decoder.device.type != "meta" else torch.device("cpu")
    zero = torch.zeros((), dtype=torch.long, device=device)

    def seen(q: Tensor, kv: Tensor) -> Tensor:
        q, kv = q.to(device), kv.to(device)
        found: Tensor = torch.as_tensor(sees(zero, zero, q, kv)).expand((q + kv).shape)
        return found if found.device.type == "meta" else found.cpu()

    chunk = getattr(decoder.model.config.get_text_config(), "attention_chunk_size", None)
    # A mask function on `meta` that returns no contents is one of attention chunks: it reads a tensor of the model's.
    if chunk is not None and decoder.device.type == "meta" and seen(_PLACES, _PLACES).device.type == "meta":
        return AttentionSpan(chunk=chunk)
    if torch.equal(seen(_PLACES[:, None], _PLACES[None]), _PLACES[None] <= _PLACES[:, None]):
        return AttentionSpan()
    first, last = 0, _FAR  # bisection: the first key that a far token sees lies between these
    while first < last:
        middle = (first + last) // 2
        if bool(seen(torch.tensor(_FAR), torch.tensor(middle))):
            last = middle
        else:
            first = middle + 1
    window = _FAR - first + 1
    around = {multiple * size + i for size in (window, chunk or 1) for multiple in (1, 2, 3) for i in range(-2, 3)}
    places = torch.cat([_PLACES, torch.tensor([at for at in around if 0 <= at < _FAR])])
    for span in (AttentionSpan(window=window), AttentionSpan(chunk=chunk)):
        if torch.equal(seen(places[:, None], places[None]), span.visible(places[:, None], places[None])):
            return span
    raise UnsupportedModelError(
        f"{type(decoder.model).__name__} has a mask that is neither causal, nor a sliding window, nor attention "
        "chunks: it cannot be streamed."
    )


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _leaves(value)
        elif isinstance(value, dict):
            yield from _leaves(value.values())
        else:
            yield value


def check_loss(decoder: HuggingFaceDecoder) -> None:
    """Refuse a loss function other than transformers' own: it needs the logits of the whole sequence.

    Raises:
        UnsupportedModelError: the model has another loss function.
    """
    if decoder.model.loss_function is not ForCausalLMLoss:
        raise UnsupportedModelError(
            f"{type(decoder.model).__name__} has a loss function of its own, which a streamed forward cannot honour: "
            "it works on the logits of the whole sequence. Reset model.loss_function, or do not pass labels."
        )


def verify(decoder: HuggingFaceDecoder) -> None:
    """Compare every piece of a model with the model itself, on a few tokens.

    The decoder learns on the way what its layers return, and which of them need a position cache. Random states and
    the training mode are restored. If the model is sharded, all ranks call this.

    Args:
        decoder: model. Parameters on the `meta` device have no values to compare: then one layer is only run.

    Raises:
        UnsupportedModelError: a piece differs, or does not run in chunks; the text names the model and the piece. Or
            the config asks for the router logits of experts.
    """
    device = decoder.device
    if getattr(decoder.model.config.get_text_config(), "output_router_logits", False):
        raise UnsupportedModelError(
            f"the config of this {type(decoder.model).__name__} has output_router_logits=True, for the auxiliary loss "
            "of experts, which is not supported yet: set it to False, and that loss is not trained."
        )
    if device.type == "meta":
        _run_one_layer(decoder)
        return
    name = type(decoder.model).__name__
    with random_state_restored(device), torch.no_grad(), in_eval_mode(decoder.model):
        check_length(decoder, _PROBE_TOKENS - 1)
        for attempt in range(_ATTEMPTS):
            try:
                _compare(decoder, device, attempt)
                return
            except UnsupportedModelError:
                if attempt == _ATTEMPTS - 1:
                    raise
            except Exception as error:
                raise UnsupportedModelError(
                    f"{name} does not run in chunks ({error}): it cannot be streamed."
                ) from error


def _run_one_layer(decoder: HuggingFaceDecoder) -> None:
    """Run one layer on one token, from which the decoder learns what a layer returns."""
    ids_BS = torch.zeros(1, 1, dtype=torch.long, device="meta")
    batch, token = Batch(ids_BS, ids_BS), Chunk(0, 0, 1)
    with torch.no_grad(), in_eval_mode(decoder.model), decoder.streamed_attention():
        x_BCE = decoder.embed(batch, token)
        decoder.layer(0, x_BCE, batch, token, lambda q, k, v, scoring: q.new_empty(*q.shape[:3], v.shape[3]))


def _compare(decoder: HuggingFaceDecoder, device: torch.device, attempt: int) -> None:
    name = type(decoder.model).__name__
    ids_BS = ((torch.arange(_PROBE_TOKENS, device=device) + 1) * (7919 + attempt) % decoder.vocab_size)[None]
    positions = torch.arange(_PROBE_TOKENS, device=device)[None]
    batch = Batch(ids_BS, positions)
    chunks = split(_PROBE_TOKENS, _PROBE_TOKENS // 2)

    logits = decoder.logits(ids_BS)
    with decoder.unsharded(None):
        spans = attention_spans(decoder)
        x_BSE = decoder.record(0, positions, input_ids=ids_BS).hidden
        parts = [decoder.embed(batch, chunk) for chunk in chunks]
        _same(torch.cat(parts, 1), x_BSE, torch.zeros_like(x_BSE), f"the embedding of {name}")
        for index in range(decoder.num_layers):
            with decoder.unsharded(index):
                x_BSE = _compare_layer(decoder, index, x_BSE, batch, spans[index])
        _same(decoder.head(x_BSE), logits, torch.zeros_like(logits), f"the head of {name}")


def _compare_layer(decoder: HuggingFaceDecoder, index: int, x_BSE: Tensor, batch: Batch, span: AttentionSpan) -> Tensor:
    """Compare one layer, note in the decoder whether it needs a position cache, and return its output (B, S, E)."""
    name, layer = type(decoder.model).__name__, decoder.layers[index]
    positions, chunks = batch.position_ids, split(_PROBE_TOKENS, _PROBE_TOKENS // 2)
    assert positions is not None
    with torch.enable_grad():
        arguments = decoder.record(index, positions, inputs_embeds=x_BSE)
    _check_arguments(arguments, decoder.record(index, positions, inputs_embeds=torch.zeros_like(x_BSE)), name)
    y = _call(layer, arguments.replaced(layer, x_BSE))
    y_BSE = hidden_state(y)
    decoder.returns_tuple = isinstance(y, tuple)
    if _asks_cache(layer, arguments, x_BSE, y_BSE, positions):
        decoder.needs_position_cache.add(index)
    row_masks = span.row_masks(batch.documents, batch.seq_len)
    core = Core(
        chunks,
        kernel="auto",
        keep_attention=False,
        keep_kv=False,
        stores=resident_stores(),
        store_names=CoreStores("k", "v", "o", "lse"),
        row_masks=row_masks,
    )
    with decoder.streamed_attention():
        parts = [_layer(decoder, index, x_BSE, batch, chunk, core) for chunk in chunks]
    _same(torch.cat(parts, 1), y_BSE, x_BSE, f"layer {index} ({type(layer).__name__}) of {name}")
    return y_BSE


def _asks_cache(layer: nn.Module, arguments: LayerArguments, x_BSE: Tensor, y_BSE: Tensor, positions: Tensor) -> bool:
    """Tell whether a layer's output depends on the length of its cache (Llama 4's query temperature)."""
    if not cache_argument(layer):
        return False
    try:
        far = hidden_state(_call(layer, arguments.replaced(layer, x_BSE, PositionCache(positions + _FAR))))
    except Exception:  # it needs a real cache, and is run without one here
        return False
    return not torch.equal(far, y_BSE)


def _call(layer: nn.Module, arguments: LayerArguments) -> Any:
    return layer(*arguments.args, **arguments.kwargs)


def _layer(decoder: HuggingFaceDecoder, index: int, x_BSE: Tensor, batch: Batch, chunk: Chunk, core: Core) -> Tensor:
    return decoder.layer(index, x_BSE[:, chunk.start : chunk.stop], batch, chunk, partial(core.forward, chunk))


def _check_arguments(arguments: LayerArguments, others: LayerArguments, name: str) -> None:
    """Refuse layers whose arguments, besides their input, depend on the embedding or are trained."""
    one = [*arguments.args[1:], *(v for k, v in sorted(arguments.kwargs.items()) if k != "hidden_states")]
    two = [*others.args[1:], *(v for k, v in sorted(others.kwargs.items()) if k != "hidden_states")]
    tensors = ([x for x in _leaves(values) if isinstance(x, Tensor)] for values in (one, two))
    for a, b in zip(*tensors, strict=True):
        if a.requires_grad:
            raise UnsupportedModelError(
                f"{name} gives its layers a trained tensor besides their input: it cannot be streamed."
            )
        if not torch.equal(a, b):
            raise UnsupportedModelError(
                f"{name} gives its layers more of the embedding than their input: it cannot be streamed."
            )


def _same(got: Tensor, expected: Tensor, given: Tensor, what: str) -> None:
    """Refuse a result that differs in any token, relative to the change that the piece makes to its input."""
    tolerance = 1e-3 if expected.dtype in (torch.float32, torch.float64) else 0.05
    error_S = (got - expected).double().norm(dim=-1).flatten()
    scale_S = (expected - given).double().norm(dim=-1).flatten()
    scale_S = scale_S + torch.finfo(expected.dtype).eps * expected.double().norm(dim=-1).flatten()
    if not bool((error_S <= tolerance * scale_S).all()):
        worst = float((error_S / scale_S).max())
        raise UnsupportedModelError(
            f"{what} computes something else in chunks than in one piece (relative difference {worst:.1e}): it carries "
            "something from token to token besides causal attention, and cannot be streamed."
        )


def random_state_restored(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Restore the random states of the CPU and of a CUDA `device` at the end of a `with`."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


@contextlib.contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Put every module in evaluation mode for the duration of a `with`; afterwards each has its own mode again."""
    training: list[nn.Module] = [m for m in model.modules() if m.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True
