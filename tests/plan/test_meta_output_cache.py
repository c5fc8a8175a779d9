"""Cached outputs of operators on meta tensors equal those that PyTorch computes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trunkline.plan.meta_output_cache import MetaOutputCache

aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


class Calls(TorchDispatchMode):
    """Counter of the operators that reach PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


def tensor_meta(x: torch.Tensor) -> tuple[Any, ...]:
    return tuple(x.shape), x.stride(), x.dtype, x.device


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.mm.default, (meta(3, 4), meta(4, 5))),
        (aten.add.Tensor, (meta(3, 1), meta(1, 5, dtype=torch.bfloat16))),
        (aten.sum.dim_IntList, (meta(3, 4, 5), [1], True)),
        (aten.clone.default, (meta(4, 3).t(),)),
        (aten.cat.default, ([meta(2, 3), meta(5, 3)], 0)),
        (aten.topk.default, (meta(7, 9), 2)),
    ],
)
def test_a_repeated_call_is_served_from_the_cache(func: Any, args: tuple[Any, ...]) -> None:
    cache, expected = MetaOutputCache(), func(*args)
    with Calls() as calls:
        given = [cache.call(func, args, {}) for _ in range(3)]
    assert calls.counts[func] == 1
    for out in given:
        pairs = zip(out, expected, strict=True) if isinstance(expected, tuple) else [(out, expected)]
        assert all(tensor_meta(a) == tensor_meta(b) for a, b in pairs)
    assert given[1] is not given[2]  # each is a tensor of its own: lifetimes are counted


def test_other_shapes_strides_dtypes_and_arguments_are_other_entries() -> None:
    cache = MetaOutputCache()
    calls = [
        (aten.sum.dim_IntList, (meta(3, 4), [0])), (aten.sum.dim_IntList, (meta(3, 4), [1])),
        (aten.clone.default, (meta(3, 4),)), (aten.clone.default, (meta(4, 3).t(),)),
        (aten.mul.Tensor, (meta(3, 4), 2)), (aten.mul.Tensor, (meta(3, 4, dtype=torch.int64), 2)),
        (aten.mul.Tensor, (meta(3, 4, dtype=torch.int64), 2.0)),  # 2 == 2.0, and the results have other dtypes
    ]  # fmt: skip
    for _ in range(2):
        for func, args in calls:
            assert tensor_meta(cache.call(func, args, {})) == tensor_meta(func(*args))


def test_views_and_in_place_operators_share_storage() -> None:
    cache, x = MetaOutputCache(), meta(4, 6)
    for _ in range(2):
        assert cache.call(aten.add_.Tensor, (x, 1), {}) is x
        for func, args in ((aten.view.default, (x, [24])), (aten._unsafe_view.default, (x, [24]))):
            out = cache.call(func, args, {})
            assert out.untyped_storage()._cdata == x.untyped_storage()._cdata


def test_operators_on_tensors_with_contents_run() -> None:
    cache, x = MetaOutputCache(), torch.arange(3.0)
    assert cache.call(aten.add.Tensor, (x, 1), {}).tolist() == [1, 2, 3]
    assert cache.call(aten.add.Tensor, (x, x), {}).tolist() == [0, 2, 4]
