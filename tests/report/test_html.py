"""The page: complete in one file, its data are the figures given, hostile names harmless; a browser runs it."""

from __future__ import annotations

import json
import math
import re
import shutil
import struct
import subprocess
import zlib
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from quark.report import ChartPoint, LayerView, ModelView, Report, Scatter, Table, TensorView
from quark.report.html import SUBJECTS, render, write_html
from quark.report.pictures import LARGEST, address, png
from quark.report.values import Box, Channels, Example, Links, SampleAnswer
from quark.report.verdict import Line, Verdict, size_line

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&\u2028\ud800"
COUNTED = np.histogram(np.random.default_rng(0).standard_normal(1000), 128)
VERDICT = Verdict((Line("accuracy", "lost", "SQNR 3 dB <b>", True, "3.0 dB"), size_line(400, 100)), ("next <command>",))


def tensor(name: str, channels: int = 0, low: float = -2.0) -> TensorView:
    counts, edges = COUNTED
    ends = np.linspace(0.1, 1, channels)
    ranges = Channels(-ends, ends, -2 * np.ones(channels), 2 * np.ones(channels)) if channels else None
    return TensorView(name, "int8", low, 2.0, counts, edges, 0.045, ranges)


def in_modules(k: int) -> str:
    return f"/stage{k % 7}/block{k % 3}/conv{k}"


def flat(k: int) -> str:
    return f"Conv_{3 * k}"


Named = Callable[[int], str]


def view(name: str, count: int = 2, low: float = -2.0, named: Named = in_modules) -> ModelView:
    """A model of ``count`` layers, the last of them with a hostile name."""
    names = [named(k) for k in range(count - 1)] + [HOSTILE]
    layers = [
        LayerView(one, "Conv" if k % 2 == 0 else "Relu", f"t{k}", 20 + k % 30 + 0.25, 0.999, 40 + k % 9, 50 - k % 11)
        for k, one in enumerate(names)
    ]
    layers[0] = LayerView(names[0], "Conv", "t0", math.inf, 1.0, None, None, rescaled=True)
    weights = {one.name: f"w{k}" for k, one in enumerate(layers) if one.op_type == "Conv"}
    tensors = [tensor(f"t{k}", low=low) for k in range(count)] + [tensor(one, 256) for one in weights.values()]
    reasons = {one: f"because of rule {k % 5}" for k, one in enumerate(names)}
    return ModelView(name, VERDICT, tuple(layers), tuple(tensors), weights, reasons)


def example(count: int = 2, models: int = 2, named: Named = in_modules) -> Report:
    picture = np.arange(64 * 64 * 3, dtype=np.uint8).reshape(64, 64, 3)
    classes = (
        SampleAnswer(classes=((3, 0.75), (1, 0.25))),
        *(SampleAnswer(classes=((1, 0.5), (3, 0.5))) for _ in range(models)),
    )
    boxes = tuple(SampleAnswer(boxes=(Box((0.1, 0.2, 0.5, 0.6), 0.9, 7),)) for _ in range(models + 1))
    shown = tuple(SampleAnswer(picture=picture) for _ in range(models + 1))
    examples = (
        Example("logits", "classes", 0, classes, picture),
        Example(HOSTILE, "boxes", 1, boxes),
        Example("image", "picture", 2, shown),
    )
    views = tuple(view(f"{k}.onnx", count, -2.0 + 0.5 * k, named) for k in range(models))
    links = {"t0": Links(("x",), ("t1",)), "t1": Links(("t0",), ())}
    tables = (Table("Cost", ("x",), (("<i>",),)),)
    points = (ChartPoint(HOSTILE, 1.0, 2.0, True), ChartPoint("nan", math.nan, 1.0))
    scatters = (Scatter("by size", "MB", "dB", points),)
    return Report("a <b> & c", views, links, examples, tables, scatters, notes=("measured so",))


