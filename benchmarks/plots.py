"""Bars of a record's table as an SVG that follows the reader's light or dark mode."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

ROW, BAR, LEFT, WIDE, RIGHT = 15, 11, 190, 400, 60
STYLE = """<style>
text { font: 12px system-ui, "Segoe UI", Roboto, Arial, sans-serif; fill: #1b2430; }
.s0 { fill: #2166ac; } .s1 { fill: #d95f02; } .line { stroke: #586675; stroke-dasharray: 3 3; }
@media (prefers-color-scheme: dark) { text { fill: #e6eaef; } .s0 { fill: #6cabe4; } .s1 { fill: #f59a52; }
.line { stroke: #a3afbc; } }
</style>"""


def bars(title: str, names: Sequence[str], series: Sequence[tuple[str, Sequence[float]]], mark: float | None) -> str:
    """A row a name, a bar a series; ``nan`` has no bar.

    Args:
        mark: where a dashed line stands: what everything is compared with.
    """
    longest = max(value for _, values in series for value in values if math.isfinite(value))
    each = ROW * len(series) + 8
    height = 30 + each * len(names) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDE + RIGHT} {height}" role="img">',
        f"<title>{html.escape(title)}</title>",
        STYLE,
    ]
    for index, (label, _) in enumerate(series):
        x = LEFT + 150 * index
        parts.append(f'<rect x="{x}" y="6" width="{BAR}" height="{BAR}" class="s{index}"/>')
        parts.append(f'<text x="{x + BAR + 6}" y="16">{html.escape(label)}</text>')
    for row, name in enumerate(names):
        top = 30 + each * row
        middle = top + ROW * len(series) / 2 + 4
        parts.append(f'<text x="{LEFT - 8}" y="{middle:g}" text-anchor="end">{html.escape(name)}</text>')
        for index, (_, values) in enumerate(series):
            if not math.isfinite(values[row]):
                continue
            width, y = WIDE * values[row] / longest, top + ROW * index
            parts.append(f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}" class="s{index}"/>')
            parts.append(f'<text x="{LEFT + width + 5:.1f}" y="{y + 10}">{values[row]:g}</text>')
    if mark is not None:
        x = LEFT + WIDE * mark / longest
        parts.append(f'<line x1="{x:.1f}" y1="26" x2="{x:.1f}" y2="{height - 4}" class="line"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"
