"""Presets and configs: sizes, positions, vocabulary, what survives export."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from trunkline.data import load_encoder
from trunkline.train.build_model import build_config, build_model, tokenizer_spec
from trunkline.train.load_recipe import RecipeError
from trunkline.train.presets import PRESETS
from trunkline.train.recipe import Recipe
from trunkline.utils.devices import parse_device

BYTES = load_encoder("bytes")
CPU = torch.device("cpu")
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
VOCABULARY = {"llama": 128_256, "gpt2": 50_257, "qwen2": 151_936, "qwen3": 151_936}


def recipe(model: dict, context: int = 64, **more) -> Recipe:
    return Recipe.model_validate(
        {"model": model, "data": {"files": ["stdlib"]}, "context": context, "steps": 1, "output": "o", **more}
    )


def meta_counts(name: str, vocab_size: int) -> tuple[int, int]:
    """All parameters, and those outside the embedding tables."""
    config = AutoConfig.for_model(vocab_size=vocab_size, **PRESETS[name])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tables = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Embedding))
    total = sum(parameter.numel() for parameter in model.parameters())
    return total, total - tables


@pytest.mark.parametrize(
    ("name", "count"),
    [
        # As published with the checkpoints.
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-8b", 8_190_735_360),
    ],
)
def test_sizes_of_released_models(name, count):
    assert meta_counts(name, VOCABULARY[PRESETS[name]["model_type"]])[0] == count


def test_size_of_qwen25_7b_with_its_padded_vocabulary():
    assert meta_counts("qwen2.5-7b", 152_064)[0] == 7_615_616_512


@pytest.mark.parametrize(
    ("name", "layers", "billions"),
    [("gpt-1.2b", 24, 1.2), ("gpt-2.7b", 32, 2.5), ("gpt-7b", 32, 6.4), ("gpt-13b", 40, 12.6), ("gpt-30b", 40, 28.3)],
)
def test_sizes_of_the_gpts(name, layers, billions):
    fields = PRESETS[name]
    _, outside_tables = meta_counts(name, 50_257)
    width = fields["n_embd"]
    # Twelve E² a layer, and its thirteen vectors; the final norm.
    assert outside_tables == layers * (12 * width**2 + 13 * width) + 2 * width
    assert round(outside_tables / 1e9, 1) == billions
    assert fields["n_layer"] == layers
    assert width % fields["n_head"] == 0
    assert (width // fields["n_head"]) % 8 == 0
    assert fields["attn_pdrop"] == 0.0


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_takes_vocabulary_and_positions_from_the_recipe(name):
    config = build_config(recipe({"preset": name}, context=300_000), BYTES)
    assert config.vocab_size == 258
    assert (config.eos_token_id, config.pad_token_id, config.bos_token_id) == (256, 257, None)
    assert config.max_position_embeddings == 300_000


def test_a_position_table_is_as_long_as_the_context_and_a_rotary_limit_never_shrinks():
    assert build_config(recipe({"preset": "gpt-1.2b"}, context=64), BYTES).n_positions == 64
    assert build_config(recipe({"preset": "tiny-llama"}, context=64), BYTES).max_position_embeddings >= 64


def test_fresh_weights_follow_seed_and_dtype():
    def weights(seed: int, dtype: str) -> torch.Tensor:
        made = recipe({"preset": "tiny-llama", "dtype": dtype}, seed=seed)
        model = build_model(made, build_config(made, BYTES), CPU)
        assert model.training
        return model.get_input_embeddings().weight.detach()

    assert weights(1, "float32").equal(weights(1, "float32"))
    assert not weights(1, "float32").equal(weights(2, "float32"))
    assert weights(1, "bfloat16").dtype == torch.bfloat16


def test_overrides_reach_the_config_under_either_name():
    config = build_config(recipe({"preset": "tiny-llama", "overrides": SMALL}), BYTES)
    assert (config.hidden_size, config.num_hidden_layers, config.head_dim) == (32, 2, 32)
    config = build_config(
        recipe({"preset": "gpt-1.2b", "overrides": {"num_hidden_layers": 2, "n_embd": 64, "n_head": 4}}), BYTES
    )
    assert (config.n_layer, config.hidden_size) == (2, 64)
    # A head width that only follows from the others follows them.
    config = build_config(recipe({"preset": "llama-3-8b", "overrides": SMALL}), BYTES)
    assert config.head_dim == 16


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"hiden_size": 3},
            r"model\.overrides\.hiden_size: a llama config has no such field\. Did you mean 'hidden_size'",
        ),
        ({"hidden_size": "wide"}, r"model\.overrides: .*'hidden_size' expected int.*Correct that field"),
        ({"num_attention_heads": 3}, r"model\.overrides: .*not a multiple of the number of attention heads"),
        ({"rope_scaling": {}}, r"model\.overrides\.rope_scaling: .*no such field"),
        (
            {"max_position_embeddings": 32},
            r"context: 64 tokens \(global\) is more than the 32 positions.*Set context to 32",
        ),
        ({"vocab_size": 100}, r"data\.tokenizer: its largest id is 257, but the model has a vocabulary of 100"),
    ],
)
def test_wrong_overrides_name_the_mend(overrides, message):
    with pytest.raises(RecipeError, match=message):
        build_config(recipe({"preset": "tiny-llama", "overrides": overrides}), BYTES)


def test_an_unknown_rotary_type_is_the_recipes_fault():
    made = recipe({"preset": "tiny-llama", "overrides": {"rope_parameters": {"rope_type": "nope"}}})
    with pytest.raises(RecipeError, match=r"model\.overrides: a llama model cannot be made with them"):
        build_model(made, build_config(made, BYTES), CPU)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Folders with a small rotary model and a small one with a position table, 64 positions each."""
    folder = tmp_path_factory.mktemp("models")
    for name, preset, overrides in [
        ("llama", "llama-3-8b", {**SMALL, "max_position_embeddings": 64, "num_key_value_heads": 1}),
        ("gpt2", "gpt-1.2b", {"n_embd": 32, "n_layer": 1, "n_head": 2}),
    ]:
        made = recipe({"preset": preset, "dtype": "float32", "overrides": overrides})
        build_model(made, build_config(made, BYTES), CPU).save_pretrained(folder / name)
        BYTES.tokenizer.save_pretrained(folder / name)
    return folder


