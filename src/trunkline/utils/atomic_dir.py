"""A folder that is whole or not there: written beside its place, then put there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def replace_dir(partial: Path, folder: Path) -> None:
    """Put a folder in its place; what was there stays until the new one is, and comes back if that fails.

    Args:
        partial: what was written, beside the place.
        folder: the place.
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
