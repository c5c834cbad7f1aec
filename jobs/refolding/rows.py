"""States as the rows of a comparison: what readers see of them, without what may have left one of the stores."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow, Stage
from aggregations.definition.times import EPOCH
from aggregations.definition.windows import Window
from aggregations.errors import RunRefusedError
from aggregations.run.results import Result, results_of
from aggregations.run.run import Run
from aggregations.run.shapes import continued
from jobs.comparing import Row, Seen
from jobs.refolding.ordered import State, ordered
from jobs.table.view import key_as_text
from persistence.names import FlowRef
from persistence.record import StateRecord, decode_record

_MICROSECOND: Final = timedelta(microseconds=1)


class Rows:
    """Reads the states of one side of a comparison.

    Args:
        flow: The flow, with its definition of this side.
        other: The flow with the definition of the other side.
        generation: Generation of the states.
        gone: Due time up to which states may have left one of the two stores, by stage, in seconds since 1970: such
            states, and such sessions, are left out. See `latest_removal`.
        keys: Only these keys of each stage, in all windows; None for all.

    Attributes:
        states: Number of states read, by stage.
        holes: Number of dead letters that wait in them, by stage.
        met: The `keys` that were found.
    """

    def __init__(
        self,
        flow: Flow[Any],
        other: Flow[Any],
        generation: int,
        *,
        gone: Mapping[str, int],
        keys: Collection[bytes] | None = None,
    ) -> None:
        self._flow = flow
        self._other = other
        self._ref = FlowRef(flow.name, generation)
        self._gone = gone
        self._keys = keys
        self.states: Counter[str] = Counter()
        self.holes: Counter[str] = Counter()
        self.met: set[bytes] = set()

    def read(self, stages: Iterable[tuple[str, Iterable[State]]]) -> Iterator[Row]:
        """Read the states of one stage after the other.

        Args:
            stages: Name of each stage, and its states in the order of their keys.

        Raises:
            Corrupt: A state cannot be read.
            DefinitionChangedError: A state of an earlier definition does not have the shape of the stage's states.
        """
        for name, found in stages:
            stage, ref = self._flow.stage(name), self._ref.stage(name)
            compared = _compared(stage, self._other)
            for key, value in found:
                if not self._chosen(stage, key):
                    continue
                record = decode_record(value, ref, key)
                state = record.state
                if record.definition != stage.definition:
                    state = continued(stage, state, ref, key)
                self.states[name] += 1
                self.holes[name] += sum(map(len, record.histories.holes.values()))
                results = [one for one in results_of(stage.aggregate, key, state) if one.state is not None]
                others = results_of(stage.aggregate, key, state, compared) if compared and results else results
                pairs = zip(results, others, strict=True)
                seen = {
                    one.key: Seen(one.state, other.state) for one, other in pairs if self._stays(stage, record, one)
                }
                yield Row(name, key, seen)

    def _chosen(self, stage: Stage, key: bytes) -> bool:
        if self._keys is None:
            return True
        window = stage.aggregate.window
        plain = key if window is None else window.stage_key(key)
        if plain in self._keys:
            self.met.add(plain)
            return True
        return False

    def _stays(self, stage: Stage, record: StateRecord, result: Result) -> bool:
        """Whether neither store can have removed a state, or one of its sessions."""
        aggregate, gone = stage.aggregate, self._gone.get(stage.name)
        if gone is None:
            return True
        if isinstance(aggregate.window, Window):
            return aggregate.window.due(result.key) > gone
        if aggregate.sessions is not None:
            assert result.window is not None
            return aggregate.sessions.due((result.window.end - EPOCH) // _MICROSECOND) > gone
        return aggregate.expiry is None or record.time_us is None or aggregate.expiry.due(record.time_us) > gone


def latest_removal(*sides: Mapping[str, int]) -> dict[str, int]:
    """Due time up to which states may have left one of several stores, by stage, in seconds since 1970."""
    found: dict[str, int] = {}
    for removed in sides:
        for stage, until in removed.items():
            found[stage] = max(until, found.get(stage, until))
    return found


def _compared(stage: Stage, other: Flow[Any]) -> Callable[[Any], Any] | None:
    """What is compared of a state, if that is not its result: see `FieldAggregate.comparable`.

    It is for fields that both definitions fold in the same way.
    """
    fold = stage.aggregate.fold
    theirs = next((one.aggregate.fold for one in other.stages if one.name == stage.name), None)
    if not isinstance(fold, Fields) or not isinstance(theirs, Fields):
        return None
    same = {
        name
        for name, field in fold.fields.items()
        if (known := theirs.fields.get(name)) is not None
        and (field.describe(), field.result_options()) == (known.describe(), known.result_options())
    }

    def compared(state: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: field.comparable(state[name]) if field.selects or name in same else field.result(state[name])
            for name, field in fold.fields.items()
        }

    return compared


def chosen_stages(flows: Collection[Flow[Any]], names: Sequence[str]) -> list[str]:
    """The stages that are compared: those named, else all; in the order of the last flow, then of the others.

    Raises:
        RunRefusedError: No flow has a stage of a name.
    """
    known = list(dict.fromkeys(stage.name for flow in reversed(list(flows)) for stage in flow.stages))
    for name in names:
        if name not in known:
            raise RunRefusedError(f"no stage {name!r}; the flow has {', '.join(known) or 'none'}")
    return [name for name in known if name in names or not names]


def states_of(run: Run, stages: Sequence[str], directory: Path) -> Iterator[tuple[str, Iterable[State]]]:
    """The states of the stages that a run's flow has, each in the order of the keys."""
    names = {stage.name for stage in run.flow.stages}
    for number, name in enumerate(stages):
        if name in names:
            yield name, ordered(run.stores[name], run.ref.stage(name), directory / str(number))


def check_met(keys: Sequence[bytes], met: Collection[bytes]) -> None:
    """Check that each key has a state on one side at least.

    Raises:
        RunRefusedError: A key has none.
    """
    if missing := [key for key in keys if key not in met]:
        raise RunRefusedError(f"no state of key {key_as_text(missing[0])} on either side; check the key and the stage")
