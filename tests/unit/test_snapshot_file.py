"""The file of a snapshot: what goes in comes out, and damage is noticed before anything is used."""

import io

import pytest

from persistence.manifest import Manifest, Progress
from persistence.names import FlowRef
from persistence.seal import DamagedError
from persistence.snapshot_file import SnapshotReader, SnapshotWriter

REF = FlowRef("fleet", 3)
MANIFEST = Manifest(4, 7, {"legs": {0: Progress(12, 5)}}, {"legs": "T1"}, clean=True)
PARTS = [
    ("aircraft", [(b"", b"{1}"), (b"\x00\xff", b"{2}")]),
    ("aircraft", [(b"N1", b"{3}")]),
    ("carrier", [(b"UA", b"{}")]),
]


def written() -> bytes:
    file = io.BytesIO()
    writer = SnapshotWriter(
        file, REF, MANIFEST, stages=["aircraft", "carrier", "none"], removed={"aircraft": 60}, made_ms=9
    )
    for stage, states in PARTS:
        writer.write(stage, states)
    writer.end()
    return file.getvalue()


def test_manifest_and_states_come_back_as_they_were() -> None:
    reader = SnapshotReader(io.BytesIO(written()))
    header = reader.header
    assert (header.ref, header.manifest, header.stages) == (REF, MANIFEST, ("aircraft", "carrier", "none"))
    assert (header.removed, header.made_ms) == ({"aircraft": 60}, 9)
    assert reader.counts == {"aircraft": 3, "carrier": 1, "none": 0}
    assert [*reader.states()] == PARTS
    assert [*reader.states()] == PARTS  # again, from the beginning


def test_two_snapshots_of_the_same_states_have_the_same_checksum() -> None:
    assert SnapshotReader(io.BytesIO(written())).checksum == SnapshotReader(io.BytesIO(written())).checksum


def test_any_changed_byte_is_noticed_before_a_state_is_used() -> None:
    whole = written()
    for place in range(len(whole)):
        damaged = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
        with pytest.raises(DamagedError):
            SnapshotReader(io.BytesIO(damaged))


def test_a_missing_end_and_more_bytes_are_noticed() -> None:
    whole = written()
    for content in (*(whole[:length] for length in range(len(whole))), whole + b"\0", whole + whole):
        with pytest.raises(DamagedError):
            SnapshotReader(io.BytesIO(content))


def test_a_file_of_another_version_says_so() -> None:
    with pytest.raises(DamagedError, match="another version"):
        SnapshotReader(io.BytesIO(written().replace(b"snapshot 1", b"snapshot 2", 1)))
