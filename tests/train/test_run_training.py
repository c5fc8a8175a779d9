"""Whole training runs: the files written, equality with plain Hugging Face, and errors that stop a run."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import trunkline
from trunkline.data import Document, cut_documents, load_encoder
from trunkline.hf.flops import model_flops
from trunkline.train import run_training, trainer
from trunkline.train.build_model import build_config, build_model
from trunkline.train.display import Display
from trunkline.train.load_recipe import load_recipe
from trunkline.train.optimizer import Optimizer
from trunkline.train.part_timer import PARTS, PartTimer
from trunkline.train.recipe import Recipe
from trunkline.train.run_training import train
from trunkline.train.trainer import Trainer, TrainingDivergedError, progress_hook
from trunkline.train.world import World

SMALL = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
CPU = torch.device("cpu")


class Recorder(Display):
    """Display that keeps all events."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.parts: Counter[str] = Counter()
        self.steps: list = []
        self.info = None
        self.ended = 0

    def note(self, text):
        self.notes.append(text)

    def begin(self, info):
        self.info = info

    def micro_batch(self, index):
        self.parts["micro_batch"] += 1

    def progress(self, position):
        self.parts[position.part] += 1

    def step(self, metrics):
        self.steps.append(metrics)

    def end(self):
        self.ended += 1


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.txt").write_text("".join(f"{name} is {i * i} of {i}\n" for i in range(60)))
    return folder


def make(tmp_path: Path, corpus: Path, **more) -> Recipe:
    model = {"preset": "tiny-llama", "dtype": "float32", "overrides": SMALL}
    return Recipe.model_validate(
        {
            "model": model,
            "data": {"files": [str(corpus)]},
            "context": 128,
            "chunk_size": 32,
            "steps": 3,
            "optimizer": {"lr": 1e-2},
            "preflight": False,
            "output": str(tmp_path / "out/run"),
            **more,
        }
    )


def read_metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_output_folder_loads_as_a_hugging_face_model(tmp_path, corpus):
    recipe = make(tmp_path, corpus, steps=12, clip=None, preflight=True)
    display = Recorder()
    result = train(recipe, display)
    assert result.output == tmp_path / "out/run"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["run"]
    assert sorted(path.name for path in result.output.iterdir()) == [
        "metrics.jsonl",
        "model",
        "plan.json",
        "recipe.yaml",
        "timeline.json",
    ]
    names = {path.name for path in (result.output / "model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
    assert load_recipe(result.output / "recipe.yaml") == recipe

    model = AutoModelForCausalLM.from_pretrained(result.output / "model")
    tokenizer = AutoTokenizer.from_pretrained(result.output / "model")
    assert model.config.use_cache is True
    assert model.dtype == torch.float32
    assert tokenizer("ab")["input_ids"] == [97, 98]

    lines = read_metrics(result.output)
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert lines[-1]["loss"] < lines[0]["loss"] - 1.0
    # The saved weights are the trained ones: they predict about as well as the last step found.
    ids_BS = torch.tensor([tokenizer((corpus / "a.txt").read_text())["input_ids"][:128]])
    assert model(input_ids=ids_BS, labels=ids_BS).loss.item() < lines[-2]["loss"] + 0.2

    flops = model_flops(model, seq_len=128)
    for line in lines:
        assert set(line) == {
            "step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "model_flops", "flops_per_second",
            "peak_memory_bytes", "seconds", "tiers", "lanes",
        }  # fmt: skip
        assert tuple(line["seconds"]) == PARTS
        total = sum(line["seconds"].values())
        assert line["tokens"] == 128
        assert line["model_flops"] == flops
        assert line["tokens_per_second"] == pytest.approx(128 / total)
        assert line["flops_per_second"] == pytest.approx(flops / total)
        assert all(line["seconds"][part] > 0 for part in PARTS)
        assert line["peak_memory_bytes"] > 50 * 2**20
        assert line["tiers"]["device"] > 0
        assert all(lane["bytes"] == 0 for lane in line["lanes"].values())
    assert display.ended == 1
    assert display.parts["micro_batch"] == 12
    # Two layers of four chunks, twelve steps.
    assert display.parts["forward"] == 12 * 2 * 4
    assert any("samples of 128 tokens" in line and "Dropped" in line for line in display.info.headline)


def test_offloading_to_disk_changes_no_loss_and_is_in_the_metrics(tmp_path, corpus):
    reference = train(make(tmp_path, corpus, output=str(tmp_path / "a"), chunk_size=16), Recorder())
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    budgets = {"device_budget": "100KiB", "offload_dir": str(scratch), "disk_budget": "64MiB", "checkpoint_every": 2}
    other = train(make(tmp_path, corpus, output=str(tmp_path / "b"), chunk_size=16, **budgets), Recorder())
    assert [s.loss for s in other.steps] == pytest.approx([s.loss for s in reference.steps], rel=1e-4)
    for line in read_metrics(other.output):
        assert 0 < line["tiers"]["device"] <= 100 * 2**10
        assert line["tiers"]["disk"] > 0
        for lane in ("fetch", "stash"):
            assert line["lanes"][lane]["bytes"] > 0
            assert line["lanes"][lane]["gb_per_second"] > 0
            assert 0 <= line["lanes"][lane]["exposed_seconds"] < sum(line["seconds"].values())
    assert list(scratch.iterdir()) == []


def test_losses_depend_on_the_seed_only(tmp_path, corpus):
    def losses(name: str, **more) -> list[float]:
        recipe = make(tmp_path, corpus, output=str(tmp_path / name), steps=2, context=64, **more)
        return [line["loss"] for line in read_metrics(train(recipe, Recorder()).output)]

    first = losses("a", seed=5)
    assert losses("b", seed=5) == first
    assert losses("c", seed=6) != first


def trainer_for(recipe: Recipe, *, streamed: bool = True) -> Trainer:
    encoder = load_encoder("bytes")
    documents = [Document("d", "".join(f"{i * i} of {i}\n" for i in range(120)))]
    samples = cut_documents(documents, encoder, context=recipe.context)
    model = build_model(recipe, build_config(recipe, encoder), CPU)
    clock, display = PartTimer(CPU), Recorder()
    if streamed:
        trunkline.stream(model, **recipe.stream_settings, progress=progress_hook(clock, display))
    meters = trunkline.stats if streamed else lambda model: trunkline.Stats({}, {})
    return Trainer(
        recipe, model, samples, Optimizer(model, recipe.optimizer), clock, display, CPU, None, World(), meters
    )


def test_steps_equal_plain_hugging_face(tmp_path, corpus):
    recipe = make(tmp_path, corpus, steps=4, batch_size=2, chunk_size=50)
    streamed, plain = trainer_for(recipe), trainer_for(recipe, streamed=False)
    for index in range(4):
        ours, theirs = streamed.step(index), plain.step(index)
        assert ours.loss == pytest.approx(theirs.loss, rel=2e-5)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-3)


def test_accumulation_equals_a_larger_batch(tmp_path, corpus):
    split = trainer_for(make(tmp_path, corpus, batch_size=1, gradient_accumulation=4))
    whole = trainer_for(make(tmp_path, corpus, batch_size=4, gradient_accumulation=1))
    for index in range(2):
        a, b = split.step(index), whole.step(index)
        assert a.tokens == b.tokens == 512
        assert a.loss == pytest.approx(b.loss, rel=1e-5)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-4)


