"""`trunkline generate`: what is printed, what is told beside it, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from families import build
from transformers import AutoModelForCausalLM

from trunkline.cli import app as cli
from trunkline.data.tokenizers import make_byte_tokenizer

TEXT = "All that is gold does not glitter. " * 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model on bytes, in fp32."""
    folder = tmp_path_factory.mktemp("model")
    build("llama", torch.float32, vocab_size=258, max_position_embeddings=4096, eos_token_id=256).save_pretrained(
        folder
    )
    make_byte_tokenizer().save_pretrained(folder)
    return folder


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.run(["generate", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def own(model: Path, text: str, count: int) -> str:
    """Return the text that transformers generates after a prompt."""
    plain, tokenizer = AutoModelForCausalLM.from_pretrained(model), make_byte_tokenizer()
    ids = torch.tensor([list(text.encode())])
    new = plain.generate(ids, max_new_tokens=count, do_sample=False, pad_token_id=257, eos_token_id=256)[
        0, ids.shape[1] :
    ]
    return str(tokenizer.decode(new, skip_special_tokens=True))


def test_text_and_speeds_are_printed(capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_text("And not all those who wander")
    code, out, err = run(
        capsys, model, "--file", tmp_path / "a.txt", "--file", tmp_path / "b.txt", "--prompt", " are",
        "--max-new-tokens", 12, "--chunk-size", 100,
    )  # fmt: skip
    assert code == 0
    prompt = f"{TEXT}And not all those who wander are"
    assert out == own(model, prompt, 12) + "\n"
    assert f"read {len(prompt):,} tokens in " in err
    assert "wrote 12 tokens, " in err
    assert "keys and values " in err


def test_json_and_tiers(capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path) -> None:
    given = [model, "--prompt", TEXT, "--max-new-tokens", 5, "--json"]
    budget = ["--chunk-size", 64, "--device-budget", "500KiB", "--offload-dir", tmp_path]
    found = [json.loads(run(capsys, *given, *more)[1]) for more in ([], budget)]
    assert found[0]["text"] == found[1]["text"] == own(model, TEXT, 5)
    assert [each["peaks"]["disk"] > 0 for each in found] == [False, True]
    assert found[1]["peaks"]["device"] <= 500 * 1024
    token = 3 * 2 * 2 * 8 * 4  # layers, keys and values, heads, head dim, bytes
    for each in found:
        assert (each["prompt_tokens"], each["new_tokens"], each["cached_tokens"]) == (len(TEXT), 5, 0)
        assert each["kv_bytes"] >= token * len(TEXT)
        assert each["prefill_tokens_per_second"] == pytest.approx(len(TEXT) / each["prefill_seconds"])
        assert each["decode_tokens_per_second"] > 0
        assert each["process_peak"] > 2**20
    tight = ["--chunk-size", 256, "--device-budget", "220KiB", "--offload-dir", tmp_path]
    code, _, err = run(capsys, *given, *tight)
    assert (code, "prefetch=1" in err) == (2, True)
    code, out, _ = run(capsys, *given, *tight, "--prefetch", 1)
    assert (code, json.loads(out)["text"]) == (0, found[0]["text"])


def test_a_saved_prompt_is_not_read_again(capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    cache = tmp_path / "cache"
    code, out, err = run(capsys, model, "--file", tmp_path / "text.txt", "--max-new-tokens", 0, "--save-cache", cache)
    assert (code, out) == (0, "")
    assert f"read {len(TEXT):,} tokens" in err
    code, out, err = run(capsys, model, "--load-cache", cache, "--prompt", "But", "--max-new-tokens", 9)
    assert code == 0
    assert out == own(model, TEXT + "But", 9) + "\n"
    assert "read 3 tokens in" in err
    assert f"after {len(TEXT):,} cached tokens" in err
    code, out, _ = run(capsys, model, "--load-cache", cache, "--max-new-tokens", 9)
    assert (code, out) == (0, own(model, TEXT, 9) + "\n")


def test_sampling_is_by_seed(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    given = [model, "--prompt", TEXT, "--max-new-tokens", 20, "--temperature", 1.5]
    texts = [run(capsys, *given, "--seed", seed)[1] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_a_wrong_budget_is_refused_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(*_: object, **__: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr("trunkline.generation.loading.load_model", loaded)
    code, _, err = run(capsys, model, "--prompt", "a", "--device-budget", "much")
    assert code == 2
    assert "device_budget='much'" in " ".join(err.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the prompt is empty: give --file or --prompt with some text"),
        (["--file", "nowhere.txt"], "--file: 'nowhere.txt' is no file"),
        (["--prompt", "a", "--max-new-tokens", "0"], "--max-new-tokens 0: give a positive number, or --save-cache"),
        (["--prompt", "a", "--temperature", "-1"], "Invalid value for '--temperature'"),
        (["--prompt", "a", "--top-k", "5"], "have no effect without sampling: set --temperature"),
        (["--prompt", "a", "--temperature", "1", "--top-p", "0"], "--top-p 0.0: give a probability above 0"),
        (
            ["--prompt", "a", "--chunk-size", "big"],
            "chunk_size='big': give a positive whole number of tokens, or 'auto'",
        ),
        (["--prompt", "a", "--chunk-size", "0"], "chunk_size=0: give a positive whole number"),
        (["--prompt", "a", "--prefetch", "0"], "prefetch=0: give a positive whole number"),
        (["--prompt", "a", "--dtype", "int8"], "dtype='int8': choose one of auto"),
        (["--prompt", "a", "--device", "cuda:7"], "device='cuda:7' is not there"),
        (["--prompt", "a", "--offload-dir", "."], "offload_dir has no effect without a device_budget"),
        (["--prompt", "a", "--load-cache", "."], "'.' holds no cache that can be read"),
        (["--prompt", "a", "--save-cache", "."], "--save-cache: '.' exists: give a new folder"),
        (["--prompt", "a", "--chat"], "--chat: this model's tokenizer has no chat template"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], model: Path, arguments: list[str], message: str) -> None:
    code, out, err = run(capsys, model, *arguments)
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())
    assert "Traceback" not in err


def test_a_folder_without_a_model_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = run(capsys, tmp_path, "--prompt", "a")
    assert code == 2
    assert "is no model folder: it must hold config.json" in " ".join(err.split())
