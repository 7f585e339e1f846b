"""Every algorithm of both registries has a page: what it is, when to take it, what it costs, what it brings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import quark.onnx
from quark.onnx.algorithms.stages import READS_DATA, TRANSFORMS, TUNES
from quark.onnx.quantization.config.algorithm import ALGO_NAME_TO_CLASS

PAGES = Path(__file__).parents[1] / "docs" / "algorithms"
PARTS = ("**What.**", "**When.**", "**Cost.**", "**What it brings.**")
#: Names in pages that show that a figure is of a real model.
REAL = ("SqueezeNet", "YOLOX", "yolox", "UltraFace", "Silero", "gtcrn", "stories260K", "Llama")


def missing(name: str, prefix: str) -> list[str]:
    """What the best page with the name lacks."""
    pages = [path for path in PAGES.glob("*.md") if path.name.startswith("torch-") == bool(prefix)]
    texts = [path.read_text(encoding="utf-8") for path in pages]
    return min(
        (lacks(text) for text in texts if f"`{name}`" in text or f"{name}(" in text), key=len, default=["a page"]
    )


def lacks(text: str) -> list[str]:
    """The parts that a page has not."""
    real = [] if any(name in text for name in REAL) else ["a figure of a real model"]
    return [part for part in PARTS if part not in text] + real


@pytest.mark.parametrize("kind", ALGO_NAME_TO_CLASS.values(), ids=lambda kind: kind.name)
def test_an_onnx_algorithm_has_a_page_and_a_public_name_and_runs_somewhere(kind: type) -> None:
    assert missing(kind.__name__, "") == []
    assert kind.__name__ in quark.onnx.__all__
    assert kind in {**TRANSFORMS, **TUNES} or kind in READS_DATA


def test_torch_algorithms_have_pages() -> None:
    pytest.importorskip("torch")
    from quark.torch.algorithms.registry import ALGORITHMS

    found = {row.config.__name__: missing(row.config.__name__, "torch-") for row in ALGORITHMS}
    assert {name: lacks for name, lacks in found.items() if lacks} == {}


def test_an_algorithm_without_a_page_is_noticed() -> None:
    assert missing("SomethingNewConfig", "") == missing("SomethingNewConfig", "torch-") == ["a page"]


def test_the_page_of_choices_has_one_row_for_each_algorithm() -> None:
    """A reader who finds a name does not read on: what another row said of it would be lost."""
    text = (PAGES.parent / "choose.md").read_text(encoding="utf-8").partition("\n## Algorithms\n")[2]
    named = [name for row in re.findall(r"^\|(.+?)\|", text, re.M) for name in re.findall(r"`(\w+)`", row)]
    assert sorted(set(named)) == sorted(named)
    assert len(named) >= 12
