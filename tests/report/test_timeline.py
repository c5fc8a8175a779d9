"""The record of a step: what it computes, that a file gives it back, and that it refuses what no step can be."""

import json

import pytest

from trunkline.report import Timeline


def test_a_file_gives_back_what_was_written(timeline):
    assert Timeline.from_json(timeline.to_json()) == timeline


def test_figures(timeline, make):
    assert timeline.tokens_per_second == 100
    # 16e12 FLOPs in 10 s on 4 devices of 1e12 FLOP/s, and 20e12 with recomputation.
    assert timeline.mfu == pytest.approx(0.4, rel=1e-12)
    assert timeline.mfu_recompute_counted == pytest.approx(0.5, rel=1e-12)
    assert timeline.peak("device") == 60 * make["gib"]
    assert timeline.peak("disk") is None
    assert timeline.busy("compute") == 8
    assert make["timeline"](peak_flops=None).mfu is None
    assert make["timeline"](model_flops=None).mfu is None


def test_work_that_overlaps_counts_once(make):
    lanes = {"compute": [(0.0, 4.0, "a"), (1.0, 2.0, "b"), (3.0, 6.0, "c"), (8.0, 9.0, "d")]}
    assert make["timeline"](lanes=lanes).busy("compute") == 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seconds": 0.0}, "seconds is 0.0"),
        ({"source": "guessed"}, "source is 'guessed', and must be one of measured, rehearsed"),
        ({"tokens": 0}, "tokens is 0"),
        ({"peak_flops": -1.0}, "peak_flops is -1.0"),
        ({"memory": {"moon": []}}, "memory names 'moon', and there are only device, host, disk"),
        ({"exposed": {"slow": 1.0}}, "exposed names 'slow'"),
        ({"lanes": {"fetch": [(0.0, 1.0, "a"), (3.0, 2.0, "b")]}}, r"lanes.fetch\[1\] goes from second 3.0 to 2.0"),
        ({"lanes": {"fetch": [(9.0, 10.1, "a")]}}, r"lie within the step, 0 to 10.0"),
        ({"memory": {"device": [(0.0, 1), (2.0, 1), (1.0, 1)]}}, r"memory.device\[2\] is at second 1.0"),
    ],
)
def test_what_no_step_can_be(make, changes, message):
    with pytest.raises(ValueError, match=message):
        make["timeline"](**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"title": None}, "title is None, and must be text"),
        ({"tokens": 1.5}, "tokens is 1.5, and must be a whole number"),
        ({"phases": [{"name": "forward", "begin": 0}]}, r"phases\[0\].end is missing"),
        ({"phases": [{"name": "sleep", "begin": 0, "end": 1}]}, r"phases\[0\] names 'sleep'"),
        ({"memory": {"device": [[0]]}}, r"memory.device\[0\] is \[0\], and must be a list of 2"),
        ({"memory": {"device": [[0, -5]]}}, r"memory.device\[0\] is -5, and must not be negative"),
        ({"lanes": {"fetch": [[0, 1, 2]]}}, r"lanes.fetch\[0\] is 2, and must be text"),
        ({"holders": {"device": {"x": "much"}}}, "holders.device.x is 'much'"),
        ({"moved": [1]}, r"moved is \[1\], and must be an object"),
        ({"seconds": True}, "seconds is True, and must be a finite number"),
    ],
)
def test_files_that_are_no_timeline(timeline, changes, message):
    text = json.dumps({**json.loads(timeline.to_json()), **changes})
    with pytest.raises(ValueError, match=message):
        Timeline.from_json(text)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "no JSON"), ("[]", "must be an object"), ("{}", "title is missing")]
)
def test_no_object_at_all(text, message):
    with pytest.raises(ValueError, match=message):
        Timeline.from_json(text)
