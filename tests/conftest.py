"""Set before torch is loaded: one thread a process, since tensors are tiny and processes as many as cores.

Threads that wait sleep, so that tests do not crawl beside another busy process.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
