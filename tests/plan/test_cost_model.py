"""Costs of operators: kinds, bytes read and written, FLOPs of products and of attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plan.profiles import constant
from transformers import MixtralConfig, MixtralForCausalLM

from trunkline.attention.meta_kernel import KernelCall
from trunkline.plan.cost_model import FREE, CostModel, OperatorCost, operator_kind
from trunkline.plan.estimate import estimate
from trunkline.plan.hardware import points

aten = torch.ops.aten

KINDS = {
    "free": [
        aten.view.default, aten._unsafe_view.default, aten.t.default, aten.transpose.int, aten.expand.default,
        aten.slice.Tensor, aten.split.Tensor, aten.unsqueeze.default, aten.as_strided.default, aten.detach.default,
        aten.alias.default, aten.empty.memory_format, aten.empty_like.default, aten.new_empty_strided.default,
        aten.resize_.default, aten._local_scalar_dense.default,
    ],
    "matmul": [aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten._grouped_mm.default],
    "fill": [
        aten.zeros.default, aten.zero_.default, aten.zeros_like.default, aten.new_zeros.default, aten.fill_.Scalar,
        aten.ones_like.default, aten.full_like.default, aten.arange.start,
    ],
    "copy": [
        aten.copy_.default, aten.clone.default, aten.cat.default, aten.stack.default, aten._to_copy.default,
        aten.repeat.default, aten.embedding_dense_backward.default,
    ],
    "rows": [
        aten.embedding.default, aten.index.Tensor, aten.index_select.default, aten.gather.default,
        aten.index_add_.default, aten.index_put_.default, aten.scatter_add_.default,
    ],
    "transcendental": [
        aten.exp.default, aten.log_.default, aten.silu.default, aten.silu_backward.default, aten.gelu.default,
        aten.tanh.default, aten._softmax.default, aten.cos.default, aten.pow.Tensor_Scalar, aten.rsqrt.default,
        aten.sigmoid.default, aten.log_sigmoid_forward.default, aten.logsumexp.default,
    ],
    "reduction": [
        aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.var.correction, aten.max.dim, aten.argmax.default,
        aten.cumsum.default, aten.linalg_vector_norm.default, aten.all.default,
    ],
    "pointwise": [
        aten.add.Tensor, aten.add_.Tensor, aten.mul.Tensor, aten.neg.default, aten.where.self, aten.lerp_.Tensor,
        aten.masked_fill_.Scalar, aten.maximum.default, aten.minimum.default, aten.logical_and.default,
        aten.native_layer_norm.default, aten.clamp_min.default,
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_operators_are_classified(kind: str) -> None:
    assert {str(func): operator_kind(func) for func in KINDS[kind]} == {str(func): kind for func in KINDS[kind]}


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


# A machine with another rate for each kind, so that a second tells which was taken; no kernel is faster than a second
# in a million million.
RATES = {"copy": 1e12, "pointwise": 2e12, "transcendental": 3e12, "reduction": 4e12}
MACHINE = constant(memory={kind: points([[1, rate]], "made up", "2026") for kind, rate in RATES.items()})


def cost(func: Any, *args: Any, **kwargs: Any) -> OperatorCost:
    out = func(*args, **kwargs)
    return CostModel(MACHINE).operator_cost(func, args, kwargs, out)


X, Y = meta(64, 32), meta(64, 32, dtype=torch.bfloat16)
N = 64 * 32
BYTES = {
    "two read, one written": (aten.add.Tensor, (X, X), 3 * 4 * N, "pointwise"),
    "in place: read and written": (aten.mul_.Tensor, (X, X), 3 * 4 * N, "pointwise"),
    "what a copy overwrites is not read": (aten.copy_.default, (X, Y), (4 + 2) * N, "copy"),
    "a cast": (aten._to_copy.default, (X,), (4 + 2) * N, "copy"),
    "written only": (aten.zero_.default, (X,), 4 * N, "copy"),
    "like what it does not read": (aten.zeros_like.default, (X,), 4 * N, "copy"),
    "what is expanded is read once": (aten.mul.Tensor, (X, meta(64, 1).expand(64, 32)), 4 * (2 * N + 64), "pointwise"),
    "a scalar that is expanded": (aten.mul.Tensor, (X, meta(1).expand(64, 32)), 4 * (2 * N + 1), "pointwise"),
    "several in a list": (aten.cat.default, ([X, X, X],), 2 * 3 * 4 * N, "copy"),
    "rows of a table": (aten.embedding.default, (meta(9_999, 32), meta(64, dtype=torch.long)), 2 * 8 * 64, "copy"),
    "zeros for a whole table": (
        aten.embedding_dense_backward.default, (X, meta(64, dtype=torch.long), 9_999, -1, False),
        4 * 9_999 * 32 + 4 * N + 8 * 64, "copy",
    ),
    "a sum": (aten.sum.dim_IntList, (X, [1]), 4 * (N + 64), "reduction"),
    "two outputs": (aten.max.dim, (X, 1), 4 * N + (4 + 8) * 64, "reduction"),
    "a table of functions": (aten.exp.default, (Y,), 2 * 2 * N, "transcendental"),
}  # fmt: skip


@pytest.mark.parametrize("name", BYTES)
def test_cost_is_bytes_over_the_rate_of_the_kind(name: str) -> None:
    func, args, nbytes, kind = BYTES[name]
    kwargs = {"dtype": torch.bfloat16} if func is aten._to_copy.default else {}
    assert cost(func, *args, **kwargs) == OperatorCost(pytest.approx(nbytes / RATES[kind]), 0)


@pytest.mark.parametrize(
    ("func", "args"), [(aten.view.default, (X, [-1])), (aten._unsafe_view.default, (X, [N])), (aten.t.default, (X,))]
)
def test_views_are_free(func: Any, args: Any) -> None:
    assert cost(func, *args) == FREE


def test_no_kernel_is_faster_than_a_launch() -> None:
    slow = CostModel(constant(kernel_seconds=1e-5))
    assert slow.operator_cost(aten.add.Tensor, (X, X), {}, X).seconds == 1e-5
    assert slow.operator_cost(aten.mm.default, (X, X.T), {}, meta(64, 64)).seconds == 1e-5
    assert slow.operator_cost(aten.view.default, (X, [-1]), {}, X.view(-1)) == FREE
    assert slow.attention_cost(attended("forward")).seconds == 1e-5


A, B = meta(512, 128), meta(128, 256)
OFFS = meta(4, dtype=torch.int32)
WIDE, EXPERTS = meta(512, 128, dtype=torch.bfloat16), meta(4, 128, 256, dtype=torch.bfloat16)
PRODUCTS = {
    "mm": (aten.mm.default, (A, B)),
    "addmm": (aten.addmm.default, (meta(256), A, B)),
    "bmm": (aten.bmm.default, (A.view(4, 128, 128), B.expand(4, 128, 256))),
    "experts: rows cut": (aten._grouped_mm.default, (WIDE, EXPERTS, OFFS)),
    "experts: what is summed cut": (aten._grouped_mm.default, (WIDE.T, meta(512, 256, dtype=torch.bfloat16), OFFS)),
    "experts: batched": (aten._grouped_mm.default, (WIDE.view(4, 128, 128), EXPERTS)),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_matrix_products_cost_their_flops(name: str) -> None:
    """All of them are 512 rows by 128 by 256."""
    func, args = PRODUCTS[name]
    flops = 2 * 512 * 128 * 256
    assert cost(func, *args) == OperatorCost(pytest.approx(flops / 1e13), flops)


def test_thin_matrix_products_cost_their_bytes() -> None:
    vector, matrix = meta(1, 4096), meta(4096, 4096)
    nbytes = 4 * (4096 + 4096 * 4096 + 4096)
    assert cost(aten.mm.default, vector, matrix) == OperatorCost(pytest.approx(nbytes / 1e12), 2 * 4096 * 4096)


def attended(direction: Any, *, kernel: str = "flash", causal: bool = True) -> KernelCall:
    return KernelCall(direction, kernel, torch.bfloat16, 2, 8, 4, 64, 256, 128, 96, causal)


def test_attention_costs_its_query_key_pairs() -> None:
    """Causal: the last query sees all keys. Scores that backward recomputes count as time, not as FLOPs."""
    costs = CostModel(MACHINE)
    for causal, seen in ((True, 64 * 256 - 64 * 63 // 2), (False, 64 * 256)):
        pairs = 2 * 8 * seen
        forward, backward = (costs.attention_cost(attended(d, causal=causal)) for d in ("forward", "backward"))
        assert forward == OperatorCost(pytest.approx(2 * (128 + 96) * pairs / 2e14), 2 * (128 + 96) * pairs)
        assert backward == OperatorCost(pytest.approx(5 * (128 + 96) * pairs / 1.5e14), 4 * (128 + 96) * pairs)


def test_math_attention_takes_longer_than_flash() -> None:
    """All of the rectangle, and scores in fp32 through memory, for the same FLOPs."""
    costs = CostModel(MACHINE)
    for direction in ("forward", "backward"):
        flash, math = (costs.attention_cost(attended(direction, kernel=kernel)) for kernel in ("flash", "math"))
        assert math.flops == flash.flops
        assert math.seconds > 6 * 2 * 8 * 64 * 256 * 4 / RATES["transcendental"] > flash.seconds


def test_products_of_experts_count_as_flops() -> None:
    """A layer is computed forward, again in backward, and its gradients: four thirds of the mathematics, but the head.

    Attention is kept; its part in a model with heads this narrow is small.
    """
    config = MixtralConfig(vocab_size=97, hidden_size=32, intermediate_size=256, num_hidden_layers=2,
                           num_attention_heads=4, num_key_value_heads=2, num_local_experts=4)  # fmt: skip
    step = estimate(
        MixtralForCausalLM(config).to(torch.bfloat16), 64, hardware=constant(), chunk_size=16, keep=("attention", "kv")
    ).step
    head = 6 * 64 * 32 * 97
    assert step.hardware_flops == pytest.approx((step.model_flops - head) * 4 / 3 + head, rel=0.02)
