"""A run's folder: files that exist are read, broken ones are refused by name, and figures come from the best source."""

import json
from dataclasses import asdict

import pytest

from trunkline.report.curves import step_curves
from trunkline.report.run_folder import LoggedEvaluation, LoggedStep, read_run
from trunkline.report.summary import measured_step, summary_cards
from trunkline.report.tables import plan_table, score_table
from trunkline.train.evaluating import EvaluationRecord
from trunkline.train.output_folder import json_line
from trunkline.utils.json_records import read_json


def test_everything_is_read(folder, timeline):
    run = read_run(folder)
    assert run.timeline == timeline
    assert [step.step for step in run.steps] == [1, 2, 3]
    assert run.steps[1].total_seconds == 5
    assert {lane: moves.exposed_seconds for lane, moves in run.steps[1].lanes.items()} == {"fetch": 0.5, "stash": 0.0}
    assert run.plan is not None
    assert run.plan.hardware == "4 x H100"
    assert run.recipe == "context: 1000\n"


def test_a_line_that_is_being_written_is_passed_over(folder):
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 4, "lo')
    assert len(read_run(folder).steps) == 3


def test_a_broken_line_is_named(folder):
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 4, "loss": 1}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl: line 4: tokens is missing.*move it away"):
        read_run(folder)


def test_evaluations_are_read(folder):
    run = read_run(folder)
    found = {curve.title: (curve.steps, curve.values) for curve in step_curves(run)[3:]}
    assert found == {
        "Loss of held-out files, nats a token": ([2, 3], [1.5, 1.0]),
        "Retrieved: needle, %": ([2, 3], [37.5, 56.25]),  # the mean over lengths
        "Retrieved: passkey, %": ([2, 3], [100, 100]),
        "Retrieved: needle, generated, %": ([2, 3], [50, 50]),
    }
    table = score_table(run.evaluations[-1])
    assert table.heads == ["retrieved", "4,096 tokens", "8,192 tokens"]
    assert table.rows == [
        ["needle", "75.0 %", "37.5 %"],
        ["passkey", "100.0 %", ""],
        ["effective length", "4,096 tokens", ""],
        ["needle, generated", "50.0 %", ""],
        ["effective length, generated", "below 4,096 tokens", ""],
    ]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("scores", {"forced": {"needle": {"4K": 1.0}}}, r"line 3: scores.forced.needle.4K is '4K': .*integer"),
        ("scores", {"forced": {"needle": 1}}, r"line 3: scores.forced.needle is 1: .*object"),
        ("loss", "low", r"line 3: loss is 'low'"),
        ("effective_length", {"forced": -1}, r"line 3: effective_length.forced is -1: .*greater than or equal to 0"),
    ],
)
def test_a_broken_evaluation_is_named(folder, make, name, value, message):
    path = folder / "evaluations.jsonl"
    path.write_text(path.read_text() + json.dumps(make["evaluation"] | {name: value}) + "\n")
    with pytest.raises(ValueError, match=rf"evaluations.jsonl: {message}"):
        read_run(folder)


def test_lines_that_training_writes_are_read_back(make):
    record = EvaluationRecord(2, 1.0, None, None, 0, {"forced": {"needle": {4096: 0.5}}}, {"forced": None})
    evaluation = read_json(LoggedEvaluation, json_line(record))
    assert (evaluation.step, evaluation.loss, evaluation.scores) == (2, None, record.scores)
    assert evaluation.effective_length == record.effective_length
    step = make["step"](3)
    read = read_json(LoggedStep, json_line(step))
    assert (read.step, read.loss, read.tokens, read.seconds) == (3, step.loss, step.tokens, step.seconds)
    assert read.lanes["fetch"].bytes == step.lanes["fetch"]["bytes"]


def test_a_step_that_took_no_time_is_refused(folder, make):
    path = folder / "metrics.jsonl"
    path.write_text(json.dumps({**asdict(make["step"](1)), "seconds": {"forward": 0.0}}) + "\n")
    with pytest.raises(ValueError, match=r"line 1: seconds are 0 in all parts, and a step takes longer\. Write"):
        read_run(folder)


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
    return {name: tuple(cells) for name, *cells in plan_table(run).rows}


