"""The harness's model class over a streamed model."""

from __future__ import annotations

import difflib
import inspect
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
from torch import nn
from tqdm import tqdm
from transformers import StoppingCriteriaList

import trunkline
from trunkline.api import streamed_forward
from trunkline.config import declared_settings
from trunkline.data.tokenizers import Tokens
from trunkline.evaluate.harness.scoring import Score, score
from trunkline.evaluate.harness.text import Pair, Texts
from trunkline.evaluate.harness.writing import Asked, Until, asked, cut
from trunkline.generation.loading import load_model
from trunkline.generation.prefixes import MIN_SHARED, Prefixes


@register_model("trunkline")
class StreamedLM(TemplateLM):  # type: ignore[misc]
    """A streamed model, as the harness wants one.

    Contexts that requests share are read once, and so is a long beginning that different contexts have in common.
    Nothing is truncated: what is longer than `max_length` is an error, before anything is computed.
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
        """Load a model and stream it, or take one that is streamed.

        Args:
            pretrained: folder with a model and its tokenizer.
            model: instead of it, a streamed model in evaluation mode.
            tokenizer: that of `model`, a Hugging Face tokenizer.
            dtype: with `pretrained`: `auto` for that of the weights, `bfloat16`, `float16` or `float32`.
            device: with `pretrained`: `cpu`, `cuda` or `cuda:N`; None for CUDA where there is one.
            batch_size: rows that are scored at a time. Texts are generated one by one.
            max_length: most tokens of a request, with those to generate; None is no limit.
            max_gen_toks: most tokens to generate where a task does not say.
            share_prefill: read contexts, and what they begin with in common, once; keys and values of all layers are
                held for that. False scores each sequence by itself, with those of one layer.
            stream: with `pretrained`: settings of `trunkline.stream`, such as chunk_size and device_budget.

        Raises:
            ValueError: a setting is unknown or out of range, the model cannot be loaded or streamed, or there are
                several processes.
        """
        super().__init__()
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError("the harness runs a streamed model in one process: start it without torchrun or launch.")
        self.batch_size = _number("batch_size", batch_size)
        self.max_length = None if max_length is None else _number("max_length", max_length)
        self.max_gen_toks = _number("max_gen_toks", max_gen_toks)
        if not isinstance(share_prefill, bool):
            raise ValueError(f"share_prefill={share_prefill!r}: give True or False.")
        self._share = share_prefill
        if (pretrained is None) == (model is None):
            raise ValueError("give either pretrained, a folder with a model, or model, one that is streamed.")
        if model is None:
            assert pretrained is not None
            _check_settings(stream, tokenizer)
            if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
                warnings.warn(
                    f"device={device!r}, the harness's own default, is not there: cpu is taken.", stacklevel=2
                )
                device = "cpu"
            model, encoder = load_model(pretrained, dtype=dtype, device=device or "auto")
            self._texts = Texts(encoder)
            trunkline.stream(model, **stream)
        else:
            if stream or dtype != "auto" or device is not None:
                name = next(iter(stream), "dtype" if dtype != "auto" else "device")
                raise ValueError(f"{name} goes with pretrained: a model that is streamed has its settings already.")
            if tokenizer is None:
                raise ValueError("model goes with its tokenizer: give tokenizer=AutoTokenizer.from_pretrained(...).")
            self._texts = Texts.of(tokenizer)
        if streamed_forward(model, "StreamedLM").ranks.size > 1:
            raise ValueError("this model is spread over ranks: the harness runs a streamed model in one process.")
        if model.training:
            raise ValueError("the model is in training mode, with dropout on: call model.eval() before.")
        self.model: Any = model
        self.tokenizer = self._texts.tokenizer
        self._device = next(model.parameters()).device
        self._template: str | None = None

    # -- what the harness asks -----------------------------------------------------------------------------------------

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Score]:
        """Log probability of each continuation behind its context, and whether it is what greedy decoding gives."""
        texts = [request.args for request in requests]
        pairs = self._texts.pairs(texts)
        given = [(text, pair.context, pair.continuation) for text, pair in zip(texts, pairs, strict=True)]
        return self._loglikelihood_tokens(given, disable_tqdm=disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log probability of each text, in one forward however long it is: each token sees all tokens before it."""
        pairs = [self._texts.document(*request.args) for request in requests]
        keys = [request.args for request in requests]
        scores = self._scored("loglikelihood_rolling", keys, pairs, disable_tqdm)
        return [log_prob for log_prob, _ in scores]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue each context until one of its stop texts, an end-of-sequence token, or as many tokens as it may.

        Raises:
            ValueError: a setting of a task cannot be meant, or a request is longer than max_length.
        """
        wanted = [asked(request.args[1], self.max_gen_toks) for request in requests]
        found = [""] * len(requests)
        groups: dict[str, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            groups[request.args[0]].append(index)
        members = list(groups.values())
        contexts = [self._texts.context(text) for text in groups]
        self._check([len(ids) + max(wanted[i].max_new_tokens for i in group)
                     for ids, group in zip(contexts, members, strict=True)])  # fmt: skip
        with tqdm(total=len(requests), disable=disable_tqdm, desc="generate_until") as bar:
            for at, cache in self._read(contexts):
                for index in members[at]:
                    text, settings = requests[index].args
                    found[index] = self._written(contexts[at], cache, wanted[index])
                    self.cache_hook.add_partial("generate_until", (text, settings), found[index])
                    bar.update()
        return found

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Messages as one text, by the tokenizer's chat template."""
        text: str = self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt, chat_template=self._template,
        )  # fmt: skip
        return text

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The tokenizer's chat template, or that of a name: what `apply_chat_template` uses from now on."""
        self._template = super().chat_template(chat_template)
        return self._template

    @property
    def tokenizer_name(self) -> str:
        """What the harness keeps prepared requests under."""
        name: str = self.tokenizer.name_or_path or type(self.tokenizer).__name__
        return name.replace("/", "__")

    @property
    def eot_token_id(self) -> int | None:
        """The end-of-sequence token."""
        token: int | None = self.tokenizer.eos_token_id
        return token

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context."""
        return self._texts.first

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Ids of a text."""
        ids: list[int] = self._texts.encode(string, special=add_special_tokens).tolist()
        return ids

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes beside the results."""
        config = streamed_forward(self.model, "StreamedLM").config
        return {
            "model_num_parameters": sum(p.numel() for p in self.model.parameters()),
            "model_dtype": str(next(self.model.parameters()).dtype),
            "chunk_size": config.chunk_tokens(self._device),
        }

    # -- how -----------------------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(self, requests: list[Any], disable_tqdm: bool = False, **kwargs: Any) -> list[Score]:
        pairs = [Pair(np.asarray(context), np.asarray(continuation)) for _, context, continuation in requests]
        return self._scored("loglikelihood", [key for key, _, _ in requests], pairs, disable_tqdm)

    def _scored(self, name: str, keys: list[Any], pairs: list[Pair], disable_tqdm: bool) -> list[Score]:
        self._check(list(map(len, pairs)))
        found: list[Score] = [(0.0, True)] * len(pairs)
        rolling = name == "loglikelihood_rolling"
        share = self._share and not rolling  # whole documents, whose logits are better made in tiles
        with tqdm(total=len(pairs), disable=disable_tqdm, desc=name) as bar:
            for index, result in score(self.model, pairs, batch_size=self.batch_size, share=share):
                found[index] = result
                self.cache_hook.add_partial(name, keys[index], result[0] if rolling else result)
                bar.update()
        return found

    def _read(self, contexts: list[Tokens]) -> Iterator[tuple[int, trunkline.StreamedCache | None]]:
        """Contexts, each with the cache of all its tokens but the last, from which a generation begins."""
        short = [at for at, ids in enumerate(contexts) if len(ids) == 1]
        yield from ((at, None) for at in short)
        long: dict[bytes, list[int]] = defaultdict(list)
        for at, ids in enumerate(contexts):
            if len(ids) > 1:
                long[ids[:-1].tobytes()].append(at)
        groups = list(long.values())
        least = MIN_SHARED if self._share else max(map(len, contexts), default=0) + 1
        for at, cache in Prefixes([contexts[group[0]][:-1] for group in groups]).read(self.model, least):
            yield from ((member, cache) for member in groups[at])

    def _written(self, context: Tokens, cache: trunkline.StreamedCache | None, how: Asked) -> str:
        last = torch.tensor([[int(context[-1])]], device=self._device)
        ends = {self.eot_token_id, *_listed(self.model.generation_config.eos_token_id)} - {None}
        pad = self.tokenizer.pad_token_id
        new = trunkline.generate(
            self.model, last, cache=cache, max_new_tokens=how.max_new_tokens, eos_token_id=sorted(ends) or None,
            pad_token_id=self.eot_token_id if pad is None else pad,
            stopping_criteria=StoppingCriteriaList([Until(self.tokenizer, how.until, 1)]),
            **how.settings,
        )[0, 1:]  # fmt: skip
        text: str = self.tokenizer.decode(new.tolist(), skip_special_tokens=True)
        return cut(text, how.until)

    def _check(self, lengths: list[int]) -> None:
        """Refuse what is too long, before the first of hours of work."""
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


def _listed(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _number(name: str, value: Any) -> int:
    """A positive number that may be written as text, as the harness hands it on."""
    text = str(value)
    if isinstance(value, bool) or not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{name}={value!r}: give a positive whole number.")
    return int(text)


def _check_settings(stream: dict[str, Any], tokenizer: Any) -> None:
    if tokenizer is not None:
        raise ValueError("tokenizer goes with model: that of pretrained is in its folder.")
    known = [declared.name for declared in declared_settings() if declared.setting.in_recipe]
    own = [name for name in inspect.signature(StreamedLM.__init__).parameters if name not in ("self", "stream")]
    for name in stream:
        if name not in known:
            close = difflib.get_close_matches(name, known + own, 1)
            mend = f"did you mean {close[0]}?" if close else f"choose out of {', '.join(own + known)}."
            raise ValueError(f"{name} is no setting of the model 'trunkline': {mend}")
