"""Calls of the `progress` function."""

from __future__ import annotations

from typing import Any

import pytest
from families import build
from oracle import tokens

import trunkline


def test_progress_reports_every_chunk_of_every_part() -> None:
    events: list[trunkline.Progress] = []
    model = trunkline.stream(build("llama"), chunk_size=8, keep=("attention", "kv"), progress=events.append)
    ids = tokens(1, 20)
    model(input_ids=ids, labels=ids).loss.backward()
    parts = [(e.part, e.layer, e.chunk) for e in events]
    up, down = range(3), (2, 1, 0)
    assert parts == [
        *(("embed", -1, c) for c in up),
        *(("forward", layer, c) for layer in up for c in up),
        *(("head", -1, c) for c in up),
        *(("backward", layer, c) for layer in (2, 1, 0, -1) for c in down),
    ]
    assert {(e.num_layers, e.num_chunks) for e in events} == {(3, 3)}


@pytest.mark.parametrize(
    ("settings", "without_progress"),
    [({}, [2, 2, 2]), ({"keep": (), "checkpoint_every": 2}, [2, 3 + 2, 0])],
    ids=["keys again", "inputs again"],
)
def test_progress_reports_recomputation(settings: dict[str, Any], without_progress: list[int]) -> None:
    """Once a chunk, so that a user can end it: keys of two chunks, and the outputs of layer 0 for layer 1."""
    events: list[trunkline.Progress] = []
    model = trunkline.stream(build("llama"), chunk_size=8, progress=events.append, **settings)
    ids = tokens(1, 20)
    model(input_ids=ids, labels=ids).loss.backward()
    found = [(e.layer, e.chunk) for e in events if e.part == "backward"]
    again = dict(zip((2, 1, 0), without_progress, strict=True))
    assert found == [(layer, c) for layer in (2, 1, 0, -1) for c in (*[2] * again.get(layer, 0), 2, 1, 0)]