@pytest.mark.parametrize("clip", [None, 0.01])
def test_clipping_bounds_the_update(tmp_path, corpus, clip):
    # A plain step of gradient descent shows the scale: AdamW's first update hides it, its averages do not.
    trainer = trainer_for(make(tmp_path, corpus, clip=clip))
    norm = trainer.step(0).grad_norm
    states = trainer.optimizer.adamw.state.values()
    average = torch.stack([state["exp_avg"].norm() for state in states]).norm() / (1 - 0.9)
    assert norm > 0.1
    assert float(average) == pytest.approx(norm if clip is None else clip, rel=1e-3)


@pytest.mark.parametrize(("preset", "dtype"), [("tiny-llama", "bfloat16"), ("gpt-1.2b", "float32")])
def test_presets_train_in_each_dtype(tmp_path, corpus, dtype, preset):
    small = SMALL if preset == "tiny-llama" else {"n_layer": 2, "n_embd": 32, "n_head": 2}
    recipe = make(tmp_path, corpus, model={"preset": preset, "dtype": dtype, "overrides": small}, steps=2)
    result = train(recipe, Recorder())
    assert result.steps[1].loss < result.steps[0].loss
    config = AutoConfig.from_pretrained(result.output / "model")
    assert str(config.dtype) == f"torch.{dtype}"


def test_keep_changes_no_loss(tmp_path, corpus):
    def losses(keep: list[str]) -> list[float]:
        trainer = trainer_for(make(tmp_path, corpus, keep=keep))
        return [trainer.step(index).loss for index in range(3)]

    reference = losses(["attention"])
    for keep in ([], ["kv"], ["attention", "kv"]):
        assert losses(keep) == pytest.approx(reference, rel=1e-5)


def test_training_goes_on_from_a_saved_model_with_scaled_positions(tmp_path, corpus):
    first = train(make(tmp_path, corpus, steps=8), Recorder())
    positions = AutoConfig.from_pretrained(first.output / "model").max_position_embeddings
    scaled = {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}
    model = {"path": str(first.output / "model"), "dtype": "float32", "overrides": scaled}
    second = train(make(tmp_path, corpus, model=model, output=str(tmp_path / "second")), Recorder())
    assert second.steps[0].loss < first.steps[0].loss - 0.5
    exported = AutoConfig.from_pretrained(second.output / "model")
    assert exported.rope_parameters["rope_type"] == "yarn"
    assert exported.rope_parameters["rope_theta"] == 500_000.0
    assert exported.rope_parameters["original_max_position_embeddings"] == positions


def leftovers(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.iterdir())


