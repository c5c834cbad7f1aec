"""The snapshot that a rebuild begins with, instead of where the flow began."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from aggregations.errors import RunRefusedError
from aggregations.run.restore import begin_with_snapshot, check_made_by
from jobs.backup import opened_snapshot
from jobs.environment import UsageError
from jobs.replaying.generations import Generations, check_origin
from jobs.snapshot_places import Place, place_of, shown
from persistence.errors import InvalidUrl
from persistence.manifest import Manifest, Rebuilt
from persistence.pointer import Origin, Pointer, Rebuild
from persistence.snapshot_file import SnapshotReader


@dataclass(frozen=True, slots=True)
class Beginning:
    """A snapshot that a rebuild can begin with.

    Attributes:
        origin: Which one it is.
        manifest: Its manifest.
    """

    origin: Origin
    manifest: Manifest


def beginning_of(found: Generations, pointer: Pointer, live: int, snapshot: Place | None) -> Beginning | None:
    """What a rebuild begins with, or began with.

    Args:
        found: The generations.
        pointer: The pointer of the flow.
        live: The live generation.
        snapshot: The file that was given; None if none was.

    Returns:
        The snapshot; None if there is none, or if the rebuild has its states already.

    Raises:
        UsageError: The file cannot be read.
        RunRefusedError: It is not a whole snapshot, is of another flow, definition or topic, or is ahead of the live
            generation; or the rebuild began with something else.
    """
    rebuild = pointer.rebuild
    if snapshot is None:
        if rebuild is None or rebuild.origin is None or _has_begun(found, rebuild.generation):
            return None
        with _opened(found, rebuild, None) as reader:
            return Beginning(rebuild.origin, reader.header.manifest)
    with opened_snapshot(snapshot, found.flow.name) as reader:
        header, manifest = reader.header, reader.header.manifest
        check_made_by(found.flow, header)
        _check_not_ahead(found, live, manifest)
        earlier = manifest.rebuilt.continues if manifest.rebuilt else ()
        origin = Origin(shown(_absolute(snapshot)), reader.checksum, (header.generation, *earlier))
    if rebuild is not None:
        check_origin(found.ref(rebuild.generation), rebuild, origin)
        if _has_begun(found, rebuild.generation):
            return None
    return Beginning(origin, manifest)


def fill_from_snapshot(found: Generations, rebuild: Rebuild, note: Rebuilt, given: Place | None = None) -> None:
    """Write the snapshot that a rebuild begins with into its generation, unless this is done. After a crash, repeat it.

    Args:
        found: The generations.
        rebuild: The rebuild.
        note: The note for its manifests.
        given: Where the snapshot is, if this command was told; None for where it was when the rebuild began.

    Raises:
        RunRefusedError: The file cannot be read any more, or is another one.
        StoreError: A store does not answer, or another command has taken over.
    """
    if rebuild.origin is None or _has_begun(found, rebuild.generation):
        return
    with _opened(found, rebuild, given) as reader:
        begin_with_snapshot(found.flow, found.run.urls, reader, generation=rebuild.generation, note=note)


def _absolute(place: Place) -> Place:
    return place.absolute() if isinstance(place, Path) else place


def _has_begun(found: Generations, generation: int) -> bool:
    """Whether every store has the whole snapshot of a rebuild that begins with one."""
    return all(manifest and not manifest.restoring for _, manifest in found.manifests(generation))


@contextmanager
def _opened(found: Generations, rebuild: Rebuild, given: Place | None) -> Iterator[SnapshotReader]:
    """The snapshot that a rebuild began with."""
    assert rebuild.origin is not None
    place = place_of(rebuild.origin.file) if given is None else given
    again = (
        f"{found.ref(rebuild.generation)}: its rebuild began with a snapshot and does not have all of its states yet"
    )
    if given is None and ("://...@" in rebuild.origin.file or "=..." in rebuild.origin.file):
        raise RunRefusedError(
            f"{again}. Give it with --snapshot: the password and the options of its store are not kept"
        )
    try:
        with opened_snapshot(place, found.flow.name) as reader:
            if reader.checksum != rebuild.origin.checksum:
                raise RunRefusedError(
                    f"{again}, and {shown(place)} is another one. Give it with --snapshot, or give up the rebuild with --abandon"
                )
            yield reader
    except (UsageError, InvalidUrl) as error:
        raise RunRefusedError(f"{again}. Give it with --snapshot: {error}") from error


def _check_not_ahead(found: Generations, live: int, manifest: Manifest) -> None:
    """Check that the live generation has read what is in a snapshot."""
    now, ref = found.manifest(live), found.ref(live)
    assert now is not None
    for topic, partitions in manifest.positions.items():
        ids = manifest.topic_ids.get(topic, ""), now.topic_ids.get(topic, "")
        if all(ids) and ids[0] != ids[1]:
            raise RunRefusedError(
                f"{ref}: topic {topic} was created again since the snapshot was made. Use a snapshot that was made since"
            )
        for partition, progress in partitions.items():
            mine = now.positions.get(topic, {}).get(partition)
            if mine is None or mine.next_offset < progress.next_offset:
                raise RunRefusedError(
                    f"{ref}: the snapshot contains {topic}:{partition} up to {progress.next_offset}, and the generation up to "
                    f"{0 if mine is None else mine.next_offset}: the rebuild would be ahead of it. Use an earlier snapshot"
                )
