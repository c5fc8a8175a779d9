"""Reading: what is found, in which order, and every way it can be wrong."""

import json
import sysconfig
from pathlib import Path

import pytest

from trunkline.data import Document, find_files, read_documents


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_folders_are_walked_in_name_order_without_hidden_names(tmp_path):
    for name in ["b/z.txt", "b/a.py", "a.md", "c.TXT", ".git/x.txt", "b/.hidden.txt", "__pycache__/m.py", "pic.png"]:
        write(tmp_path / name, name)
    found = [str(path.relative_to(tmp_path)) for path in find_files([str(tmp_path)])]
    assert found == ["a.md", "b/a.py", "b/z.txt", "c.TXT"]


def test_entries_keep_their_order_and_repeats_count_once(tmp_path):
    first, second, third = (write(tmp_path / name, name) for name in ["1.txt", "2.txt", "odd.bin"])
    assert find_files([str(third), str(second), str(tmp_path / "*.txt"), str(tmp_path)]) == [third, second, first]


def test_globs_are_recursive_and_relative_to_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    deep = write(tmp_path / "x/y/deep.log", "text")
    assert find_files(["**/*.log"]) == [deep]
    assert find_files(["x/y/deep.log"]) == [deep]


def test_stdlib_is_the_running_pythons_source_without_its_tests():
    files = find_files(["stdlib"])
    root = Path(sysconfig.get_paths()["stdlib"]).resolve()
    assert root / "argparse.py" in files
    assert root / "asyncio/base_events.py" in files
    assert all(path.suffix == ".py" for path in files)
    assert not [path for path in files if {"test", "tests", "site-packages"} & set(path.relative_to(root).parts[:-1])]
    assert sum(path.stat().st_size >= 32_768 for path in files) > 50
    assert files == sorted(files)


def test_documents_keep_every_character(tmp_path):
    text = "first\r\nsecond\rthird\n\ttäb 🚆\x00"
    path = write(tmp_path / "a.txt", text)
    assert list(read_documents([path])) == [Document(str(path), text)]


def test_jsonl_is_one_document_a_line(tmp_path):
    lines = [{"text": "one\ntwo", "id": 1}, {"text": ""}, {"text": "drei ü"}]
    path = write(tmp_path / "a.jsonl", "\n".join(json.dumps(line) for line in lines) + "\n\n")
    assert list(read_documents([path])) == [Document(f"{path}:1", "one\ntwo"), Document(f"{path}:3", "drei ü")]
    path = write(tmp_path / "b.jsonl", '{"body": "x"}')
    assert list(read_documents([path], text_field="body")) == [Document(f"{path}:1", "x")]


def test_empty_files_are_no_documents(tmp_path):
    assert list(read_documents([write(tmp_path / "a.txt", "")])) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"abc\xe9def", r"a\.txt' is not UTF-8 text: byte 3 \(0xe9\).*leave it out of data\.files"),
        (b"x" * 70_000 + b"\xff", r"byte 70,000 \(0xff\)"),
    ],
)
def test_not_utf8_names_file_and_byte(tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        list(read_documents([write(tmp_path / "a.txt", content)]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n{"text": "\xff"}', r"a\.jsonl' is not UTF-8 text: byte 24 \(0xff\)"),
        (b'{"text": "a"}\nplain', r"line 2 of '.*a\.jsonl' is not JSON \(.*column 1\)"),
        (b'{"body": "a", "id": 3}', r"data\.text_field: line 1 of .* has no field 'text' \(it has body, id\)"),
        (b'["a"]', r"no field 'text' \(it is no object\)"),
        (b'{"text": 3}', r"field 'text' in line 1 of .* is int, not text"),
    ],
)
def test_bad_jsonl_names_the_line(tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        list(read_documents([write(tmp_path / "a.jsonl", content)]))


def test_a_missing_file_is_refused_with_the_fix(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "pictures/a.png", b"\x89")
    with pytest.raises(ValueError, match=r"data\.files is empty"):
        find_files([])
    with pytest.raises(ValueError, match=r"data\.files: '.*nowhere' does not exist\. Name a text file"):
        find_files(["nowhere"])
    with pytest.raises(ValueError, match=r"data\.files: no file matches the pattern '.*\*\.txt'"):
        find_files(["*.txt"])
    with pytest.raises(ValueError, match=r"data\.files: the folder '.*pictures' has no text files.*glob pattern"):
        find_files(["pictures"])


def test_messages_name_the_setting_that_files_came_from(tmp_path):
    with pytest.raises(ValueError, match=r"^evaluate\.files: '.*nowhere' does not exist"):
        find_files(["nowhere"], setting="evaluate.files")
    with pytest.raises(ValueError, match=r"^--perplexity: .*is not UTF-8.*leave it out of --perplexity\."):
        list(read_documents([write(tmp_path / "a.txt", b"\xff")], setting="--perplexity"))
    with pytest.raises(ValueError, match=r"^--perplexity: line 1 of .*is not JSON"):
        list(read_documents([write(tmp_path / "a.jsonl", "{")], setting="--perplexity"))
