"""Gathers the pages of the site in ``build/pages``: ``python docs/site.py`` (``make site`` then runs mkdocs).

The pages live where readers of the sources look for them: in ``docs``, and a few in the root. Here they come into one
tree with their pictures, links are rewritten to it, links to files of the sources become plain words, and hidden blocks
are left out. mkdocs calls the functions ``on_…``: the site needs no network, and its search works from files.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import notebooks

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "build" / "pages"
#: Pages outside of ``docs``.
OUTSIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/RESULTS.md")
HIDDEN = re.compile(r"^<!-- setup\n.*?^-->\n", re.M | re.S)
#: What the theme's plugin ``offline`` puts into every page.
FOREIGN = re.compile(r'<script src="https://unpkg\.com/iframe-worker/shim"></script>')
LINK = re.compile(r"\[(?P<words>[^]]*)\]\((?!https?:|#|mailto:)(?P<path>[^)#\s]+)(?P<anchor>#[^)]*)?\)")


def pages() -> dict[Path, Path]:
    """Page of the sources -> its place in the site."""
    docs = ROOT / "docs"
    found = {page: page.relative_to(docs) for page in sorted(docs.rglob("*.md"))}
    books = {book: book.relative_to(docs).with_suffix(".md") for book in sorted((docs / "notebooks").glob("*.ipynb"))}
    return found | books | {ROOT / name: Path(name) for name in OUTSIDE}


def text_of(page: Path) -> str:
    """A page as Markdown, without its hidden blocks."""
    return notebooks.page(page) if page.suffix == ".ipynb" else HIDDEN.sub("", page.read_text(encoding="utf-8"))


def pictures() -> dict[Path, Path]:
    """Picture of the sources -> its place in the site."""
    docs = ROOT / "docs"
    return {picture: picture.relative_to(docs) for picture in sorted((docs / "pictures").glob("*.svg"))}


def linked(page: Path, places: dict[Path, Path], text: str) -> str:
    """The text with its links as they are in the site; links to what is no page are their words."""

    def moved(match: re.Match[str]) -> str:
        goal = (page.parent / match["path"]).resolve()
        goal = ROOT / "docs" / "index.md" if goal == ROOT / "README.md" else goal
        if goal not in places:
            return match["words"]
        path = os.path.relpath(places[goal], places[page].parent).replace(os.sep, "/")
        return f"[{match['words']}]({path}{match['anchor'] or ''})"

    return LINK.sub(moved, text)


def gather() -> None:
    """Write the tree."""
    shutil.rmtree(TARGET, ignore_errors=True)
    places = pages()
    for page, place in places.items():
        (TARGET / place).parent.mkdir(parents=True, exist_ok=True)
        (TARGET / place).write_text(linked(page, places | pictures(), text_of(page)), encoding="utf-8")
    for picture, place in pictures().items():
        (TARGET / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(picture, TARGET / place)


def on_post_page(output: str, **_: object) -> str:
    """The page with the worker of ``worker.js`` in the place of the one that the theme loads from a network."""
    ours = (ROOT / "docs" / "worker.js").read_text(encoding="utf-8")
    return FOREIGN.sub(lambda _: f"<script>\n{ours}</script>", output)


def on_post_template(output_content: str, **_: object) -> str:
    """The same for the page of a missing page."""
    return on_post_page(output_content)


if __name__ == "__main__":
    gather()
