"""Recipes: accepted values and names, and the message for each mistake."""

from pathlib import Path

import pytest
import yaml

from trunkline.train.load_recipe import ALIASES, RecipeError, dump_recipe, load_recipe, recipe_fields
from trunkline.train.recipe import Recipe

BASE = {
    "model": {"preset": "tiny-llama"},
    "data": {"files": ["stdlib"]},
    "context": 1024,
    "steps": 10,
    "output": "runs/x",
}


def load(tmp_path: Path, content: dict | str, *overrides: tuple[str, str], notices: list[str] | None = None) -> Recipe:
    path = tmp_path / "recipe.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return load_recipe(path, overrides, notice=(notices if notices is not None else []).append)


def changed(**more) -> dict:
    return {**BASE, **more}


def without(name: str) -> dict:
    return {key: value for key, value in BASE.items() if key != name}


def test_defaults(tmp_path):
    recipe = load(tmp_path, BASE)
    assert recipe.model.dtype == "bfloat16"
    assert (recipe.chunk_size, recipe.keep, recipe.batch_size, recipe.gradient_accumulation) == (
        "auto",
        ("attention",),
        1,
        1,
    )
    assert (recipe.optimizer.lr, recipe.optimizer.betas, recipe.clip, recipe.seed) == (3e-4, (0.9, 0.95), 1.0, 0)
    assert recipe.tokens_per_step == 1024


def test_tokens_per_step_count_the_whole_batch(tmp_path):
    assert load(tmp_path, changed(batch_size=2, gradient_accumulation=3)).tokens_per_step == 6144


def test_a_dumped_recipe_loads_to_an_equal_one(tmp_path):
    recipe = load(
        tmp_path,
        changed(model={"preset": "gpt-1.2b", "overrides": {"n_layer": 2}}, keep=[], clip=None, chunk_size=7),
        ("optimizer.lr", "1e-3"),
    )
    assert load(tmp_path, dump_recipe(recipe)) == recipe


@pytest.mark.parametrize(
    ("name", "text", "read", "expected"),
    [
        ("optimizer.lr", "3e-4", lambda r: r.optimizer.lr, 3e-4),
        ("optimizer.betas", "[0.8, 0.99]", lambda r: r.optimizer.betas, (0.8, 0.99)),
        ("optimizer.fp32_master", "false", lambda r: r.optimizer.fp32_master, False),
        ("context", "32_768", lambda r: r.context, 32768),
        ("chunk_size", "512", lambda r: r.chunk_size, 512),
        ("chunk_size", "auto", lambda r: r.chunk_size, "auto"),
        ("clip", "null", lambda r: r.clip, None),
        ("overwrite", "true", lambda r: r.overwrite, True),
        ("keep", "[]", lambda r: r.keep, ()),
        ("keep", "attention,kv", lambda r: r.keep, ("attention", "kv")),
        ("keep", "kv", lambda r: r.keep, ("kv",)),
        ("data.files", "a.txt", lambda r: r.data.files, ["a.txt"]),
        ("data.files", "[a.txt, 'b c.txt']", lambda r: r.data.files, ["a.txt", "b c.txt"]),
        # Text settings are taken as typed, also where YAML would see a number.
        ("output", "2024", lambda r: r.output, "2024"),
        ("data.tokenizer", "0x10", lambda r: r.data.tokenizer, "0x10"),
        ("model.dtype", "fp32", lambda r: r.model.dtype, "float32"),
        ("model.dtype", "bf16", lambda r: r.model.dtype, "bfloat16"),
        ("model.overrides.hidden_size", "96", lambda r: r.model.overrides, {"hidden_size": 96}),
        (
            "model.overrides.rope_parameters",
            "{rope_type: yarn, factor: 4.0}",
            lambda r: r.model.overrides,
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        ),
    ],
)
def test_overrides_are_typed_by_the_schema(tmp_path, name, text, read, expected):
    assert read(load(tmp_path, BASE, (name, text))) == expected


def test_overrides_replace_the_file_and_the_last_one_counts(tmp_path):
    content = changed(model={"preset": "tiny-llama", "overrides": {"hidden_size": 64, "num_hidden_layers": 3}})
    recipe = load(tmp_path, content, ("model.overrides.hidden_size", "32"), ("steps", "3"), ("steps", "4"))
    assert recipe.model.overrides == {"hidden_size": 32, "num_hidden_layers": 3}
    assert recipe.steps == 4


def test_preset_can_be_exchanged_for_a_path(tmp_path):
    recipe = load(tmp_path, BASE, ("model.preset", "null"), ("model.path", "some/model"))
    assert (recipe.model.preset, recipe.model.path) == (None, "some/model")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (changed(contxt=5), r"^'contxt' is not a setting\. Did you mean 'context'\?"),
        (changed(optimizer={"learnig_rate": 1}), r"'optimizer\.learnig_rate' is not a setting\. .*'optimizer\.lr'"),
        (changed(optimizer={"weight_decy": 1}), r"'optimizer\.weight_decy' .* 'optimizer\.weight_decay'"),
        (changed(fp32_master=True), r"'fp32_master' is not a setting\. Did you mean 'optimizer\.fp32_master'"),
        (changed(model={"preset": "tiny-llama", "dtyp": "x"}), r"'model\.dtyp' .* 'model\.dtype'"),
        (changed(optimiser={"lr": 1}), r"'optimiser' is not a setting\. Did you mean 'optimizer'"),
        (changed(qqqq=1), r"'qqqq' is not a setting\. Settings are: model\.preset, .*log_every"),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest_name(tmp_path, content, message):
    with pytest.raises(RecipeError, match=message):
        load(tmp_path, content)