def test_stored_weights_come_back(stored):
    made = recipe({"path": str(stored / "llama"), "dtype": "float32"})
    assert tokenizer_spec(made) == str(stored / "llama")
    assert tokenizer_spec(recipe({"preset": "tiny-llama"})) == "bytes"
    model = build_model(made, build_config(made, load_encoder(tokenizer_spec(made))), CPU)
    reference = AutoModelForCausalLM.from_pretrained(stored / "llama", dtype=torch.float32)
    assert all(a.equal(b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


def test_a_longer_context_than_the_models_is_refused_until_positions_are_set(stored, tmp_path):
    path = str(stored / "llama")
    with pytest.raises(RecipeError, match=r"256 tokens \(global\) is more than the 64 positions.*yarn.*saved with"):
        build_config(recipe({"path": path}, context=256), BYTES)
    scaled = {"max_position_embeddings": 256, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}}
    made = recipe({"path": path, "overrides": scaled, "dtype": "float32"}, context=256)
    model = build_model(made, build_config(made, BYTES), CPU)
    model.save_pretrained(tmp_path)
    exported = AutoConfig.from_pretrained(tmp_path)
    # The base and the original length are the stored model's, not the class's defaults.
    assert exported.rope_parameters | {} == exported.rope_parameters
    assert exported.rope_parameters["rope_type"] == "yarn"
    assert exported.rope_parameters["factor"] == 4.0
    assert exported.rope_parameters["rope_theta"] == 500_000.0
    assert exported.rope_parameters["original_max_position_embeddings"] == 64
    assert exported.max_position_embeddings == 256


def test_a_position_table_cannot_be_lengthened(stored):
    path = str(stored / "gpt2")
    with pytest.raises(
        RecipeError, match=r"more than the 64 positions this model is made for\. Set context to 64 or less\.$"
    ):
        build_config(recipe({"path": path}, context=128), BYTES)
    with pytest.raises(RecipeError, match=r"learned table of 64 positions, which cannot be lengthened"):
        build_config(recipe({"path": path, "overrides": {"n_positions": 128}}, context=128), BYTES)


def test_wrong_model_folders_are_told(stored, tmp_path):
    with pytest.raises(RecipeError, match=r"model\.path: '.*' is not a Hugging Face model folder.*not downloaded"):
        build_config(recipe({"path": "meta/llama"}), BYTES)
    made = recipe({"path": str(stored / "llama"), "overrides": {"intermediate_size": 40}})
    with pytest.raises(RecipeError, match=r"model\.path: the weights in .* cannot be loaded"):
        build_model(made, build_config(made, BYTES), CPU)
    (tmp_path / "config.json").write_text((stored / "llama/config.json").read_text())
    made = recipe({"path": str(tmp_path)})
    with pytest.raises(RecipeError, match=r"model\.path: the weights in .* cannot be loaded"):
        build_model(made, build_config(made, BYTES), CPU)
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    with pytest.raises(RecipeError, match=r"is of no model that transformers knows"):
        build_config(made, BYTES)
    deeper = recipe({"path": str(stored / "llama"), "overrides": {"num_hidden_layers": 3}})
    with pytest.raises(RecipeError, match=r"has no weights for 9 parameters"):
        build_model(deeper, build_config(deeper, BYTES), CPU)


def test_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert parse_device("auto") == CPU
    assert parse_device("cpu") == CPU
    with pytest.raises(ValueError, match=r"device='cuda:1' is not there.*sees 0 CUDA devices"):
        parse_device("cuda:1")
