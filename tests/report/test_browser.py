"""The page in a browser: no error on its console, and what moves does; skipped where there is no Chromium."""

import re
import shutil
import subprocess

import pytest

from trunkline.report.folder import read_run
from trunkline.report.page import make_page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")


def render(page, tmp_path):
    """Return the page's elements after its script has run, and the lines of its console."""
    path = tmp_path / "page.html"
    path.write_text(page, encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=2000"]
    command = [CHROMIUM, *flags, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_no_errors_and_the_lanes_are_drawn_by_the_script(folder, tmp_path):
    elements, console = render(make_page(read_run(folder)), tmp_path)
    assert console == []
    assert 'class="chart zoomable"' in elements
    assert re.search(r'data-from="0\.0+" data-to="10\.0+"', elements)


def test_zoom_hover_and_theme(folder, tmp_path):
    act = """<script>
      document.querySelector('[data-zoom="0.5"]').click();
      document.getElementById("theme").click();
      const chart = document.querySelector(".pair .same .wide svg"), area = chart.getBoundingClientRect();
      const at = { clientX: area.left + area.width / 2, clientY: area.top + area.height / 2, bubbles: true };
      chart.dispatchEvent(new PointerEvent("pointermove", at));
    </script></body>"""
    elements, console = render(make_page(read_run(folder)).replace("</body>", act), tmp_path)
    assert console == []
    assert re.search(r'data-from="2\.50+" data-to="7\.50+"', elements), "half the step around its middle"
    assert re.search(r'<html lang="en" style="color-scheme: (dark|light);">', elements)
    tip = re.search(r'<div id="tip"[^>]*>([^<]*)</div>', elements)
    assert tip
    # The middle of the drawing is some 5 s after the beginning of the unchunked step's 12 s.
    assert re.fullmatch(r"(500|9)\.0 GiB\nat [45]\.\d+ s, backward", tip[1])


def test_an_error_would_be_seen(folder, tmp_path):
    broken = make_page(read_run(folder)).replace("</body>", "<script>absent()</script></body>")
    _, console = render(broken, tmp_path)
    assert any("absent is not defined" in line for line in console)
