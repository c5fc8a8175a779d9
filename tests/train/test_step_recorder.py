"""Recorder of a step: its timeline agrees with the metrics, and recording changes no result."""

import json
import mmap
import time
from collections import Counter

import pytest
import torch

import trunkline
from trunkline.api import tiers_of
from trunkline.data import Document, cut_documents, load_encoder
from trunkline.distributed.grad_norm import local
from trunkline.report import write_report
from trunkline.report.timeline import Timeline
from trunkline.train.build_model import build_config, build_model
from trunkline.train.display import Display
from trunkline.train.memory_sampler import INTERVAL, ProcessMemorySampler
from trunkline.train.optimizer import Optimizer
from trunkline.train.part_timer import PartTimer
from trunkline.train.recipe import Recipe
from trunkline.train.run_training import train
from trunkline.train.step_recorder import StepRecorder, _without
from trunkline.train.trainer import Trainer, TrainingDivergedError, progress_hook
from trunkline.train.world import World

CPU = torch.device("cpu")
MIB = 2**20


def make(tmp_path, **more):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("".join(f"{i * i} of {i}\n" for i in range(400)))
    scratch = tmp_path / "scratch"
    scratch.mkdir(exist_ok=True)
    small = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_hidden_layers": 4}
    return Recipe.model_validate(
        {
            "model": {"preset": "tiny-llama", "dtype": "bfloat16", "overrides": small},
            "data": {"files": [str(corpus)]},
            "context": 1024,
            "chunk_size": 128,
            "steps": 3,
            "output": str(tmp_path / "run"),
            "device_budget": "600KiB",
            "offload_dir": str(scratch),
            "disk_budget": "64MiB",
            "preflight": False,
            **more,
        }
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that goes through a disk: its folder, recipe and metrics."""
    folder = tmp_path_factory.mktemp("recorded")
    recipe = make(folder, gradient_accumulation=2)
    result = train(recipe, Display())
    return result.output, recipe, [json.loads(line) for line in (result.output / "metrics.jsonl").open()]


@pytest.fixture(scope="module")
def timeline(run):
    return Timeline.from_json((run[0] / "timeline.json").read_text())


def test_second_step_is_recorded(run, timeline):
    _, _, lines = run
    seconds = [sum(line["seconds"].values()) for line in lines]
    assert timeline.seconds == seconds[1] != seconds[0]
    assert timeline.source == "measured"
    assert timeline.title == "tiny-llama, 1,024 tokens in chunks of 128, CPU"
    assert (timeline.tokens, timeline.devices) == (2048, 1)
    assert timeline.model_flops == lines[1]["model_flops"]
    assert timeline.mfu is None


def test_timeline_agrees_with_the_metrics(run, timeline):
    line = run[2][1]
    for part in ("embed", "forward", "head", "backward", "optimizer"):
        spans = [phase.end - phase.begin for phase in timeline.phases if phase.name == part]
        assert sum(spans) == pytest.approx(line["seconds"][part], abs=1e-6)
        assert len(spans) >= 2, "a part comes in each of two micro-batches"
    for lane in ("fetch", "stash"):
        assert timeline.moved[lane] == line["lanes"][lane]["bytes"] > 0
        assert timeline.exposed[lane] == line["lanes"][lane]["exposed_seconds"]
        busy = timeline.moved[lane] / line["lanes"][lane]["gb_per_second"] / 1e9
        assert timeline.busy(lane) == pytest.approx(busy, rel=1e-6)
        assert {label for _, _, label in timeline.lanes[lane]} == {"disk"}
    # Compute is all that is not a wait of more than the least that is drawn.
    waits = sum(timeline.exposed.values())
    count = sum(map(len, timeline.lanes.values()))
    idle = timeline.seconds - timeline.busy("compute")
    assert waits - 1e-5 * count <= idle <= waits + 1e-6
    layers = {f"{part} {layer}" for part in ("forward", "backward") for layer in range(4)}
    labels = {label for _, _, label in timeline.lanes["compute"]}
    assert labels == {"data", "embed", "head", "backward", "optimizer", *layers}


def test_timeline_has_memory_and_holders_of_each_tier(run, timeline):
    _, recipe, lines = run
    assert set(timeline.memory) == {"device", "disk"}
    assert timeline.peak("disk") == lines[1]["tiers"]["disk"]
    assert timeline.memory["disk"][-1][1] == 0
    assert timeline.capacity["disk"] == 64 * MIB
    assert 50 * MIB < timeline.peak("device") <= lines[1]["peak_memory_bytes"]
    assert sum(timeline.holders["disk"].values()) == timeline.peak("disk")
    assert set(timeline.holders["disk"]) <= {"layer inputs", "attention outputs"}
    held = timeline.holders["device"]
    assert sum(held.values()) == timeline.peak("device")
    model = build_model(recipe, build_config(recipe, load_encoder("bytes")), CPU)
    count = sum(parameter.numel() for parameter in model.parameters())
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    assert held["parameters"] == 2 * count + buffers
    # Masters and two averages in float32, and a few step counters of 4 bytes.
    assert held["optimizer"] == pytest.approx(12 * count, rel=1e-3)


def test_report_can_be_made_from_the_output_folder(run):
    written = write_report(run[0])
    assert "trace.json" in written.files
    page = (written.folder / "index.html").read_text()
    assert "Memory through one step" in page
    assert "Measured." in page
    assert "What holds the peak" in page
    assert "backward 3" in (written.folder / "trace.json").read_text()


def trainer_for(recipe, step):
    encoder = load_encoder("bytes")
    samples = cut_documents(
        [Document("d", "".join(f"{i * i} of {i}\n" for i in range(400)))], encoder, context=recipe.context
    )
    torch.manual_seed(0)
    model = build_model(recipe, build_config(recipe, encoder), CPU)
    clock, display = PartTimer(CPU), Display()
    recorder = None if step is None else StepRecorder(model, CPU, clock, step=step, title="a step", devices=1)
    trunkline.stream(model, **recipe.stream_settings, progress=progress_hook(clock, display, recorder))
    optimizer = Optimizer(model, recipe.optimizer)
    return Trainer(recipe, model, samples, optimizer, clock, display, CPU, None, World(), recorder=recorder)


def test_recorded_step_is_bitwise_the_same(tmp_path):
    recipe = make(tmp_path)
    recorded, plain = trainer_for(recipe, 1), trainer_for(recipe, None)
    for index in range(2):
        a, b = recorded.step(index), plain.step(index)
        assert (a.loss, a.grad_norm) == (b.loss, b.grad_norm)
        assert (recorded.timeline is None) == (index == 0)
    for a, b in zip(recorded.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(local(a), local(b))


def test_recorder_removes_its_hooks_after_the_step(tmp_path):
    trainer = trainer_for(make(tmp_path), 0)
    trainer.step(0)
    tiers = tiers_of(trainer.model)
    assert tiers.observer is None
    assert tiers.lanes.log is None
    first = trainer.timeline
    trainer.step(1)
    assert trainer.timeline is first


def test_recorder_stops_its_thread_when_the_step_fails(tmp_path):
    trainer = trainer_for(make(tmp_path), 0)
    with torch.no_grad():
        next(trainer.model.parameters()).fill_(float("nan"))
    with pytest.raises(TrainingDivergedError):
        trainer.step(0)
    assert trainer.timeline is None
    assert tiers_of(trainer.model).observer is None
    assert not trainer.recorder._sampler._thread.is_alive()


def test_single_step_is_recorded(tmp_path):
    output = train(make(tmp_path, steps=1), Display()).output
    timeline = Timeline.from_json((output / "timeline.json").read_text())
    (line,) = [json.loads(line) for line in (output / "metrics.jsonl").open()]
    assert timeline.seconds == sum(line["seconds"].values())
    assert timeline.moved["stash"] == line["lanes"]["stash"]["bytes"] > 0


def test_timeline_without_budgets_has_the_compute_lane_only(tmp_path):
    recipe = make(tmp_path, device_budget=None, offload_dir=None, disk_budget=None, steps=1)
    output = train(recipe, Display()).output
    timeline = Timeline.from_json((output / "timeline.json").read_text())
    assert set(timeline.lanes) == {"compute"}
    assert set(timeline.memory) == {"device"}
    assert timeline.busy("compute") == pytest.approx(timeline.seconds, rel=1e-6)


def test_memory_sampler_sees_peaks_between_two_samples():
    sampler = ProcessMemorySampler()
    sampler.start()
    try:
        before, _ = sampler.sample()
        pages = mmap.mmap(-1, 64 * MIB)  # new ones: an allocator may hand out what it held already
        pages.write(b"\1" * MIB * 64)
        time.sleep(20 * INTERVAL)
        pages.close()
        held, most = sampler.sample()
    finally:
        sampler.stop()
    assert most > before + 60 * MIB
    assert held < before + 32 * MIB
    seconds = [second for second, _ in sampler.points]
    assert Counter(seconds[i] <= seconds[i + 1] for i in range(len(seconds) - 1))[False] <= 2


def test_waits_are_removed_from_compute_segments():
    segments = [(0.0, 2.0, "a"), (2.0, 5.0, "b"), (5.0, 6.0, "c")]
    waits = [(0.5, 1.0, "fetch"), (1.5, 3.0, "fetch"), (4.0, 4.5, "stash"), (4.9, 6.0, "stash")]
    assert _without(segments, waits) == [
        (0.0, 0.5, "a"), (1.0, 1.5, "a"), (3.0, 4.0, "b"), (4.5, 4.9, "b"),
    ]  # fmt: skip
