"""The differences between two generations of a flow."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from aggregations.definition.flow import Flow
from aggregations.errors import RunRefusedError
from aggregations.run.border import removed_by_stage
from aggregations.run.run import Run
from jobs.comparing import compare
from jobs.refolding.rows import Rows, latest_removal, states_of
from jobs.refolding.workspace import workspace
from jobs.replaying.generations import Generations
from jobs.replaying.planning import stages_redefined
from jobs.replaying.results import Differences


def check_against(found: Generations, old: int, against: Flow[Any] | None) -> None:
    """Check that a flow has the definition of a generation.

    Raises:
        RunRefusedError: It is another flow, or a stage has another definition.
    """
    if against is None:
        return
    if against.name != found.flow.name:
        raise RunRefusedError(f"--against is flow {against.name}, not {found.flow.name}")
    if changed := stages_redefined(Generations(against, found.run), old):
        raise RunRefusedError(
            f"{found.ref(old)}: stage {changed[0]} was made by another definition than that of --against. Give the code that "
            "made it"
        )


def differences(
    found: Generations,
    old: int,
    new: int,
    *,
    sample: int,
    work: Path,
    against: Flow[Any] | None = None,
    progress: Callable[[int, int | None], Any] = lambda _done, _total: None,
) -> Differences:
    """Compare the states of two generations, in bounded memory.

    Args:
        found: The generations.
        old: The generation with the old states.
        new: The generation with the new states, made by the flow of `found`.
        sample: Differences of each stage that are kept.
        work: Directory for copies of states, if a store does not keep keys in order.
        against: The flow with the definition of the old states; None if the definition has not changed. Without it,
            stages with another definition are not compared.
        progress: Called with the number of states compared, and None.

    Raises:
        Corrupt: A state cannot be read.
        StoreError: A store does not answer.
    """
    redefined = set() if against else set(stages_redefined(found, old))
    left, right = against or found.flow, found.flow
    names = list(dict.fromkeys([stage.name for flow in (right, left) for stage in flow.stages]))
    stages = [name for name in names if name not in redefined and name in found.run.stores]
    olds, news = _run(found, left, old), _run(found, right, new)
    gone: Mapping[str, int] = latest_removal(*(removed_by_stage(run) for run in (olds, news)))
    with workspace(work) as directory:
        comparison = compare(
            Rows(left, right, old, gone=gone).read(states_of(olds, stages, directory / "old")),
            Rows(right, left, new, gone=gone).read(states_of(news, stages, directory / "new")),
            stages=stages,
            sample=sample,
            progress=progress,
        )
    return Differences(comparison, tuple(name for name in names if name not in stages))


def _run(found: Generations, flow: Flow[Any], generation: int) -> Run:
    """A generation as a read-only run; a stage that the new definition no longer has is where its manifest says."""
    stores = dict(found.run.stores)
    for store, (_, manifest) in zip(found.stores, found.manifests(generation), strict=True):
        stores |= {
            stage: store
            for stage in ((manifest.kept or manifest.definitions) if manifest else ())
            if stage not in stores
        }
    return Run(flow, found.ref(generation), stores, found.run.urls, 0, None)
