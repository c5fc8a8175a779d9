"""Layers that torch.compile compiles, and forwards that were put on a model from outside."""

from __future__ import annotations

import warnings
from types import MethodType
from typing import Any

import pytest
import torch
import torch._dynamo
from cases import others_in_soak
from families import build
from oracle import check, plain, streamed, tokens
from torch import nn
from torch._dynamo.testing import CompileCounter

import trunkline


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> CompileCounter:
    """Counts graphs instead of generating code for them."""
    found = CompileCounter()
    compile_ = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self: compile_(self, backend=found))
    torch._dynamo.reset()
    return found


@pytest.mark.parametrize("family", others_in_soak(["llama", "gpt-neox"], ["llama"]))
def test_layers_are_compiled_once_whatever_the_lengths(family: str, counter: CompileCounter) -> None:
    model = build(family, torch.float32, num_hidden_layers=3)
    expected = {seq_len: plain(model, tokens(2, seq_len), tokens(2, seq_len)) for seq_len in (21, 29, 27)}
    trunkline.stream(model, chunk_size=8, compile=True)
    graphs = []
    for seq_len in (21, 21, 29, 27):  # with tails of 5, 5, 5, 3
        check(streamed(model, tokens(2, seq_len), tokens(2, seq_len)), expected[seq_len], torch.float32)
        graphs.append(counter.frame_count)
    assert 0 < graphs[0] <= 16  # forward and backward, whole chunks and tails; not a layer each
    assert len(set(graphs)) == 1
    trunkline.unstream(model)
    assert all(module._compiled_call_impl is None for module in model.modules())
    check(plain(model, tokens(2, 21), tokens(2, 21)), expected[21], torch.float32)


@pytest.mark.soak
def test_layers_compiled_by_the_user(counter: CompileCounter) -> None:
    model = build("llama", torch.float32, num_hidden_layers=2)
    ids = tokens(2, 21)
    expected = plain(model, ids, ids)
    trunkline.stream(model, chunk_size=8)
    for layer in model.model.layers:
        layer.compile()
    check(streamed(model, ids, ids), expected, torch.float32)
    assert counter.frame_count > 0
    trunkline.unstream(model)
    assert all(layer._compiled_call_impl is not None for layer in model.model.layers)  # as it was found


@pytest.mark.soak
def test_compiled_layers_have_exact_gradients() -> None:
    """Use the default backend, which needs a C++ compiler."""
    model = build("llama", torch.float32, num_hidden_layers=2)
    ids = tokens(1, 21)
    expected = plain(model, ids, ids)
    torch._dynamo.reset()
    trunkline.stream(model, chunk_size=8, compile=True)
    check(streamed(model, ids, ids), expected, torch.float32)


def test_a_model_compiled_as_a_whole_is_refused() -> None:
    with pytest.raises(ValueError, match=r"compiled as a whole .* compile=True"):
        trunkline.stream(torch.compile(build("llama", torch.float32)))
    model = build("llama", torch.float32)
    model.compile(backend="eager")
    with pytest.raises(ValueError, match="was compiled as a whole: pass compile=True"):
        trunkline.stream(model)
    with pytest.raises(ValueError, match="compile='yes': give True or False"):
        trunkline.stream(build("llama", torch.float32), compile="yes")


@pytest.mark.parametrize("how", ["in place", "around it"])
def test_a_streamed_model_that_is_compiled_afterwards_is_refused(how: str) -> None:
    model = trunkline.stream(build("llama", torch.float32), chunk_size=8)
    ids = tokens(1, 20)
    if how == "in place":
        model.compile(backend="eager")
        compiled = model
    else:
        compiled = torch.compile(model, backend="eager")
    with pytest.raises(ValueError, match=r"runs under torch.compile.*compile=True to stream"):
        compiled(input_ids=ids, labels=ids)


def test_the_recompile_limit_is_raised_while_streaming(counter: CompileCounter) -> None:
    """Two batch sizes and two lengths of chunks: more graphs than a limit of one."""
    one_layer = build("llama", torch.float32, num_hidden_layers=1).eval()
    model = trunkline.stream(one_layer, chunk_size=8, compile=True)
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        for batch in (1, 2):
            model(input_ids=tokens(batch, 11), labels=tokens(batch, 11))
    assert counter.frame_count > 1


@pytest.mark.soak
def test_the_default_recompile_limit_is_enough(counter: CompileCounter) -> None:
    """Training, evaluation, other batches, autocast: more graphs of shared code than torch.compile's limit of 8."""
    one_layer = build("llama", torch.float32, num_hidden_layers=1)
    model = trunkline.stream(one_layer, chunk_size=8, compile=True)
    with warnings.catch_warnings(), torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for batch, seq_len in ((1, 21), (2, 21), (3, 9)):
            ids = tokens(batch, seq_len)
            model(input_ids=ids, labels=ids).loss.backward()
            with torch.no_grad():
                model.eval()(input_ids=ids, labels=ids)
            model.train()
            with torch.autocast("cpu", torch.bfloat16):
                model(input_ids=ids, labels=ids).loss.backward()
    assert counter.frame_count > 12


def test_a_forward_replaced_by_liger() -> None:
    """Its fused loss is not called, since logits never exist as a whole; everything else of it is."""
    model = build("granite")
    ids = tokens(2, 37)
    calls = []

    def lce_forward(
        self: Any, input_ids: Any = None, position_ids: Any = None, inputs_embeds: Any = None, labels: Any = None,
        logits_to_keep: int = 0, skip_logits: Any = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        assert labels is None, "the fused loss was asked for"
        calls.append(1)
        return type(self).forward(self, input_ids=input_ids, position_ids=position_ids, inputs_embeds=inputs_embeds,
                                  logits_to_keep=logits_to_keep, **kwargs)  # fmt: skip

    own = model.forward = MethodType(lce_forward, model)
    expected = plain(model, ids, ids)
    calls.clear()
    trunkline.stream(model, chunk_size=8)
    check(streamed(model, ids, ids), expected, torch.float64)
    assert calls
    trunkline.unstream(model)
    assert model.forward is own
    model.forward = lambda **kwargs: None
    with pytest.raises(ValueError, match="the forward of this GraniteForCausalLM has been replaced"):
        trunkline.stream(model)
