"""Behaviour of a streamed model as a module: backward, hooks, optimizers, copies, replays, what a step costs."""

from __future__ import annotations

import copy
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import transformers as T
from families import build
from oracle import check, collect, plain, relative_error, streamed, tokens

import trunkline
from trunkline.api import streamed_forward

KEEPS = [(), ("attention",), ("kv",), ("attention", "kv")]


def test_a_second_backward_is_refused() -> None:
    model = trunkline.stream(build("llama"), chunk_size=8)
    loss = model(input_ids=tokens(1, 20), labels=tokens(1, 20)).loss
    loss.backward(retain_graph=True)
    gradients = collect(model)
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()
    assert gradients
    assert not collect(model)


def test_two_models_in_one_process_and_two_forwards_of_each() -> None:
    one, two = build("llama"), build("gpt2", n_head=2)
    ids = [tokens(1, n, seed=n) for n in (20, 33)]
    expected = [[plain(model, x, x) for x in ids] for model in (one, two)]
    trunkline.stream(one, chunk_size=8)
    trunkline.stream(two, chunk_size=5, keep=())
    losses = [[model(input_ids=x, labels=x, num_items_in_batch=71).loss for x in ids] for model in (one, two)]
    for i in (1, 0):
        for j, model in ((1, two), (0, one)):
            losses[j][i].backward()
            check((losses[j][i].detach(), collect(model)), expected[j][i], torch.float64)


def test_a_deep_copy_streams_the_copy() -> None:
    model = trunkline.stream(build("llama"), chunk_size=8)
    other = copy.deepcopy(model)
    ids = tokens(1, 20)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    assert float(model(input_ids=ids, labels=ids).loss) != float(other(input_ids=ids, labels=ids).loss)
    other(input_ids=ids, labels=ids).loss.backward()
    assert not collect(model)
    assert collect(other)


def test_save_pretrained_and_load(tmp_path: Path) -> None:
    model = trunkline.stream(build("llama", torch.float32), chunk_size=8)
    model.save_pretrained(tmp_path)
    loaded = T.AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = tokens(1, 20)
    assert abs(float(loaded(input_ids=ids, labels=ids).loss - model(input_ids=ids, labels=ids).loss)) < 1e-5
    assert "trunkline" not in (tmp_path / "config.json").read_text()


def test_streaming_again_replaces_the_settings() -> None:
    model = build("llama")
    seen: list[Any] = []
    trunkline.stream(model, chunk_size=8)
    trunkline.stream(model, chunk_size=5, progress=seen.append)
    model(input_ids=tokens(1, 20), labels=tokens(1, 20))
    assert {event.num_chunks for event in seen if event.part == "forward"} == {4}
    trunkline.unstream(model)
    assert "forward" not in model.__dict__


def test_parameter_hooks_run_once_with_the_whole_gradient() -> None:
    model = build("llama")
    ids = tokens(1, 37)
    _, expected = plain(model, ids, ids)
    calls: Counter[str] = Counter()
    for name, parameter in model.named_parameters():

        def after(p: torch.Tensor, name: str = name) -> None:
            calls[name] += 1
            assert relative_error(p.grad, expected[name]) < 1e-8

        parameter.register_post_accumulate_grad_hook(after)
    trunkline.stream(model, chunk_size=8)
    streamed(model, ids, ids)
    assert set(calls) == set(expected)
    assert set(calls.values()) == {1}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fused_adamw_steps_on_the_result(dtype: torch.dtype) -> None:
    """Five steps follow those of plain autograd."""
    reference, model = build("llama", dtype), trunkline.stream(build("llama", dtype), chunk_size=8)
    losses: list[list[float]] = [[], []]
    for i, each in enumerate((reference, model)):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2, fused=True)
        for step in range(5):
            ids = tokens(2, 37, seed=step % 2)
            loss = each(input_ids=ids, labels=ids).loss
            loss.backward()
            assert all(p.grad.dtype == dtype for p in each.parameters())
            optimizer.step()
            optimizer.zero_grad()
            losses[i].append(float(loss.detach()))
    assert losses[0][-1] < losses[0][0] - 0.1
    tolerance = 0.02 if dtype == torch.bfloat16 else 2e-4
    assert all(abs(a - b) < tolerance * a for a, b in zip(*losses, strict=True)), losses


@pytest.mark.parametrize("keep", KEEPS, ids=["nothing", "attention", "kv", "both"])
def test_dropout_mask_is_the_same_in_replay(keep: tuple[str, ...]) -> None:
    """The gradient is that of the very function the forward computed: it predicts how that changes (fp64)."""
    model = build("gpt2", resid_pdrop=0.3, embd_pdrop=0.2)
    ids = tokens(2, 37)
    trunkline.stream(model, chunk_size=8, keep=keep)

    def loss() -> torch.Tensor:
        torch.manual_seed(5)
        return model(input_ids=ids, labels=ids).loss

    value = loss()
    after_forward = torch.get_rng_state()
    value.backward()
    assert torch.equal(after_forward, torch.get_rng_state())  # backward leaves the user's generator alone
    gradients = collect(model)
    torch.manual_seed(8)
    direction = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    slope = sum(float((gradients[name] * d).sum()) for name, d in direction.items())
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.add_(direction[name], alpha=sign * 1e-5)
            values.append(float(loss()))
            for name, p in model.named_parameters():
                p.sub_(direction[name], alpha=sign * 1e-5)
    assert abs((values[0] - values[1]) / 2e-5 - slope) < 1e-6 * abs(slope)


