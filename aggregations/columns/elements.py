"""Elements over columns: what a function of a vectorised flow is called with, each attribute read when it is used."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import polars as pl

from aggregations.columns import schema
from aggregations.columns.signature import Signature
from aggregations.definition.element import Element
from aggregations.definition.source import Topic
from envelope import Hop, Node, Route, decode
from envelope.codec import redriven_payload
from envelope.filters.producers import Stamp

_new = object.__new__
_set = object.__setattr__


class Elements:
    """The rows of a frame as elements, equal to those of the per-message path.

    Args:
        frame: The payload's columns, the system columns, and optionally `schema.VALUE` and `schema.HEADERS`.
        signatures: By the codes of `_signature`.
        topics: Returns the source of that name.
        node: Returns coordinates with topic id and cluster, given topic, partition and offset.
        values: Values that functions made, by the numbers of `schema.MADE`; None where the payload's columns are the
            value.
    """

    def __init__(
        self,
        frame: pl.DataFrame,
        signatures: Sequence[Signature],
        topics: Callable[[str], Topic],
        node: Callable[[str, int, int], Node],
        values: Sequence[Any] | None = None,
    ) -> None:
        self.frame = frame
        self.signatures = signatures
        self._columns = _Columns(frame)
        payload = frame.select(name for name in frame.columns if not name.startswith("_"))
        self._payload = _Columns(payload) if values is None else None
        self._values = values
        gone = None if values is not None else schema.tombstones(frame)
        self._gone = None if gone is None else gone.tolist()
        self._items = schema.item_columns(frame.columns)
        self._topics = topics
        self._node = node

    def __getitem__(self, row: int) -> Element[Any]:
        element: Element[Any] = _new(_RowElement)
        _set_source(element, self)
        _set_row(element, row)
        _set_cells(element, None if self._gone is not None and self._gone[row] else self._payload)
        return element

    def __iter__(self) -> Iterator[Element[Any]]:
        return map(self.__getitem__, range(self.frame.height))

    def own(self, row: int) -> Node:
        """Coordinates of the record."""
        columns = self._columns
        return self._node(columns[schema.TOPIC][row], columns[schema.PARTITION][row], columns[schema.OFFSET][row])

    def value(self, row: int) -> Any:
        """The payload's columns, or what a function made of them; None for a tombstone."""
        if self._gone is not None and self._gone[row]:
            return None
        cells = self._payload
        if cells is None:
            assert self._values is not None
            return self._values[self._columns[schema.MADE][row]]
        return {name: cells[name][row] for name in cells.names}

    def chain(self, row: int) -> tuple[Hop, ...]:
        """The hops of the record's envelope."""
        if not self.signatures[self._columns[schema.SIGNATURE][row]].chained:
            return ()
        own = self._columns[schema.TOPIC][row]
        return chain_of(self._columns[schema.VALUE][row], self._topics(own), own)

    def chained(self, row: int) -> bool:
        """Whether the record has a chain."""
        return bool(self.signatures[self._columns[schema.SIGNATURE][row]].chained)

    def republished(self, row: int) -> bool:
        """Whether the record was republished; one that was only redriven was not."""
        return bool(self.signatures[self._columns[schema.SIGNATURE][row]].republished)

    def stamp(self, row: int) -> Stamp | None:
        """What the record's envelope says about its producer."""
        found = self.optional(schema.STAMP, row)
        return None if found is None else Stamp(**found)

    def headers(self, row: int) -> tuple[tuple[str, bytes | None], ...]:
        """The record's headers."""
        found = self.optional(schema.HEADERS, row)
        return tuple((one["key"], one["value"]) for one in found or ())

    def indices(self, row: int) -> tuple[int, ...]:
        """Its index in each flat-map."""
        found = (self._columns[name][row] for name in self._items)
        return tuple(index for index in found if index is not None)

    def again(self, row: int) -> bool:
        """Whether it may be a copy."""
        return bool(self.optional(schema.AGAIN, row))

    def route(self, row: int) -> Route:
        """Route that the previous stage gave it."""
        late = self.optional(schema.LATE, row)
        return Route(late) if late else Route.PLAIN

    def cell(self, column: str, row: int) -> Any:
        """A value of a system column."""
        return self._columns[column][row]

    def optional(self, column: str, row: int) -> Any:
        """A value of a system column that may be absent; None if it is."""
        return self._columns[column][row] if column in self._columns.names else None


