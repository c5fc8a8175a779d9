"""What a run's folder holds: read as far as it is there, and refused with its name where it is broken."""

import json

import pytest

from trunkline.report.comparison import compare, measured
from trunkline.report.evaluations import Found, score_rows
from trunkline.report.folder import read_run
from trunkline.report.headline import headline
from trunkline.train.evaluating import EvaluationRecord
from trunkline.utils import json_fields


def test_everything_is_read(folder, timeline):
    run = read_run(folder)
    assert run.timeline == timeline
    assert [step.step for step in run.history] == [1, 2, 3]
    assert run.history[1].seconds == 5
    assert run.history[1].exposed == {"fetch": 0.5, "stash": 0.0}
    assert run.plan is not None
    assert run.plan.hardware == "4 x H100"
    assert run.recipe == "context: 1000\n"


def test_a_line_that_is_being_written_is_passed_over(folder):
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 4, "lo')
    assert len(read_run(folder).history) == 3


def test_a_broken_line_is_named(folder):
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 4, "loss": 1}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl: line 4: seconds is missing.*move it away"):
        read_run(folder)


def test_evaluations_are_read(folder):
    run = read_run(folder)
    found = {curve.title: (curve.steps, curve.values) for curve in run.curves[3:]}
    assert found == {
        "Loss of held-out files, nats a token": ([2, 3], [1.5, 1.0]),
        "Retrieved: needle, %": ([2, 3], [37.5, 56.25]),  # the mean over lengths
        "Retrieved: passkey, %": ([2, 3], [100, 100]),
        "Retrieved: needle, generated, %": ([2, 3], [50, 50]),
    }
    heads, table = score_rows(run.evaluations[-1])
    assert heads == ["retrieved", "4,096 tokens", "8,192 tokens"]
    assert table == [
        ["needle", "75.0 %", "37.5 %"],
        ["passkey", "100.0 %", ""],
        ["effective length", "4,096 tokens", ""],
        ["needle, generated", "50.0 %", ""],
        ["effective length, generated", "below 4,096 tokens", ""],
    ]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("scores", {"forced": {"needle": {"4K": 1.0}}}, r"line 3: scores.forced.needle has '4K'"),
        ("scores", {"forced": {"needle": 1}}, r"line 3: scores.forced.needle is 1, and must be an object"),
        ("loss", "low", r"line 3: loss is 'low'"),
        ("effective_length", {"forced": -1}, r"line 3: effective_length.forced is -1"),
    ],
)
def test_a_broken_evaluation_is_named(folder, make, name, value, message):
    path = folder / "evaluations.jsonl"
    path.write_text(path.read_text() + json.dumps(make["evaluation"] | {name: value}) + "\n")
    with pytest.raises(ValueError, match=rf"evaluations.jsonl: {message}"):
        read_run(folder)


def test_evaluations_of_a_run_are_what_the_report_reads():
    record = EvaluationRecord(2, 1.0, None, None, 0, {"forced": {"needle": {4096: 0.5}}}, {"forced": None})
    assert Found.of(json_fields.parse(record.to_json())) == Found(2, None, record.scores, record.effective_length)


def test_a_broken_timeline_is_named(folder):
    (folder / "timeline.json").write_text("{}")
    with pytest.raises(ValueError, match=r"timeline.json: title is missing.*move it away"):
        read_run(folder)


def test_nothing_to_report(tmp_path):
    (tmp_path / "recipe.yaml").write_text("context: 8\n")
    with pytest.raises(ValueError, match=r"nothing to report.*trunkline train"):
        read_run(tmp_path)
    with pytest.raises(ValueError, match="does not exist: report takes the folder of a run"):
        read_run(tmp_path / "none")
    with pytest.raises(ValueError, match="is a file: report takes the folder"):
        read_run(tmp_path / "recipe.yaml")


def rows(run):
    return {row.name: (row.predicted, row.measured, row.ratio) for row in compare(run)}