def test_dropout_differs_between_chunks_layers_and_forwards() -> None:
    from trunkline.engine.replay import ReplayContext, draw_seed

    torch.manual_seed(0)
    draws = []
    for _ in range(2):
        conditions = ReplayContext(torch.nn.Identity(), torch.device("cpu"), draw_seed())
        for stage in range(-1, 40):
            for chunk in range(40):
                with torch.random.fork_rng([]):
                    conditions.seed(stage, chunk)
                    draws.append(int(torch.randint(2**62, ())))
    assert len(set(draws)) == len(draws)


@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
@pytest.mark.parametrize("keep", KEEPS, ids=["nothing", "attention", "kv", "both"])
def test_autocast_is_the_same_in_replay(keep: tuple[str, ...], inside: bool) -> None:
    model = build("llama", torch.float32)
    ids = tokens(1, 64)
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(model, ids, ids)
    _, full = plain(model, ids, ids)
    trunkline.stream(model, chunk_size=16, keep=keep)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=ids, labels=ids, num_items_in_batch=71).loss
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    got = collect(model)
    assert got.keys() == expected[1].keys()
    for name, gradient in got.items():
        assert gradient.dtype == torch.float32
        distance = relative_error(expected[1][name], full[name])  # what autocast itself changes
        assert distance > 1e-3
        assert relative_error(gradient, full[name]) < 1.5 * distance + 0.01
        assert relative_error(gradient, full[name]) > 1e-3  # it really ran in bf16


def test_a_change_of_mode_before_backward_is_refused() -> None:
    model = trunkline.stream(build("gpt2", resid_pdrop=0.3), chunk_size=8)
    loss = model(input_ids=tokens(1, 20), labels=tokens(1, 20)).loss
    model.eval()
    with pytest.raises(RuntimeError, match=r"train\(\) and eval\(\)"):
        loss.backward()


def test_fp32_islands_under_autocast_are_differentiated_in_fp32() -> None:
    model = build("llama", torch.float32)

    class Island(torch.nn.Module):
        def __init__(self, inner: torch.nn.Linear) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                return self.inner(x.float())

    model.model.layers[2].mlp.down_proj = Island(model.model.layers[2].mlp.down_proj)
    trunkline.stream(model, chunk_size=64)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=tokens(1, 64), labels=tokens(1, 64)).loss
    loss.backward()
    gradient = model.model.layers[2].mlp.down_proj.inner.weight.grad
    assert not torch.equal(gradient, gradient.bfloat16().float())