def embedded(page: str) -> dict:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert match
    return json.loads(match[1], parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_the_data_are_the_figures_given() -> None:
    data = embedded(render(example()))
    first, last = data["layers"]
    assert first["m"] == [[None, None, "inf", 1.0, 1]] * 2  # alone, own, accumulated, cosine, rescaled
    assert last["m"][0] == [49, 41, 21.25, 0.999] and (last["n"], last["o"], last["t"]) == (HOSTILE, "Relu", "t1")
    assert (first["r"], first["f"], first["w"]) == (["x"], ["t1"], "w0")
    assert data["words"][data["reasons"][1][HOSTILE]] == "because of rule 1"
    entry, other = data["tensors"]["t0"]
    assert (entry["low"], entry["high"], entry["clipped"], entry["format"]) == (-2.0, 2.0, 0.045, "int8")
    assert sum(entry["counts"]) == 1000 and len(entry["counts"]) == 64 and entry["span"][0] < entry["span"][1]
    assert other == {"format": "int8", "low": -1.5, "high": 2.0, "clipped": 0.045}  # the same histogram is kept once
    assert data["scatters"][0]["points"] == [{"name": HOSTILE, "x": 1.0, "y": 2.0, "chosen": True}]
    classes, boxes, picture = data["examples"]
    assert classes["answers"][0]["classes"] == [[3, 0.75], [1, 0.25]] and classes["picture"].startswith(
        "data:image/png"
    )
    assert boxes["answers"][2]["boxes"] == [[0.1, 0.2, 0.5, 0.6, 0.9, 7]] and "picture" in picture["answers"][1]


def test_many_channels_share_columns_without_losing_the_widest() -> None:
    channels = embedded(render(example()))["tensors"]["w0"][0]["channels"]
    assert channels["of"] == 256 and channels["each"] == 3 and len(channels["highest"]) == 86
    assert max(channels["highest"]) == 1.0 and min(channels["lowest"]) == -1.0 and set(channels["high"]) == {2.0}


def test_words_are_escaped_and_nothing_ends_the_data() -> None:
    page = render(example())
    page.encode("utf-8")
    assert "<title>a &lt;b&gt; &amp; c</title>" in page and "<td class='words'>&lt;i&gt;</td>" in page
    assert "SQNR 3 dB &lt;b&gt;" in page and "next &lt;command&gt;" in page
    assert "alert(1)</script>" not in page and "<img src=x" not in page
    assert page.count("<script") == page.count("</script>") == 2


def test_verdict_and_four_figures_stand_on_top() -> None:
    page = render(example())
    head = page[: page.index('id="causes"')]
    assert head.count("class='tile'") == 2 * len(SUBJECTS) and "3.0 dB" in head and "4.0×" in head
    assert head.count("not measured") == 2 * 2  # speed and coverage, which this verdict lacks, of two models


def test_a_verdict_of_no_model_has_no_name_and_four_figures_at_most() -> None:
    verdict = Verdict((Line("chosen by", "sqnr", "x", figure="27"), size_line(400, 100)), ("go on",))
    models = (ModelView("A8W8"), ModelView("XINT8"))
    page = render(Report("plan", models, verdict=verdict))
    head = page[: page.index('id="causes"')]
    assert head.count("class='tile'") == len(SUBJECTS) and "<h2>" not in head
    assert "<li><b>chosen by</b> sqnr: x</li>" in head and head.count("<code>go on</code>") == 1
    alone = render(Report("plan", models, verdict=Verdict(verdict.lines[:1])))
    assert alone.count("class='tile'") == 1 and "<b>27</b>" in alone and "<li><b>chosen by" not in alone


def test_page_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    page = write_html(example(), tmp_path / "new" / "report.html").read_text(encoding="utf-8")
    own = re.sub(r'<script type="application/json".*?</script>', "", page, flags=re.S)
    assert not re.search(r"""(src|href)\s*=\s*["']|url\(|@import|fetch\(|innerHTML|insertAdjacentHTML|eval\(""", own)
    assert "default-src 'none'" in own and "{{" not in own.split("<body>")[0]


def test_size_of_the_page() -> None:
    assert len(render(example(400, 1)).encode()) < 1.0e6 and len(render(example(400, 3)).encode()) < 1.5e6


def test_a_png_holds_the_picture_and_large_ones_are_thinned() -> None:
    picture = np.random.default_rng(1).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    data = png(picture)
    assert struct.unpack(">2I", data[16:24]) == (7, 5)
    length = struct.unpack(">I", data[33:37])[0]
    rows = np.frombuffer(zlib.decompress(data[41 : 41 + length]), np.uint8).reshape(5, 1 + 7 * 3)
    assert (rows[:, 0] == 2).all() and np.array_equal(
        np.cumsum(rows[:, 1:], axis=0, dtype=np.uint8), picture.reshape(5, -1)
    )
    import base64

    large = base64.b64decode(address(np.zeros((1000, 400), np.uint8)).partition(",")[2])
    assert max(struct.unpack(">2I", large[16:24])) <= LARGEST


def entries(node: dict) -> list[int]:
    """How many stand side by side, in every fold."""
    return [len(node["rows"]) + len(node["children"]), *(n for child in node["children"] for n in entries(child))]


def rows(node: dict) -> list[int]:
    return sorted([*node["rows"], *(index for child in node["children"] for index in rows(child))])


@pytest.mark.parametrize(
    "named",
    [
        flat,
        in_modules,
        lambda k: f"/backbone/Conv_{k}",  # one module for all
        lambda k: f"conv{k}/Conv",  # a module for each
        lambda k: f"/head{k % 4}/Conv_{k}" if k % 3 == 0 else f"Conv_{k}",
    ],
)
@pytest.mark.parametrize("count", [20, 41, 400, 2000])
def test_no_fold_is_long_whatever_the_names(count: int, named: Named) -> None:
    if not (node := shutil.which("node")):
        pytest.skip("no node")
    names = [named(k) for k in range(count)]
    program = (resources.files("quark.report") / "assets" / "tree.js").read_text(encoding="utf-8")
    program += f"process.stdout.write(JSON.stringify(tree({json.dumps(names)})));"
    found = json.loads(subprocess.run([node, "-"], input=program, capture_output=True, text=True, check=True).stdout)
    assert rows(found) == list(range(count)) and max(entries(found)) <= max(40, math.isqrt(count - 1) + 1)
    if named is flat and count > 40:
        runs = [rows(run) for run in found["children"]]
        assert [index for run in runs for index in run] == list(range(count)) and min(map(len, runs)) >= 5
        ends = [f"{names[run[0]]} … {names[run[-1]]}" for run in runs]
        assert [run["name"] for run in found["children"]] == ends


#: Runs in the page before and after its own program: the faults it had, and what a click and a word in the search do.
BEFORE = "<script>window.faults = []; window.onerror = (m) => { faults.push(m); };</script>"
AFTER = """<script>
const all = words => document.querySelectorAll(words), one = words => document.querySelector(words);
const type = (control, words) => { control.value = words; control.dispatchEvent(new Event("input")); };
const seen = {causes: all("#causes button.row").length, folded: all("#list .module").length};
seen.shown = all("#list button.row").length;
seen.height = one("#list").offsetHeight;
one("#causes button.row").click();
seen.plots = all("#causes .detail svg").length;
seen.reason = one("#causes .detail").textContent.includes("because of rule");
one("#list .module")?.click();
seen.unfolded = all("#list button.row").length;
type(one("#search"), "ALERT(1)");
seen.found = all("#list button.row").length;
seen.hostile = one("#list bdi").textContent;
seen.images = all("img[src=x]").length;
type(one("#search"), "");
one("#fold").checked = false;
type(one("#order"), "alone");
seen.first = one("#list .alone u").textContent;
seen.rows = all("#list button.row").length;
seen.examples = all("#examples .card").length;
document.body.style.width = Math.min(WIDTH, window.innerWidth) + "px";
seen.wide = document.body.scrollWidth - document.body.clientWidth;
seen.faults = faults;
document.title = "seen " + JSON.stringify(seen);
</script>"""


@pytest.mark.slow
@pytest.mark.parametrize("named", [in_modules, flat])
@pytest.mark.parametrize(("count", "width"), [(20, 1280), (400, 390), (2000, 1280)])
def test_a_browser_runs_the_page(count: int, width: int, named: Named, tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if not browser:
        pytest.skip("no chromium")
    page = tmp_path / "report.html"
    whole = render(example(count, named=named)).replace("\\ud800", "")  # --dump-dom cannot write half a surrogate pair
    text = whole.replace("<head>", f"<head>{BEFORE}").replace("</body>", f"{AFTER.replace('WIDTH', str(width))}</body>")
    page.write_text(text, encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
    flags += [
        "--disable-background-networking",
        "--disable-component-update",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    command = [browser, *flags, f"--window-size={width},900", "--dump-dom", page.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    match = re.search(r"<title>seen (.*?)</title>", dom, re.S)
    assert match, "the page's program did not come to its end"
    seen = json.loads(match[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    assert seen["faults"] == [] and seen["causes"] == min(20, count - 1) and seen["plots"] >= 1 and seen["reason"]
    assert seen["found"] == 1 and "alert(1)" in seen["hostile"] and seen["images"] == 0
    assert seen["rows"] == count and seen["first"].startswith("40.0 dB") and seen["examples"] == 10
    assert (seen["folded"] > 0) == (count > 40) and seen["wide"] <= 0
    assert seen["shown"] <= 45 and seen["height"] < 4000 and (seen["unfolded"] > seen["shown"]) == (count > 40)
