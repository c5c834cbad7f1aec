"""The warm rates as an SVG image."""

from collections.abc import Sequence
from html import escape
from typing import Final

from benchmarks.report import OURS, Subject

WIDTH: Final = 760
_LABEL: Final = 240
_BAR: Final = 22
_GAP: Final = 8
_STYLE: Final = """\
  <style>
    .card { fill: #f8fafc; stroke: #cbd5e1 }
    .ours { fill: #15803d }
    .peer { fill: #94a3b8 }
    .off { fill: #b91c1c }
    .small { font-size: 12px; fill: #475569 }
    text { fill: #0f172a }
    .end { text-anchor: end }
    .bold { font-weight: 600 }
  </style>
"""


def svg(subjects: Sequence[Subject]) -> str:
    """Draw a bar per system and store, grouped by number of keys; a system without a rate has none, only its name."""
    lines: list[str] = []
    y = 56
    for keys in sorted({subject.keys for subject in subjects}):
        group = [subject for subject in subjects if subject.keys == keys]
        most = max((subject.warm or 0.0 for subject in group), default=0.0) or 1.0
        lines.append(f'  <text class="bold" x="20" y="{y}">{keys:,} keys</text>')
        y += 14
        for subject in group:
            lines += _bar(subject, most, y)
            y += _BAR + _GAP
        y += 28
    height = y - 8
    title = "Events per second, second half of the topic"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="t"'
        f' font-family="system-ui, sans-serif" font-size="14">\n  <title id="t">{title}</title>\n{_STYLE}'
        f'  <rect class="card" x="1" y="1" width="{WIDTH - 2}" height="{height - 2}" rx="10"/>\n'
        f'  <text x="20" y="28">{title}</text>\n' + "\n".join(lines) + "\n</svg>\n"
    )


def _bar(subject: Subject, most: float, y: int) -> list[str]:
    label = escape(f"{subject.system}, {subject.store}")
    middle = y + _BAR - 7
    drawn = [f'  <text class="end" x="{_LABEL}" y="{middle}">{label}</text>']
    if subject.warm is None:
        why = "unavailable" if subject.unavailable else "failed" if subject.failed else "too few events"
        return [*drawn, f'  <text class="small" x="{_LABEL + 10}" y="{middle}">{why}</text>']
    width = max(1.0, (WIDTH - _LABEL - 150) * subject.warm / most)
    kind = "off" if not subject.verified else "ours" if subject.system == OURS else "peer"
    drawn.append(f'  <rect class="{kind}" x="{_LABEL + 10}" y="{y}" width="{width:.1f}" height="{_BAR}" rx="3"/>')
    note = f"{subject.warm:,.0f}" + ("" if subject.verified else ", not verified")
    return [*drawn, f'  <text class="small" x="{_LABEL + 18 + width:.1f}" y="{middle}">{note}</text>']