@pytest.mark.parametrize("kernel", ["auto", "math"])
def test_attention_under_autocast_computes_in_the_autocast_dtype(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries, keys and values reach the kernel in the autocast dtype, as they do in SDPA, also on bf16 processors."""
    from trunkline.attention import kernels

    dtypes: set[torch.dtype] = set()

    def resolve(device: Any, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
        dtypes.add(dtype)
        return original(device, dtype, *args, **kwargs)

    original = kernels.resolve
    monkeypatch.setattr("trunkline.attention.core.resolve", resolve)
    monkeypatch.setattr(kernels.CpuFlashKernel, "compute_dtype", lambda self, dtype: dtype)
    monkeypatch.setattr(kernels.MathKernel.__init__, "__defaults__", (16,))
    model = trunkline.stream(build("llama", torch.float32), chunk_size=48, attn_kernel=kernel)
    dtypes.clear()
    with torch.autocast("cpu", torch.bfloat16):
        model(input_ids=tokens(1, 128), labels=tokens(1, 128)).loss.backward()
    assert dtypes == {torch.bfloat16}
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_fp16_weight_gradients_of_the_head_do_not_overflow() -> None:
    """8,192 tokens that all have large hidden states and one target: unnormalised, their sum is far above 65,504."""
    model = build("llama", torch.float32, max_position_embeddings=8192)
    with torch.no_grad():
        model.model.norm.weight.fill_(10)
        model.model.embed_tokens.weight.add_(0.5)
    trunkline.stream(model, chunk_size=8192)
    ids = tokens(1, 8192)
    ids[:, ::2] = 5
    with torch.autocast("cpu", torch.float16):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("changed", ["a parameter", "a frozen parameter", "input_ids"])
def test_inputs_and_parameters_changed_before_backward_are_refused(changed: str) -> None:
    model = build("llama")
    model.lm_head.requires_grad_(False)
    trunkline.stream(model, chunk_size=8)
    ids = tokens(1, 20)
    loss = model(input_ids=ids, labels=ids).loss
    with torch.no_grad():
        if changed == "input_ids":
            ids[0, 0] += 1
        else:
            (model.lm_head if "frozen" in changed else model.model.layers[0].mlp.up_proj).weight.mul_(1.1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_loss_may_be_changed_in_place_and_a_hook_may_want_the_embedding() -> None:
    model = build("llama")
    ids = tokens(1, 20)
    _, expected = plain(model, ids, ids, 0.5)
    trunkline.stream(model, chunk_size=8)
    loss = model(input_ids=ids, labels=ids, num_items_in_batch=64).loss
    loss *= 128
    loss.backward()
    assert max(relative_error(g, expected[name]) for name, g in collect(model).items()) < 1e-8
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1" in name)
    model.enable_input_require_grads()
    model(input_ids=ids, labels=ids).loss.backward()
    assert all("layers.1" in name for name in collect(model))


@pytest.mark.parametrize("bf16", [False, True])
def test_transformers_trainer(tmp_path: Path, bf16: bool) -> None:
    """transformers' Trainer, with accumulation and evaluation: the losses of plain training."""

    class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            ids = tokens(1, 37, seed=index)[0]
            return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(37) < 5 * (index % 3), -100)}

    histories = []
    for streamed_too in (False, True):
        model = build("llama", torch.float32)
        if streamed_too:
            trunkline.stream(model, chunk_size=8)
        arguments = T.TrainingArguments(
            str(tmp_path), max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=1,
            eval_strategy="steps", eval_steps=3, report_to=[], save_strategy="no", bf16=bf16, use_cpu=True, seed=0,
            disable_tqdm=True,
        )  # fmt: skip
        trainer = T.Trainer(model, arguments, train_dataset=Rows(), eval_dataset=Rows())
        trainer.train()
        histories.append(
            [
                v
                for h in trainer.state.log_history
                for k, v in sorted(h.items())
                if k in ("loss", "grad_norm", "eval_loss")
            ]
        )
        if streamed_too and bf16:
            with pytest.raises(ValueError, match="has been replaced"):
                trunkline.stream(model)
        if streamed_too:
            trunkline.unstream(model)
            trunkline.stream(model)
    assert len(histories[0]) == 7
    assert histories[1] == pytest.approx(histories[0], rel=0.02 if bf16 else 1e-4)


def test_forwards_in_several_threads() -> None:
    """Two threads that use one streamed model get what they would get alone."""
    model = build("llama")
    trunkline.stream(model, chunk_size=4)
    ids = [tokens(1, 37, seed=seed) for seed in range(8)]
    with torch.no_grad():
        expected = [float(model(input_ids=x, labels=x).loss) for x in ids]
        with ThreadPoolExecutor(4) as pool:
            got = list(pool.map(lambda x: float(_loss_without_graph(model, x)), ids * 4))
    assert got == expected * 4


def _loss_without_graph(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, labels=ids).loss


def test_a_model_on_several_devices_is_refused() -> None:
    model = build("llama")
    model.lm_head.to("meta")
    with pytest.raises(ValueError, match="are on cpu, meta: put the model on one device"):
        trunkline.stream(model)


def test_a_wrapper_that_binds_the_streamed_forward() -> None:
    """State of a model after accelerate's `unwrap_model(keep_fp32_wrapper=False)`."""
    model = trunkline.stream(build("llama"), chunk_size=8)
    ids = tokens(1, 20)
    expected = model(input_ids=ids, labels=ids).loss
    model.forward = MethodType(model.forward, model)
    assert float(model(input_ids=ids, labels=ids).loss.detach()) == float(expected.detach())
    assert float(model(ids, labels=ids).loss.detach()) == float(expected.detach())
    trunkline.unstream(model)


def test_tiers_follow_the_model_to_another_device() -> None:
    model = trunkline.stream(build("llama"), chunk_size=8)
    before = model.forward.tiers
    assert model.forward.tiers is before
    model.to("meta")
    assert model.forward.tiers is not before


def test_an_input_on_another_device_is_refused() -> None:
    model = trunkline.stream(build("llama"), chunk_size=8)
    model.get_input_embeddings().to("meta")
    with pytest.raises(ValueError, match=r"input_ids are on cpu and the model is on meta.*DataParallel"):
        model(input_ids=tokens(1, 20), labels=tokens(1, 20))


@torch.no_grad()
def test_flags_of_a_config_are_for_forwards_and_not_for_scores() -> None:
    model = trunkline.stream(build("llama", torch.float32).eval(), chunk_size=8)
    ids = tokens(1, 20)
    expected = streamed_forward(model, "score").score(input_ids=ids, labels=ids)
    model.config.output_hidden_states = True
    with pytest.raises(ValueError, match="output_hidden_states is not supported"):
        model(input_ids=ids, labels=ids)
    assert torch.equal(streamed_forward(model, "score").score(input_ids=ids, labels=ids), expected)
