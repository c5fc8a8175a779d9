"""Interleaved and pipelined calls, without ranks."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from trunkline.distributed.interleave import Interleaver

_name = contextvars.ContextVar("_name", default=-1)


def calls(interleaver: Interleaver, done: list[str], pauses: list[int]) -> Iterator[Callable[[], Any]]:
    """Yield calls; each notes a letter before every pause, and after the last."""

    def call(number: int) -> int:
        for piece in "ABC"[: pauses[number]]:
            done.append(f"{piece}{number}")
            interleaver.pause()
        done.append(f"{'ABC'[pauses[number]]}{number}")
        return number

    return (partial(call, number) for number in range(len(pauses)))


@pytest.mark.parametrize(
    ("pauses", "order"),
    [
        ([2] * 5, "A0 A1 B0 B1 C0 A2 C1 A3 B2 B3 C2 A4 C3 B4 C4"),
        ([1] * 4, "A0 A1 B0 A2 B1 A3 B2 B3"),
        ([0] * 3, "A0 A1 A2"),
        ([2, 0, 1], "A0 A1 A2 B0 B2 C0"),
        ([2], "A0 B0 C0"),
        ([], ""),
    ],
)
def test_two_calls_run_in_turn(pauses: list[int], order: str) -> None:
    """Between two pieces of a call runs a piece of another, except at both ends."""
    interleaver, done = Interleaver("cpu"), list[str]()
    with interleaver.scope():
        interleaver.interleave(calls(interleaver, done, pauses))
    assert " ".join(done) == order


def test_next_call_runs_while_a_result_is_in_use() -> None:
    interleaver, done, results = Interleaver("cpu"), list[str](), list[int]()
    for number in interleaver.pipeline(calls(interleaver, done, [2] * 3)):
        results.append(number)
        done.append("use")
        interleaver.run_next()
        done.append("use")
        interleaver.run_next()
    assert results == [0, 1, 2]
    assert " ".join(done) == "A0 B0 C0 use A1 use B1 C1 use A2 use B2 C2 use use"


def test_pause_does_nothing_outside_a_call() -> None:
    interleaver = Interleaver("cpu")
    interleaver.pause()
    interleaver.run_next()
    assert next(calls(interleaver, [], [2]))() == 0


def test_every_call_keeps_its_grad_mode_autocast_and_context() -> None:
    interleaver = Interleaver("cpu")

    def call(number: int) -> tuple[bool, bool, torch.dtype, int]:
        token = _name.set(number)
        with torch.set_grad_enabled(number % 2 == 0), torch.autocast("cpu", torch.float16, enabled=number < 2):
            interleaver.pause()
            found = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
            seen = _name.get()
        interleaver.pause()
        _name.reset(token)
        return *found, seen

    before = torch.get_autocast_dtype("cpu")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for number, found in enumerate(interleaver.pipeline(partial(call, number) for number in range(4))):
            interleaver.run_next()
            assert found == (number % 2 == 0, number < 2, torch.float16, number)
            assert not torch.is_grad_enabled()
            assert torch.is_autocast_enabled("cpu")
            assert torch.get_autocast_dtype("cpu") == torch.bfloat16
            assert _name.get() == -1
    assert torch.is_grad_enabled()
    assert torch.get_autocast_dtype("cpu") == before


def test_error_ends_unfinished_calls() -> None:
    interleaver, ended = Interleaver("cpu"), list[int]()

    def call(number: int) -> None:
        try:
            interleaver.pause()
            if number == 0:
                raise OSError("disk")
        finally:
            ended.append(number)
            if number == 1:
                raise RuntimeError("while it ended")

    with torch.no_grad(), pytest.raises(OSError, match="disk") as raised, interleaver.scope():
        interleaver.interleave(partial(call, number) for number in range(3))
    assert "RuntimeError: while it ended" in raised.value.__notes__[0]
    assert ended == [0, 1]
    done = list[str]()
    interleaver.interleave(calls(interleaver, done, [1, 1]))
    assert " ".join(done) == "A0 A1 B0 B1"


def test_error_ends_the_next_call_of_a_pipeline() -> None:
    interleaver, done, ended = Interleaver("cpu"), list[str](), list[bool]()

    def call() -> None:
        try:
            interleaver.pause()
        finally:
            ended.append(torch.is_grad_enabled())

    def sweep() -> None:
        ahead = interleaver.pipeline([*calls(interleaver, done, [0]), call])
        assert next(ahead) == 0
        interleaver.run_next()
        assert not ended
        torch.set_grad_enabled(False)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), interleaver.scope():
        sweep()
    assert ended == [True]
    assert not torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    interleaver.run_next()


def test_nested_scope_has_its_own_order() -> None:
    interleaver, done = Interleaver("cpu"), list[str]()

    def outer(number: int) -> int:
        interleaver.pause()
        with interleaver.scope():
            interleaver.interleave(calls(interleaver, done, [1, 1]))
            assert list(interleaver.pipeline(calls(interleaver, done, [0, 0]))) == [0, 1]
        interleaver.pause()
        return number

    with interleaver.scope():
        interleaver.interleave((lambda number=number: done.append(f"outer {outer(number)}")) for number in range(2))
        for number in interleaver.pipeline(partial(outer, number) for number in range(2)):
            interleaver.run_next()
            done.append(f"ahead {number}")
    inner = ["A0", "A1", "B0", "B1", "A0", "A1"]
    assert done == [*inner, *inner, "outer 0", "outer 1", *inner, "ahead 0", *inner, "ahead 1"]


def test_next_call_is_not_run_from_another_thread() -> None:
    """Autograd runs CUDA backwards in its own thread: nothing is interleaved there, and nothing fails."""
    interleaver, done = Interleaver("cpu"), list[str]()
    ahead = interleaver.pipeline(calls(interleaver, done, [2] * 2))
    assert next(ahead) == 0
    thread = threading.Thread(target=interleaver.run_next)
    thread.start()
    thread.join()
    assert next(ahead) == 1
    assert " ".join(done) == "A0 B0 C0 A1 B1 C1"
