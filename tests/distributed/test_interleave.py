"""Calls that take turns."""

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


def calls(turns: Interleaver, done: list[str], pauses: list[int]) -> Iterator[Callable[[], Any]]:
    """One call for each, which pauses so often."""

    def call(number: int) -> int:
        for piece in "ABC"[: pauses[number]]:
            done.append(f"{piece}{number}")
            turns.pause()
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
def test_two_calls_take_turns(pauses: list[int], order: str) -> None:
    """Each piece but those at the ends has one of another call before the next of its own."""
    turns, done = Interleaver("cpu"), list[str]()
    with turns.scope():
        turns.interleave(calls(turns, done, pauses))
    assert " ".join(done) == order


def test_the_next_call_goes_on_meanwhile() -> None:
    turns, done, results = Interleaver("cpu"), list[str](), list[int]()
    for number in turns.pipeline(calls(turns, done, [2] * 3)):
        results.append(number)
        done.append("use")
        turns.meanwhile()
        done.append("use")
        turns.meanwhile()
    assert results == [0, 1, 2]
    assert " ".join(done) == "A0 B0 C0 use A1 use B1 C1 use A2 use B2 C2 use use"


def test_outside_a_call_nothing_pauses() -> None:
    turns = Interleaver("cpu")
    turns.pause()
    turns.meanwhile()
    assert next(calls(turns, [], [2]))() == 0


def test_every_call_has_its_own_modes_and_context() -> None:
    turns = Interleaver("cpu")

    def call(number: int) -> tuple[bool, bool, torch.dtype, int]:
        token = _name.set(number)
        with torch.set_grad_enabled(number % 2 == 0), torch.autocast("cpu", torch.float16, enabled=number < 2):
            turns.pause()
            found = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
            seen = _name.get()
        turns.pause()
        _name.reset(token)
        return *found, seen

    before = torch.get_autocast_dtype("cpu")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for number, found in enumerate(turns.pipeline(partial(call, number) for number in range(4))):
            turns.meanwhile()
            assert found == (number % 2 == 0, number < 2, torch.float16, number)
            assert not torch.is_grad_enabled()
            assert torch.is_autocast_enabled("cpu")
            assert torch.get_autocast_dtype("cpu") == torch.bfloat16
            assert _name.get() == -1
    assert torch.is_grad_enabled()
    assert torch.get_autocast_dtype("cpu") == before


def test_an_error_ends_what_is_under_way() -> None:
    turns, ended = Interleaver("cpu"), list[int]()

    def call(number: int) -> None:
        try:
            turns.pause()
            if number == 0:
                raise OSError("disk")
        finally:
            ended.append(number)
            if number == 1:
                raise RuntimeError("while it ended")

    with torch.no_grad(), pytest.raises(OSError, match="disk") as raised, turns.scope():
        turns.interleave(partial(call, number) for number in range(3))
    assert "RuntimeError: while it ended" in raised.value.__notes__[0]
    assert ended == [0, 1]
    done = list[str]()
    turns.interleave(calls(turns, done, [1, 1]))
    assert " ".join(done) == "A0 A1 B0 B1"


def test_an_abandoned_call_ahead_is_ended() -> None:
    turns, done, ended = Interleaver("cpu"), list[str](), list[bool]()

    def call() -> None:
        try:
            turns.pause()
        finally:
            ended.append(torch.is_grad_enabled())

    def sweep() -> None:
        ahead = turns.pipeline([*calls(turns, done, [0]), call])
        assert next(ahead) == 0
        turns.meanwhile()
        assert not ended
        torch.set_grad_enabled(False)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), turns.scope():
        sweep()
    assert ended == [True]
    assert not torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    turns.meanwhile()


def test_calls_within_calls() -> None:
    """What runs inside a call, or while one is ahead, has turns of its own."""
    turns, done = Interleaver("cpu"), list[str]()

    def outer(number: int) -> int:
        turns.pause()
        with turns.scope():
            turns.interleave(calls(turns, done, [1, 1]))
            assert list(turns.pipeline(calls(turns, done, [0, 0]))) == [0, 1]
        turns.pause()
        return number

    with turns.scope():
        turns.interleave((lambda number=number: done.append(f"outer {outer(number)}")) for number in range(2))
        for number in turns.pipeline(partial(outer, number) for number in range(2)):
            turns.meanwhile()
            done.append(f"ahead {number}")
    inner = ["A0", "A1", "B0", "B1", "A0", "A1"]
    assert done == [*inner, *inner, "outer 0", "outer 1", *inner, "ahead 0", *inner, "ahead 1"]


def test_another_thread_leaves_a_call_alone() -> None:
    """Autograd may differentiate in a thread of its own: then nothing goes on meanwhile, and nothing fails."""
    turns, done = Interleaver("cpu"), list[str]()
    ahead = turns.pipeline(calls(turns, done, [2] * 2))
    assert next(ahead) == 0
    thread = threading.Thread(target=turns.meanwhile)
    thread.start()
    thread.join()
    assert next(ahead) == 1
    assert " ".join(done) == "A0 B0 C0 A1 B1 C1"
