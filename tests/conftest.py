"""Set before torch is loaded: threads that wait sleep, so that tests do not crawl beside another busy process."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
