"""The outputs of operators on tensors without contents, worked out once for each form of inputs.

PyTorch works out what an operator gives on the `meta` device in Python, which takes up to a millisecond; a rehearsal
calls the same few operators with the same few shapes over and over.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_Form = tuple[torch.Size, tuple[int, ...], torch.dtype]


class MetaOutputCache:
    """Calls operators; what they give on the `meta` device may come from memory."""

    def __init__(self) -> None:
        self._kinds: dict[Any, _Kind] = {}
        self._known: dict[Hashable, _Form | tuple[_Form, ...]] = {}

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operator gives."""
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = _kind(func)
        if kind.changes_first and isinstance(args[0], Tensor) and args[0].device.type == "meta":
            return args[0]
        if not kind.makes_new:
            return func(*args, **kwargs)
        try:
            key = func, _key(args), _key(tuple(kwargs.items()))
            known = self._known.get(key)
        except TypeError:  # it was given what has no form
            return func(*args, **kwargs)
        if known is None:
            out = func(*args, **kwargs)
            outs = out if isinstance(out, tuple) else (out,)
            if _share(outs, args):  # whatever its schema says (`_unsafe_view`)
                self._kinds[func] = _Kind(makes_new=False, changes_first=False)
            elif all(isinstance(x, Tensor) and x.device.type == "meta" and x.layout == torch.strided for x in outs):
                forms = tuple((x.shape, x.stride(), x.dtype) for x in outs)
                self._known[key] = forms if isinstance(out, tuple) else forms[0]
            return out
        if isinstance(known[0], torch.Size):
            return _empty(known)
        return tuple(_empty(form) for form in known)


@dataclass(frozen=True, slots=True)
class _Kind:
    """Of an operator: whether all that it gives is new, or is its first argument, changed in place."""

    makes_new: bool
    changes_first: bool


def _kind(func: Any) -> _Kind:
    arguments, returns = func._schema.arguments, func._schema.returns
    written = [a.alias_info is not None and a.alias_info.is_write for a in arguments]
    aliased = any(r.alias_info is not None for r in returns)
    in_place = len(returns) == 1 and aliased and bool(written) and written[0] and not any(written[1:])
    keeps_shape = torch.Tag.inplace_view not in func.tags and not func._schema.name.endswith("resize_")
    is_method = in_place and func._schema.name.endswith("_") and keeps_shape
    return _Kind(bool(returns) and not aliased and not any(written), is_method)


def _share(outs: tuple[Any, ...], args: tuple[Any, ...]) -> bool:
    """Whether an output lies in the storage of an input."""
    given = {x.untyped_storage()._cdata for x in args if isinstance(x, Tensor)}
    return any(isinstance(x, Tensor) and x.untyped_storage()._cdata in given for x in outs)


def _key(values: tuple[Any, ...]) -> Hashable:
    return tuple([_key_of(value) for value in values])


def _key_of(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        if value.device.type != "meta":
            raise TypeError("contents decide")
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return _key(tuple(value))
    hash(value)
    return type(value), value


def _empty(form: _Form) -> Tensor:
    shape, stride, dtype = form
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
