"""`stream` and `unstream`: a Hugging Face model whose forward and backward run in chunks, in place."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from trunkline import engine, inputs, support
from trunkline.config import Progress, StreamConfig
from trunkline.huggingface import HuggingFaceDecoder

M = TypeVar("M", bound=nn.Module)


def stream(
    model: M,
    *,
    chunk_size: int | Literal["auto"] = "auto",
    keep: Iterable[str] = ("attention",),
    head_bytes: int = 64 * 2**20,
    kernel: str = "auto",
    progress: Callable[[Progress], None] | None = None,
) -> M:
    """Make a decoder-only model run its forward and backward in chunks of the sequence, in place.

    The model stays what it is: its class, parameters, config, `save_pretrained`, PEFT and `Trainer` keep working.
    `model(input_ids=ids, labels=labels).loss` is transformers' loss, and `loss.backward()` leaves the gradients of
    plain autograd in `.grad`. Streaming a streamed model replaces its settings.

    Args:
        model: a transformers causal language model, or a PEFT model around one.
        chunk_size: tokens of the global sequence in a chunk, any positive number; `auto` chooses by device.
        keep: what stays in memory between forward and backward, out of `attention` and `kv`; see `StreamConfig`.
        head_bytes: most bytes of fp32 logits that exist at once.
        kernel: attention kernel, `auto` or one of `cpu_flash`, `cuda_flash`, `math`.
        progress: called with a `Progress` before each chunk's work is issued.

    Returns:
        `model`.

    Raises:
        ValueError: a setting is out of range, or the model computes something that cannot be streamed exactly.
    """
    config = StreamConfig(
        chunk_size=chunk_size, keep=frozenset([keep] if isinstance(keep, str) else keep), head_bytes=head_bytes,
        kernel=kernel, progress=progress,
    )  # fmt: skip
    base = _base(model)
    if isinstance(base.__dict__.get("forward"), StreamedForward):
        unstream(model)
    decoder = HuggingFaceDecoder(base)
    support.verify(decoder)
    base.forward = StreamedForward(decoder, config)
    return model


def unstream(model: M) -> M:
    """Undo `stream`: the model runs its own forward again.

    Raises:
        ValueError: the model is not streamed.
    """
    base = _base(model)
    streamed = base.__dict__.get("forward")
    if not isinstance(streamed, StreamedForward):
        raise ValueError(f"{type(base).__name__} is not streamed: there is nothing to undo.")
    del base.forward
    if streamed.replaced is not None:
        base.forward = streamed.replaced
    return model


def _base(model: nn.Module) -> PreTrainedModel:
    """The transformers model itself, without PEFT's wrappers."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise ValueError(
            "the model is wrapped in DistributedDataParallel, whose reduction runs before a streamed backward is done: "
            "pass the model itself."
        )
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    if not isinstance(base, PreTrainedModel):
        raise ValueError(
            f"{type(model).__name__} is not a transformers model: give stream() a causal language model from "
            "transformers, or a PEFT model around one."
        )
    return base


class StreamedForward:
    """A model's `forward` while it is streamed: transformers' signature and semantics, in chunks.

    An object rather than a closure, so that a deep copy of the model streams the copy.
    """

    def __init__(self, decoder: HuggingFaceDecoder, config: StreamConfig) -> None:
        self.decoder = decoder
        self.config = config
        self.replaced = decoder.model.__dict__.get("forward")  # what an instance attribute had put there before us
        self.__signature__ = inspect.signature(decoder.model.forward)
        self._plain_up_to = 0  # tokens up to which the model is known to be plainly causal

    def __call__(self, *args: Any, **kwargs: Any) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Forward in chunks.

        Takes what the model's own forward takes: `input_ids` (B, S), and optionally `labels` (B, S, unshifted) or
        `shift_labels` (B, S), `num_items_in_batch`, `position_ids`, a right-padded `attention_mask`, and without labels
        `logits_to_keep`.

        Returns:
            With labels the loss, fp32 (fp64 for an fp64 model): the mean over all tokens whose label is not -100, or
            their sum over `num_items_in_batch`; 0 where there is none. Logits are not returned: they never exist as a
            whole. Without labels the logits of the last position (B, 1, V), or of the last `logits_to_keep`.

        Raises:
            ValueError: an argument is of the wrong shape or not supported; the text names it and the mend.
        """
        model = self.decoder.model
        if model.training and any(getattr(layer, "gradient_checkpointing", False) for layer in self.decoder.layers):
            raise ValueError(
                f"{type(model).__name__} has gradient checkpointing on; streaming already recomputes what it needs: "
                "call model.gradient_checkpointing_disable() (gradient_checkpointing=False in TrainingArguments)."
            )
        given = self.__signature__.bind(*args, **kwargs).arguments
        for parameter in self.__signature__.parameters.values():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                given |= given.pop(parameter.name, {})
        wanted = inputs.read(given, type(model).__name__, model.get_input_embeddings().weight.shape[0])
        seq_len = wanted.batch.input_ids_BS.shape[1]
        if seq_len > self._plain_up_to:
            support.check_length(self.decoder, seq_len)
            self._plain_up_to = seq_len
        run, differentiate = engine.forward(self.decoder, self.config, wanted.batch, model)
        loss: Tensor | None = None
        logits: Tensor | None = None
        if wanted.batch.targets_BS is not None:
            loss = engine.loss(run, differentiate=differentiate)
        else:
            logits = engine.last_logits(run, wanted.logits_to_keep)
        output = CausalLMOutputWithPast(loss=loss, logits=logits)
        return output if wanted.return_dict else output.to_tuple()
