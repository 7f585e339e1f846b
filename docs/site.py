"""Gathers the pages of the site in ``build/pages``: ``python docs/site.py`` (``make site`` then runs mkdocs).

The pages live where readers of the sources look for them: in ``docs``, and a few in the root. Here they come into one
tree, links are rewritten to it, links to files of the sources become plain words, and hidden blocks are left out.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "build" / "pages"
#: Pages outside of ``docs``.
OUTSIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/RESULTS.md")
HIDDEN = re.compile(r"^<!-- setup\n.*?^-->\n", re.M | re.S)
LINK = re.compile(r"\[(?P<words>[^]]*)\]\((?!https?:|#|mailto:)(?P<path>[^)#\s]+)(?P<anchor>#[^)]*)?\)")


def pages() -> dict[Path, Path]:
    """Page of the sources -> its place in the site."""
    docs = ROOT / "docs"
    found = {page: page.relative_to(docs) for page in sorted(docs.rglob("*.md"))}
    return found | {ROOT / name: Path(name) for name in OUTSIDE}


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
        text = HIDDEN.sub("", page.read_text(encoding="utf-8"))
        (TARGET / place).parent.mkdir(parents=True, exist_ok=True)
        (TARGET / place).write_text(linked(page, places, text), encoding="utf-8")


if __name__ == "__main__":
    gather()
