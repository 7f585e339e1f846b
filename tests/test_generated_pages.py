"""The pages that are printed from tables say what the tables say."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[1] / "docs"


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["formats.md", "options.md", "migrate/names.md"])
def test_a_generated_page_is_fresh(name: str) -> None:
    written = (DOCS / name).read_text(encoding="utf-8")
    assert written == generator().PAGES[name](), f"docs/{name} is stale: run python docs/generate.py"


def script(folder: str) -> ModuleType:
    """``tests/FOLDER/run.py``."""
    spec = importlib.util.spec_from_file_location(f"{folder}_run", DOCS.parent / "tests" / folder / "run.py")
    assert spec is not None and spec.loader is not None
    run = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(run)
    return run


def test_no_cell_of_the_consumers_is_wrong_or_worse() -> None:
    run = script("consumers")
    results = json.loads(run.RESULTS.read_text(encoding="utf-8"))
    assert len(results) > 2000 and not [key for key, value in results.items() if run.is_worse(value, value)]
    kinds = ("right", "import", "refused", "differs", "silent", "crash")
    worse = {(old, new) for old in kinds for new in kinds if run.is_worse({"cell": new}, {"cell": old})}
    assert worse == {(old, new) for old in kinds for new in kinds[3:]} | {("right", "import"), ("right", "refused")}
    assert not run.is_worse({"cell": "refused"}, None) and run.is_worse({"cell": "silent"}, None)


def test_the_scoreboard_shows_what_was_counted() -> None:
    run = script("judges")
    results = json.loads(run.RESULTS.read_text(encoding="utf-8"))
    assert run.PAGE.read_text(encoding="utf-8") == run.page(results), "stale: run python tests/judges/run.py --page"
    failed = run.sorted_out(run.JUDGES["microxcaling"], ["failed", "Torch not compiled with CUDA enabled"])
    assert failed == ["skipped", "needs a CUDA device"]
    assert run.reason(run.JUDGES["onnxruntime"], "2 != 0 : op_type QGemm count").startswith("integer op")


def test_every_format_has_its_line() -> None:
    from quark.numerics.formats import FORMATS

    page = (DOCS / "formats.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in page for name in FORMATS)


def test_every_public_name_is_described_with_an_example() -> None:
    """Every parameter of every public name has words, and every name an example on the page, which runs as a test."""
    api = importlib.import_module("api") if generator().api_page() else None
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    found = api.public()
    assert {module.__name__ for module in found} == {"quark", "quark.onnx", "quark.torch", "quark.torch.quantization"}
    for module, names in found.items():
        for name in names:
            one = getattr(module, name)
            lacking = set(api.parameters(one)) - set(api.described(one)) if callable(one) else set()
            assert not lacking, f"{module.__name__}.{name}: {sorted(lacking)}"
            assert f"### {name}\n" in page and name in api.example(module, name)
