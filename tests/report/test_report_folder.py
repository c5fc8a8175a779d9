"""Writing of a report: all or nothing, never over other files; a missing package is named; the command."""

import subprocess
import sys

import pytest

from trunkline.cli.app import run as command
from trunkline.report import report_folder, write_report

ALL = ["holders.png", "index.html", "lanes.png", "memory-own-scale.png", "memory.png", "steps.png", "trace.json"]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_files(folder):
    written = write_report(folder)
    assert written.folder == folder / "report"
    assert written.files == ALL
    first = contents(folder / "report")
    assert all(first[name].startswith(b"\x89PNG") for name in ALL if name.endswith(".png"))
    write_report(folder)
    assert contents(folder / "report") == first, "written again, it is the same"
    assert sorted(path.name for path in folder.iterdir()) == [
        "before.json", "evaluations.jsonl", "metrics.jsonl", "plan.json", "recipe.yaml", "report", "timeline.json",
    ]  # fmt: skip


def test_only_what_there_is_data_for(folder, tmp_path):
    (folder / "timeline.json").unlink()
    (folder / "before.json").unlink()
    assert write_report(folder, tmp_path / "elsewhere" / "page").files == ["index.html", "steps.png"]
    assert not (folder / "report").exists()


def test_nothing_is_half_written(folder, monkeypatch):
    write_report(folder)
    earlier = contents(folder / "report")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(report_folder, "make_trace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_report(folder)
    assert contents(folder / "report") == earlier
    assert not [path for path in folder.iterdir() if "partial" in path.name or "old" in path.name]


def test_only_reports_are_replaced(folder, tmp_path):
    with pytest.raises(ValueError, match=r"holds 'before.json' that no report consists of.*--output"):
        write_report(folder, folder)
    mine = tmp_path / "mine"
    mine.mkdir()
    write_report(folder, mine)  # empty
    (mine / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds 'notes.txt'"):
        write_report(folder, mine)
    page = tmp_path / "page"
    page.mkdir()
    (page / "index.html").write_text("<html>my homepage</html>")
    with pytest.raises(ValueError, match=r"holds files that no report consists of"):
        write_report(folder, page)
    assert (page / "index.html").read_text() == "<html>my homepage</html>"
    with pytest.raises(ValueError, match=r"is a file. Set --output"):
        write_report(folder, mine / "notes.txt")


@pytest.mark.parametrize(("module", "name"), [("matplotlib", "matplotlib"), ("jinja2", "Jinja2")])
def test_a_missing_package_is_named(folder, monkeypatch, module, name):
    monkeypatch.setattr(report_folder, "find_spec", lambda asked: None if asked == module else asked)
    with pytest.raises(ValueError, match=rf"a report needs {name}: pip install 'trunkline\[report\]'"):
        write_report(folder)
    assert not (folder / "report").exists()


def test_only_a_report_loads_matplotlib_and_none_loads_torch(folder):
    code = (
        "import sys; from pathlib import Path; from trunkline.report import Timeline, write_report;"
        "found = lambda: [m for m in ('torch', 'matplotlib', 'jinja2') if m in sys.modules];"
        "before = found(); write_report(Path(sys.argv[1])); print(before, found())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[] ['matplotlib', 'jinja2']"


def test_command(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command(["report", str(folder), "--output", "here"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Wrote here/\n")
    assert "index.html" in said
    assert (tmp_path / "here" / "index.html").is_file()
    assert command(["report", str(tmp_path)]) == 2
    assert "nothing to report" in capsys.readouterr().err
    assert not (tmp_path / "report").exists()
