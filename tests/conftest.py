"""Set before torch is loaded: one thread a process, since tensors are tiny and processes as many as cores.

Threads that wait sleep, so that tests do not crawl beside another busy process.
"""

import os
import sys
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module", autouse=True)
def _end_ranks_with_their_file() -> Iterator[None]:
    """Rank processes live as long as a test file."""
    yield
    if "distributed.processes" in sys.modules:
        sys.modules["distributed.processes"].close_pool()
