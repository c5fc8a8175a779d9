"""Model class of the harness for a streamed model."""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.models.utils_hf import stop_sequences_criteria
from torch import nn
from tqdm import tqdm
from typing_extensions import override

import trunkline
from trunkline.api import streamed_forward
from trunkline.config import resolve_config
from trunkline.data.tokenizers import Tokens, encoder_of
from trunkline.evaluate.harness.continuations import Continuation, LogLikelihood, score_continuations
from trunkline.generation.loading import load_model
from trunkline.generation.prefixes import MIN_SHARED, Prefixes

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
_CACHED_TEXTS = 4  # requests with one context follow each other


@register_model("trunkline")
class StreamedLM(TemplateLM):  # type: ignore[misc]
    """Streamed model in the harness.

    A context that several requests share is read once, and so is a long common beginning of different contexts, unless
    `share_prefill` is off. Nothing is truncated: a request longer than `max_length` is an error before anything is
    computed; one longer than the model's `max_position_embeddings` gives a warning.
    """

    def __init__(
        self,
        pretrained: str | Path | None = None,
        *,
        model: nn.Module | None = None,
        tokenizer: Any = None,
        dtype: str = "auto",
        device: str | None = None,
        batch_size: int | str = 1,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        share_prefill: bool = True,
        **stream: Any,
    ) -> None:
        """Load a model and stream it, or take a streamed model.

        Args:
            pretrained: folder with a model and its tokenizer.
            model: a streamed model in evaluation mode, instead of `pretrained`.
            tokenizer: Hugging Face tokenizer of `model`; not with `pretrained`.
            dtype: with `pretrained`: `auto` for the dtype of the weights, `bfloat16`, `float16` or `float32`.
            device: with `pretrained`: `cpu`, `cuda` or `cuda:N`; None for CUDA where there is one. Without any CUDA
                device, `cuda` is the CPU, with a warning.
            batch_size: rows scored at a time. Texts are generated one by one.
            max_length: most tokens of a request, including generated ones; None for no limit.
            max_gen_toks: most tokens to generate where a task does not say.
            share_prefill: read contexts and their common beginnings once, which holds keys and values of all layers.
                False scores each sequence by itself, which holds those of one layer.
            stream: with `pretrained`: settings of `trunkline.stream`, such as chunk_size and device_budget.

        Raises:
            ValueError: a setting is unknown or out of range, the model cannot be loaded or streamed, or there are
                several processes.
        """
        super().__init__()
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError("the harness runs a streamed model in one process: start it without torchrun or launch.")
        self.batch_size = _positive("batch_size", batch_size)
        self.max_length = None if max_length is None else _positive("max_length", max_length)
        self.max_gen_toks = _positive("max_gen_toks", max_gen_toks)
        if not isinstance(share_prefill, bool):
            raise ValueError(f"share_prefill={share_prefill!r}: give True or False.")
        self._share = share_prefill
        if (pretrained is None) == (model is None):
            raise ValueError("give either pretrained, a folder with a model, or model, one that is streamed.")
        if model is None:
            assert pretrained is not None
            if tokenizer is not None:
                raise ValueError("tokenizer goes with model: that of pretrained is in its folder.")
            config = resolve_config(None, stream)  # before the weights are loaded
            if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
                warnings.warn(f"device={device!r}, the harness's default, does not exist: using cpu.", stacklevel=2)
                device = "cpu"
            model, encoder = load_model(pretrained, dtype=dtype, device=device or "auto")
            trunkline.stream(model, config)
        else:
            if stream or dtype != "auto" or device is not None:
                name = next(iter(stream), "dtype" if dtype != "auto" else "device")
                raise ValueError(f"{name} goes with pretrained: a model that is streamed has its settings already.")
            if tokenizer is None:
                raise ValueError("model goes with its tokenizer: give tokenizer=AutoTokenizer.from_pretrained(...).")
            encoder = encoder_of(tokenizer)
        if streamed_forward(model, "StreamedLM").ranks.size > 1:
            raise ValueError("this model is spread over ranks: the harness runs a streamed model in one process.")
        if model.training:
            raise ValueError("the model is in training mode, with dropout on: call model.eval() before.")
        self.model: Any = model
        self.tokenizer = encoder.tokenizer
        if self.tokenizer.bos_token_id is None and self.tokenizer.eos_token_id is None:
            raise ValueError(
                "the tokenizer has neither a beginning-of-sequence nor an end-of-sequence token, one of which stands "
                "before a text without context: set tokenizer.bos_token or tokenizer.eos_token."
            )
        self._bos = encoder.prefix
        self._body = dataclasses.replace(encoder, prefix=(), suffix=())
        self._ids = functools.lru_cache(_CACHED_TEXTS)(self._encode)
        self._device = next(model.parameters()).device
        self._template: str | None = None

    @override
    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        # In one forward however long a text is: each token sees all tokens before it.
        texts = []
        for request in requests:
            ids = self._encode(request.args[0], special=False)
            begins = len(ids) > 0 and ids[0] == self.prefix_token_id
            texts.append(self._continuation([], ids[1:] if begins else ids))
        keys = [request.args for request in requests]
        return [score for score, _ in self._score("loglikelihood_rolling", keys, texts, disable_tqdm)]

    @override
    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        settings = [normalize_gen_kwargs(request.args[1], self.max_gen_toks) for request in requests]
        texts = [""] * len(requests)
        groups: dict[str, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            groups[request.args[0]].append(index)
        members = list(groups.values())
        contexts = [self._continuation(self._encode(text), []).context for text in groups]
        self._check_lengths([
            len(ids) + max(settings[i]["max_gen_toks"] for i in group)
            for ids, group in zip(contexts, members, strict=True)
        ])  # fmt: skip
        with tqdm(total=len(requests), disable=disable_tqdm, desc="generate_until") as bar:
            for at, cache in self._read(contexts):
                for index in members[at]:
                    texts[index] = self._generate(contexts[at], cache, settings[index])
                    self.cache_hook.add_partial("generate_until", requests[index].args, texts[index])
                    bar.update()
        return texts

    @override
    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        text: str = self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt, chat_template=self._template,
        )  # fmt: skip
        return text

    @override
    def chat_template(self, chat_template: bool | str = False) -> str | None:
        self._template = super().chat_template(chat_template)  # `apply_chat_template` uses it from now on
        return self._template

    @property
    @override
    def tokenizer_name(self) -> str:
        name: str = self.tokenizer.name_or_path or type(self.tokenizer).__name__
        return name.replace("/", "__")

    @property
    @override
    def eot_token_id(self) -> int | None:
        token: int | None = self.tokenizer.eos_token_id
        return token

    @property
    @override
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        token: int = self.tokenizer.eos_token_id if bos is None else bos
        return token

    @override
    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        ids: list[int] = self._encode(string, special=add_special_tokens).tolist()
        return ids

    def get_model_info(self) -> dict[str, Any]:
        """Return the facts about the model that the harness writes beside the results."""
        return {
            "model_num_parameters": sum(p.numel() for p in self.model.parameters()),
            "model_dtype": str(next(self.model.parameters()).dtype),
            "chunk_size": streamed_forward(self.model, "StreamedLM").config.chunk_tokens(self._device),
        }

    def _encode(self, text: str, *, special: bool | None = None) -> Tokens:
        """Return the ids of a text of any length.

        Args:
            text: the text.
            special: begin with the beginning-of-sequence token, if the tokenizer adds one by itself; None does so
                unless the text, such as a filled chat template, begins with it already.
        """
        if special is None:
            special = not (self._bos and text.startswith(self.tokenizer.decode(list(self._bos))))
        ids = self._body.encode(text) if text else np.empty(0, self._body.dtype)
        return np.concatenate([np.asarray(self._bos if special else (), ids.dtype), ids])

    @override
    def _encode_pair(self, context: str, continuation: str) -> tuple[Tokens, Tokens]:
        # Spaces at the end of a context belong to the continuation. The whole text is tokenized, so that a tokenizer
        # that merges a space with the next word does so at the border, too.
        before = self._ids(context.rstrip())
        return before, self._encode(context + continuation)[len(before) :].copy()  # a view would keep the whole

    def _continuation(self, context: Any, ids: Any) -> Continuation:
        """Return a request as arrays, behind the prefix token where there is no context."""
        dtype = self._body.dtype
        before = context if len(context) else [self.prefix_token_id]
        return Continuation(np.asarray(before, dtype), np.asarray(ids, dtype))

    @override
    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[LogLikelihood]:
        texts = [self._continuation(context, ids) for _, context, ids in requests]
        return self._score("loglikelihood", [key for key, *_ in requests], texts, disable_tqdm)

    def _score(
        self, name: str, keys: list[Any], requests: list[Continuation], disable_tqdm: bool
    ) -> list[LogLikelihood]:
        self._check_lengths([request.total for request in requests])
        scores: list[LogLikelihood] = [(0.0, True)] * len(requests)
        rolling = name == "loglikelihood_rolling"
        share = self._share and not rolling  # logits of whole documents are computed in tiles
        with tqdm(total=len(requests), disable=disable_tqdm, desc=name) as bar:
            for index, score in score_continuations(self.model, requests, batch_size=self.batch_size, share=share):
                scores[index] = score
                self.cache_hook.add_partial(name, keys[index], score[0] if rolling else score)
                bar.update()
        return scores

    def _read(self, contexts: list[Tokens]) -> Iterator[tuple[int, trunkline.StreamedCache | None]]:
        """Yield each context's index with a cache of all its tokens but the last; None for a context of one token."""
        groups: dict[bytes, list[int]] = defaultdict(list)
        for at, ids in enumerate(contexts):
            groups[ids[:-1].tobytes()].append(at)
        yield from ((at, None) for at in groups.pop(b"", []))
        members = list(groups.values())
        least = MIN_SHARED if self._share else max(map(len, contexts), default=0) + 1
        for at, cache in Prefixes([contexts[group[0]][:-1] for group in members]).read(self.model, least):
            yield from ((member, cache) for member in members[at])

    def _generate(self, context: Tokens, cache: trunkline.StreamedCache | None, settings: Any) -> str:
        last = torch.tensor([[int(context[-1])]], device=self._device)
        eos = self.model.generation_config.eos_token_id
        ends = {self.eot_token_id, *(eos if isinstance(eos, list) else [eos])} - {None}
        pad = self.tokenizer.pad_token_id
        until = [text for text in settings["until"] if text]
        more = {name: value for name, value in settings.items() if name not in ("until", "max_gen_toks")}
        if not more["do_sample"]:  # then they have no effect, and transformers warns
            more = {name: value for name, value in more.items() if name not in _SAMPLING}
        new = trunkline.generate(
            self.model, last, cache=cache, max_new_tokens=settings["max_gen_toks"], eos_token_id=sorted(ends) or None,
            pad_token_id=self.eot_token_id if pad is None else pad,
            stopping_criteria=stop_sequences_criteria(self.tokenizer, until, 1, 1), **more,
        )[0, 1:]  # fmt: skip
        text = self.tokenizer.decode(new.tolist(), skip_special_tokens=True)
        return str(postprocess_generated_text(text, until, None))

    def _check_lengths(self, lengths: list[int]) -> None:
        """Refuse requests longer than `max_length`, before hours of work; warn of those longer than the positions."""
        longest = max(lengths, default=0)
        if self.max_length is not None and longest > self.max_length:
            raise ValueError(
                f"a request has {longest:,} tokens, with those to generate, and max_length is {self.max_length:,}. "
                "Nothing is truncated here: raise max_length, or leave it out, which is no limit."
            )
        trained = getattr(self.model.config, "max_position_embeddings", None)
        if trained is not None and longest > trained:
            warnings.warn(
                f"a request has {longest:,} tokens, and the model's max_position_embeddings is {trained:,}: it is read "
                "whole, at positions that the model may not know.",
                stacklevel=3,
            )


def _positive(name: str, value: Any) -> int:
    """Return a positive integer that may be given as text, as the harness passes it on."""
    text = str(value)
    if isinstance(value, bool) or not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{name}={value!r}: give a positive whole number.")
    return int(text)