def test_the_measured_step_beside_the_plan(folder, make):
    gib = make["gib"]
    found = rows(read_run(folder))
    assert found["step time"] == (8, 10, 1.25)
    assert found["tokens/s, all devices"] == (125, 100, 0.8)
    assert found["MFU, recomputation not counted"] == (0.5, pytest.approx(0.4), pytest.approx(0.8))
    assert found["hardware FLOPs utilisation, recomputation counted"][2] == pytest.approx(0.8)
    assert found["peak of device"] == (48 * gib, 60 * gib, 1.25)
    assert found["compute waited for fetch"] == (0.5, 1.0, 2.0)
    assert found["bytes over fetch"] == (1_500_000_000, 3_000_000_000, 2.0)
    assert "peak of disk" not in found, "neither planned nor measured"


def test_without_a_measured_step_it_is_the_middle_of_the_run(folder, make):
    (folder / "timeline.json").write_text(make["timeline"](source="estimated").to_json())
    run = read_run(folder)
    found = rows(run)
    assert found["step time"] == (8, 5, 0.625), "the first step, of 9 s, does not count"
    assert found["peak of device"][1] == 50 * make["gib"], "the allocator's figure, which counts parameters"
    assert found["peak of host"][1] == 90 * make["gib"]
    # 8e12 FLOPs in 5 s on 4 devices of 1e12.
    assert found["MFU, recomputation not counted"][1] == pytest.approx(0.4)
    assert measured(run).source == "the middle of the steps after the first"


def test_a_plan_alone(folder):
    for name in ("timeline.json", "before.json", "metrics.jsonl"):
        (folder / name).unlink()
    run = read_run(folder)
    assert rows(run)["step time"] == (8, None, None)
    assert [(figure.name, figure.value) for figure in headline(run)] == [("Step time", "8.00 s")]


def test_headline_of_a_measured_step(folder):
    figures = {figure.name: figure for figure in headline(read_run(folder))}
    assert figures["Step time"].value == "10.0 s"
    assert figures["Tokens/s per device"].value == "25.0"
    assert figures["MFU"].value == "40.0 %"
    assert figures["Hardware FLOPs utilisation"].value == "50.0 %"
    assert figures["Peak of device"].value == "60.0 GiB"
    assert figures["Peak of device"].note == "of 80.0 GiB, unchunked 500.0 GiB"
    assert figures["Peak of device"].share == 0.75
    assert figures["Peak of host"].share is None, "its capacity is not known"
    assert figures["Loss"].value == "1.0000"


def test_headline_of_a_run_without_a_step_over_time(folder):
    for name in ("timeline.json", "before.json"):
        (folder / name).unlink()
    figures = {figure.name: figure.value for figure in headline(read_run(folder))}
    assert figures["Step time"] == "5.00 s"
    assert figures["Tokens/s"] == "200"
    assert figures["Model FLOPs"] == "1.60 TFLOP/s"


def test_steps_of_a_run_come_before_a_rehearsal(folder, make):
    (folder / "timeline.json").write_text(make["timeline"](source="estimated").to_json())
    figures = {figure.name: figure for figure in headline(read_run(folder))}
    assert figures["Step time"].value == "5.00 s"
    assert figures["Tokens/s per device"].value == "50.0"
    assert figures["MFU"].value == "40.0 %"
    assert figures["Peak memory"].note == "of 80.0 GiB, first process"
    assert figures["Peak memory"].share == 50 / 80


def test_a_plan_that_lacks_its_time(folder, make):
    (folder / "plan.json").write_text(json.dumps({key: v for key, v in make["plan"].items() if key != "seconds"}))
    plan = read_run(folder).plan
    assert plan is not None
    assert plan.seconds is None
    assert plan.peaks == make["plan"]["peaks"]
    (folder / "plan.json").write_text(json.dumps({**make["plan"], "seconds": "soon"}))
    with pytest.raises(ValueError, match=r"plan.json: seconds"):
        read_run(folder)
