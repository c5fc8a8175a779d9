"""The trace: events as Perfetto reads them, in microseconds, spans of a lane one after the other."""

import json
from itertools import pairwise

from trunkline.report.trace import make_trace


def test_format(timeline, make):
    trace = json.loads(make_trace(timeline, make["timeline"](title="unchunked", lanes={})))
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    for event in events:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert isinstance(event["tid"], int)
        elif event["ph"] == "C":
            assert list(event["args"]) == ["bytes"]
            assert isinstance(event["args"]["bytes"], int)
        else:
            assert event["args"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {(1, 1): "phases", (1, 2): "compute", (1, 3): "fetch", (2, 1): "phases"}
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == [timeline.title, "before: unchunked"]


def test_times_are_microseconds(timeline, make):
    events = json.loads(make_trace(timeline))["traceEvents"]
    spans = [(e["ts"], e["dur"], e["name"]) for e in events if e["ph"] == "X" and e.get("cat") == "compute"]
    assert spans == [(0.0, 3e6, "layer 0"), (4e6, 5e6, "layer 0 <again>")]
    counters = [(e["ts"], e["args"]["bytes"]) for e in events if e["ph"] == "C" and e["name"] == "device"]
    assert counters == [(0.0, 20 * make["gib"]), (4e6, 60 * make["gib"]), (4.5e6, 25 * make["gib"])]


def test_spans_that_touch_do_not_overlap(make):
    ends = [i / 7 for i in range(60)]
    lanes = {"compute": [(a, b, "") for a, b in pairwise(ends)]}
    spans = [
        e for e in json.loads(make_trace(make["timeline"](lanes=lanes)))["traceEvents"] if e.get("cat") == "compute"
    ]
    for a, b in pairwise(spans):
        # Less than the nanosecond to which times are rounded.
        assert a["ts"] + a["dur"] <= b["ts"] + 5e-4
