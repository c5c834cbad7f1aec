"""Which executor of a cluster reads which slot: the same one from batch to batch, as long as it lives.

What reads a slot keeps its consumer, which has fetched ahead. On another executor the records would be fetched again.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import RDD, SparkContext

Executors = Mapping[str, str]
"""Host by executor id."""


class Placement:
    """Places the tasks that read.

    Args:
        spark: The context.
        is_local: All tasks run in the driver's JVM.
    """

    def __init__(self, spark: SparkContext, *, is_local: bool) -> None:
        self._spark = spark
        self._is_local = is_local
        self._executor: dict[int, str] = {}  # by slot
        self._hosts: dict[str, str] = {}  # by executor
        self._last: tuple[object, RDD[int]] | None = None

    def tasks(self, slots: Sequence[int]) -> RDD[int]:
        """Indexes of the slots, one partition each, placed on the executors of their slots.

        It is a preference: after `spark.locality.wait` Spark runs a task elsewhere.
        """
        if self._is_local or not (executors := self._executors()):
            return self._spark.parallelize(range(len(slots)), len(slots))
        self._executor = placed(slots, self._executor, executors)
        places = [f"executor_{executors[one]}_{one}" for one in (self._executor[slot] for slot in slots)]
        if self._last is None or self._last[0] != places:
            self._last = places, self._located(places)
        return self._last[1]

    def _executors(self) -> dict[str, str]:
        """The executors that have registered; none if this Spark does not say."""
        try:
            context: Any = self._spark._jsc.sc()
            names = [name for name in context.getExecutorIds().mkString(";").split(";") if name]
            for name in names:
                if name not in self._hosts:
                    with suppress(Py4JJavaError):  # its registration is not in Spark's own records yet
                        address = context.statusStore().executorSummary(name).hostPort()
                        self._hosts[name] = address.rpartition(":")[0]
        except Py4JError:  # not allowed by the security manager of some services
            return {}
        return {name: self._hosts[name] for name in names if name in self._hosts}

    def _located(self, places: Sequence[str]) -> RDD[int]:
        jvm: Any = self._spark._jvm
        serializer: Any = self._spark._unbatched_serializer
        rows = [
            jvm.scala.Tuple2(serializer.dumps(index), jvm.PythonUtils.toSeq([place]))
            for index, place in enumerate(places)
        ]
        found = self._spark._jsc.sc().makeRDD(jvm.PythonUtils.toSeq(rows), jvm.scala.reflect.ClassTag.AnyRef())
        return RDD(found.toJavaRDD(), self._spark, serializer)


def placed(slots: Sequence[int], before: Mapping[int, str], executors: Executors) -> dict[int, str]:
    """Give every slot to an executor, evenly; a slot keeps its executor if that one lives and has not too many.

    Args:
        slots: Numbers of the slots to read.
        before: Executor by slot so far, of other slots too.
        executors: The executors.
    """
    most = -(-len(slots) // max(len(executors), 1))
    load: Counter[str] = Counter()
    found = {}
    for slot in slots:
        if (executor := before.get(slot, "")) in executors and load[executor] < most:
            found[slot] = executor
            load[executor] += 1
    for slot in slots:
        if slot not in found:
            found[slot] = min(executors, key=lambda one: (load[one], one))
            load[found[slot]] += 1
    return {**before, **found}
