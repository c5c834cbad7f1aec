"""A flow as a picture: SVG text with one row for each line of `describe`, one column for each depth of branches."""

from collections.abc import Iterator, Mapping
from html import escape
from itertools import pairwise
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from aggregations.definition.description import Line, lines_of
from aggregations.definition.operators import Publish, PublishStates, flattened

if TYPE_CHECKING:
    from aggregations.definition.flow import Flow

WIDTH: Final = 300
_CHARS: Final = 39
"""Characters of a monospaced line of 12 pixels in a box: one takes 7.2 pixels."""
_LINE, _GAP, _MARGIN, _ASIDE = 16, 22, 24, 40
_STORE: Final = 190
_STORE_CHARS: Final = 23
_LINES: Final = 16
"""Lines of text in a box."""
_STYLE: Final = """
  text { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #1f2328 }
  .name { font-weight: bold } .path { font-size: 10px; fill: #656d76 }
  .back { fill: #ffffff } .line { stroke: #656d76; fill: none; stroke-width: 1.5 } .head { fill: #656d76 }
  .step { fill: #f6f8fa; stroke: #8c959f } .stage { fill: #ddf4ff; stroke: #0969da; stroke-width: 1.5 }
  .fork { fill: #fff8c5; stroke: #9a6700 } .piece { fill: none; stroke: #8c959f; stroke-dasharray: 4 3 }
  .topic { fill: #dafbe1; stroke: #1a7f37 } .dead { fill: #ffebe9; stroke: #cf222e } .store { fill: #fbefff; stroke: #8250df }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .path { fill: #9198a1 } .back { fill: #0d1117 } .line { stroke: #9198a1 } .head { fill: #9198a1 }
    .step { fill: #161b22; stroke: #6e7681 } .stage { fill: #0c2d6b; stroke: #58a6ff }
    .fork { fill: #3b2300; stroke: #d29922 } .piece { stroke: #6e7681 }
    .topic { fill: #04260f; stroke: #3fb950 } .dead { fill: #490202; stroke: #f85149 } .store { fill: #271052; stroke: #a371f7 }
  }
"""
_HEAD: Final = (
    '<defs><marker id="to" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path class="head" d="M0 0 8 4 0 8z"/></marker></defs>'
)
_STAGES: Final = ("aggregate", "deduplicate")
_KEEPING: Final = (*_STAGES, "table")
"""Lines of what has states."""
_KINDS: Final = {**dict.fromkeys(_STAGES, "stage"), "branch": "fork", "also_to": "fork", "via": "piece"}


class _Box(NamedTuple):
    """A line of the description, and its place.

    Attributes:
        line: The line.
        depth: Number of branches that it is in.
        x: Left edge, in pixels.
        y: Upper edge, in pixels.
        height: Height, in pixels.
        text: Its content, wrapped.
        topics: Topics that it produces to.
        store: Name of the stage whose store is beside it, and text about the store; empty for none.
    """

    line: Line
    depth: int
    x: int
    y: int
    height: int
    text: list[str]
    topics: list[str]
    store: list[str]

    @property
    def middle(self) -> int:
        return self.x + WIDTH // 2

    @property
    def half(self) -> int:
        return self.y + self.height // 2

    @property
    def room(self) -> int:
        """Height of the row, in pixels."""
        return max(self.height, _height(self.topics), _store_height(self.store))


def picture(flow: "Flow[Any]", stores: Mapping[str, str]) -> str:
    """The flow as SVG: its source, steps, branches, stages and their stores, and the topics that it produces to.

    Args:
        flow: The flow.
        stores: Text about the store by stage name, for example its URL without secrets.
    """
    boxes = list(_boxes(flow, stores))
    width = max(box.x + WIDTH + (_ASIDE + WIDTH if box.topics or box.line.step == "divert" else 0) for box in boxes)
    height = boxes[-1].y + boxes[-1].room + _MARGIN
    size = f'viewBox="0 0 {width + _MARGIN} {height}" width="{width + _MARGIN}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
        f"<title>{escape(f'flow {flow.name}')}</title>",
        f"<desc>{escape(flow.describe())}</desc>",
        f"<style>{_STYLE}</style>",
        _HEAD,
        '<rect class="back" width="100%" height="100%"/>',
        *_arrows(boxes),
    ]
    for box in boxes:
        parts += _drawn(box)
        if box.store:
            parts += _cylinder(box)
    return "\n".join([*parts, "</svg>", ""])


