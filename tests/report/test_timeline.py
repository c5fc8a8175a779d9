"""The record of a step: what it computes, that a file gives it back, and that it refuses what no step can be."""

import json
import random

import pytest
from records import GIB, make_timeline

from trunkline.report.columns import memory_columns
from trunkline.report.timeline import Timeline, clipped, thinned, within


@pytest.fixture
def timeline():
    return make_timeline()


def test_a_file_gives_back_what_was_written(timeline):
    assert Timeline.from_json(timeline.to_json()) == timeline


def test_figures(timeline):
    assert timeline.tokens_per_second == 100
    # 16e12 FLOPs in 10 s on 4 devices of 1e12 FLOP/s, and 20e12 with recomputation.
    assert timeline.mfu == pytest.approx(0.4, rel=1e-12)
    assert timeline.mfu_recompute_counted == pytest.approx(0.5, rel=1e-12)
    assert timeline.peak("device") == 60 * GIB
    assert timeline.peak("disk") is None
    assert timeline.busy("compute") == 8
    assert make_timeline(peak_flops=None).mfu is None
    assert make_timeline(model_flops=None).mfu is None


def test_work_that_overlaps_counts_once():
    lanes = {"compute": [(0.0, 4.0, "a"), (1.0, 2.0, "b"), (3.0, 6.0, "c"), (8.0, 9.0, "d")]}
    assert make_timeline(lanes=lanes).busy("compute") == 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seconds": 0.0}, "seconds is 0.0"),
        ({"source": "guessed"}, "source is 'guessed': .*'measured' or 'estimated'"),
        ({"tokens": 0}, "tokens is 0"),
        ({"peak_flops": -1.0}, "peak_flops is -1.0"),
        ({"memory": {"moon": []}}, r"memory.moon is 'moon': .*device\|host\|disk"),
        ({"exposed": {"slow": 1.0}}, "exposed.slow is 'slow'"),
        ({"lanes": {"fetch": [(0.0, 1.0, "a"), (3.0, 2.0, "b")]}}, r"lanes.fetch\[1\] goes from second 3.0 to 2.0"),
        ({"lanes": {"fetch": [(9.0, 10.1, "a")]}}, r"lie within the step, 0 to 10.0"),
        ({"memory": {"device": [(0.0, 1), (2.0, 1), (1.0, 1)]}}, r"memory.device\[2\] is at second 1.0"),
    ],
)
def test_impossible_values_are_refused(timeline, changes, message):
    with pytest.raises(ValueError, match=r"Timeline"):
        make_timeline(**changes)
    text = json.dumps({**json.loads(timeline.to_json()), **changes})
    with pytest.raises(ValueError, match=message):
        Timeline.from_json(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"title": None}, "title is None: .*string"),
        ({"tokens": 1.5}, "tokens is 1.5: .*integer"),
        ({"phases": [{"name": "forward", "begin": 0}]}, r"phases\[0\].end is missing"),
        ({"phases": [{"name": "sleep", "begin": 0, "end": 1}]}, r"phases\[0\].name is 'sleep': .*'forward'"),
        ({"memory": {"device": [[0]]}}, r"memory.device\[0\]\[1\] is missing"),
        ({"memory": {"device": [[0, -5]]}}, r"memory.device\[0\]\[1\] is -5: .*greater than or equal to 0"),
        ({"lanes": {"fetch": [[0, 1, 2]]}}, r"lanes.fetch\[0\]\[2\] is 2: .*string"),
        ({"holders": {"device": {"x": "much"}}}, "holders.device.x is 'much'"),
        ({"moved": [1]}, r"moved is \[1\]: .*object"),
        ({"seconds": True}, "seconds is True: .*number"),
    ],
)
def test_a_wrong_field_of_a_file_is_named(timeline, changes, message):
    text = json.dumps({**json.loads(timeline.to_json()), **changes})
    with pytest.raises(ValueError, match=message):
        Timeline.from_json(text)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "no JSON"), ("[]", r"the file is \[\]: .*object"), ("{}", "title is missing")]
)
def test_a_file_without_a_timeline_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Timeline.from_json(text)


def test_thinned_memory_keeps_every_spike():
    generator = random.Random(0)
    steps = sorted((generator.random() * 9.0, generator.randrange(100)) for _ in range(5000))
    steps[1234] = (steps[1234][0], 500)
    kept = thinned(steps, 9.0, most=300)
    assert len(kept) <= 300
    assert steps[1234] in kept
    assert kept[-1] == steps[-1]
    assert [second for second, _ in kept] == sorted(second for second, _ in kept)
    # Of each of the hundred columns the lowest and the highest are what they were.
    low, high = memory_columns(steps, 9.0, 100)
    got_low, got_high = memory_columns(kept, 9.0, 100)
    assert (low[1:], high[1:]) == (got_low[1:], got_high[1:])
    assert thinned(steps[:300], 9.0, most=300) == steps[:300]


def test_events_outside_the_step_are_cut_off():
    assert within([(0.0, 1), (2.0, 5), (1.9999999, 6), (7.0, 2)], 4.0) == [(0.0, 1), (2.0, 5), (2.0, 6), (4.0, 2)]
    segments = [(3.0, 5.0, "c"), (-1.0, 1.0, "a"), (4.0, 6.0, "d"), (1.0, 2.0, "b")]
    assert clipped({"fetch": segments}, 4.0) == {"fetch": [(0.0, 1.0, "a"), (1.0, 2.0, "b"), (3.0, 4.0, "c")]}
