"""A run's folder with every file that a report can show."""

import json

import pytest
from records import GIB, make_step, make_timeline

from trunkline.report.charts import charts_of
from trunkline.report.page import make_page
from trunkline.report.run_folder import read_run
from trunkline.train.output_folder import json_line

PLAN = {
    "hardware": "4 x H100",
    "seconds": 8.0,
    "tokens_per_second": 125.0,
    "mfu": 0.5,
    "mfu_recompute_counted": 0.625,
    "peaks": {"device": 48 * GIB, "host": 100 * GIB, "disk": 0},
    "exposed": {"fetch": 0.5, "stash": 0.0},
    "moved": {"fetch": 1_500_000_000},
}
EVALUATIONS = [
    {
        "step": step,
        "seconds": 4.0,
        "loss": 3.0 / step,
        "perplexity": 20.0,
        "loss_tokens": 1000,
        "scores": {
            "forced": {"needle": {"4096": 0.25 * step, "8192": 0.125 * step}, "passkey": {"4096": 1.0}},
            "generated": {"needle": {"4096": 0.5}},
        },
        "effective_length": {"forced": 4096, "generated": None},
    }
    for step in (2, 3)
]


@pytest.fixture
def timeline():
    return make_timeline()


def fill(path):
    """Write every file of a run into a new folder."""
    path.mkdir()
    before = make_timeline(
        title="Tiny, unchunked", seconds=12.0, memory={"device": [(0.0, 20 * GIB), (4.0, 500 * GIB), (5.0, 9 * GIB)]}
    )
    (path / "timeline.json").write_text(make_timeline().to_json())
    (path / "before.json").write_text(before.to_json())
    (path / "plan.json").write_text(json.dumps(PLAN))
    (path / "metrics.jsonl").write_text("".join(json_line(make_step(i, 9.0 if i == 1 else 5.0)) for i in (1, 2, 3)))
    (path / "evaluations.jsonl").write_text("".join(json.dumps(each) + "\n" for each in EVALUATIONS))
    (path / "recipe.yaml").write_text("context: 1000\n")
    return path


@pytest.fixture
def folder(tmp_path):
    """A run's folder with everything."""
    return fill(tmp_path / "a run")


@pytest.fixture(scope="session")
def full(tmp_path_factory):
    """A run with everything, and its charts, which take a second to draw."""
    run = read_run(fill(tmp_path_factory.mktemp("runs") / "a run"))
    return run, charts_of(run)


@pytest.fixture(scope="session")
def page(full):
    """The page of the run with everything."""
    return make_page(*full)


@pytest.fixture
def make():
    """The makers of records, for tests that change them."""
    return {"timeline": make_timeline, "step": make_step, "plan": PLAN, "evaluation": EVALUATIONS[0], "gib": GIB}
