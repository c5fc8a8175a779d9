"""Parity on CUDA: the flash kernels (bf16, fp16) and math (fp32) against plain autograd in fp64."""

from __future__ import annotations

import copy

import pytest
import torch
from families import build
from oracle import plain, streamed, tokens, total_error

import trunkline

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("keep", [(), ("attention",), ("kv",), ("attention", "kv")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_no_worse_than_transformers(family: str, dtype: torch.dtype, keep: tuple[str, ...]) -> None:
    heads = {"head_dim": 32} if family == "llama" else {"n_embd": 128}
    model = build(family, dtype, **heads).cuda()
    ids = tokens(2, 300).cuda()
    _, exact = plain(copy.deepcopy(model).double(), ids, ids, 512)
    _, own = plain(model, ids, ids, 512)
    trunkline.stream(model, chunk_size=64, keep=keep)
    _, got = streamed(model, ids, ids, 512)
    floor = 1e-5 if dtype == torch.float32 else 0.0
    assert total_error(got, exact) <= 1.2 * total_error(own, exact) + floor
