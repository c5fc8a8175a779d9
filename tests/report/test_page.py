"""The page: self-contained, the same each time, with what there is data for; no text in it becomes markup."""

import json
import re
from html.parser import HTMLParser

import pytest

from trunkline.report.folder import read_run
from trunkline.report.lanes import lane_data, lane_totals
from trunkline.report.memory import shares_of
from trunkline.report.page import make_page

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


class Elements(HTMLParser):
    """Counts elements and attributes of a page, and checks that each is closed."""

    VOID = frozenset({"meta", "input"})

    def __init__(self, page):
        super().__init__()
        self.open, self.found = [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_all_parts(folder):
    page = make_page(read_run(folder))
    assert sections(page) == SECTIONS
    assert page == make_page(read_run(folder))
    assert re.findall(r'<li><i class="(\w+)"></i>\1</li>', page) == ["forward", "head", "backward"], (
        "what the bands mean"
    )
    for text in (
        "40.0 %",
        "50.0 %",
        "unchunked 500.0 GiB",
        "capacity 80.0 GiB",
        "measured / predicted",
        "1.25",
        "After step 3,",
        "37.5 %",
    ):
        assert text in page, text


@pytest.mark.parametrize(
    ("names", "left"),
    [
        (["timeline.json", "before.json"], ["Over the steps", "Evaluation", "Plan and measurement", "Settings"]),
        (["metrics.jsonl", "evaluations.jsonl"], SECTIONS[2:]),
        (["evaluations.jsonl"], [s for s in SECTIONS if s != "Evaluation"]),
        (["plan.json"], [s for s in SECTIONS if s != "Plan and measurement"]),
        (["recipe.yaml", "plan.json", "before.json", "metrics.jsonl", "evaluations.jsonl"], SECTIONS[2:5]),
    ],
)
def test_parts_without_data_are_left_out(folder, names, left):
    for name in names:
        (folder / name).unlink()
    assert sections(make_page(read_run(folder))) == left


def test_before_and_after_have_one_scale(folder):
    page = make_page(read_run(folder))
    assert page.count('class="own-scale"') == 1, "only the device is in both"
    same = [part.split('class="own"')[0] for part in page.split('class="same"')[1:]]
    assert len(same) == 2
    # 500 GiB is the top of both; alone, the chunked step's scale ends at 100 GiB.
    assert all(">500 GiB<" in part or ">600 GiB<" in part for part in same)
    (folder / "before.json").unlink()
    assert "GiB<" in make_page(read_run(folder))
    assert ">500 GiB<" not in make_page(read_run(folder))


def test_nothing_is_loaded_and_no_text_is_markup(folder, make):
    evil = '</script><script>alert(1)</script><img src="http://x">&"\u2028'
    (folder / "timeline.json").write_text(
        make["timeline"](
            title=evil,
            lanes={"compute": [(0.0, 1.0, evil)]},
            holders={"device": {evil: 10}},
        ).to_json()
    )
    (folder / "recipe.yaml").write_text(evil)
    (folder / "plan.json").write_text(json.dumps({**make["plan"], "hardware": evil}))
    elements = Elements(make_page(read_run(folder))).found
    names = [name for name, _ in elements]
    assert names.count("script") == 2, "the data of the lanes, and the page's own"
    assert not {"img", "link", "iframe", "image", "use"} & set(names)
    assert not [attributes for _, attributes in elements if {"src", "href", "xlink:href"} & set(attributes)]
    policy = next(a["content"] for n, a in elements if n == "meta" and a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")


def test_style_and_script_load_nothing(folder):
    page = make_page(read_run(folder))
    assert "@import" not in page
    assert "url(" not in page
    assert "fetch(" not in page


def test_a_large_step_makes_a_small_page(folder, make):
    lanes = {"compute": [(i * 1e-4, (i + 0.9) * 1e-4, f"chunk {i % 64}") for i in range(99_000)]}
    memory = {"device": [(i * 1e-4, (i * 7919) % 60_000_000_000) for i in range(99_000)]}
    (folder / "timeline.json").write_text(make["timeline"](lanes=lanes, memory=memory).to_json())
    page = make_page(read_run(folder))
    # 20,000 segments of about 25 bytes, and labels of those that were merged, about 20 bytes each.
    assert len(page) < 1_500_000
    assert "99,000 pieces of work" in page
    assert "drawn as one" in page


def test_lanes_come_back_from_their_data(timeline):
    data = lane_data(timeline)
    found = {}
    for lane in data["lanes"]:
        reached, flat = 0, lane["segments"]
        for gap, length, label in zip(flat[::3], flat[1::3], flat[2::3], strict=True):
            begin, reached = reached + gap, reached + gap + length
            found.setdefault(lane["name"], []).append(
                (begin * data["unit"], reached * data["unit"], data["labels"][label])
            )
    assert found.keys() == timeline.lanes.keys()
    for lane, segments in timeline.lanes.items():
        for (begin, end, label), (a, b, c) in zip(segments, found[lane], strict=True):
            assert c == label
            # Half a tick.
            assert (a, b) == (pytest.approx(begin, abs=data["unit"]), pytest.approx(end, abs=data["unit"]))


def test_totals_of_lanes(timeline):
    totals = {lane.name: lane for lane in lane_totals(timeline)}
    assert totals["fetch"].busy == 1.5
    assert totals["fetch"].exposed == 1
    assert totals["compute"].moved is None
    assert "stash" not in totals


def test_what_holds_the_peak(timeline, make):
    gib = make["gib"]
    shares = [(share.name, share.nbytes) for share in shares_of(timeline, "device")]
    assert shares == [("keys and values", 32 * gib), ("parameters", 16 * gib), ("other", 12 * gib), ("free", 20 * gib)]
    assert [share.name for share in shares_of(timeline, "host")] == ["layer inputs"]
    assert shares_of(timeline, "disk") == []


def test_small_holders_are_put_together(make):
    held = {f"part {i:02}": 100 - i for i in range(12)}
    timeline = make["timeline"](holders={"device": held}, memory={"device": [(0.0, sum(held.values()))]}, capacity={})
    shares = shares_of(timeline, "device")
    assert len(shares) == 8
    assert shares[-1].name == "other"
    assert sum(share.nbytes for share in shares) == sum(held.values())
    assert len({share.colour for share in shares}) == 8


@pytest.mark.parametrize(("times", "shown"), [(4, True), (5, False)])
def test_free_room_is_drawn_where_it_leaves_the_rest_visible(make, times, shown):
    held = {"device": {"parameters": 60 * make["gib"]}}
    step = make["timeline"](capacity={"device": times * 60 * make["gib"]}, holders=held)
    assert [share.name for share in shares_of(step, "device")] == ["parameters", *(["free"] if shown else [])]