def _boxes(flow: "Flow[Any]", stores: Mapping[str, str]) -> Iterator[_Box]:
    left, y = _MARGIN + _STORE + _ASIDE, _MARGIN
    lines = list(lines_of(flow))
    targets = iter(
        [[*step.targets] for step in flattened(flow.every_step) if isinstance(step, Publish | PublishStates)]
    )
    stages = iter(flow.stage_names)
    for number, line in enumerate(lines):
        depth = line.branch.count("/") + bool(line.branch)
        text = _wrapped(line.what, _CHARS)
        topics = next(targets) if line.step in ("publish", "publish_states") else []
        keeps = line.step in _KEEPING if flow.stages else number == 0
        name = next(stages) if keeps else ""
        store = [name, *_wrapped(stores.get(name, ""), _STORE_CHARS)] if keeps else []
        box = _Box(line, depth, left + depth * (WIDTH + _ASIDE), y, _height(["", *text]), text, topics, store)
        yield box
        y += box.room + _GAP


def _height(lines: list[str]) -> int:
    return 14 + _LINE * len(lines)


def _store_height(lines: list[str]) -> int:
    return _height(lines) + 12 if lines else 0


def _wrapped(text: str, width: int) -> list[str]:
    lines = wrap(text, width, break_on_hyphens=False)
    return (
        lines
        if len(lines) <= _LINES
        else [*lines[: _LINES - 1], f"{lines[_LINES - 1][: width - 1]}\N{HORIZONTAL ELLIPSIS}"]
    )


def _arrows(boxes: list[_Box]) -> Iterator[str]:
    """From each box to the next one of its branch, into the branches, and from every source to where they meet."""
    above: dict[int, _Box] = {0: boxes[0]}
    ends: list[_Box] = []
    for before, box in pairwise(boxes):
        if box.depth > before.depth:
            yield _path(f"M{before.x + WIDTH} {before.half}H{box.middle}V{box.y}")
        elif box.line.step == "source":
            ends += [above[0]] if above[0].line.step != "table" else []
        elif before.line.step != "table":
            upper = above[box.depth]
            yield _path(f"M{upper.middle} {upper.y + upper.height}V{box.y}")
        if box.line.step == "merge":
            yield from (_path(f"M{end.x} {end.half}H{end.x - _ASIDE // 2}V{box.half}H{box.x}") for end in ends)
        above[box.depth] = box


def _path(d: str) -> str:
    return f'<path class="line" marker-end="url(#to)" d="{d}"/>'


def _drawn(box: _Box) -> Iterator[str]:
    line, kind = box.line, _KINDS.get(box.line.step, "step")
    if line.step in ("source", "table"):
        yield _pill("topic", box.x, box.y, box.height)
    else:
        yield _rect(kind, box.x, box.y, box.height, 6)
    yield _text(box.x + 12, box.y + 19, line.step, "name")
    if line.path:
        yield _text(box.x + WIDTH - 10, box.y + 18, _short(line.path), "path", anchor="end")
    for number, one in enumerate(box.text, start=1):
        yield _text(box.x + 12, box.y + 19 + number * _LINE, one)
    dead = line.step == "divert"
    if beside := ["dead letters"] if dead else box.topics:
        at, height = box.x + WIDTH + _ASIDE, _height(beside)
        yield _path(f"M{box.x + WIDTH} {box.y + 15}H{at}")
        yield _pill("dead" if dead else "topic", at, box.y, height)
        for number, one in enumerate(beside):
            yield _text(at + 16, box.y + 19 + number * _LINE, _wrapped(one, _CHARS - 1)[0])


def _short(path: str) -> str:
    """The path in a few words."""
    if path.startswith("vectorised, with"):
        return "with Python"
    return path.partition(" from here")[0].partition(":")[0].partition(", merging")[0]


def _cylinder(box: _Box) -> Iterator[str]:
    x, y, height = _MARGIN, box.y, max(_store_height(box.store), box.height)
    yield (
        f'<path class="store" d="M{x} {y + 6}v{height - 12}a{_STORE // 2} 6 0 0 0 {_STORE} 0v-{height - 12}'
        f'a{_STORE // 2} 6 0 0 0 -{_STORE} 0a{_STORE // 2} 6 0 0 0 {_STORE} 0"/>'
    )
    yield f'<path class="line" d="M{x + _STORE} {box.half}H{box.x}"/>'
    for number, one in enumerate(box.store):
        yield _text(x + 10, y + 28 + number * _LINE, one, "" if number else "name")


def _rect(kind: str, x: int, y: int, height: int, radius: int) -> str:
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{WIDTH}" height="{height}" rx="{radius}"/>'


def _pill(kind: str, x: int, y: int, height: int) -> str:
    return _rect(kind, x, y, height, 15)


def _text(x: int, y: int, text: str, kind: str = "", *, anchor: str = "start") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'