def test_attention_dropout_is_refused_and_leaves_no_files(tmp_path, corpus):
    model = {"preset": "gpt-1.2b", "overrides": {"n_layer": 1, "n_embd": 32, "n_head": 2, "attn_pdrop": 0.1}}
    with pytest.raises(ValueError, match="dropout"):
        train(make(tmp_path, corpus, model=model), Recorder())
    assert leftovers(tmp_path) == ["corpus"]


def test_wrong_data_leaves_no_files(tmp_path, corpus):
    with pytest.raises(ValueError, match=r"context: 5,000 tokens is longer than every document"):
        train(make(tmp_path, corpus, context=5000), Recorder())
    (corpus / "c.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"c\.txt' is not UTF-8"):
        train(make(tmp_path, corpus), Recorder())
    assert leftovers(tmp_path) == ["corpus"]


def test_non_finite_loss_stops_before_the_update(tmp_path, corpus):
    trainer = trainer_for(make(tmp_path, corpus))
    with torch.no_grad():
        trainer.model.get_input_embeddings().weight[:] = float("nan")
    others = [p.detach().clone() for n, p in trainer.model.named_parameters() if "layers" in n]
    with pytest.raises(TrainingDivergedError, match=r"the loss of step 1 is nan.*Lower optimizer\.lr \(0\.01\)"):
        trainer.step(0)
    now = [p for n, p in trainer.model.named_parameters() if "layers" in n]
    assert all(a.equal(b) for a, b in zip(now, others, strict=True))


def test_non_finite_gradient_stops_before_the_update(tmp_path, corpus):
    trainer = trainer_for(make(tmp_path, corpus))
    before = [p.detach().clone() for p in trainer.model.parameters()]
    original = trainer.optimizer.collect

    def collect():
        trainer.optimizer.parameters[0].grad[0] = float("inf")
        return original()

    trainer.optimizer.collect = collect
    with pytest.raises(TrainingDivergedError, match=r"the gradient norm of step 1 is inf"):
        trainer.step(0)
    assert all(a.equal(b) for a, b in zip(trainer.model.parameters(), before, strict=True))


class Stops(Recorder):
    """A display during whose second step the user gives up."""

    def step(self, metrics):
        super().step(metrics)
        if metrics.step == 2:
            raise KeyboardInterrupt


def test_an_interrupted_run_keeps_its_metrics_and_no_model(tmp_path, corpus):
    display = Stops()
    with pytest.raises(KeyboardInterrupt) as caught:
        train(make(tmp_path, corpus), display)
    (partial,) = (tmp_path / "out").iterdir()
    assert partial.name.startswith("run.partial-")
    assert [line["step"] for line in read_metrics(partial)] == [1, 2]
    assert not (partial / "model").exists()
    assert caught.value.__notes__ == [f"The metrics of the 2 steps so far are in '{partial / 'metrics.jsonl'}'."]
    assert display.ended == 1


def test_overwrite_replaces_the_folder_of_an_earlier_run_only(tmp_path, corpus):
    first = train(make(tmp_path, corpus), Recorder())
    with pytest.raises(ValueError, match=r"output: the folder '.*' exists\..*--overwrite true"):
        train(make(tmp_path, corpus), Recorder())
    train(make(tmp_path, corpus, overwrite=True, steps=1), Recorder())
    assert len(read_metrics(first.output)) == 1
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["run"]
    with pytest.raises(ValueError, match=r"holds something other than an earlier run"):
        train(make(tmp_path, corpus, overwrite=True, output=str(corpus)), Recorder())
    with pytest.raises(ValueError, match=r"is a file"):
        train(make(tmp_path, corpus, output=str(corpus / "a.txt")), Recorder())
    empty = tmp_path / "empty"
    empty.mkdir()
    assert train(make(tmp_path, corpus, output=str(empty), steps=1, preflight=True), Recorder()).output == empty
    assert sorted(path.name for path in empty.iterdir()) == [
        "metrics.jsonl", "model", "plan.json", "recipe.yaml", "timeline.json",
    ]  # fmt: skip


def test_models_without_a_flop_count_train(tmp_path, corpus, monkeypatch):
    def refuse(model, *, seq_len):
        raise run_training.UncountedModuleError("cannot count the FLOPs of 'x'.")

    monkeypatch.setattr(run_training, "model_flops", refuse)
    display = Recorder()
    result = train(make(tmp_path, corpus, steps=1), display)
    (line,) = read_metrics(result.output)
    assert (line["model_flops"], line["flops_per_second"]) == (None, None)
    assert any("model_flops is null" in note for note in display.notes)


def test_quick_start_recipe_trains_on_the_standard_library():
    path = Path(__file__).parents[2] / "examples/quickstart.yaml"
    recipe = load_recipe(path)
    assert recipe.context >= 32_768
    assert recipe.data.files == ["stdlib"]
    assert yaml.safe_load(path.read_text())["data"]["tokenizer"] == "bytes"
    assert trainer.SampleOrder(10, recipe.seed).take(0, recipe.steps)
