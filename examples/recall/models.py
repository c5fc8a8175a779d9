"""Model, and the three ways to train it.

The model is a small Exaone 4: one layer with a window of 4 tokens and rotary positions, and one layer with full
attention and no positions. The first layer copies a key into the value beside it; the second finds that value at any
distance. The second has no positions, so skills learned on short sequences carry over to long ones.
"""

from __future__ import annotations

import torch
from cut import register
from task import VOCAB_SIZE, chunk_size_of
from torch import Tensor
from transformers import Exaone4Config, Exaone4ForCausalLM, PreTrainedModel

import trunkline

VARIANTS = {
    "full": "streamed: every chunk sees all before it, and all gradients flow",
    "own-chunk": "streamed, but a chunk sees itself only",
    "cut": "every chunk sees all before it, but no gradient flows back into earlier keys and values",
}


def build(seed: int) -> PreTrainedModel:
    """Build a model with random weights: 160K parameters in float32."""
    torch.manual_seed(seed)
    config = Exaone4Config(
        vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=1,
        num_key_value_heads=1, head_dim=64, sliding_window=4, layer_types=["sliding_attention", "full_attention"],
        max_position_embeddings=1 << 20, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return Exaone4ForCausalLM(config)


class Learner:
    """Model trained in one of the three ways, on one length at a time.

    Args:
        model: from `build`; changed in place.
        variant: one of `VARIANTS`.
        widen: size of chunks as a multiple of the tokens of the questions; above 1, the last chunk holds pairs, too.

    Raises:
        ValueError: there is no such variant, or `widen` is below 1.
    """

    def __init__(self, model: PreTrainedModel, variant: str, widen: int = 1) -> None:
        if variant not in VARIANTS:
            raise ValueError(f"variant={variant!r}: give one of {', '.join(VARIANTS)}.")
        if widen < 1:
            raise ValueError(f"widen={widen}: give 1 or more.")
        self.model = model
        self.variant = variant
        self.widen = widen

    def set_length(self, length: int) -> None:
        """Prepare the model for sequences of a length; the last chunk holds the questions."""
        chunk_size = self._chunk_size(length)
        if self.variant == "cut":
            self.model.set_attn_implementation(register(chunk_size))
        else:
            trunkline.stream(self.model, chunk_size=chunk_size)

    def loss(self, ids_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Compute the mean loss over answers."""
        loss: Tensor = self.model(
            input_ids=ids_BS, labels=targets_BS, shift_labels=targets_BS, use_cache=False, **self._seen(ids_BS)
        ).loss
        return loss

    @torch.no_grad()
    def answers(self, ids_BS: Tensor) -> Tensor:
        """Return the most likely answer to each question: tokens (B, P)."""
        asked = chunk_size_of(ids_BS.shape[1])
        logits = self.model(input_ids=ids_BS, logits_to_keep=asked, use_cache=False, **self._seen(ids_BS)).logits
        return logits[:, ::2].argmax(-1)

    def _seen(self, ids_BS: Tensor) -> dict[str, Tensor]:
        """Return inputs that make each chunk a document of its own; positions go on, so that nothing else differs."""
        if self.variant != "own-chunk":
            return {}
        positions = torch.arange(ids_BS.shape[1])[None]
        return {"document_ids": positions // self._chunk_size(ids_BS.shape[1]), "position_ids": positions}

    def _chunk_size(self, length: int) -> int:
        return self.widen * chunk_size_of(length)
