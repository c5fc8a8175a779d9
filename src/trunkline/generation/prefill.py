"""`prefill`, and `generate` from what it leaves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation.streamers import BaseStreamer

from trunkline.api import streamed_forward
from trunkline.kv_cache import cache_inputs
from trunkline.kv_cache.cache import StreamedCache


def prefill(
    model: nn.Module,
    input_ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    document_ids: Tensor | None = None,
    cache: StreamedCache | None = None,
    logits_to_keep: int = 1,
) -> StreamedCache:
    """Read tokens: the forward sweep, whose keys and values stay, in the tiers of the model.

    The first stage of inference, and where a long prompt takes its time. Continuations go on from the cache that comes
    back: `trunkline.generate(model, cache=cache)`, or `model.generate(ids, past_key_values=cache)`. Its `logits` are
    those of the last position (B, 1, V), or of the last `logits_to_keep`.

    Args:
        model: streamed, in evaluation mode. Over ranks every rank calls this, with the same tokens.
        input_ids: (B, S).
        attention_mask: (B, S), 0 for padding, all on the left or all on the right: rows have lengths of their own.
        position_ids: (1, S) or (B, S); one that begins at 0 again marks a packed document.
        document_ids: (B, S), a number for each token's document; documents never attend to each other, and what is
            generated goes on in the last.
        cache: of tokens read before, which these follow; it is extended in place. None begins a new one.
        logits_to_keep: of how many last positions.

    Returns:
        The cache: a new one, or the one given.

    Raises:
        ValueError: the model is not streamed or in training mode, an argument is not supported, or keys and values do
            not fit in the budgets. A cache that was given holds what it held before then.
    """
    if cache is not None and not isinstance(cache, StreamedCache):
        raise ValueError(
            f"cache is a {type(cache).__name__}: a streamed model fills one of its own. Leave it out for a new one."
        )
    if (cache is None or not cache.length) and attention_mask is not None and isinstance(input_ids, Tensor):
        input_ids, attention_mask, position_ids = _padded_left(input_ids, attention_mask, position_ids)
    given: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids,
                             "document_ids": document_ids, "logits_to_keep": logits_to_keep}  # fmt: skip
    output = streamed_forward(model, "prefill").extend(given, cache)
    found: StreamedCache = next(output[name] for name in cache_inputs.CACHE_ARGUMENTS if name in output)
    return found


def generate(
    model: nn.Module,
    input_ids: Tensor | None = None,
    *,
    cache: StreamedCache | None = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """Transformers' `generate` on a streamed model: sampling, beams, stopping and streamers are all its own.

    Args:
        model: streamed, in evaluation mode.
        input_ids: (B, n), the tokens that follow those of the cache; without a cache the whole prompt. None goes on
            right behind the cache.
        cache: of what was read before. It stays as it is, so that any number of continuations can go on from it; one
            row of it serves several rows of `input_ids`. Penalties and the like see all its tokens.
        attention_mask: (B, n), without a cache: 0 for padding, all on the left or all on the right.
        kwargs: see `transformers.GenerationMixin.generate`: `max_new_tokens`, `do_sample`, `num_beams`, `streamer`,
            `stopping_criteria`, …

    Returns:
        What transformers' `generate` returns: tokens (B, n + new), those given before those generated, or its output
        object with `return_dict_in_generate=True`.

    Raises:
        ValueError: there is neither a cache nor a prompt, the model is not streamed or in training mode, or an argument
            is not supported.
    """
    forward = streamed_forward(model, "generate")
    taken = [name for name in ("past_key_values", "use_cache", "position_ids") if kwargs.get(name) is not None]
    if taken:
        raise ValueError(f"{taken[0]} is not an argument of trunkline.generate: give what was read before as cache.")
    if input_ids is None and (cache is None or not cache.length):
        raise ValueError("there is nothing to go on from: give input_ids (B, S), or a cache from trunkline.prefill.")
    whole: Any = model
    if cache is None or not cache.length:
        assert input_ids is not None
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        input_ids, attention_mask, _ = _padded_left(input_ids, attention_mask, None)
        return whole.generate(input_ids, attention_mask=attention_mask, **kwargs)
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ValueError("attention_mask has padding behind the cache: continue rows of one length together.")
    own = cache.fork()
    rows = own.batch_size if input_ids is None else len(input_ids)
    own.begin(rows)
    if input_ids is None:  # its last token is read again: its logits are what the first new one is drawn from
        ids, positions = own.tokens, own.positions
        own.rewind()
    else:
        count = torch.arange(input_ids.shape[1])
        ids = torch.cat([own.tokens, input_ids.cpu()], 1)
        positions = torch.cat([own.positions, (own.next_positions.cpu() + count).expand(rows, -1)], 1)
    behind = ids.shape[1] if input_ids is None else cache.length
    if kwargs.get("streamer") is not None:
        kwargs["streamer"] = _Behind(kwargs["streamer"], input_ids)
    device = forward.decoder.device
    output = whole.generate(
        ids.to(device), attention_mask=torch.ones_like(ids, device=device), position_ids=positions.to(device),
        **{cache_inputs.cache_argument(forward.decoder.model): own}, **kwargs,
    )  # fmt: skip
    if isinstance(output, Tensor):
        return output[:, behind:]
    output.sequences = output.sequences[:, behind:]
    return output


class _Behind(BaseStreamer):  # type: ignore[misc]
    """Hands on what a streamer hears of tokens that follow a cache: of those before, nothing.

    Args:
        streamer: the user's.
        given: the prompt that it hears first, (B, n); None for none.
    """

    def __init__(self, streamer: Any, given: Tensor | None) -> None:
        self._streamer, self._given, self._is_first = streamer, given, True

    def put(self, value: Tensor) -> None:
        """Tokens."""
        first, self._is_first = self._is_first, False
        if not first:
            self._streamer.put(value)
        elif self._given is not None:
            self._streamer.put(self._given.cpu())
        elif hasattr(self._streamer, "next_tokens_are_prompt"):
            self._streamer.next_tokens_are_prompt = False

    def end(self) -> None:
        """That was all."""
        self._streamer.end()


def _padded_left(ids: Tensor, mask: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rows that are padded on the right, padded on the left: the next token comes on the right."""
    if mask.shape != ids.shape:
        return ids, mask, positions  # refused elsewhere
    real = mask != 0
    lengths = real.sum(1)
    places = torch.arange(ids.shape[1], device=ids.device)
    if not bool((lengths < ids.shape[1]).any()) or not torch.equal(real, places < lengths[:, None]):
        return ids, mask, positions
    source = (places - (ids.shape[1] - lengths)[:, None]) % ids.shape[1]
    moved = positions if positions is None else positions.expand(len(ids), -1).gather(1, source)
    return ids.gather(1, source), mask.gather(1, source), moved
