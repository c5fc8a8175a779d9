"""A recorded step on CUDA: the allocator's peak, the lanes' events, and the same loss."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from trunkline.report.timeline import Timeline
from trunkline.train.display import Display
from trunkline.train.recipe import Recipe
from trunkline.train.run_training import train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("beyond", ["host", "disk"])
def test_a_run_that_offloads(tmp_path: Path, beyond: str) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("".join(f"{i * i} of {i}\n" for i in range(4000)))
    room = {"host_budget": "1GiB"} if beyond == "host" else {"offload_dir": str(tmp_path), "disk_budget": "1GiB"}
    recipe = {
        "model": {"preset": "tiny-llama", "dtype": "bfloat16", "overrides": {"num_hidden_layers": 4}},
        "data": {"files": [str(corpus)]},
        "context": 16_384,
        "chunk_size": 2048,
        "steps": 2,
        "device": "cuda",
        "device_budget": "24MiB",
        "output": str(tmp_path / "run"),
        **room,
    }
    output = train(Recipe.model_validate(recipe), Display()).output
    lines = [json.loads(line) for line in (output / "metrics.jsonl").open()]
    timeline = Timeline.from_json((output / "timeline.json").read_text())
    assert timeline.seconds == sum(lines[1]["seconds"].values())
    # The most that the allocator gave out in the step, which the recorder has read in pieces.
    assert timeline.peak("device") == lines[1]["peak_memory_bytes"] >= 0.9 * lines[0]["peak_memory_bytes"]
    assert sum(timeline.holders["device"].values()) == timeline.peak("device")
    assert timeline.peak(beyond) == lines[1]["tiers"][beyond] > 0
    for lane in ("fetch", "stash"):
        assert timeline.moved[lane] == lines[1]["lanes"][lane]["bytes"] > 0
        worked = sum(end - begin for begin, end, _ in timeline.lanes[lane])
        expected = timeline.moved[lane] / lines[1]["lanes"][lane]["gb_per_second"] / 1e9
        # Events count in half microseconds.
        assert worked == pytest.approx(expected, abs=1e-6 * len(timeline.lanes[lane]) + 1e-4)
        assert {label for _, _, label in timeline.lanes[lane]} == {beyond}
    assert timeline.busy("compute") <= timeline.seconds