def test_the_measured_step_stands_beside_the_plan(full):
    found = rows(full[0])
    assert found["step time"] == ("8.00 s", "10.0 s", "1.25")
    assert found["tokens/s, all devices"] == ("125", "100", "0.80")
    assert found["model FLOPs utilization, recomputation not counted"] == ("50.0 %", "40.0 %", "0.80")
    assert found["hardware FLOPs utilization, recomputation counted"][2] == "0.80"
    assert found["peak of device"] == ("48.0 GiB", "60.0 GiB", "1.25")
    assert found["compute waited for fetch"] == ("500 ms", "1.00 s", "2.00")
    assert found["bytes over fetch"] == ("1.4 GiB", "2.8 GiB", "2.00")
    assert "peak of disk" not in found, "neither planned nor measured"


def test_without_a_measured_step_the_median_of_the_run_counts(folder, make):
    (folder / "timeline.json").write_text(make["timeline"](source="estimated").to_json())
    run = read_run(folder)
    step = measured_step(run)
    assert step is not None
    assert step.source == "the median of the steps after the first"
    assert step.seconds == 5, "the first step, of 9 s, does not count"
    assert step.peaks["device"] == 50 * make["gib"], "the allocator's figure, which counts parameters"
    assert step.peaks["host"] == 90 * make["gib"]
    # 8e12 FLOPs in 5 s on 4 devices of 1e12.
    assert step.mfu == pytest.approx(0.4)
    cards = {card.name: card for card in summary_cards(run)}
    assert cards["Step time"].value == "5.00 s"
    assert cards["Tokens/s per device"].value == "50.0"
    assert cards["MFU"].value == "40.0 %"
    assert cards["Peak of device"].note == "of 80.0 GiB, first process"
    assert cards["Peak of device"].share == 50 / 80


def test_a_plan_alone(folder):
    for name in ("timeline.json", "before.json", "metrics.jsonl"):
        (folder / name).unlink()
    run = read_run(folder)
    assert rows(run)["step time"] == ("8.00 s", "", "")
    assert [(card.name, card.value) for card in summary_cards(run)] == [("Step time", "8.00 s")]


def test_cards_of_a_measured_step(full):
    cards = {card.name: card for card in summary_cards(full[0])}
    assert cards["Step time"].value == "10.0 s"
    assert cards["Step time"].note == "10.0% of it waiting for moves"
    assert cards["Tokens/s per device"].value == "25.0"
    assert cards["MFU"].value == "40.0 %"
    assert cards["Hardware FLOPs utilization"].value == "50.0 %"
    assert cards["Peak of device"].value == "60.0 GiB"
    assert cards["Peak of device"].note == "of 80.0 GiB, unchunked 500.0 GiB"
    assert cards["Peak of device"].share == 0.75
    assert cards["Peak of host"].share is None, "its capacity is not known"
    assert cards["Loss"].value == "1.0000"


def test_cards_of_a_run_without_a_timeline(folder):
    for name in ("timeline.json", "before.json"):
        (folder / name).unlink()
    cards = {card.name: card.value for card in summary_cards(read_run(folder))}
    assert cards["Step time"] == "5.00 s"
    assert cards["Tokens/s"] == "200"
    assert cards["Model FLOPs"] == "1.60 TFLOP/s"


def test_a_plan_that_lacks_its_time(folder, make):
    (folder / "plan.json").write_text(json.dumps({key: v for key, v in make["plan"].items() if key != "seconds"}))
    plan = read_run(folder).plan
    assert plan is not None
    assert plan.seconds is None
    assert plan.peaks == make["plan"]["peaks"]
    (folder / "plan.json").write_text(json.dumps({**make["plan"], "seconds": "soon"}))
    with pytest.raises(ValueError, match=r"plan.json: seconds"):
        read_run(folder)