def chain_of(value: bytes, topic: Topic, own: str) -> tuple[Hop, ...]:
    """The hops of a record that has a chain, given its value, its source, and the name of its topic."""
    message = decode(value, topic.limits) if topic.envelope else redriven_payload(value, topic.limits)
    assert message is not None
    return topic.retries.marked(message.chain, own)


class _Columns(dict[str, list[Any]]):
    """Columns as lists of Python's values, each converted when it is first used."""

    def __init__(self, frame: pl.DataFrame) -> None:
        super().__init__()
        self._frame = frame
        self.names = frame.columns

    def __missing__(self, name: str) -> list[Any]:
        if name not in self.names:
            raise KeyError(name)
        found = self[name] = self._frame.get_column(name).to_list()
        return found


class _RowElement(Element[Any]):
    """An element whose attributes are read from a row when they are first used, and then kept."""

    __slots__ = ("_cells", "_row", "_source")

    def __getattr__(self, name: str) -> Any:
        # An attribute that is not set yet: slots raise AttributeError.
        if name == "_cells":
            return None  # made by `replace`, with every attribute
        read = _READ.get(name)
        if read is None:
            raise AttributeError(f"'Element' object has no attribute {name!r}")
        found = read(self._source, self._row)
        _set(self, name, found)
        if name == "value":
            _set(self, "_cells", None)  # the function may change it
        return found

    def __getitem__(self, column: str) -> Any:
        cells = self._cells
        return Element.__getitem__(self, column) if cells is None else cells[column][self._row]

    @property
    def chained(self) -> bool:
        source = getattr(self, "_source", None)
        if source is None:
            return any(not hop.pass_through for hop in self.chain)
        return bool(source.republished(self._row))

    def of(self, value: Any) -> Element[Any]:
        """The element with another value, its other attributes still unread."""
        return _with_value(self, value)

    def nth(self, index: int, value: Any) -> Element[Any]:
        """The `index`-th output of a flat-map of this element."""
        made = _with_value(self, value)
        _set(made, "indices", (*self.indices, index))
        return made

    def __repr__(self) -> str:
        return repr(plain_element(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return Element, _attributes(self)


def _with_value(of: _RowElement, value: Any) -> Element[Any]:
    if getattr(of, "_source", None) is None:
        return replace(of, value=value)  # made by `replace`
    made: Element[Any] = _new(_RowElement)
    _set_source(made, of._source)
    _set_row(made, of._row)
    _set_cells(made, None)
    _set(made, "value", value)
    if of.indices:
        _set(made, "indices", of.indices)
    return made


def row_of(element: Element[Any]) -> int:
    """The number of the row from which `Elements` made an element."""
    assert isinstance(element, _RowElement)
    row: int = element._row
    return row


def plain_element(of: Element[Any]) -> Element[Any]:
    """The element with every attribute read."""
    return Element(*_attributes(of))


def _attributes(of: Element[Any]) -> tuple[Any, ...]:
    return tuple(getattr(of, name) for name in Element.__dataclass_fields__)


_READ: Final[Mapping[str, Callable[[Elements, int], Any]]] = {
    "value": Elements.value,
    "key": lambda rows, row: rows.cell(schema.KEY, row),
    "own": Elements.own,
    "chain": Elements.chain,
    "event_time_us": lambda rows, row: rows.cell(schema.EVENT_TIME, row),
    "event_id": lambda rows, row: rows.cell(schema.EVENT_ID, row) or "",
    "headers": Elements.headers,
    "indices": Elements.indices,
    "branch": lambda _rows, _row: (),
    "again": Elements.again,
    "route": Elements.route,
    "timestamp_ms": lambda rows, row: rows.cell(schema.TIMESTAMP, row),
    "time_us": lambda rows, row: rows.optional(schema.TIME, row),
    "before_us": lambda rows, row: rows.optional(schema.BEFORE, row),
    "stamp": Elements.stamp,
}
_set_source = _RowElement.__dict__["_source"].__set__
_set_row = _RowElement.__dict__["_row"].__set__
_set_cells = _RowElement.__dict__["_cells"].__set__
