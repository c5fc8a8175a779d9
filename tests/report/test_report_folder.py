"""Writing of a report: all or nothing, never over other files; a missing package is named; the command."""

import subprocess
import sys

import pytest

from trunkline.cli.app import run as command
from trunkline.report import report_folder, write_report

ALL = ["holders.png", "index.html", "lanes.png", "memory-own-scale.png", "memory.png", "steps.png", "trace.json"]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def small(folder):
    """A run with steps alone, which is drawn faster."""
    for path in folder.iterdir():
        if path.name != "metrics.jsonl":
            path.unlink()
    return folder


def test_files(folder, page, full, tmp_path):
    written = write_report(folder)
    assert written.folder == folder / "report"
    assert written.files == ALL
    files = contents(folder / "report")
    assert files["index.html"].decode() == page, "written again, it is the same"
    for chart in full[1].values():
        chart.save_png(tmp_path)
        picture = (tmp_path / f"{chart.name}.png").read_bytes()
        assert picture == files[f"{chart.name}.png"]
        assert picture.startswith(b"\x89PNG")
    assert sorted(path.name for path in folder.iterdir()) == [
        "before.json", "evaluations.jsonl", "metrics.jsonl", "plan.json", "recipe.yaml", "report", "timeline.json",
    ]  # fmt: skip


def test_only_charts_with_data_are_written(small, tmp_path):
    assert write_report(small, tmp_path / "elsewhere" / "page").files == ["index.html", "steps.png"]
    assert not (small / "report").exists()


def test_a_report_is_whole_or_not_there(small, monkeypatch):
    write_report(small)
    earlier = contents(small / "report")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("trunkline.report.charts.ReportChart.save_png", fail)
    with pytest.raises(OSError, match="disk full"):
        write_report(small)
    assert contents(small / "report") == earlier
    assert not [path for path in small.iterdir() if "partial" in path.name or "old" in path.name]


def test_only_reports_are_replaced(small, tmp_path):
    with pytest.raises(ValueError, match=r"holds 'metrics.jsonl' that no report contains.*--output"):
        write_report(small, small)
    mine = tmp_path / "mine"
    mine.mkdir()
    write_report(small, mine)  # empty
    (mine / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds 'notes.txt'"):
        write_report(small, mine)
    page = tmp_path / "page"
    page.mkdir()
    (page / "index.html").write_text("<html>my homepage</html>")
    with pytest.raises(ValueError, match=r"holds files that no report contains"):
        write_report(small, page)
    assert (page / "index.html").read_text() == "<html>my homepage</html>"
    with pytest.raises(ValueError, match=r"is a file. Set --output"):
        write_report(small, mine / "notes.txt")


@pytest.mark.parametrize(("module", "name"), [("matplotlib", "matplotlib"), ("jinja2", "Jinja2")])
def test_a_missing_package_is_named(small, monkeypatch, module, name):
    monkeypatch.setattr(report_folder, "find_spec", lambda asked: None if asked == module else asked)
    with pytest.raises(ValueError, match=rf"a report needs {name}: pip install 'trunkline\[report\]'"):
        write_report(small)
    assert not (small / "report").exists()


def test_only_a_report_loads_matplotlib_and_none_loads_torch(small):
    code = (
        "import sys; from pathlib import Path; from trunkline.report import Timeline, write_report;"
        "found = lambda: [m for m in ('torch', 'matplotlib', 'jinja2') if m in sys.modules];"
        "before = found(); write_report(Path(sys.argv[1])); print(before, found())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(small)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[] ['matplotlib', 'jinja2']"


def test_command(small, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command(["report", str(small), "--output", "here"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Wrote here/\n")
    assert "index.html" in said
    assert (tmp_path / "here" / "index.html").is_file()
    assert command(["report", str(tmp_path)]) == 2
    assert "nothing to report" in capsys.readouterr().err
    assert not (tmp_path / "report").exists()
