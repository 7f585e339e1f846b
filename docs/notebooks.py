"""Runs the notebooks and stores what their cells print: ``python docs/notebooks.py [NAME …]``.

A notebook is JSON: cells of Markdown and of Python. Here they are read, run in order in one namespace and an empty
folder, and rendered as pages of the site. No cell uses magics, so plain Python runs them as a notebook server does.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

HOME = Path(__file__).resolve().parent / "notebooks"


def cells_of(path: Path) -> list[dict[str, Any]]:
    """The cells of a notebook, in order."""
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def run(path: Path) -> list[str]:
    """What each cell prints, and the value that it ends with; the working folder is where files go."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    for cell in cells_of(path):
        said = io.StringIO()
        if cell["cell_type"] == "code":
            tree = ast.parse("".join(cell["source"]))
            last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
            with contextlib.redirect_stdout(said):
                exec(compile(tree, path.name, "exec"), namespace)
                value = last and eval(compile(ast.Expression(last.value), path.name, "eval"), namespace)
                if value is not None:
                    print(value)
        printed.append(said.getvalue())
    return printed


def page(path: Path) -> str:
    """The notebook as Markdown."""
    parts = []
    for cell in cells_of(path):
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        parts += [f"```text\n{''.join(output['text']).rstrip()}\n```" for output in cell.get("outputs", [])]
    return "\n\n".join(parts) + f"\n\nAs a notebook: `docs/notebooks/{path.name}` of the sources.\n"


def store(path: Path) -> None:
    """Run a notebook in an empty folder, and write it with its outputs."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        try:
            os.chdir(folder)
            printed = run(path)
        finally:
            os.chdir(here)
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for number, (cell, text) in enumerate(zip(notebook["cells"], printed, strict=True), start=1):
        if cell["cell_type"] == "code":
            lines = text.splitlines(keepends=True)
            cell["execution_count"] = number
            cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for notebook in sorted(HOME.glob("*.ipynb")):
        if not sys.argv[1:] or notebook.stem in sys.argv[1:]:
            store(notebook)
