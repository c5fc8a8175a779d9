"""Cached shapes of operator outputs on the `meta` device.

PyTorch computes output shapes on `meta` in Python, in up to a millisecond an operator. A simulated step calls few
distinct operators with few distinct shapes, many times each.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Literal

import torch
from torch import Tensor

_TensorMeta = tuple[torch.Size, tuple[int, ...], torch.dtype]  # shape, stride, dtype
_Aliasing = Literal["new", "in place", "other"]  # all outputs are new; the output is the first argument, changed


class MetaOutputCache:
    """Operator calls whose `meta` outputs are allocated from cached shapes, strides and dtypes.

    PyTorch runs every call with a tensor that has contents, and every operator that returns a view. An in-place
    operator on a `meta` tensor is not run at all.
    """

    def __init__(self) -> None:
        self._aliasing: dict[Any, _Aliasing] = {}  # by operator
        self._outputs: dict[Hashable, _TensorMeta | tuple[_TensorMeta, ...]] = {}

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the outputs of an operator overload, as it would: new tensors, a view, or its first argument."""
        aliasing = self._aliasing.get(func)
        if aliasing is None:
            aliasing = self._aliasing[func] = _aliasing_of(func)
        if aliasing == "in place" and isinstance(args[0], Tensor) and args[0].device.type == "meta":
            return args[0]
        if aliasing != "new":
            return func(*args, **kwargs)
        try:
            key = func, _key(args), _key(tuple(kwargs.items()))
            cached = self._outputs.get(key)
        except TypeError:  # an argument without a key: not hashable, or a tensor with contents
            return func(*args, **kwargs)
        if cached is None:
            out = func(*args, **kwargs)
            outs = out if isinstance(out, tuple) else (out,)
            if _share_storage(outs, args):  # the schema of `_unsafe_view` claims a new tensor, and it is a view
                self._aliasing[func] = "other"
            elif all(isinstance(x, Tensor) and x.device.type == "meta" and x.layout == torch.strided for x in outs):
                metas = tuple((x.shape, x.stride(), x.dtype) for x in outs)
                self._outputs[key] = metas if isinstance(out, tuple) else metas[0]
            return out
        if isinstance(cached[0], torch.Size):
            return _empty(cached)
        return tuple(_empty(meta) for meta in cached)


def _aliasing_of(func: Any) -> _Aliasing:
    arguments, returns = func._schema.arguments, func._schema.returns
    written = [a.alias_info is not None and a.alias_info.is_write for a in arguments]
    aliased = any(r.alias_info is not None for r in returns)
    writes_first = len(returns) == 1 and aliased and bool(written) and written[0] and not any(written[1:])
    keeps_shape = torch.Tag.inplace_view not in func.tags and not func._schema.name.endswith("resize_")
    if writes_first and keeps_shape and func._schema.name.endswith("_"):
        return "in place"
    return "new" if returns and not aliased and not any(written) else "other"


def _share_storage(outs: tuple[Any, ...], args: tuple[Any, ...]) -> bool:
    """Return whether an output uses the storage of an input."""
    inputs = {x.untyped_storage()._cdata for x in args if isinstance(x, Tensor)}
    return any(isinstance(x, Tensor) and x.untyped_storage()._cdata in inputs for x in outs)


def _key(values: tuple[Any, ...]) -> Hashable:
    return tuple([_key_of(value) for value in values])


def _key_of(value: Any) -> Hashable:
    """Return a cache key of an argument; numbers keep their type, since 2 and 2.0 give other dtypes."""
    if isinstance(value, Tensor):
        if value.device.type != "meta":
            raise TypeError("a tensor with contents has no key: the output's shape may depend on them")
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return _key(tuple(value))
    hash(value)
    return type(value), value


def _empty(meta: _TensorMeta) -> Tensor:
    shape, stride, dtype = meta
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
