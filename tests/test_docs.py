"""The code of the documentation runs: every ``python`` block of a page in order, in one namespace, in an empty folder.

A page may begin with a hidden block, ``<!-- setup … -->``, that makes what its reader already has (a model, a folder of
samples). In ``console`` blocks every line after ``$`` is run too and must exit with 0. Other languages are not run.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from quark.cli import main
from quark.onnx import tuned_speed
from quark.onnx.quantization.config import tuners

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SKETCHES = {"docs/architecture.md"}  # signatures only
BLOCK = re.compile(r"^<!-- setup\n(?P<setup>.*?)^-->|^```(?P<language>python|console)\n(?P<code>.*?)^```", re.M | re.S)
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)(?:#[^)]*)?\)")


def blocks(page: Path) -> Iterator[tuple[str, str, int]]:
    """(language, code, line number) of everything on a page that runs."""
    text = page.read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        kind = "python" if match["setup"] is not None else match["language"]
        line = text.count("\n", 0, match.start()) + 1
        yield kind, match["setup"] if match["setup"] is not None else match["code"], line


def run_python(code: str, page: Path, line: int, namespace: dict[str, object]) -> None:
    """Run one block; tracebacks show the line of the page."""
    exec(compile("\n" * line + code, str(page), "exec"), namespace)


def run_console(code: str) -> None:
    """Run the lines after ``$``: ``quark`` in this process (its start is tested elsewhere), others as they are."""
    here = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{here}{os.pathsep}{os.environ['PATH']}"}
    for command in re.findall(r"^\$ (.+(?:\\\n.+)*)$", code, re.M):
        words = shlex.split(command)
        if words[0] == "quark":
            with redirect_stdout(io.StringIO()) as out, redirect_stderr(out):
                code_of_exit, told = main(words[1:]), out.getvalue()
        else:
            done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment, check=False)
            code_of_exit, told = done.returncode, f"{done.stdout}{done.stderr}"
        assert code_of_exit == 0, f"$ {command}\n{told}"


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Presets tune their weights by a tenth of their steps, and kernels are timed for less long: enough for what pages
    say about the demo's network."""
    monkeypatch.setitem(tuners._PRESET, "num_iterations", 60)
    monkeypatch.setattr(tuned_speed, "SECONDS", 0.3)
    tuners.preset_tuners.cache_clear()
    yield
    tuners.preset_tuners.cache_clear()


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("page", [p for p in PAGES if str(p.relative_to(ROOT)) not in SKETCHES], ids=lambda p: p.stem)
def test_code_of_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "page", "__page__": str(page)}
    for language, code, line in blocks(page):
        if language == "python":
            run_python(code, page, line, namespace)
        else:
            run_console(code)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_of_page(page: Path) -> None:
    targets = LINK.findall(page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_pages_hold_code_that_runs() -> None:
    """The finder finds: a page whose blocks it misses would pass unseen."""
    for name in ("README.md", "docs/quickstart.md", "docs/seeds/configuration.md", "docs/seeds/xint8.md"):
        assert {language for language, _, _ in blocks(ROOT / name)} >= {"python"}, name
    assert any(language == "console" for language, _, _ in blocks(ROOT / "docs" / "cli.md"))


def test_a_broken_block_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- setup\nx = 1\n-->\n\n```python\nassert x == 2\n```\n\n```console\n$ false\n```\n")
    found = list(blocks(page))
    assert [(language, line) for language, _, line in found] == [("python", 1), ("python", 5), ("console", 9)]
    namespace: dict[str, object] = {}
    run_python(found[0][1], page, 1, namespace)
    with pytest.raises(AssertionError):
        run_python(found[1][1], page, 5, namespace)
    with pytest.raises(AssertionError, match=r"\$ false"):
        run_console(found[2][1])
