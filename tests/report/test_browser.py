"""The page in a browser: no error on its console, and each width shows its own drawings; skipped without Chromium."""

import re
import shutil
import subprocess

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")

# The page's policy allows no script, so that the copy that is measured has none of it.
PROBE = """<script>
  document.documentElement.dataset.shown = [...document.querySelectorAll("svg")].filter(
    (svg) => svg.checkVisibility()).map((svg) => svg.parentElement.className).join(" ");
  document.documentElement.dataset.overflow = document.documentElement.scrollWidth > innerWidth;
  document.getElementById("other-theme").click();
  document.documentElement.dataset.scheme = getComputedStyle(document.documentElement).colorScheme;
</script></body>"""


def render(page, tmp_path, width=1280):
    """Return the page's elements as the browser has them, and the lines of its console."""
    path = tmp_path / "page.html"
    path.write_text(page, encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=2000"]
    flags += [f"--window-size={width},900", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [CHROMIUM, *flags, "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.parametrize(("width", "kind"), [(1280, "wide"), (500, "narrow")])
def test_each_width_shows_its_own_drawings(page, tmp_path, width, kind):
    open_page = re.sub("<meta http-equiv[^>]*>", "", page).replace("</body>", PROBE)
    elements, console = render(open_page, tmp_path, width)
    assert console == []
    # Steps, memory, holders, lanes; memory on its own scale is folded away.
    assert re.search(r'data-shown="([^"]*)"', elements)[1].split() == [kind] * 4
    assert 'data-overflow="false"' in elements
    assert 'data-scheme="dark"' in elements


def test_a_script_in_the_page_would_not_run(page, tmp_path):
    assert render(page, tmp_path)[1] == []
    _, console = render(page.replace("</body>", "<script>alert(1)</script></body>"), tmp_path)
    assert any("Content Security Policy" in line for line in console)
