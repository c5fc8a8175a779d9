"""Models that cannot be streamed exactly are refused by name; which those are is found out by asking the model."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import transformers as T
from families import FAMILIES, build
from oracle import check, plain, streamed, tokens
from peft import AdaptionPromptConfig, get_peft_model
from torch import nn
from transformers.models.llama import modeling_llama

import trunkline
from trunkline.forward import StreamedForward

TINY: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def refused(model: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trunkline.stream(model)
    assert "forward" not in model.__dict__


def test_models_without_the_attention_interface_are_refused() -> None:
    config = T.FalconConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    refused(T.FalconForCausalLM(config), "FalconForCausalLM")


def test_state_space_layers_are_refused() -> None:
    config = T.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4)
    refused(T.MambaForCausalLM(config), "MambaForCausalLM")


def test_linear_attention_layers_are_refused() -> None:
    config = T.Qwen3NextConfig(
        **{**TINY, "num_hidden_layers": 4}, head_dim=8, linear_num_key_heads=2, linear_num_value_heads=2,
        linear_key_head_dim=8, linear_value_head_dim=8, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, shared_expert_intermediate_size=16,
    )  # fmt: skip
    refused(T.Qwen3NextForCausalLM(config), "Qwen3NextForCausalLM")


def test_encoders_models_without_head_and_other_modules_are_refused() -> None:
    refused(T.T5ForConditionalGeneration(T.T5Config(vocab_size=97, d_model=32, num_layers=1, d_ff=8)), "encoder")
    refused(build("llama").model, "has no language-model head")
    refused(nn.Linear(2, 2), "Linear is not a transformers model")


def test_a_layer_that_mixes_neighbouring_tokens_is_refused() -> None:
    """A token mixer besides attention is found by comparing numbers, whatever its name."""
    model = build("llama", torch.float32)

    class Shift(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x + nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])

    model.model.layers[1].mlp = Shift(model.model.layers[1].mlp)
    refused(model, "layer 1 .* computes something else in chunks than in one piece")


def test_a_layer_that_takes_the_embedding_is_refused() -> None:
    model = build("llama", torch.float32)
    inner = model.model.rotary_emb

    class Leak(nn.Module):
        def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
            cos, sin = inner(x, position_ids=position_ids)
            return cos + x.mean(), sin

    model.model.rotary_emb = Leak()
    refused(model, "gives its layers more of the embedding than their input")


def test_a_custom_mask_is_refused() -> None:
    """Neither causal nor a window nor chunks: tokens see every other one before them."""
    model = build("llama")
    create = modeling_llama.create_causal_mask

    def every_other(*args: Any, **kwargs: Any) -> Any:
        return create(*args, **kwargs, and_mask_function=lambda b, h, q, kv: (q - kv) % 2 == 0)

    modeling_llama.create_causal_mask = every_other
    try:
        refused(model, "has a mask that is neither causal, nor a sliding window, nor attention chunks")
    finally:
        modeling_llama.create_causal_mask = create


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_rotary_frequencies_that_depend_on_the_length_are_refused(rope: str) -> None:
    parameters: dict[str, Any] = {"rope_type": rope, "rope_theta": 10000.0, "factor": 2.0}
    if rope == "longrope":
        parameters |= {
            "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 32,
        }  # fmt: skip
    model = build("llama", rope_parameters=parameters, max_position_embeddings=32)
    ids = tokens(1, 32)
    expected = plain(model, ids, ids)
    trunkline.stream(model, chunk_size=8)
    check(streamed(model, ids, ids), expected, torch.float64)
    with pytest.raises(ValueError, match=f"rope_type='{rope}'.*beyond 32 tokens"):
        model(input_ids=tokens(1, 33), labels=tokens(1, 33))


def test_more_tokens_than_learned_positions_are_refused() -> None:
    model = trunkline.stream(build("gpt2", n_positions=16), chunk_size=8)
    with pytest.raises(ValueError, match="has 16 learned positions and was given 17 tokens"):
        model(input_ids=tokens(1, 17), labels=tokens(1, 17))


def test_a_window_set_after_the_first_forward_and_positions_that_start_late() -> None:
    model = trunkline.stream(build("mistral"), chunk_size=8)
    model(input_ids=tokens(1, 40), labels=tokens(1, 40))
    model.config.sliding_window = 16
    check(streamed(model, tokens(1, 40), tokens(1, 40)), plain(trunkline.unstream(model), tokens(1, 40), tokens(1, 40)),
          torch.float64)  # fmt: skip
    late = torch.arange(500, 520)[None]
    with pytest.raises(ValueError, match="512 learned positions and was given 520"):
        trunkline.stream(build("gpt2"), chunk_size=8)(input_ids=tokens(1, 20), labels=tokens(1, 20), position_ids=late)


def test_a_custom_loss_function_and_output_flags_are_refused() -> None:
    model = trunkline.stream(build("llama"), chunk_size=8)
    model.loss_function = lambda logits, labels, **kwargs: logits.mean()
    with pytest.raises(ValueError, match="has a loss function of its own"):
        model(input_ids=tokens(1, 20), labels=tokens(1, 20))
    model = trunkline.stream(build("llama"), chunk_size=8)
    model.config.output_hidden_states = True
    with pytest.raises(ValueError, match="output_hidden_states"):
        model(input_ids=tokens(1, 20), labels=tokens(1, 20))


def test_wrappers_that_bypass_or_replace_forward_are_refused() -> None:
    adapted = get_peft_model(
        build("llama", torch.float32),
        AdaptionPromptConfig(adapter_len=2, adapter_layers=1, task_type="CAUSAL_LM"),
    )
    refused_wrapper = pytest.raises(ValueError, match=r"PeftModel.* goes around the model's forward")
    with refused_wrapper:
        trunkline.stream(adapted)
    assert "forward" not in adapted.get_base_model().__dict__ or not isinstance(
        adapted.get_base_model().__dict__["forward"], StreamedForward
    )
    model = build("llama", torch.float32)
    model.forward = partial(model.forward)
    with pytest.raises(ValueError, match="has been replaced"):
        trunkline.stream(model)


def test_attention_dropout_in_training_is_refused() -> None:
    model = trunkline.stream(build("gpt2", attn_pdrop=0.1), chunk_size=8)
    ids = tokens(1, 20)
    with pytest.raises(ValueError, match=r"attention dropout is 0.1 in GPT2Attention.*attn_pdrop"):
        model(input_ids=ids, labels=ids)
    assert torch.isfinite(model.eval()(input_ids=ids, labels=ids).loss)


def test_gradient_checkpointing_and_ddp_are_refused() -> None:
    model = trunkline.stream(build("llama"), chunk_size=8)
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="gradient_checkpointing_disable"):
        model(input_ids=tokens(1, 20), labels=tokens(1, 20))
    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    with pytest.raises(ValueError, match="DistributedDataParallel"):
        trunkline.stream(wrapped)


def test_stream_and_unstream_leave_the_model_as_it_was() -> None:
    model = build("llama")
    before = list(model.__dict__), model.config.to_dict(), model.config._attn_implementation
    random = torch.get_rng_state()
    assert trunkline.stream(model, chunk_size=8) is model
    assert torch.equal(random, torch.get_rng_state())
    assert all(module.training for module in model.modules())
    ids = tokens(1, 20)
    model(input_ids=ids, labels=ids).loss.backward()
    assert trunkline.unstream(model) is model
    assert (list(model.__dict__), model.config.to_dict(), model.config._attn_implementation) == before
    assert model(input_ids=ids).logits.shape == (1, 20, 97)
    with pytest.raises(ValueError, match="is not streamed"):
        trunkline.unstream(model)


def test_a_model_on_the_meta_device_is_accepted_without_comparison() -> None:
    with torch.device("meta"):
        model = T.LlamaForCausalLM(T.LlamaConfig(**TINY))
    trunkline.stream(model)
    trunkline.unstream(model)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_are_accepted(family: str, dtype: torch.dtype) -> None:
    for seed in range(3):
        trunkline.stream(build(family, dtype, seed=seed))


def test_the_auxiliary_loss_of_experts_is_refused() -> None:
    config = T.MixtralConfig(**TINY, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
    refused(T.MixtralForCausalLM(config), "output_router_logits=True, for the auxiliary loss of experts")
