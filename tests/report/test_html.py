"""The page: complete in one file, strict JSON inside, hostile names harmless; rendered in a browser where one is."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from quark.report import Layer, Report, Table, TensorView
from quark.report.html import render, write_html

HOSTILE = "</script><script>alert(1)</script>"


def example() -> Report:
    values = np.random.default_rng(0).standard_normal(1000)
    counts, edges = np.histogram(values, 32)
    layers = (Layer("conv", "Conv", "conv_out", 31.25, 0.999), Layer(HOSTILE, "Relu", "r", math.inf, 1.0))
    tensors = (TensorView("conv_out", "int8", -2.0, 2.0, counts, edges, 0.045),)
    return Report("a <b> & c", (("top-1", "98 %"),), (Table("Cost", ("x",), (("<i>",),)),), layers, tensors)


def embedded(page: str) -> dict:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert match
    return json.loads(match[1], parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_data_in_the_page_is_the_data_given() -> None:
    data = embedded(render(example()))
    assert [layer["sqnr"] for layer in data["layers"]] == [31.25, "inf"]
    assert data["layers"][1]["name"] == HOSTILE
    tensor = data["tensors"][0]
    assert (tensor["low"], tensor["high"], tensor["clipped"]) == (-2.0, 2.0, 0.045)
    assert sum(tensor["counts"]) == 1000 and len(tensor["edges"]) == 33


def test_words_are_escaped() -> None:
    page = render(example())
    assert "<title>a &lt;b&gt; &amp; c</title>" in page
    assert "<td class='words'>&lt;i&gt;</td>" in page


def test_page_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    page = write_html(example(), tmp_path / "new" / "report.html").read_text(encoding="utf-8")
    own = page.replace(re.search(r"<script>(/\*\*.*?)</script>", page, re.S)[1], "")  # without plotly.js itself
    assert not re.search(r"""(src|href)\s*=|url\(|@import|fetch\(""", own)
    assert "{{" not in own.split("<body>")[0]


@pytest.mark.slow
def test_a_browser_draws_the_plots(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if not browser:
        pytest.skip("no chromium")
    page = write_html(example(), tmp_path / "report.html")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=8000", "--dump-dom"]
    dom = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120, check=True).stdout
    assert len(re.findall(r'class="main-svg"', dom)) >= 4  # plotly draws two layers a plot
    assert "alert(1)" in dom and dom.count('<g class="point">') == 2 + 32
