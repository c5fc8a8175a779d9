"""The page: self-contained, the same each time, without the parts that have no data; no text in it becomes markup."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from trunkline.report.charts import charts_of, peak_holders
from trunkline.report.page import make_page
from trunkline.report.run_folder import read_run
from trunkline.report.tables import lane_table
from trunkline.train.output_folder import json_line

SECTIONS = [
    "Over the steps",
    "Evaluation",
    "Memory through one step",
    "What holds the peak",
    "Lanes",
    "Plan and measurement",
    "Settings",
]


def sections(page):
    return re.findall(r"<h2>(.*?)</h2>", page)


def page_of(folder):
    run = read_run(folder)
    return make_page(run, charts_of(run))


class Elements(HTMLParser):
    """Counts elements and attributes of a page, and checks that each is closed."""

    VOID = frozenset({"meta", "input"})

    def __init__(self, page):
        super().__init__()
        self.open, self.found, self.ids = [], [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_all_parts(page):
    assert sections(page) == SECTIONS
    for text in (
        "40.0 %",
        "50.0 %",
        "unchunked 500.0 GiB",
        "capacity 80.0 GiB",
        "measured / predicted",
        "1.25",
        "After step 3,",
        "37.5 %",
        "layer 0 &lt;again&gt;</text>",
    ):
        assert text in page, text


@pytest.mark.parametrize(
    ("names", "left"),
    [
        (["timeline.json", "before.json"], ["Over the steps", "Evaluation", "Plan and measurement", "Settings"]),
        (["recipe.yaml", "plan.json", "before.json", "metrics.jsonl", "evaluations.jsonl"], SECTIONS[2:5]),
        (["timeline.json", "metrics.jsonl", "evaluations.jsonl", "plan.json", "recipe.yaml"], SECTIONS[2:3]),
    ],
)
def test_parts_without_data_are_left_out(folder, names, left):
    for name in names:
        (folder / name).unlink()
    assert sections(page_of(folder)) == left


def test_tables_without_data_are_left_out(full):
    run, charts = full
    page = make_page(replace(run, evaluations=[], plan=None, recipe=None), charts)
    assert sections(page) == [s for s in SECTIONS if s not in ("Evaluation", "Plan and measurement", "Settings")]


def byte_ticks(svg):
    return [float(value) for value in re.findall(r">(\d+) GiB</text>", svg)]


def test_before_and_after_have_one_scale(full):
    run, charts = full
    # Both charts of the device go up to 500 GiB; alone, the chunked step's goes up to its capacity of 80 GiB.
    assert byte_ticks(charts["memory"].svg()[0])[:6] == [0, 200, 400] * 2
    assert max(byte_ticks(charts["memory-own-scale"].svg()[0])[3:8]) == 80
    assert run.before is not None


def test_each_chart_is_drawn_for_both_widths_and_described(page, full):
    elements = Elements(page)
    charts = [attributes for name, attributes in elements.found if name == "svg"]
    assert [chart["role"] for chart in charts] == ["img"] * 10
    assert len({chart["aria-label"] for chart in charts}) == 5
    assert "Memory through one step. device, before: unchunked, gradient checkpointing, peak 500.0 GiB." in page
    assert "Loss, nats a token: 3.00 to 1.00." in full[1]["steps"].alt
    assert len(elements.ids) == len(set(elements.ids))


def test_colours_follow_light_and_dark(full):
    for svg in full[1]["memory"].svg():
        # Black is the browser's own, and text or lines in it would not be seen in the dark.
        assert set(re.findall(r"(?:fill|stroke): ([^;\"]+)", svg)) <= {
            "none", *(f"var(--{name})" for name in ("ink", "soft", "rule", "blue", "red", "paper", "sky", "pink",
                                                   "orange", "grey"))
        }  # fmt: skip
        assert all("fill: var" in style for style in re.findall(r'<text style="([^"]*)"', svg))


def test_nothing_is_loaded_and_no_text_is_markup(folder, make):
    evil = '</script><script>alert(1)</script><img src="http://x">&"\u2028--> $x_1$'
    (folder / "timeline.json").write_text(
        make["timeline"](
            title=evil,
            lanes={"compute": [(0.0, 10.0, evil)]},
            holders={"device": {evil: 10}},
        ).to_json()
    )
    for name in ("before.json", "metrics.jsonl", "evaluations.jsonl"):
        (folder / name).unlink()
    (folder / "recipe.yaml").write_text(evil)
    (folder / "plan.json").write_text(json.dumps({**make["plan"], "hardware": evil}))
    page = page_of(folder)
    elements = Elements(page).found
    assert not {"script", "img", "link", "iframe", "image"} & {name for name, _ in elements}
    addresses = [v for _, found in elements for k, v in found.items() if k in ("src", "href", "xlink:href")]
    assert {address for address in addresses if not address.startswith("#")} == {"https://ui.perfetto.dev"}
    policy = next(a["content"] for n, a in elements if n == "meta" and a.get("http-equiv") == "Content-Security-Policy")
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    assert "@import" not in page
    assert re.findall(r"url\((?!#)", page) == []
    assert "$x_1$" in page, "no formula"


def test_a_large_run_makes_a_small_page(folder, make):
    lanes = {"compute": [(i * 1e-4, (i + 0.9) * 1e-4, f"chunk {i % 64}") for i in range(99_000)]}
    memory = {"device": [(i * 1e-4, (i * 7919) % 60_000_000_000) for i in range(99_000)]}
    (folder / "timeline.json").write_text(make["timeline"](lanes=lanes, memory=memory).to_json())
    lines = [json_line(make["step"](i, loss=2 + (i * 7919 % 1000) / 1000)) for i in range(1, 5001)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    for name in ("before.json", "evaluations.jsonl"):
        (folder / name).unlink()
    page = page_of(folder)
    assert len(page) < 1_500_000
    assert "99,000 pieces of work" in page


def test_totals_of_lanes(timeline):
    rows = {row[0]: row[1:] for row in lane_table(timeline).rows}
    assert rows == {
        "compute": ["8.00 s (80.0%)", "", "", ""],
        "fetch": ["1.50 s (15.0%)", "2.8 GiB", "2.0 GB/s", "1.00 s (10.0%)"],
    }


def test_data_at_the_peak(timeline, make):
    gib = make["gib"]
    shares = list(peak_holders(timeline, "device").items())
    assert shares == [("keys and values", 32 * gib), ("parameters", 16 * gib), ("other", 12 * gib), ("free", 20 * gib)]
    assert list(peak_holders(timeline, "host")) == ["layer inputs"]
    assert peak_holders(timeline, "disk") == {}


def test_small_holders_are_put_together(make):
    held = {f"part {i:02}": 100 - i for i in range(12)}
    timeline = make["timeline"](holders={"device": held}, memory={"device": [(0.0, sum(held.values()))]}, capacity={})
    shares = peak_holders(timeline, "device")
    assert len(shares) == 8
    assert list(shares)[-1] == "other"
    assert sum(shares.values()) == sum(held.values())


@pytest.mark.parametrize(("times", "shown"), [(4, True), (5, False)])
def test_free_room_is_drawn_where_it_leaves_the_rest_visible(make, times, shown):
    held = {"device": {"parameters": 60 * make["gib"]}}
    step = make["timeline"](capacity={"device": times * 60 * make["gib"]}, holders=held)
    assert list(peak_holders(step, "device")) == ["parameters", *(["free"] if shown else [])]
