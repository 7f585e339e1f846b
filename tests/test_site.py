"""The documentation site: every page has one place in it, and it builds without a broken link."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_of_docs", ROOT / "docs" / "site.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_has_one_place(site: ModuleType) -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    placed = re.findall(r"[\w./-]+\.md", text.partition("\nnav:")[2])
    assert sorted(placed) == sorted(map(str, site.pages().values()))
    assert [next(iter(part)) for part in yaml.safe_load(text)["nav"]] == [
        *("Start", "ONNX recipes", "LLM recipes", "Migrate", "Reference", "Trust", "Develop"),
    ]


def test_links_follow_the_pages(site: ModuleType, tmp_path: Path) -> None:
    places = site.pages()
    page = ROOT / "benchmarks" / "RESULTS.md"
    text = "[a](../docs/results/speed.md#x), [b](page.py), [c](https://e.org), [d](../CHANGELOG.md)"
    assert site.linked(page, places, text) == "[a](../results/speed.md#x), b, [c](https://e.org), [d](../CHANGELOG.md)"


class References(HTMLParser):
    """What a page loads and links to, and the anchors that it has."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.loaded, self.links, self.anchors = set[str](), set[str](), set[str]()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors |= {value for value in (given.get("id"), given.get("name")) if value}
        if tag in ("script", "img") and given.get("src"):
            self.loaded.add(str(given["src"]))
        if tag == "link" and given.get("href") and given.get("rel") not in ("canonical", "next", "prev"):
            self.loaded.add(str(given["href"]))
        if tag == "a" and given.get("href"):
            self.links.add(str(given["href"]))


@pytest.mark.slow
def test_the_site_builds_and_needs_no_network(tmp_path: Path) -> None:
    """Strict: a broken link or anchor, or a page that is nowhere, fails. Nothing is loaded from elsewhere."""
    mkdocs = shutil.which("mkdocs", path=str(Path(sys.executable).parent)) or shutil.which("mkdocs")
    if mkdocs is None:
        pytest.skip("mkdocs-material is not installed: pip install '.[docs]'")
    subprocess.run([sys.executable, "docs/site.py"], cwd=ROOT, check=True)
    command = [mkdocs, "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {page: References(page) for page in tmp_path.rglob("*.html")}
    assert len(found) > 60
    for page, references in found.items():
        assert [one for one in references.loaded if one.startswith(("http", "//"))] == [], page
        for link in references.links:
            path, _, anchor = link.partition("#")
            if link.startswith(("http", "mailto:", "/")) or page.name == "404.html":
                continue
            goal = (page.parent / path).resolve() if path else page
            assert goal.exists(), f"{page.name} links to {link}"
            if anchor and goal in found:
                assert anchor in found[goal].anchors, f"{page.name} links to {link}"
