"""FLOPs against PyTorch's own counter, a published figure, and the definition."""

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from trunkline.hf.flops import UncountedModuleError, attention_flops, linear_flops_per_token, model_flops
from trunkline.train.presets import PRESETS

TINY = {
    "llama": {
        "vocab_size": 101,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
    "gpt2": {"vocab_size": 101, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 64, "attn_pdrop": 0.0},
}


def tiny(kind: str, **more) -> nn.Module:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **TINY[kind], **more))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("tied", [True, False])
def test_linear_flops_equal_the_counter(kind, tied):
    model = tiny(kind, tie_word_embeddings=tied)
    batch_size, seq_len = 2, 24
    ids_BS = torch.randint(0, 101, (batch_size, seq_len))
    # The CPU flash operator is not in the counter's table, so what it counts is the matrix products.
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), FlopCounterMode(display=False) as counter:
        model(input_ids=ids_BS, labels=ids_BS).loss.backward()
    assert counter.get_total_flops() == batch_size * seq_len * linear_flops_per_token(model)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_attention_flops_are_the_lower_triangle_of_the_square(kind):
    model = tiny(kind)
    seq_len = 24
    ids_BS = torch.randint(0, 101, (1, seq_len))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(input_ids=ids_BS, labels=ids_BS).loss.backward()
    square = counter.get_total_flops() - seq_len * linear_flops_per_token(model)
    assert attention_flops(model, seq_len=seq_len) * 2 * seq_len == square * (seq_len + 1)


def test_llama_3_8b_is_the_published_figure():
    config = AutoConfig.for_model(vocab_size=128_256, **PRESETS["llama-3-8b"])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    seq_len = 1 << 20
    per_token = model_flops(model, seq_len=seq_len) / seq_len
    assert linear_flops_per_token(model) == 6 * (8_030_261_248 - 128_256 * 4096 - 65 * 4096)
    assert per_token == pytest.approx(0.0450e12 + 786_432 * seq_len, rel=2e-4)
    assert attention_flops(model, seq_len=seq_len) == 786_432 * seq_len * (seq_len + 1)


def test_frozen_weights_have_no_weight_gradient():
    model = tiny("llama")
    full = linear_flops_per_token(model)
    down = model.model.layers[0].mlp.down_proj.weight.requires_grad_(False)
    assert full - linear_flops_per_token(model) == 2 * down.numel()


@pytest.mark.parametrize("documents", [None, [12], [5, 1, 6], [1] * 12])
@pytest.mark.parametrize("window", [None, 1, 5, 11, 12, 40])
def test_visible_pairs_equal_a_count(window, documents):
    """Windows in one layer of two, and packed documents: proportional to the sum of their squared lengths."""
    kinds = ["full_attention", "sliding_attention" if window else "full_attention"]
    config = AutoConfig.for_model("qwen2", **{**TINY["llama"], "sliding_window": window, "layer_types": kinds},
                                  use_sliding_window=window is not None)  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    numbers = torch.arange(len(documents or [12])).repeat_interleave(torch.tensor(documents or [12]))
    mask = (numbers[:, None] == numbers) & torch.ones(12, 12).tril().bool()
    limited = mask if window is None else mask & torch.ones(12, 12).triu(1 - window).bool()
    expected = 12 * 4 * 16 * int(mask.sum() + limited.sum())
    assert attention_flops(model, seq_len=12, documents=documents) == expected


def test_document_lengths_must_add_up_to_the_sequence():
    with pytest.raises(ValueError, match=r"documents=\[5, 6\]: give lengths .* that are 12 together"):
        model_flops(tiny("llama"), seq_len=12, documents=[5, 6])


def test_experts_count_as_often_as_tokens_use_them():
    """Two of four experts, as the counter counts them where each expert is a product of its own."""
    config = AutoConfig.for_model("mixtral", **TINY["llama"], num_local_experts=4, num_experts_per_tok=2)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    ids_BS = torch.randint(0, 101, (1, 24))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), FlopCounterMode(display=False) as counter:
        model(input_ids=ids_BS, labels=ids_BS).loss.backward()
    assert counter.get_total_flops() == 24 * linear_flops_per_token(model)


def test_values_of_another_width_than_keys():
    config = AutoConfig.for_model("deepseek_v3", **{**TINY["llama"], "num_key_value_heads": 4, "head_dim": None},
                                  qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6, n_routed_experts=4,
                                  n_group=1, topk_group=1, num_experts_per_tok=2)  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    assert attention_flops(model, seq_len=10) == 6 * 4 * (12 + 6) * 2 * 55


def test_windows_of_layers_are_counted():
    config = AutoConfig.for_model(
        "gemma2",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=8,
    )
    model = AutoModelForCausalLM.from_config(config)
    assert sorted(config.layer_types) == ["full_attention", "sliding_attention"]
    assert attention_flops(model, seq_len=32) == 12 * 2 * 16 * (32 * 33 // 2 + 32 * 33 // 2 - 24 * 25 // 2)


def test_batches_multiply_and_bad_sizes_are_refused():
    model = tiny("llama")
    assert model_flops(model, seq_len=10, batch_size=3) == 3 * model_flops(model, seq_len=10)
    with pytest.raises(ValueError, match="seq_len=0"):
        model_flops(model, seq_len=0)
    with pytest.raises(ValueError, match="batch_size=-1"):
        model_flops(model, seq_len=4, batch_size=-1)


def test_matrices_outside_linear_layers_are_refused_not_guessed():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.down = nn.Parameter(torch.zeros(4, 8, 8))

    with pytest.raises(UncountedModuleError, match=r"'0' \(Experts\).*'down' of shape \(4, 8, 8\)"):
        linear_flops_per_token(nn.Sequential(Experts()))
