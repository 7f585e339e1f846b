"""The notebooks: each parses, names only what is public, and runs in an empty folder with what the package ships."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
#: Modules that documents name beside the two flows and the package itself.
PUBLIC = {
    *("quark", "quark.onnx", "quark.torch", "quark.demo.data", "quark.observers", "quark.numerics.elements"),
    *("quark.onnx.sensitivity", "quark.onnx.search", "quark.torch.quantization.config.type"),
}


@pytest.fixture(scope="module")
def notebooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("notebooks_of_docs", ROOT / "docs" / "notebooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def code_of(notebooks: ModuleType, path: Path) -> str:
    cells = [cell for cell in notebooks.cells_of(path) if cell["cell_type"] == "code"]
    return "\n".join("".join(cell["source"]) for cell in cells)


def test_there_are_five() -> None:
    assert len(NOTEBOOKS) == 5


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_names_what_is_public(notebooks: ModuleType, path: Path) -> None:
    code = code_of(notebooks, path)
    made = {"FP8E3M4Spec"} if "register_format" in code else set()  # a name that the notebook itself brings about
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("quark"):
            assert node.module in PUBLIC
            module = importlib.import_module(str(node.module))
            assert [one.name for one in node.names if one.name not in made and not hasattr(module, one.name)] == []
    assert path.stat().st_size < 20_000 and "/shared" not in code


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_holds_what_its_cells_print(notebooks: ModuleType, path: Path) -> None:
    """Each was run before it was stored, in order, and nothing failed."""
    counts = [(number, cell) for number, cell in enumerate(notebooks.cells_of(path), 1) if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] == number for number, cell in counts)
    outputs = [output for _, cell in counts for output in cell["outputs"]]
    assert outputs and {output["output_type"] for output in outputs} == {"stream"}
    page = notebooks.page(path)
    assert page.startswith("# ") and all("".join(output["text"]).rstrip() in page for output in outputs)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebooks: ModuleType, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    printed = notebooks.run(path)
    stored = [cell.get("outputs", []) for cell in notebooks.cells_of(path)]
    assert [bool(text) for text in printed] == [bool(outputs) for outputs in stored]
