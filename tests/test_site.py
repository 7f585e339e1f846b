"""The documentation site: every page has one place in it, and it builds without a broken link."""

from __future__ import annotations

import html
import importlib.util
import json
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


def built(mkdocs: str, folder: Path) -> None:
    """The site, in ``folder``."""
    subprocess.run([sys.executable, "docs/site.py"], cwd=ROOT, check=True)
    command = [mkdocs, "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_the_site_builds_and_needs_no_network(tmp_path: Path) -> None:
    """Strict: a broken link or anchor, or a page that is nowhere, fails. Nothing is loaded from elsewhere."""
    mkdocs = shutil.which("mkdocs", path=str(Path(sys.executable).parent)) or shutil.which("mkdocs")
    if mkdocs is None:
        pytest.skip("mkdocs-material is not installed: pip install '.[docs]'")
    built(mkdocs, tmp_path)
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


#: Runs in every page: faults, and pixels by which the text is wider than a phone. On the first page it searches too.
LOOK = """<script>
window.faults = [];
const fault = event => faults.push(event.message || "not loaded: " + (event.target.src || event.target.href));
window.addEventListener("error", fault, true);
setTimeout(() => {
  const query = document.querySelector("[data-md-component=search-query]");
  query.focus();
  query.value = "percentile";
  query.dispatchEvent(new KeyboardEvent("keyup", { bubbles: true }));
}, 500);
setTimeout(() => {
  document.body.style.width = "390px";
  const found = document.querySelector(".md-search-result__meta").textContent.trim();
  const parts = [...document.querySelectorAll(".md-content article > *")];
  const wide = parts.filter(part => part.getBoundingClientRect().right > 392);
  document.title = "seen " + JSON.stringify({ found, faults, wide: wide.map(part => part.outerHTML.slice(0, 80)) });
}, 4000);
</script></body>"""


@pytest.mark.slow
def test_a_browser_opens_the_site_as_files(tmp_path: Path) -> None:
    """No fault in any page, nothing wider than a phone, and a search without a server."""
    mkdocs = shutil.which("mkdocs", path=str(Path(sys.executable).parent)) or shutil.which("mkdocs")
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if mkdocs is None or browser is None:
        pytest.skip("mkdocs-material or chromium is not installed")
    site = tmp_path / "site"
    built(mkdocs, site)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
    flags += [
        "--disable-background-networking",
        "--disable-component-update",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    for name in ("index", "concepts", "cli", "architecture", "formats", "report", "results/speed", "notebooks/cnn_cpu"):
        page = site / f"{name}.html"
        page.write_text(page.read_text(encoding="utf-8").replace("</body>", LOOK), encoding="utf-8")
        command = [browser, *flags, "--virtual-time-budget=8000", "--window-size=500,900", "--dump-dom", page.as_uri()]
        dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
        match = re.search(r"<title>seen (.*?)</title>", dom, re.S)
        assert match, name
        seen = json.loads(html.unescape(match[1]))
        assert seen["faults"] == [] and seen["wide"] == [], (name, seen)
        assert "matching documents" in seen["found"], (name, seen)