def test_unknown_overrides_are_refused_with_the_nearest_name(tmp_path):
    with pytest.raises(RecipeError, match=r"'stepz' is not a setting\. Did you mean 'steps'"):
        load(tmp_path, BASE, ("stepz", "4"))
    with pytest.raises(RecipeError, match=r"--steps: the value '\[1' cannot be read"):
        load(tmp_path, BASE, ("steps", "[1"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (without("context"), r"'context' is missing; set it in the recipe or with --context"),
        (changed(data={}), r"'data\.files' is missing"),
        (changed(chunk_size=0), r"chunk_size=0: give a positive whole number of tokens, or 'auto'"),
        (changed(chunk_size=True), r"chunk_size: must be a number, not true \(got True\)"),
        (changed(checkpoint_every=1.5), r"checkpoint_every: .*integer.* \(got 1\.5\)"),
        (changed(offload_dir=5), r"^offload_dir: .* \(got 5\)"),
        (changed(context="long"), r"context: 'long' is not a number of tokens: write 4096, 4K or 1M \(got 'long'\)"),
        (changed(context=1), r"context must be at least 2"),
        (changed(steps=True), r"steps: must be a number, not true"),
        (changed(steps=1.5), r"steps: .*integer.*\(got 1\.5\)"),
        (changed(clip=0), r"clip: .*greater than 0 \(got 0\)"),
        (changed(optimizer={"lr": -1}), r"optimizer\.lr: .*greater than 0 \(got -1\)"),
        (changed(optimizer={"lr": float("inf")}), r"optimizer\.lr: .*finite number"),
        (changed(optimizer={"betas": [0.9]}), r"optimizer\.betas\.1'? "),
        (changed(optimizer={"betas": [0.9, 1.0]}), r"optimizer\.betas\.1: .*less than 1 \(got 1\.0\)"),
        (changed(optimizer={"warmup_steps": 11}), r"optimizer\.warmup_steps \(11\) is larger than steps \(10\)"),
        (
            changed(keep=["everything"]),
            r"keep=\['everything'\]: 'everything' is unknown; choose out of \['attention', 'kv'\]",
        ),
        (changed(data={"files": False}), r"data\.files: .*valid list.* \(got False\)"),
        (changed(keep={}), r"keep: .*valid tuple"),
        (changed(keep=["kv", "kv"]), r"keep: names the same thing twice"),
        (changed(device="gpu"), r"device: 'gpu' is no device; use auto, cpu, cuda"),
        (changed(device="cpu:0"), r"device: 'cpu:0' is no device"),
        (changed(model={"preset": "gpt-9b"}), r"model\.preset: 'gpt-9b' is no preset; there are tiny-llama, "),
        (changed(model={}), r"set exactly one of model\.preset .* and model\.path .*; neither is set"),
        (changed(model={"preset": "tiny-llama", "path": "x"}), r"both are set"),
        (changed(model={"preset": "tiny-llama", "dtype": "float16"}), r"model\.dtype: .*'float32' or 'bfloat16'"),
        (changed(model="llama"), r"model: .*valid dictionary"),
        ("", r"holds nothing, not settings"),
        ("- a\n- b\n", r"holds list, not settings"),
        ("context: [1\nsteps: 2\n", r"is not valid YAML at line 2, column \d+: .*Fix that line"),
    ],
)
def test_wrong_values_name_setting_and_value(tmp_path, content, message):
    with pytest.raises(RecipeError, match=message) as caught:
        load(tmp_path, content)
    assert "\n" not in str(caught.value)
    assert "pydantic" not in str(caught.value)


def test_a_missing_recipe_is_named(tmp_path):
    with pytest.raises(RecipeError, match=r"the recipe '.*no\.yaml' does not exist"):
        load_recipe(tmp_path / "no.yaml")


@pytest.mark.parametrize(("alias", "real"), ALIASES.items())
def test_every_alias_means_its_setting_and_is_announced(tmp_path, alias, real):
    values = {
        "context": "77",
        "output": "o",
        "overwrite": "true",
        "model.dtype": "float32",
        "model.path": "m",
        "data.files": "f",
        "ranks.zero": "2",
    }
    value = values.get(real, "3" if real in ("steps", "log_every", "seed", "batch_size") else "1")
    section, _, field = real.rpartition(".")
    content = {key: dict(value) if isinstance(value, dict) else value for key, value in BASE.items()}
    (content.get(section, {}) if section else content).pop(field, None)
    if real == "model.path":
        content["model"].pop("preset")
    notices = []
    recipe = load(tmp_path, content, (alias, value), notices=notices)
    plain = load(tmp_path, content, (real, value))
    assert recipe == plain
    assert notices == [f"note: '{alias}' is called '{real}' here; taken as {real}: {notices[0].rsplit(': ')[-1]}"]
    assert real in dict(recipe_fields())


def test_alias_and_real_name_together_are_refused(tmp_path):
    with pytest.raises(
        RecipeError, match=r"sets both 'context' and 'seq_len', which mean the same; keep only 'context'"
    ):
        load(tmp_path, changed(seq_len=5))
    with pytest.raises(RecipeError, match=r"the command line sets both 'learning_rate' and 'optimizer\.lr'"):
        load(tmp_path, BASE, ("learning_rate", "1"), ("optimizer.lr", "1"))
    # A file and the command line are two sources: the command line wins under any name.
    assert load(tmp_path, {**without("context"), "max_seq_length": 64}, ("context", "32")).context == 32
    assert load(tmp_path, BASE, ("sequence_len", "48")).context == 48
