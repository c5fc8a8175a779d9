"""Documents from files, folders, glob patterns, `.jsonl` files, and the source of the Python standard library.

A document is one text file, or one line of a `.jsonl` file. The order depends on the settings and the file names alone,
so two machines with the same files train on the same sequence of samples.
"""

from __future__ import annotations

import contextlib
import glob
import json
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

STDLIB = "stdlib"
DATA = "data.files"

_PROSE = "txt text md markdown rst tex org adoc html xml csv tsv json jsonl yaml yml toml ini cfg ipynb"
_CODE = (
    "py pyi c h cc cpp hpp cu cuh rs go java kt scala js jsx ts tsx rb php pl sh sql r jl lua hs ml ex erl swift cs f90"
)
TEXT_SUFFIXES = frozenset(f".{suffix}" for suffix in f"{_PROSE} {_CODE}".split())
_SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules"})
_STDLIB_SKIPPED = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"})


@dataclass(frozen=True, slots=True)
class Document:
    """Text of one document, and its name for messages."""

    name: str
    text: str


def find_files(specs: Sequence[str], *, setting: str = DATA) -> list[Path]:
    """Resolve `data.files` to files.

    Args:
        specs: entries: a file (whatever its suffix), a folder (searched recursively for text suffixes, without hidden
            names, `__pycache__` and `node_modules`), a glob pattern (`**` is recursive; files of any suffix), or the
            word `stdlib` (sources of Python's standard library, without tests).
        setting: name of the setting, for messages.

    Returns:
        Absolute paths of files without repeats: in the order of the entries, and those of one entry sorted by path.

    Raises:
        ValueError: there is no entry, or one does not exist, matches nothing, or is a folder without text files.
    """
    if not specs:
        raise ValueError(f"{setting} is empty: name at least one text file, folder, glob pattern, or 'stdlib'.")
    found: dict[Path, None] = {}
    for spec in specs:
        for path in _resolve(spec, setting):
            found.setdefault(path.resolve())
    return list(found)


def read_documents(files: Sequence[Path], *, text_field: str = "text", setting: str = DATA) -> Iterator[Document]:
    """Read documents lazily, one in memory at a time; errors come up during iteration.

    Args:
        files: files to read, in order. A `.jsonl` file holds one JSON object, a document, a line; blank lines are
            skipped. Any other file is one document.
        text_field: field of these objects that holds the text.
        setting: name of the setting, for messages.

    Yields:
        Documents that are not empty.

    Raises:
        ValueError: a file cannot be read or is not UTF-8, or a line of a `.jsonl` file has no such text field.
    """
    for path in files:
        if path.suffix == ".jsonl":
            with _opened(path, setting) as file:
                yield from _read_jsonl(file, path, text_field, setting)
        else:
            with _opened(path, setting) as file:
                text = _decode(file.read(), path, 0, setting)
            if text:
                yield Document(str(path), text)


def _resolve(spec: str, setting: str) -> list[Path]:
    if spec == STDLIB:
        return _stdlib_files(setting)
    path = Path(spec).expanduser()
    if path.is_dir():
        files = _walk(path)
        if not files:
            raise ValueError(
                f"{setting}: the folder '{path}' has no text files (known suffixes: .txt, .md, .jsonl, .py and the "
                "like; hidden names are skipped). Name the files, or a glob pattern such as "
                f"'{path}/*', to read them whatever their suffix."
            )
        return files
    if path.is_file():
        return [path]
    if glob.has_magic(spec):
        files = sorted(Path(match) for match in glob.glob(str(path), recursive=True) if Path(match).is_file())
        if not files:
            raise ValueError(f"{setting}: no file matches the pattern '{path}'. Check the pattern and the folder.")
        return files
    raise ValueError(
        f"{setting}: '{path}' does not exist. Name a text file, a folder, a glob pattern, or 'stdlib'"
        f" (relative names start from '{Path.cwd()}')."
    )


def _walk(folder: Path) -> list[Path]:
    files = []
    for path in folder.rglob("*"):
        parts = path.relative_to(folder).parts
        if any(part.startswith(".") or part in _SKIPPED_FOLDERS for part in parts):
            continue
        if path.suffix.lower() in TEXT_SUFFIXES and path.is_file():
            files.append(path)
    return sorted(files)


def _stdlib_files(setting: str) -> list[Path]:
    """Return the standard library's source files, without its tests, which many distributions leave out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        path for path in root.rglob("*.py") if not _STDLIB_SKIPPED.intersection(path.relative_to(root).parts[:-1])
    )
    if not files:
        raise ValueError(
            f"{setting}: 'stdlib' found no Python source below '{root}' (a zipped or stripped installation). "
            "Name a folder with text files instead."
        )
    return files


@contextlib.contextmanager
def _opened(path: Path, setting: str) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise ValueError(
            f"{setting}: '{path}' cannot be read ({error.strerror}). Check its permissions, or leave it out."
        ) from error


def _decode(raw: bytes, path: Path, offset: int, setting: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{setting}: '{path}' is not UTF-8 text: byte {offset + error.start:,} (0x{raw[error.start]:02x}) cannot "
            f"be decoded. Convert the file (iconv -f latin1 -t utf-8 is often right), or leave it out of {setting}."
        ) from error


def _read_jsonl(lines: Iterable[bytes], path: Path, text_field: str, setting: str) -> Iterator[Document]:
    offset = 0
    for number, raw in enumerate(lines, start=1):
        line = _decode(raw, path, offset, setting)
        offset += len(raw)
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{setting}: line {number} of '{path}' is not JSON ({error.msg} at column {error.colno}). "
                "A .jsonl file holds one JSON object a line; rename the file if it is plain text."
            ) from error
        if not isinstance(record, dict) or text_field not in record:
            has = f"it has {', '.join(sorted(map(str, record)))}" if isinstance(record, dict) else "it is no object"
            raise ValueError(
                f"data.text_field: line {number} of '{path}' has no field '{text_field}' ({has}). "
                "Set data.text_field to the field that holds the text."
            )
        text = record[text_field]
        if not isinstance(text, str):
            raise ValueError(
                f"data.text_field: field '{text_field}' in line {number} of '{path}' is {type(text).__name__}, not "
                "text. Set data.text_field to the field that holds the text."
            )
        if text:
            yield Document(f"{path}:{number}", text)
