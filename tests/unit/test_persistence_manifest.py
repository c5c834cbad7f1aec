import pytest

from persistence.errors import Corrupt
from persistence.manifest import Manifest, Progress, ahead, decode_manifest, encode_manifest, minimum
from persistence.names import FlowRef

FLOW = FlowRef("fleet")


def manifest(topic_id="id1", incarnations=("id1",), **offsets):
    """`manifest(p0=3, p2=7)`: next offsets of topic `legs`."""
    return Manifest(
        epoch=1,
        batch=1,
        positions={"legs": {int(name[1:]): Progress(offset) for name, offset in offsets.items()}},
        topic_ids={"legs": topic_id},
        incarnations={"legs": tuple(incarnations)},
    )


def test_a_manifest_comes_back_equal():
    given = Manifest(
        epoch=7,
        batch=3,
        positions={"flights.legs": {0: Progress(12), 11: Progress(2**62)}, "b": {}},
        topic_ids={"flights.legs": "qd5k-u9TRnm"},
        incarnations={"flights.raw": ("a", "b"), "flights.legs": ("qd5k-u9TRnm",)},
        definitions={"aircraft": "5f"},
    )
    assert decode_manifest(encode_manifest(given), FLOW) == given


def test_a_manifest_is_readable_json_with_its_checksum():
    text = encode_manifest(manifest(p0=3)).decode()
    assert '"positions":{"legs":{"0":{"next_offset":3}}}' in text
    assert text.endswith('"}')


@pytest.mark.parametrize("damage", ["truncate", "flip", "foreign", "empty", "newer"])
def test_a_damaged_manifest_is_corrupt_and_never_absent(damage):
    value = encode_manifest(manifest(p0=3))
    broken = {
        "truncate": value[:-5],
        "flip": value.replace(b":3}", b":4}"),
        "foreign": b'{"a": 1}',
        "empty": b"",
        "newer": encode_manifest(Manifest(epoch=1, batch=1, schema=2)),
    }[damage]
    text = "has schema 2; this code reads 1. Upgrade headwater" if damage == "newer" else "cannot be read: .+"
    with pytest.raises(Corrupt, match=f"^flow fleet, generation 1: the manifest {text}"):
        decode_manifest(broken, FLOW)


def test_the_start_is_the_minimum_per_partition():
    assert minimum([manifest(p0=5, p1=9), manifest(p0=7, p1=2)]) == {"legs": {0: 5, 1: 2}}


def test_a_partition_or_store_without_a_manifest_starts_at_its_beginning():
    assert minimum([manifest(p0=5, p1=9), manifest(p0=7)]) == {"legs": {0: 5}}
    assert minimum([manifest(p0=5), None]) == {}
    assert minimum([]) == {}


def test_an_older_incarnation_is_lower_whatever_its_offset():
    old = manifest(topic_id="id1", incarnations=("id1",), p0=500)
    new = manifest(topic_id="id2", incarnations=("id1", "id2"), p0=3)
    assert minimum([old, new]) == {"legs": {0: 500}}
    assert ahead(old, new) == []
    assert ahead(new, old) == [("legs", 0)]


def test_a_downstream_manifest_of_a_younger_incarnation_is_ahead_of_partitions_that_it_has_not_read_yet():
    """What a crash between two manifests leaves, right after the topic was created again."""
    old = manifest(topic_id="id1", incarnations=("id1",), p0=500, p1=7)
    new = manifest(topic_id="id2", incarnations=("id1", "id2"), p0=3)
    assert ahead(old, new) == []
    assert ahead(new, old) == [("legs", 0)]


def test_downstream_first_leaves_the_downstream_store_at_or_ahead():
    assert ahead(manifest(p0=5), manifest(p0=5)) == []
    assert ahead(manifest(p0=5), manifest(p0=8, p1=1)) == []
    assert ahead(None, manifest(p0=8)) == []
    assert ahead(None, None) == []


def test_an_upstream_store_ahead_means_that_the_downstream_store_lost_data():
    assert ahead(manifest(p0=5, p1=3), manifest(p0=4, p1=3)) == [("legs", 0)]
    assert ahead(manifest(p0=5, p1=3), manifest(p0=5)) == [("legs", 1)]
    assert ahead(manifest(p0=5), None) == [("legs", 0)]
    assert ahead(manifest(p0=0), None) == []
    assert ahead(manifest(p0=1), None) == [("legs", 0)]


def test_a_topic_created_again_hides_no_other_topic_that_lost_data():
    old, new = (
        Manifest(
            1,
            1,
            {"a": {0: Progress(500)}, "b": {1: Progress(offset), 0: Progress(offset)}},
            {"a": topic_id, "b": "b"},
            {"a": ids, "b": ("b",)},
        )
        for topic_id, ids, offset in [("1", ("1",), 7), ("2", ("1", "2"), 6)]
    )
    assert ahead(old, new) == [("b", 0), ("b", 1)]
