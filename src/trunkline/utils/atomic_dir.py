"""Atomic folders: written under another name, then renamed, so that a folder is complete or absent."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def replace_dir(partial: Path, folder: Path) -> None:
    """Rename a folder to its final name. A folder of that name is replaced, and restored if the rename fails.

    Args:
        partial: complete folder on the same disk.
        folder: final name.
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
