"""Contents of docs/support.md: models that are streamed and refused; test_support_matrix.py tests each row.

python tests/support_matrix.py     writes docs/support.md anew
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers as T
from families import scatter
from transformers import PreTrainedModel

PAGE = Path(__file__).parent.parent / "docs" / "support.md"

_COMMON: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_GPT: dict[str, Any] = {
    "vocab_size": 97, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 512, "bos_token_id": 1, "eos_token_id": 2,
    "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
}  # fmt: skip
_LATENT = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "kv_lora_rank": 8, "q_lora_rank": 8,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1, "num_key_value_heads": 4,
}  # fmt: skip
_LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
_ALTERNATING = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 2}


@dataclass(frozen=True)
class Row:
    """A model that is streamed.

    Attributes:
        family: its name.
        config: the name of transformers' config.
        exercises: what of it a plain causal decoder does not have.
        settings: of the config, beyond a tiny one.
        experts: whether it has experts of which transformers has several implementations.
        dtype: in which it is compared with plain transformers.
        tolerance: of gradients, where some of it is computed in fp32 whatever the dtype.
        rows: of a batch in which each row may have documents of its own.
    """

    family: str
    config: str
    exercises: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    experts: bool = False
    dtype: torch.dtype = torch.float64
    tolerance: float | None = None
    rows: int = 2

    @property
    def name(self) -> str:
        """Name of the class that is streamed."""
        return T.AutoModelForCausalLM._model_mapping[getattr(T, self.config)].__name__

    def build(self, experts: str = "eager", dtype: torch.dtype | None = None) -> PreTrainedModel:
        """A tiny model with random weights, in training mode."""
        torch.manual_seed(0)
        base = _GPT if "n_embd" in self.settings else _COMMON
        implementation = {"experts_implementation": experts} if self.experts else {}
        model = T.AutoModelForCausalLM.from_config(
            getattr(T, self.config)(**{**base, **self.settings}), **implementation
        )
        return scatter(model).to(dtype or self.dtype).train()


_EAGER: dict[str, Any] = {"dtype": torch.float32}  # transformers has it with eager attention alone
ROWS = [
    Row("Llama 1 to 3, and its like", "LlamaConfig"),
    Row("Llama 4 (text)", "Llama4TextConfig",
        "attention chunks, layers without rotary positions, their temperature, experts",
        {"intermediate_size": 24, "intermediate_size_mlp": 48, "num_local_experts": 4, "num_experts_per_tok": 1,
         "head_dim": 8, "attention_chunk_size": 16, "no_rope_layers": [1, 1, 1, 0], "interleave_moe_layer_step": 2,
         "attn_temperature_tuning": True, "floor_scale": 8}, rows=1, dtype=torch.float32),
    Row("Mistral", "MistralConfig", "sliding window", {"sliding_window": 11}),
    Row("Ministral", "MinistralConfig", "sliding window",
        {"sliding_window": 9, "head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    Row("Ministral 3", "Ministral3Config", "YaRN, scaled queries"),
    Row("Mixtral", "MixtralConfig", "experts", {"num_local_experts": 4, "sliding_window": 9}, experts=True),
    Row("Qwen 2 and 2.5", "Qwen2Config", "biases, windows in some layers",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
    Row("Qwen 3", "Qwen3Config", "norms of queries and keys", {"head_dim": 16}),
    Row("Qwen 2 MoE", "Qwen2MoeConfig", "experts, one shared",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1,
         "shared_expert_intermediate_size": 16}, experts=True),
    Row("Qwen 3 MoE", "Qwen3MoeConfig", "experts",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}, experts=True),
    Row("Gemma", "GemmaConfig", "scaled embedding", {"head_dim": 8}, tolerance=1e-6),
    Row("Gemma 2", "Gemma2Config", "soft caps of scores and logits, alternating windows",
        {"head_dim": 8, **_ALTERNATING, "attn_logit_softcapping": 2.0}, **_EAGER),
    Row("Gemma 3 (text)", "Gemma3TextConfig", "windows, two rotary bases, norms of queries and keys",
        {"head_dim": 8, **_ALTERNATING}, tolerance=1e-6),
    Row("Phi", "PhiConfig", "parallel branches, partial rotary"),
    Row("Phi 3 and 4", "Phi3Config", "one projection for queries, keys and values"),
    Row("GPT-2", "GPT2Config", "learned positions", _GPT),
    Row("GPT-J", "GPTJConfig", "parallel branches, rotary by pairs", {**_GPT, "rotary_dim": 4}),
    Row("GPT-NeoX, Pythia", "GPTNeoXConfig", "parallel branches, partial rotary"),
    Row("OLMo 2", "Olmo2Config", "norms after the branches"),
    Row("OLMo 3", "Olmo3Config", "windows", _ALTERNATING),
    Row("OLMoE", "OlmoeConfig", "experts", {"num_experts": 4, "num_experts_per_tok": 2}, experts=True),
    Row("Cohere, Command R", "CohereConfig", "one norm for parallel branches", tolerance=1e-6),
    Row("Cohere 2, Command A", "Cohere2Config", "windows; no rotary in the other layers", _ALTERNATING, tolerance=1e-6),
    Row("StarCoder 2", "Starcoder2Config", "biases, window", {"sliding_window": 9}),
    Row("StableLM", "StableLmConfig", "partial rotary"),
    Row("GLM 4", "Glm4Config", "four norms, rotary by pairs", {"head_dim": 8}),
    Row("GLM 4.5 (MoE)", "Glm4MoeConfig", "experts in groups",
        {"head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1,
         "topk_group": 1, "first_k_dense_replace": 1}, experts=True, dtype=torch.float32),
    Row("Granite", "GraniteConfig", "multipliers, logit scale",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3, "logits_scaling": 2.0}),
    Row("Granite MoE", "GraniteMoeConfig", "experts", {"num_local_experts": 4, "num_experts_per_tok": 2}, experts=True),
    Row("SmolLM 3", "SmolLM3Config", "layers without rotary positions", {"no_rope_layers": [1, 1, 1, 0]}),
    Row("gpt-oss", "GptOssConfig", "attention sinks, alternating windows, experts",
        {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, **_ALTERNATING}, experts=True, **_EAGER),
    Row("DeepSeek V2", "DeepseekV2Config", "latent attention (values of another width), experts", _LATENT,
        experts=True, dtype=torch.float32),
    Row("DeepSeek V3 and R1", "DeepseekV3Config", "latent attention (values of another width), experts", _LATENT,
        experts=True, dtype=torch.float32),
    Row("Nemotron", "NemotronConfig", "layer norms with 1 + weight, squared ReLU"),
    Row("Exaone 4", "Exaone4Config", "windows, norms after the branches",
        {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 2}),
    Row("Hunyuan", "HunYuanDenseV1Config", "norms of queries and keys", {"head_dim": 8}),
    Row("Hunyuan MoE", "HunYuanMoEV1Config", "experts", {"head_dim": 8, "num_experts": 4, "moe_topk": 2}, experts=True),
]  # fmt: skip


@dataclass(frozen=True)
class Refusal:
    """A model that is refused.

    Attributes:
        family: its name.
        config: the name of transformers' config.
        why: for readers.
        message: what the error says, a regular expression.
        settings: of the config, beyond a tiny one.
    """

    family: str
    config: str
    why: str
    message: str
    settings: dict[str, Any] = field(default_factory=dict)

    def build(self) -> PreTrainedModel:
        """A tiny model."""
        base = {} if self.settings.get("alone") else _COMMON
        settings = {key: value for key, value in self.settings.items() if key != "alone"}
        return T.AutoModelForCausalLM.from_config(getattr(T, self.config)(**{**base, **settings}))


_MAMBA = {"mamba_d_state": 4, "mamba_n_groups": 1}
REFUSALS = [
    Refusal("Falcon", "FalconConfig", "does not call transformers' attention interface", "FalconForCausalLM",
            {"alone": True, "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}),
    Refusal("BLOOM", "BloomConfig", "ALiBi; takes no positions", "BloomForCausalLM.forward takes no position_ids",
            {"alone": True, "vocab_size": 97, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    Refusal("MPT", "MptConfig", "ALiBi; takes no positions", "MptForCausalLM.forward takes no position_ids",
            {"alone": True, "vocab_size": 97, "d_model": 32, "n_layers": 2, "n_heads": 4}),
    Refusal("Gemma 3n", "Gemma3nTextConfig", "layers share keys and values, and get embeddings of their own",
            "Gemma3nForCausalLM does not run in chunks",
            {"head_dim": 8, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 97, **_ALTERNATING,
             "hidden_size_per_layer_input": 8, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4}),
    Refusal("Gemma 4", "Gemma4TextConfig", "layers get embeddings of their own", "Gemma4ForCausalLM",
            {"head_dim": 8, "sliding_window": 9}),
    Refusal("Diff-Llama", "DiffLlamaConfig", "attends twice in a layer",
            "DiffLlamaForCausalLM called transformers' attention interface 2 times instead of once"),
    Refusal("Qwen 3 Next", "Qwen3NextConfig", "linear attention", "Qwen3NextForCausalLM has layers without attention",
            {"head_dim": 8, **_LINEAR}),
    Refusal("MiniMax", "MiniMaxConfig", "linear attention", "MiniMaxForCausalLM",
            {"num_local_experts": 4, "block_size": 8}),
    Refusal("Mamba", "MambaConfig", "state space", "MambaForCausalLM",
            {"alone": True, "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
    Refusal("Mamba 2", "Mamba2Config", "state space", "Mamba2ForCausalLM",
            {"alone": True, "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4,
             "num_heads": 4, "head_dim": 16, "n_groups": 1}),
    Refusal("Jamba", "JambaConfig", "state-space layers", "JambaForCausalLM has layers without attention",
            {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
             "use_mamba_kernels": False}),
    Refusal("Bamba", "BambaConfig", "state-space layers", "BambaForCausalLM has layers without attention",
            {**_MAMBA, "mamba_n_heads": 4, "mamba_d_head": 16, "attn_layer_indices": [1, 3]}),
    Refusal("Falcon H1", "FalconH1Config", "a state space beside attention",
            r"FalconH1ForCausalLM computes something else in chunks",
            {**_MAMBA, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_ssm": 32}),
    Refusal("RecurrentGemma", "RecurrentGemmaConfig", "recurrent layers",
            "RecurrentGemmaForCausalLM has layers without attention"),
    Refusal("LFM 2", "Lfm2Config", "convolutions", "Lfm2ForCausalLM has layers without attention",
            {"layer_types": ["conv", "full_attention"] * 2}),
]  # fmt: skip


_INTRODUCTION = """# Models

