"""`prefill` reads tokens into a cache; `generate` continues it."""

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
    """Read tokens in chunks, and keep their keys and values in the tiers of the model.

    This is the first stage of inference, and takes most of the time of a long prompt. Continue the returned cache with
    `trunkline.generate(model, cache=cache)`, or `model.generate(ids, past_key_values=cache)`. Its `logits` are of the
    last position (B, 1, V), or of the last `logits_to_keep`.

    Args:
        model: streamed, in evaluation mode. Over ranks every rank calls this, with the same tokens.
        input_ids: (B, S).
        attention_mask: (B, S), 0 for padding, for rows of different lengths. The padding is either on the left or on
            the right; in the cache it is on the left. Behind a cache new tokens have no padding: leave the mask out, or
            give that of all tokens so far.
        position_ids: (1, S) or (B, S); where they restart at 0 a packed document begins.
        document_ids: (B, S), the number of each token's document; documents never attend to each other, and generation
            continues the last. Only for the first tokens of a cache, and not with padding.
        cache: of earlier tokens, which these follow; extended in place. None for a new cache.
        logits_to_keep: last positions whose logits are kept; 0 and 1 both keep the last.

    Returns:
        The cache: a new one, or the one given.

    Raises:
        ValueError: the model is not streamed or in training mode, an argument is not supported, or keys and values do
            not fit in the budgets. A cache that was passed is unchanged then.
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
    filled: StreamedCache = next(output[name] for name in cache_inputs.CACHE_ARGUMENTS if name in output)
    return filled


def generate(
    model: nn.Module,
    input_ids: Tensor | None = None,
    *,
    cache: StreamedCache | None = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """Generate with transformers' own `generate`: sampling, beams, stopping criteria and streamers are unchanged.

    Args:
        model: streamed, in evaluation mode.
        input_ids: (B, n), the tokens that follow the cache; without a cache the whole prompt. None continues right
            behind the cache.
        cache: of earlier tokens. It does not change, so that it can be continued any number of times; one of its rows
            serves several rows of `input_ids`. Penalties see all its tokens.
        attention_mask: (B, n), without a cache: 0 for padding, either on the left or on the right. Padding behind a
            cache is refused.
        kwargs: see `transformers.GenerationMixin.generate`: `max_new_tokens`, `do_sample`, `num_beams`, `streamer`,
            `stopping_criteria`, … `past_key_values`, `use_cache` and `position_ids` are refused.

    Returns:
        The result of transformers' `generate`: tokens (B, n + new), `input_ids` (padded on the left) and then the new
        ones, without the cache's; or its output object with `return_dict_in_generate=True`.

    Raises:
        ValueError: there is neither a cache nor a prompt, the model is not streamed or in training mode, or an argument
            is not supported.
    """
    forward = streamed_forward(model, "generate")
    taken = [name for name in ("past_key_values", "use_cache", "position_ids") if kwargs.get(name) is not None]
    if taken:
        raise ValueError(f"{taken[0]} is not an argument of trunkline.generate: pass the tokens read before as cache.")
    if input_ids is None and (cache is None or not cache.length):
        raise ValueError("there is nothing to go on from: give input_ids (B, S), or a cache from trunkline.prefill.")
    generator: Any = model
    if cache is None or not cache.length:
        assert input_ids is not None
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        input_ids, attention_mask, _ = _padded_left(input_ids, attention_mask, None)
        return generator.generate(input_ids, attention_mask=attention_mask, **kwargs)
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ValueError("attention_mask has padding behind the cache: continue rows of one length together.")
    own = cache.fork()
    rows = own.batch_size if input_ids is None else len(input_ids)
    own.expand_rows(rows)
    if input_ids is None:  # read the last token again: the first new token is drawn from its logits
        ids, positions = own.tokens, own.positions
        own.rewind()
    else:
        count = torch.arange(input_ids.shape[1])
        ids = torch.cat([own.tokens, input_ids.cpu()], 1)
        positions = torch.cat([own.positions, (own.next_positions.cpu() + count).expand(rows, -1)], 1)
    behind = ids.shape[1] if input_ids is None else cache.length
    if kwargs.get("streamer") is not None:
        kwargs["streamer"] = _SkipCached(kwargs["streamer"], input_ids)
    device = forward.decoder.device
    output = generator.generate(
        ids.to(device), attention_mask=torch.ones_like(ids, device=device), position_ids=positions.to(device),
        **{cache_inputs.cache_argument(forward.decoder.model): own}, **kwargs,
    )  # fmt: skip
    if isinstance(output, Tensor):
        return output[:, behind:]
    output.sequences = output.sequences[:, behind:]
    return output


class _SkipCached(BaseStreamer):  # type: ignore[misc]
    """Streamer that passes on the tokens that follow a cache, and not the cached ones.

    Args:
        streamer: the user's.
        given: the prompt that it receives first, (B, n); None for none.
    """

    def __init__(self, streamer: Any, given: Tensor | None) -> None:
        self._streamer, self._given, self._is_first = streamer, given, True

    def put(self, value: Tensor) -> None:
        """Pass tokens on; the first call, which holds the cached tokens, is replaced by the prompt."""
        first, self._is_first = self._is_first, False
        if not first:
            self._streamer.put(value)
        elif self._given is not None:
            self._streamer.put(self._given.cpu())
        elif hasattr(self._streamer, "next_tokens_are_prompt"):
            self._streamer.next_tokens_are_prompt = False

    def end(self) -> None:
        """End the stream."""
        self._streamer.end()


def _padded_left(ids: Tensor, mask: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Move padding from the right to the left of each row; any other arguments are returned as they are."""
    if mask.shape != ids.shape:
        return ids, mask, positions  # `cache_inputs` refuses it
    real = mask != 0
    lengths = real.sum(1)
    places = torch.arange(ids.shape[1], device=ids.device)
    if not bool((lengths < ids.shape[1]).any()) or not torch.equal(real, places < lengths[:, None]):
        return ids, mask, positions
    source = (places - (ids.shape[1] - lengths)[:, None]) % ids.shape[1]
    moved = positions if positions is None else positions.expand(len(ids), -1).gather(1, source)
    return ids.gather(1, source), mask.gather(1, source), moved
