"""Which models are streamed, found out by asking the model itself: exact, or refused by name.

`verify` runs every layer of a model on a few tokens, once as transformers does and once in two chunks through the
core, and compares: whatever carries state across tokens in another way than attention (convolutions, recurrences, masks
of its own) shows. `check_length` asks the model's own mask function and rotary settings whether anything changes at a
length.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.loss.loss_utils import ForCausalLMLoss

from trunkline.attention.core import Core, Names
from trunkline.chunking import Chunk, split
from trunkline.decoder import Batch
from trunkline.huggingface import Arguments, HuggingFaceDecoder, first
from trunkline.structure import Unsupported
from trunkline.tiers.stores import resident

_PROBE_TOKENS = 8
_ATTEMPTS = 3  # a router of experts may decide a near tie the other way; a model that mixes tokens differs every time
_MASK_PROBE = "trunkline_mask_probe"  # an attention implementation that exists to be handed the model's mask functions
_masks: ContextVar[list[Callable[..., Any]]] = ContextVar("trunkline_masks")


def _collect_mask(*args: Any, mask_function: Callable[..., Any], **kwargs: Any) -> None:
    _masks.get().append(mask_function)


AttentionInterface.register(_MASK_PROBE, lambda *args, **kwargs: None)
AttentionMaskInterface.register(_MASK_PROBE, _collect_mask)


def check_length(decoder: HuggingFaceDecoder, seq_len: int, last_position: int) -> None:
    """Refuse a length at which the model is not plainly causal, or at which its positions change.

    Args:
        decoder: the model, with what is in no layer present.
        seq_len: tokens of the global sequence.
        last_position: largest position id.

    Raises:
        ValueError: a sliding window or attention chunk is shorter than the sequence; rotary frequencies that depend on
            the length of the input; more tokens than learned positions.
    """
    model = decoder.model
    config = model.config.get_text_config()
    name = type(model).__name__
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [rope, *(r for r in rope.values() if isinstance(r, dict))]
    for kind in kinds:
        rope_type = kind.get("rope_type", kind.get("type"))
        if rope_type in ("dynamic", "longrope"):
            original = kind.get("original_max_position_embeddings") or config.max_position_embeddings
            if last_position >= original:
                raise Unsupported(
                    f"{name} has rope_type={rope_type!r}, whose frequencies depend on the length of the input beyond "
                    f"{original} tokens ({last_position + 1} were given): that cannot be streamed yet. Shorten the "
                    "input, or set rope_type to 'yarn', 'linear' or 'llama3' in the config's rope_parameters."
                )
    limit = getattr(config, "max_position_embeddings", None)
    if not rope and limit is not None and last_position >= limit:
        raise ValueError(
            f"{name} has {limit} learned positions and was given {last_position + 1} tokens: shorten the input, or "
            f"build the model with max_position_embeddings of {last_position + 1} or more."
        )
    device = decoder.device
    ids = torch.zeros(1, 2, dtype=torch.long, device=device)
    masks: list[Callable[..., Any]] = []
    _masks.set(masks)
    with decoder.engaged(_MASK_PROBE), torch.no_grad(), random_state_kept(device):
        decoder.record(0, torch.arange(2, device=device)[None], input_ids=ids)
    at = torch.linspace(0, seq_len - 1, min(seq_len, 64), dtype=torch.float64).round().long()
    zero = torch.zeros((), dtype=torch.long)
    for mask in masks:
        q, kv = at[:, None], at[None, :]
        seen = torch.as_tensor(mask(zero, zero, q, kv)).expand(len(at), len(at))
        if not torch.equal(seen, kv <= q):
            raise Unsupported(
                f"{name} does not let every token attend to all earlier ones at {seq_len} tokens (a sliding window, "
                "attention chunks, or a mask of its own): that cannot be streamed yet. Shorten the input to the "
                "window, or switch the window off in the config (sliding_window=None)."
            )


def check_loss(decoder: HuggingFaceDecoder) -> None:
    """Refuse a loss function other than transformers' own: it would get no logits."""
    if decoder.model.loss_function is not ForCausalLMLoss:
        raise Unsupported(
            f"{type(decoder.model).__name__} has a loss function of its own, which a streamed forward cannot honour: "
            "it works on the logits of the whole sequence. Reset model.loss_function, or do not pass labels."
        )


def verify(decoder: HuggingFaceDecoder) -> None:
    """Compare every piece of a model with the model itself, on a few tokens.

    Args:
        decoder: the model. Parameters on the `meta` device have no values to compare; then one layer is run.

    Raises:
        ValueError: a piece differs; the text names the model and the piece.
    """
    device = decoder.device
    if device.type == "meta":
        _run_one_layer(decoder)
        return
    name = type(decoder.model).__name__
    with random_state_kept(device), torch.no_grad(), evaluation(decoder.model):
        with decoder.present(None):
            check_length(decoder, _PROBE_TOKENS, _PROBE_TOKENS - 1)
        for attempt in range(_ATTEMPTS):
            try:
                _compare(decoder, device, attempt)
                return
            except Unsupported:
                if attempt == _ATTEMPTS - 1:
                    raise
            except Exception as error:
                raise Unsupported(f"{name} does not run in chunks ({error}): it cannot be streamed.") from error


