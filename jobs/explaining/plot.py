"""The re-sends of a range over time, as an SVG image."""

from collections import Counter
from datetime import UTC, datetime
from html import escape
from typing import Final

from jobs.explaining.blame import Blame, Resent

WIDTH: Final = 860
SLOTS: Final = 100
"""Equal parts of the time of the range; each has a bar."""
_LEFT: Final = 20
_BAR: Final = 8
_ROW: Final = 84
_HEIGHT: Final = 44
_STYLE: Final = """\
  <style>
    .card { fill: #f8fafc; stroke: #cbd5e1 }
    .republisher { fill: #b91c1c }
    .redrive { fill: #15803d }
    .retry { fill: #b45309 }
    .base { stroke: #cbd5e1 }
    .small { font-size: 12px; fill: #475569 }
    text { fill: #0f172a }
    .end { text-anchor: end }
  </style>
"""


def svg(blame: Blame) -> str:
    """Draw a row for each hop that sent records again: its re-sends over the time of the range.

    The bars of a row are as high as the most re-sends of one of them; the row names that number.
    """
    hops = [hop for hop in blame.hops if hop.resent]
    first, last = blame.first_ms or 0, blame.last_ms or 0
    title = f"Records sent again: {blame.resent:,} of {blame.records:,}"
    rows = [line for number, hop in enumerate(hops) for line in _row(hop, 56 + number * _ROW, first, last)]
    bottom = 56 + len(hops) * _ROW + 8
    right = _LEFT + SLOTS * _BAR
    rows += [
        f'  <text class="small" x="{_LEFT}" y="{bottom}">{_time(first)}</text>',
        f'  <text class="small end" x="{right}" y="{bottom}">{_time(last)}</text>',
    ]
    height = bottom + 16
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="t"'
        f' font-family="system-ui, sans-serif" font-size="14">\n  <title id="t">{title}</title>\n{_STYLE}'
        f'  <rect class="card" x="1" y="1" width="{WIDTH - 2}" height="{height - 2}" rx="10"/>\n'
        f'  <text x="{_LEFT}" y="28">{title}</text>\n' + "\n".join(rows) + "\n</svg>\n"
    )


def _row(hop: Resent, y: int, first_ms: int, last_ms: int) -> list[str]:
    passage, base = hop.passage, y + 16 + _HEIGHT
    slots = Counter(min((at - first_ms) * SLOTS // (last_ms - first_ms or 1), SLOTS - 1) for at in hop.times_ms)
    most = max(slots.values())
    label = f"{passage.via or '(no name)'}: {passage.source} to {passage.target}"
    note = f"{hop.resent:,} of {hop.records:,}, at most {most:,} in a bar"
    right = _LEFT + SLOTS * _BAR
    return [
        f'  <text x="{_LEFT}" y="{y}">{escape(label)}</text>',
        f'  <text class="small end" x="{right}" y="{y}">{note}</text>',
        f'  <line class="base" x1="{_LEFT}" y1="{base}" x2="{right}" y2="{base}"/>',
        *(
            f'  <rect class="{passage.kind}" x="{_LEFT + slot * _BAR}" y="{base - tall:.1f}" width="{_BAR - 1}" '
            f'height="{tall:.1f}"/>'
            for slot, count in sorted(slots.items())
            for tall in [max(_HEIGHT * count / most, 1)]
        ),
    ]


def _time(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