`python tests/support_matrix.py` writes this page from the table that the tests run: every row is tested. Other
models are streamed, too: `stream` runs each layer on a few tokens, in one piece and in chunks, and compares. A
model that cannot be streamed exactly is refused by name.

## Streamed

The tests build a tiny random model of each family. Its loss and every gradient equal those of plain
transformers, in two chunk sizes, with and without kept attention, and packed documents equal each document
alone. In fp64 the loss agrees to 1e-12 and gradients to 1e-8 (1e-6 where transformers computes a norm in fp32
in any case). Families for which transformers has only eager attention, or a router in fp32, are compared in
fp32, to 1e-5. Models with experts are also tested with each implementation of experts: `eager`, `batched_mm`,
`grouped_mm`.
"""
_REFUSED = """
## Refused

`stream` refuses these models and gives the reason; where it depends on the forward (dropout, kernels), the
first forward does.
"""
_ALSO = """
Refused for every model: attention dropout in training, the auxiliary loss of experts (`output_router_logits`),
rotary frequencies that depend on the length of the input (`dynamic`, `longrope`) beyond the original length,
masks that are neither causal, nor a sliding window, nor attention chunks, left padding and masks with holes in
training, prompt tuning and other adapters that do not call the model's forward.
"""


def page() -> str:
    """Return the text of docs/support.md."""
    lines = [
        _INTRODUCTION,
        "| Family | Class | Special features | Compared in |",
        "| --- | --- | --- | --- |",
    ]
    for row in ROWS:
        compared = "fp32, 1e-5" if row.dtype == torch.float32 else "fp64, 1e-6" if row.tolerance else "fp64, 1e-8"
        more = "; packed documents in one row at a time" if row.rows == 1 else ""
        lines.append(f"| {row.family} | `{row.name}` | {row.exercises}{more} | {compared} |")
    lines += [_REFUSED, "| Family | Why |", "| --- | --- |"]
    lines += [f"| {each.family} | {each.why} |" for each in REFUSALS]
    lines.append(_ALSO)
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