def _run_one_layer(decoder: HuggingFaceDecoder) -> None:
    """Show the decoder what a layer returns."""
    ids_BS = torch.zeros(1, 1, dtype=torch.long, device="meta")
    batch, token = Batch(ids_BS, ids_BS), Chunk(0, 0, 1)
    with torch.no_grad(), evaluation(decoder.model), decoder.engaged():
        x_BCE = decoder.embed(batch, token)
        decoder.layer(0, x_BCE, batch, token, lambda q, k, v, scale: q.new_empty(*q.shape[:3], v.shape[3]))


def _compare(decoder: HuggingFaceDecoder, device: torch.device, attempt: int) -> None:
    name = type(decoder.model).__name__
    ids_BS = ((torch.arange(_PROBE_TOKENS, device=device) + 1) * (7919 + attempt) % decoder.vocab_size)[None]
    positions = torch.arange(_PROBE_TOKENS, device=device)[None]
    batch = Batch(ids_BS, positions)
    chunks = split(_PROBE_TOKENS, _PROBE_TOKENS // 2)

    logits = decoder.logits(ids_BS)
    with decoder.present(None):
        x_BSE = decoder.record(0, positions, input_ids=ids_BS).hidden
        parts = [decoder.embed(batch, chunk) for chunk in chunks]
        _same(torch.cat(parts, 1), x_BSE, torch.zeros_like(x_BSE), f"the embedding of {name}")
        for index in range(decoder.num_layers):
            with decoder.present(index):
                x_BSE = _compare_layer(decoder, index, x_BSE, batch)
        _same(decoder.head(x_BSE), logits, torch.zeros_like(logits), f"the head of {name}")


def _compare_layer(decoder: HuggingFaceDecoder, index: int, x_BSE: Tensor, batch: Batch) -> Tensor:
    """Compare one layer; gives its output."""
    name, layer = type(decoder.model).__name__, decoder.layers[index]
    positions, chunks = batch.position_ids, split(_PROBE_TOKENS, _PROBE_TOKENS // 2)
    assert positions is not None
    with torch.enable_grad():
        arguments = decoder.record(index, positions, inputs_embeds=x_BSE)
    _check_arguments(arguments, decoder.record(index, positions, inputs_embeds=torch.zeros_like(x_BSE)), name)
    y = arguments.call(layer, x_BSE)
    y_BSE = first(y)
    decoder.returns_tuple = isinstance(y, tuple)
    core = Core(chunks, kernel="auto", keep_attention=False, keep_kv=False, stores=resident(),
                names=Names("k", "v", "o", "lse"))  # fmt: skip
    with decoder.engaged():
        parts = [_layer(decoder, index, x_BSE, batch, chunk, core) for chunk in chunks]
    _same(torch.cat(parts, 1), y_BSE, x_BSE, f"layer {index} ({type(layer).__name__}) of {name}")
    return y_BSE


def _layer(decoder: HuggingFaceDecoder, index: int, x_BSE: Tensor, batch: Batch, chunk: Chunk, core: Core) -> Tensor:
    return decoder.layer(index, x_BSE[:, chunk.start : chunk.stop], batch, chunk, partial(core.forward, chunk))


def _check_arguments(arguments: Arguments, others: Arguments, name: str) -> None:
    """Refuse layers that are given more than their input, positions and flags."""
    one = [*arguments.args[1:], *(v for k, v in sorted(arguments.kwargs.items()) if k != "hidden_states")]
    two = [*others.args[1:], *(v for k, v in sorted(others.kwargs.items()) if k != "hidden_states")]
    for a, b in zip(_tensors(one), _tensors(two), strict=True):
        if a.requires_grad:
            raise Unsupported(f"{name} gives its layers a trained tensor besides their input: it cannot be streamed.")
        if not torch.equal(a, b):
            raise Unsupported(f"{name} gives its layers more of the embedding than their input: it cannot be streamed.")


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors([values[key] for key in sorted(values)])


def _same(got: Tensor, expected: Tensor, given: Tensor, what: str) -> None:
    """Compare token by token, relative to what the piece adds to its input."""
    tolerance = 1e-3 if expected.dtype in (torch.float32, torch.float64) else 0.05
    error_S = (got - expected).double().norm(dim=-1).flatten()
    scale_S = (expected - given).double().norm(dim=-1).flatten()
    scale_S = scale_S + torch.finfo(expected.dtype).eps * expected.double().norm(dim=-1).flatten()
    if not bool((error_S <= tolerance * scale_S).all()):
        worst = float((error_S / scale_S).max())
        raise Unsupported(
            f"{what} computes something else in chunks than in one piece (relative difference {worst:.1e}): it carries "
            "something from token to token besides causal attention, and cannot be streamed."
        )


def random_state_kept(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """The user's generators end as they began."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


@contextlib.contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Every module in evaluation mode; afterwards as before."""
    training: list[nn.Module] = [m for m in model.modules() if m.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True
