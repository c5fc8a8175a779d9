"""The `forward` of a streamed model: transformers' signature and semantics, in chunks."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from trunkline.config import StreamConfig
from trunkline.engine import documents, sweeps
from trunkline.engine.batch import Batch
from trunkline.engine.loss import last_logits, mean_loss, token_scores
from trunkline.engine.ranks import Agreement, Ranks
from trunkline.engine.replay import ReplayContext, draw_seed
from trunkline.engine.setup import begin_step
from trunkline.engine.step import StepState
from trunkline.hf import inputs, probe
from trunkline.hf.compile import is_under_compile
from trunkline.hf.decoder import HuggingFaceDecoder
from trunkline.kv_cache import cache_inputs
from trunkline.kv_cache.cache import StreamedCache
from trunkline.kv_cache.extend import NewTokens, extend
from trunkline.offload.backends import tiers_for
from trunkline.offload.stores import Tiers

_CACHE_FIELD = next(
    f.name for f in dataclasses.fields(CausalLMOutputWithPast) if f.name in cache_inputs.CACHE_ARGUMENTS
)


class StreamedForward:
    """Forward of a streamed model, set as `model.forward`.

    It is an object rather than a closure, so that a deep copy of the model streams the copy.

    Attributes:
        decoder: the model in pieces.
        config: settings.
        ranks: ranks that share the sequence.
        calls: number of calls of the model so far, those over a cache included.
    """

    def __init__(self, decoder: HuggingFaceDecoder, config: StreamConfig, ranks: Ranks) -> None:
        self.decoder = decoder
        self.config = config
        self.ranks = ranks
        self.calls = 0
        self._num_parameters = sum(1 for _ in decoder.model.parameters())
        self._verified = decoder.device.type != "meta"  # a model without values is verified at its first forward
        self._tiers: Tiers | None = None
        self._tiers_device: torch.device | None = None
        own = inspect.signature(decoder.model.forward)
        # Trainer drops the columns of a dataset that are no argument of the model's forward.
        more = inspect.Parameter("document_ids", inspect.Parameter.KEYWORD_ONLY, default=None)
        kept = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        rest = [p for p in own.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
        self.__signature__ = own.replace(parameters=[*kept, more, *rest])

    def __getstate__(self) -> dict[str, Any]:
        """Return all but the tiers: a copy of the model has its own."""
        return {**self.__dict__, "_tiers": None}

    @property
    def tiers(self) -> Tiers:
        """Tiers of the model on the device where it is now; new ones after the model has moved to another device."""
        device = self.decoder.device
        if self._tiers is None or self._tiers_device != device:
            config, self._tiers_device = self.config, device
            self._tiers = tiers_for(device, config.budgets, config.offload_dir, config.prefetch)
        return self._tiers

    def __call__(self, *args: Any, **kwargs: Any) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Run the forward in chunks.

        Args:
            args: arguments of the model's own forward.
            kwargs: the same by name: `input_ids` (B, S), and optionally `labels` (B, S, unshifted) or `shift_labels`
                (B, S), `num_items_in_batch`, `position_ids`, a right-padded `attention_mask`, and without labels
                `logits_to_keep`. `position_ids` that begin at 0 again mark packed documents; so do `document_ids`
                (B, S), a number for each token's document, and `cu_seq_lens_q` or `seq_idx` of packing collators.
                Documents never attend to each other, and the last token of a document has no target; `shift_labels` are
                taken as they are. Without labels a cache (`past_key_values`, or `use_cache=True` for a new one) is
                extended by the tokens; see `extend`.

        Returns:
            transformers' output, or a tuple with `return_dict=False`. With labels it has the loss, fp32 (fp64 for an
            fp64 model): the mean over all tokens whose label is not -100, or their sum over `num_items_in_batch`; 0
            where there is none. Ranks that share a sequence all get its loss; replicas each get their own. Logits are
            not returned: those of the whole sequence never exist. Without labels it has the logits of the last position
            (B, 1, V), or of the last `logits_to_keep`.

        Raises:
            ValueError: an argument is of the wrong shape or not supported, the model is trained without labels, ranks
                that must agree were given different inputs, or the step does not fit in the budgets. The text names
                the fix.
        """
        self._refuse_changes()
        self.calls += 1
        given = self._by_name(args, kwargs)
        cache = cache_inputs.take_cache(given, type(self.decoder.model).__name__, self.new_cache)
        if cache is not None:
            return self.extend(given, cache, again=True)
        for flag in ("output_hidden_states", "output_attentions", "output_router_logits"):
            if given.get(flag) is None:
                given[flag] = getattr(self.decoder.model.config, flag, None)
        loss: Tensor | None = None
        logits: Tensor | None = None
        with self._step(given) as (state, differentiable, wanted):
            sweeps.forward(state, differentiable=differentiable)
            if state.batch.targets is not None:
                loss = mean_loss(state, differentiable=differentiable)
            else:
                logits = last_logits(state, wanted.logits_to_keep)
        output = CausalLMOutputWithPast(loss=loss, logits=logits)
        return output if wanted.return_dict else output.to_tuple()

    @torch.no_grad()
    def score(self, **given: Any) -> Tensor:
        """Score how well each token is predicted by the tokens before it, in one forward without gradients.

        Args:
            given: arguments of a forward by name, with labels.

        Returns:
            (2, B, S), fp32, on every rank: log probability of each position's target (the label of the token that
            follows), and 1 where it is the likeliest token; 0 where there is no target. S is without columns that are
            padding in every row.
        """
        with self._step(given) as (state, differentiable, _):
            sweeps.forward(state, differentiable=differentiable)
            return token_scores(state)

    @contextlib.contextmanager
    def _step(self, given: dict[str, Any]) -> Iterator[tuple[StepState, bool, inputs.ForwardInputs]]:
        """Check the arguments of a forward with all ranks, and begin a step.

        Yield its state, whether it is differentiable, and the checked inputs. Run the forward within the `with`.
        """
        wanted, agreement = self._agree(given)
        batch = wanted.batch
        if agreement.num_targets is not None and given.get("num_items_in_batch") is None:
            batch = replace(batch, divisor=agreement.num_targets)
        self._verify_once()
        replay = ReplayContext(self.decoder.model, batch.input_ids_BS.device, agreement.seed, self.ranks.seed_offset)
        self.decoder.begin()
        with self.ranks.guard(), self.decoder.lock, self.decoder.unsharded(None):
            probe.check_length(self.decoder, batch.last_position)
            spans = probe.attention_spans(self.decoder)
            yield *begin_step(self.decoder, self.config, batch, replay, self.tiers, self.ranks, spans), wanted

    # -- caches --------------------------------------------------------------------------------------------------------

    def extend(self, given: dict[str, Any], cache: StreamedCache | None, *, again: bool = False) -> Any:
        """Run a forward without labels that reads new tokens over a cache, and appends their keys and values to it.

        Args:
            given: arguments by name, without the cache; see `trunkline.kv_cache.cache_inputs`.
            cache: cache of this model, which is extended in place; None for a new one.
            again: allow the tokens of the cache and no others: then the logits of its last token are computed again.

        Returns:
            transformers' output, with logits of the last positions (B, n, V) and the cache.

        Raises:
            ValueError: the model is in training mode, or an argument is not supported. After this or any other error
                the cache holds what it held before.
        """
        if cache is None:
            cache = self.new_cache()
        ids_BS = given.get("input_ids")
        if cache.length and isinstance(ids_BS, Tensor) and ids_BS.ndim == 2 and not ids_BS.shape[1]:
            raise ValueError(
                f"input_ids has no tokens after the {cache.length:,} of the cache: model.generate takes all tokens, "
                "the cache's first; trunkline.generate(model, ids, cache=cache) takes the tokens that follow the cache."
            )
        before = cache.snapshot()
        try:
            logits = self._extend(given, cache, again=again)
        except BaseException:
            cache.rollback(before)
            raise
        output = CausalLMOutputWithPast(logits=logits, **{_CACHE_FIELD: cache})
        return output if given.get("return_dict") is not False else output.to_tuple()

    def _extend(self, given: dict[str, Any], cache: StreamedCache, *, again: bool) -> Tensor:
        model, tiers = self.decoder.model, self.tiers
        new_tokens: list[NewTokens] = []

        def read() -> tuple[Batch, str]:
            nonlocal given
            if model.training:
                raise ValueError("a cache is filled in training mode, with dropout on: call model.eval() before.")
            if cache.tiers is not tiers:
                raise ValueError("this cache is another model's, or of other settings of stream(): prefill it anew.")
            given = _last_token_again(given, cache) if again else given
            new_tokens.append(cache_inputs.read_new_tokens(given, type(model).__name__, self._num_embeddings, cache))
            self._check_device(new_tokens[0].batch.input_ids_BS)
            kind = ("cache", cache.length, new_tokens[0].logits_to_keep, self.config.decisive)
            return new_tokens[0].batch, repr(kind)

        _, agreement = self.ranks.agree(read, 0)  # no seed is drawn: sampling from the logits is not disturbed
        self._verify_once()
        replay = ReplayContext(model, new_tokens[0].batch.input_ids_BS.device, agreement.seed, self.ranks.seed_offset)
        self.decoder.begin()
        with self.ranks.guard(), self.decoder.lock, self.decoder.unsharded(None):
            probe.check_length(self.decoder, new_tokens[0].batch.last_position)
            return extend(self.decoder, self.config, self.ranks, replay, cache, new_tokens[0])

    def new_cache(self) -> StreamedCache:
        """Return an empty cache for this model."""
        gather = self.ranks.kv_gather
        part = (0, 1) if gather is None else (gather.rank, gather.size)
        cache = StreamedCache(self.tiers, self.decoder.num_layers, part)
        cache.max_merged_tokens = self.config.chunk_tokens(self.decoder.device)
        with self.decoder.lock, self.decoder.unsharded(None):
            cache.attention_spans = probe.attention_spans(self.decoder)
        return cache

    # -- checks --------------------------------------------------------------------------------------------------------

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Bind the arguments of a forward to their names."""
        model = self.decoder.model
        if args and args[0] is model:  # accelerate makes a method of the function below its wrappers
            args = args[1:]
        packing = {name: kwargs.pop(name) for name in documents.ARGUMENTS if name in kwargs}
        given = self.__signature__.bind(*args, **kwargs).arguments | packing
        for parameter in self.__signature__.parameters.values():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                given |= given.pop(parameter.name, {})
        return given

    def _agree(self, given: dict[str, Any]) -> tuple[inputs.ForwardInputs, Agreement]:
        """Check the arguments of a forward together with all other ranks, before the first sweep; draw the seed."""
        wanted: list[inputs.ForwardInputs] = []

        def read() -> tuple[Batch, str]:
            wanted.append(self._read(given))
            batch, device = wanted[0].batch, self.decoder.device.type
            # Everything that decides which collectives follow.
            kind = [
                batch.targets is not None,
                torch.is_grad_enabled(),
                self.config.decisive,
                torch.is_autocast_enabled(device),
                torch.get_autocast_dtype(device),
                None if given.get("num_items_in_batch") is None else float(batch.num_targets or 0),
            ]
            return batch, repr(kind)

        _, agreement = self.ranks.agree(read, draw_seed())
        return wanted[0], agreement

    def _read(self, given: dict[str, Any]) -> inputs.ForwardInputs:
        """Check the arguments of a forward, as far as this rank alone can."""
        model = self.decoder.model
        if model.training and any(getattr(layer, "gradient_checkpointing", False) for layer in self.decoder.layers):
            raise ValueError(
                f"{type(model).__name__} has gradient checkpointing on; streaming already recomputes activations: "
                "call model.gradient_checkpointing_disable() (gradient_checkpointing=False in TrainingArguments)."
            )
        wanted = inputs.read(given, type(model).__name__, self._num_embeddings)
        self._check_device(wanted.batch.input_ids_BS)
        if wanted.batch.targets is None and model.training and torch.is_grad_enabled():
            raise ValueError(
                "no labels in training: logits of the whole sequence never exist, so there is nothing to "
                "differentiate. Pass labels (Trainer takes them away for label_smoothing_factor and "
                "compute_loss_func: leave these out); for the last logits use model.eval() or torch.no_grad()."
            )
        if wanted.batch.targets is not None:
            probe.check_loss(self.decoder)
        return wanted

    @property
    def _num_embeddings(self) -> int:
        """Number of token embeddings of the model."""
        count: int = self.decoder.model.get_input_embeddings().weight.shape[0]
        return count

    def _check_device(self, ids_BS: Tensor) -> None:
        if ids_BS.device != self.decoder.device:
            raise ValueError(
                f"input_ids are on {ids_BS.device} and the model is on {self.decoder.device}: a streamed model is one "
                "process and one device. Move the input; under torch.nn.DataParallel, which Trainer uses where it sees "
                "several devices, let it see one (CUDA_VISIBLE_DEVICES=0)."
            )

    def _verify_once(self) -> None:
        """Compare the pieces of a model with the model itself, if it had no values when it was streamed."""
        if self._verified or self.decoder.device.type == "meta":
            return
        self._verified = True
        model = self.decoder.model
        del model.forward
        try:
            if self.decoder.own_forward is not None:
                model.forward = self.decoder.own_forward
            with self.ranks.guard():
                probe.verify(self.decoder)
        finally:
            model.forward = self

    def _refuse_changes(self) -> None:
        """Refuse changes to the model since `stream` that would go wrong silently.

        Raises:
            ValueError: the model runs under torch.compile, or parameters were added that differ between ranks.
        """
        model = self.decoder.model
        if is_under_compile() or model._compiled_call_impl is not None:
            raise ValueError(
                f"{type(model).__name__} runs under torch.compile, which would trace every sweep into one graph: pass "
                "compile=True to stream() instead, which compiles its layers (in TrainingArguments leave torch_compile "
                "off)."
            )
        count = sum(1 for _ in model.parameters())
        if count != self._num_parameters:  # adapters were added, perhaps drawn at random on each rank
            self.ranks.require_same_weights(model)
            self._num_parameters = count


def _last_token_again(given: dict[str, Any], cache: StreamedCache) -> dict[str, Any]:
    """Replace the arguments of a forward that has the tokens of the cache and no others; return others as they are.

    transformers' `generate` passes all tokens then, as if they were new, and asks for the last logits. The cache then
    forgets its last token, which is run again: the first new token is drawn from its logits.
    """
    ids_BS = given.get("input_ids")
    if given.get("logits_to_keep") != 1 or not isinstance(ids_BS, Tensor) or ids_BS.ndim != 2:
        return given
    if ids_BS.shape[1] != cache.length or cache.length < 2 or not torch.equal(ids_BS.cpu(), cache.tokens):
        return given
    cache.rewind()
    return {**given, "input_ids": ids_BS[:, -1:], "position_ids": None, "attention_mask": None}
