"""The command line: what it accepts, prints and returns; mistakes end with 2, one paragraph, and nothing written."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from cases import others_in_soak
from typer.testing import CliRunner

from trunkline.cli import app as cli
from trunkline.cli.options import split_recipe_arguments
from trunkline.train.trainer import TrainingDivergedError

SMALL = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"{i * i} of {i}\n" for i in range(90)))
    content = {
        "model": {"preset": "tiny-llama", "dtype": "float32", "overrides": SMALL},
        "data": {"files": [str(tmp_path / "a.txt")]},
        "context": 128,
        "chunk_size": 32,
        "steps": 2,
        "output": str(tmp_path / "run"),
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def trunkline(*arguments: object, **more) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "trunkline", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=120, **more)


def test_help_and_version():
    runner = CliRunner()
    result = runner.invoke(cli.app, ["--help"])
    assert result.exit_code == 0
    assert "train" in result.output
    assert runner.invoke(cli.app, ["--version"]).output == "trunkline 0.1.0\n"
    assert "RECIPE" in runner.invoke(cli.app, ["train", "--help"]).output


def test_the_library_imports_no_command_line():
    code = "import sys, trunkline; print([m for m in ('typer', 'rich', 'matplotlib', 'datasets') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "overrides"),
    [
        (["r.yaml"], []),
        (["r.yaml", "--steps", "3", "--optimizer.lr=3e-4"], [("steps", "3"), ("optimizer.lr", "3e-4")]),
        (["--steps", "3", "r.yaml", "--overwrite"], [("steps", "3"), ("overwrite", "true")]),
        (["--overwrite", "--steps=3", "r.yaml"], [("overwrite", "true"), ("steps", "3")]),
        (["r.yaml", "--chunk-size", "-1"], [("chunk_size", "-1")]),
        (["r.yaml", "--output=a=b"], [("output", "a=b")]),
    ],
)
def test_arguments(arguments, overrides):
    assert split_recipe_arguments(arguments) == (Path("r.yaml"), overrides)


@pytest.mark.parametrize(("arguments", "message"), [(["--steps", "3"], "got none"), (["a", "b"], "got 2: a, b")])
def test_one_recipe(arguments, message):
    with pytest.raises(ValueError, match=message):
        split_recipe_arguments(arguments)


@pytest.mark.parametrize("programs", others_in_soak(["trunkline", "all"], ["trunkline"]))
def test_a_run_in_a_real_process(recipe, tmp_path, monkeypatch, programs):
    done = trunkline("train", recipe, "--learning_rate", "1e-2", "--steps=3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "note: 'learning_rate' is called 'optimizer.lr' here; taken as optimizer.lr: 1e-2"
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == 3
    assert re.fullmatch(
        r"step 1/3  loss \d\.\d{4}  grad norm [\d.]+  lr 1\.00e-02  [\d,]+ tokens/s  [\d.]+ s  eta \d:\d\d", steps[0]
    )
    assert "Wrote run/" in lines
    assert done.stderr == ""
    assert yaml.safe_load((tmp_path / "run/recipe.yaml").read_text())["optimizer"]["lr"] == 0.01

    # The three next things to try are commands that work as they stand: in processes of their own, or here.
    commands = [lines[i + 1].strip() for i, line in enumerate(lines) if re.match(r"  \d\. ", line)]
    assert len(commands) == 3
    if programs == "all":
        for command in commands:
            again = subprocess.run(
                command, shell=True, capture_output=True, text=True, env=ENVIRONMENT, timeout=120, cwd=tmp_path
            )
            assert again.returncode == 0, (command, again.stderr)
    else:
        monkeypatch.chdir(tmp_path)
        ours = [words[1:] for words in map(shlex.split, commands) if words[0].endswith("trunkline")]
        assert len(ours) == 2
        assert [cli.run(words) for words in ours] == [0, 0]
    assert {"run", "run-2", "run-256"} <= {path.name for path in tmp_path.iterdir()}


def run_in_process(capsys, *arguments: object) -> tuple[int, str, str]:
    code = cli.run([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--contxt", "5"], "'contxt' is not a setting. Did you mean 'context'?"),
        (["--chunk_size", "0"], "chunk_size: '0' is not a number of tokens: write 4096, 4K or 1M"),
        (["--context", "9999"], "context: 9,999 tokens is longer than every document"),
        (["--data.files", "nowhere.txt"], "data.files: 'nowhere.txt' does not exist"),
        (["--data.files", "EMPTY"], "the corpus is empty"),
        (["--data.files", "LATIN"], "is not UTF-8 text: byte 3 (0xe9)"),
        (["--data.files", "PICTURES"], "has no text files"),
        (["--model.preset", "gpt-2b"], "'gpt-2b' is no preset"),
        (
            ["--model.preset", "null", "--model.path", "nowhere"],
            "model.path: 'nowhere' is not a Hugging Face model folder",
        ),
        (["--output", "PICTURES"], "exists. Set output to another folder"),
        (["extra.yaml"], "give one recipe (got 2"),
        (
            ["--model.preset=gpt-1.2b", "--model.overrides={n_layer: 1, n_embd: 32, n_head: 2, attn_pdrop: 0.1}"],
            "dropout",
        ),
    ],
)
def test_wrong_settings_exit_with_2_and_one_paragraph(recipe, tmp_path, capsys, arguments, message):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures/a.png").write_bytes(b"\x89PNG")
    names = {"EMPTY": "empty.txt", "LATIN": "latin.txt", "PICTURES": "pictures"}
    before = sorted(tmp_path.rglob("*"))
    code, _, err = run_in_process(
        capsys, "train", recipe, *[str(tmp_path / names[a]) if a in names else a for a in arguments]
    )
    assert code == 2
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("content", "message"), [("context: [1", "not valid YAML"), (None, "does not exist"), ("", "holds nothing")]
)
def test_invalid_recipes_exit_with_2(tmp_path, capsys, content, message):
    path = tmp_path / "r.yaml"
    if content is not None:
        path.write_text(content)
    code, out, err = run_in_process(capsys, "train", path)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.soak
def test_wrong_settings_in_a_real_process(recipe):
    done = trunkline("train", recipe, "--optimizer.lrr", "1")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "error: 'optimizer.lrr' is not a setting. Did you mean 'optimizer.lr'?\n"


def test_usage_errors_exit_with_2(capsys):
    assert run_in_process(capsys, "trian")[0] == 2
    assert run_in_process(capsys, "train")[0] == 2


def test_divergence_exits_with_1(recipe, capsys, monkeypatch, tmp_path):
    def diverge(self, index):
        raise TrainingDivergedError("the loss of step 1 is nan.")

    monkeypatch.setattr("trunkline.train.trainer.Trainer.step", diverge)
    code, _, err = run_in_process(capsys, "train", recipe)
    assert (code, err) == (1, "error: the loss of step 1 is nan.\n")
    assert not (tmp_path / "run").exists()


def test_bugs_keep_their_traceback(recipe, monkeypatch):
    # A ValueError from a library below is not a message for the user.
    monkeypatch.setattr("trunkline.train.trainer.Trainer.step", lambda self, index: json.loads("{"))
    with pytest.raises(ValueError, match="Expecting"):
        cli.run(["train", str(recipe)])


def test_an_interruption_exits_with_130_and_one_sentence(recipe, tmp_path):
    command = [
        sys.executable,
        "-u",
        "-m",
        "trunkline",
        "train",
        str(recipe),
        "--steps",
        "100000",
        "--preflight",
        "false",
    ]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        # A shell starts what it puts in the background with SIGINT ignored, and Python would leave it so.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    for line in process.stdout:
        if line.startswith("step"):
            break
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert re.fullmatch(r"Interrupted; no model was written\. The metrics of the \d+ steps so far are in '.*'\.\n", err)
    (partial,) = tmp_path.glob("run.partial-*")
    assert {path.name for path in partial.iterdir()} - {"timeline.json"} == {"metrics.jsonl"}
    assert not (tmp_path / "run").exists()


def test_an_unsupported_family_is_refused_by_name(recipe, tmp_path, capsys):
    from transformers import FalconConfig, FalconForCausalLM

    from trunkline.data import load_encoder

    config = FalconConfig(vocab_size=258, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    FalconForCausalLM(config).save_pretrained(tmp_path / "falcon")
    load_encoder("bytes").tokenizer.save_pretrained(tmp_path / "falcon")
    arguments = ["--model.preset", "null", "--model.overrides", "{}", "--model.path", str(tmp_path / "falcon")]
    capsys.readouterr()
    assert cli.run(["train", str(recipe), *arguments]) == 2
    said = capsys.readouterr().err
    assert "FalconForCausalLM" in said
    assert "Traceback" not in said
    assert len(said.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
            "Use a smaller chunk_size",
        ),
        (OSError(28, "No space left on device", "run/model"), "No space left on device: run/model"),
    ],
)
def test_out_of_memory_and_full_disks_are_explained(recipe, capsys, monkeypatch, error, said):
    def fail(self, index):
        raise error

    monkeypatch.setattr("trunkline.train.trainer.Trainer.step", fail)
    assert cli.run(["train", str(recipe)]) == 1
    printed = capsys.readouterr().err
    assert said in printed
    assert "Traceback" not in printed


def test_a_disk_that_fails_in_a_step(recipe, tmp_path, capsys, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    budgets = ["--device_budget", "100KiB", "--offload_dir", str(tmp_path), "--chunk_size", "8", "--context", "256"]
    assert cli.run(["train", str(recipe), *budgets]) == 1
    assert f"scratch file in {tmp_path} failed: No space left" in capsys.readouterr().err


def test_a_budget_that_is_too_small(recipe, tmp_path, capsys):
    assert cli.run(["train", str(recipe), "--device_budget", "1KiB"]) == 2
    assert "device_budget leaves 1.0 KiB" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert cli.run(["train", str(recipe), "--device_budget", "lots"]) == 2
    assert "device_budget='lots'" in capsys.readouterr().err
