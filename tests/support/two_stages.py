"""A flow of two stages, in one store or in two; its records, and manifests of their progress."""

import msgspec

from aggregations.definition.aggregates import count
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from persistence.manifest import Manifest, Progress
from persistence.registry import open_store
from tests.support.pure import bare, fresh_store, leg

COUNT = Fields(n=count())


def flow(fields=COUNT, *, topic=None, **options):
    source = Flow("fleet").source(topic or bare())
    return source.aggregate("a", "tail", fields, **options).aggregate("b", "carrier", COUNT)


def two_stores():
    return {"a": fresh_store(), "b": fresh_store()}


def legs(*offsets, partition=0):
    return [leg(offset, carrier="UA", partition=partition) for offset in offsets]


def save(url, ref, manifest):
    open_store(url).install_epoch(ref, manifest.epoch)
    open_store(url).save_manifest(ref, manifest)


def manifest(offset, *, batch=1, topic_id="T1", incarnations=("T1",), partition=0):
    return Manifest(1, batch, {"legs": {partition: Progress(offset)}}, {"legs": topic_id}, {"legs": incarnations})


def one_stage():
    return Flow("fleet").source(bare()).aggregate("a", "tail", COUNT)


def stored(run):
    """The manifests without their data about stages, and without times."""
    found = [store.load_manifest(run.ref) for _, store in run.distinct_stores()]
    assert [list(one.definitions.items()) for one in found] == [list(run.flow.definitions.items())] * len(found)
    assert [one.kept for one in found] == [("a",), ("b",)]
    return [msgspec.structs.replace(one, definitions={}, kept=(), times=()) for one in found]
