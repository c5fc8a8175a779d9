"""Atomic folders: written under another name, then renamed, so that a folder is complete or absent."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def atomic_dir(folder: Path) -> Iterator[Path]:
    """Lend an empty folder for the duration of a `with`; it then takes the name `folder`, or is removed on an error."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    partial.mkdir()
    try:
        yield partial
        replace_dir(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def replace_dir(partial: Path, folder: Path) -> None:
    """Rename a folder to its final name. A folder of that name is replaced, and restored if the rename fails.

    Args:
        partial: complete folder on the same disk.
        folder: final name.

    Raises:
        OSError: a rename failed.
    """
    if not folder.exists():
        partial.rename(folder)
        return
    old = folder.with_name(f"{folder.name}.old-{os.getpid()}")
    folder.rename(old)
    try:
        partial.rename(folder)
    except OSError:
        old.rename(folder)
        raise
    shutil.rmtree(old)
