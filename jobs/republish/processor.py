"""The pure part of a republisher: from one input record to the records to produce, or to a reason code."""

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from envelope import EnvelopeError, Limits, Node, Reason, Tombstones, append_hop, decode
from envelope import envelope_pb2 as pb
from envelope.codec import Rewriter, rewrite
from envelope.deadletter import PREFIX as DEAD_PREFIX
from envelope.deadletter import Form, size_of
from envelope.headers import MIRRORED, Headers, is_cloudevents, mirror
from envelope.hops import HopWriter
from envelope.limits import DEFAULT_LIMITS, MAX_OFFSET, check_coordinates, check_topic
from envelope.raised import Raised
from envelope.redrive import read_via
from jobs.republish.record import KEEP, RETRY_PREFIX, InputRecord, OutputRecord, Transform, identity
from jobs.republish.source import InputTopics, ValueOpener, Wrapping

if TYPE_CHECKING:
    from jobs.republish.express import Express

MAX_OUTPUTS = 10_000  # of one input, by default
_MOST_KNOWN = 1000
_OVERHEAD_BYTES = 256  # of a record batch around one record, with room to spare


class Outgoing(NamedTuple):
    """One record to produce."""

    topic: str
    key: bytes | None
    value: bytes
    headers: Headers


class TransformError(EnvelopeError):
    """The transform raised, or returned what is no output.

    Attributes:
        error: Name of the exception's type.
    """

    def __init__(self, error: str, detail: str = "") -> None:
        super().__init__(Reason.TRANSFORM_FAILED, detail or f"the transform raised {error}")
        self.args = (error, detail)
        self.error = error


class NotOurs(Exception):
    """A redriven record that this republisher did not reject: it has forwarded the original record."""


class Processor:
    """Processes one record of a republisher. Deterministic, no I/O.

    Args:
        transform: Returns the outputs of a record.
        via: Name of the republisher, part of every message's path.
        source: How the input is read.
        targets: Topics that may be written, the default first, with the largest record that each accepts in bytes.
        retry_topics: Topics whose records return to the same transform, with the largest record that each accepts in
            bytes; they contain envelopes.
        limits: Limits of envelopes.
        max_outputs: Maximum number of outputs of one input.
        roots: Topics that a chain may begin with; None for any.
        is_beyond: Returns whether a root lies beyond the end of its topic; None to accept every root.
        headers_mirror: Write the envelope's mirror into headers.
        mark_destination: Write the target topic into every envelope, not only into those that name one.
        target_cluster: Name of the cluster of the targets, as in the chain.

    Attributes:
        target: The default target.
    """

    def __init__(
        self,
        transform: Transform,
        *,
        via: str,
        source: InputTopics,
        targets: Mapping[str, int],
        retry_topics: Mapping[str, int] = {},
        limits: Limits = DEFAULT_LIMITS,
        max_outputs: int = MAX_OUTPUTS,
        roots: Iterable[str] | None = None,
        is_beyond: Callable[[Node], bool] | None = None,
        headers_mirror: bool = False,
        mark_destination: bool = False,
        target_cluster: str = "",
    ) -> None:
        self._transform = transform
        self._target_cluster = target_cluster
        self._via = via
        self._targets = dict(targets)
        self._sizes = {**targets, **retry_topics}
        self.target = next(iter(self._targets))
        self._limits = limits
        self._max_outputs = max_outputs
        self._roots = None if roots is None else frozenset(roots)
        self._is_beyond = is_beyond
        self._known: set[str] = set()
        self._mirror = headers_mirror
        self._mark = mark_destination
        self._skips_tombstones = source.tombstones is Tombstones.SKIP
        self._cloudevents = source.wrapping is Wrapping.CLOUDEVENTS
        self._reads = source.wrapping is not Wrapping.ENVELOPE or source.payload is not None
        opener = ValueOpener(source, limits)
        retried = ValueOpener(InputTopics(source.topics, payload=source.payload, retries=source.retries), limits)
        self._openers = dict.fromkeys(source.topics, opener) | dict.fromkeys(retry_topics, retried)

    def form(self, topic: str) -> Form:
        """Form of the values of an input topic."""
        return Form.ENVELOPE if self._openers[topic].enveloped else Form.PAYLOAD

    @property
    def forwards(self) -> bool:
        """Whether most records are forwarded unchanged: the transform and the options allow the fast path."""
        looks = self._roots is not None or self._is_beyond is not None
        return self._transform is identity and not (self._mirror or self._mark or self._reads or looks)

    def express(self) -> "Express | None":
        """The fast path of this processor; None if it has none.

        It loads compiled code: half a second and 130 MB, or some seconds where numba has to compile it.
        """
        if not self.forwards:
            return None
        from jobs.republish.express import Express

        most_bytes = min(self._targets[self.target] - _OVERHEAD_BYTES, self._limits.message_bytes)
        return Express(self._known, most_bytes, self._limits)

    def skips(self, record: InputRecord) -> bool:
        """Whether the record is a tombstone that is skipped."""
        return record.value is None and self._skips_tombstones

    def open(self, record: InputRecord) -> None:
        """Parse the record's value and check its chain.

        Raises:
            EnvelopeError: With the reason code of the first rule that is broken.
            NotOurs: It is redriven, and another application rejected it.
        """
        topic = record.topic
        self._openers[topic].open(record)
        if record.wrapped is None:
            record.way = (topic,)
            return
        message, known = record.message, self._known
        last = message.chain[-1] if message.chain else None
        if last is not None and last.pass_through and (back := read_via(last.via)) and back.application != self._via:
            raise NotOurs
        way: list[str] = []
        for hop in message.chain:
            name = hop.topic
            if name not in known or hop.partition < 0 or not 0 <= hop.offset < MAX_OFFSET:
                self._check(hop)
            way.append(name)
        way.append(topic)
        record.way = way
        if message.destination and message.destination != topic:
            raise EnvelopeError(Reason.WRONG_DESTINATION, "the envelope was written for another topic")
        if message.key != record.key and message.HasField("key"):
            raise EnvelopeError(Reason.KEY_MISMATCH, "the envelope was written with another key")
        if len(way) > self._limits.hops:
            raise EnvelopeError(Reason.TOO_MANY_HOPS, f"no room for another hop, the limit is {self._limits.hops}")
        if self._roots is not None and way[0] not in self._roots:
            raise EnvelopeError(Reason.FOREIGN_ROOT, "the root topic is not an allowed one")
        if len(set(way)) != len(way):
            record.lineage.check()  # a retry topic may occur twice
        if self._is_beyond and len(way) > 1 and self._is_beyond(record.root):
            raise EnvelopeError(Reason.ROOT_BEYOND_END, "the root's offset is beyond the end of the root topic")

    def _check(self, hop: pb.Hop) -> None:
        """Check what could harm a reader. The writer that sealed a hop checked the rest of it."""
        check_topic(hop.topic, self._limits)
        check_coordinates(hop.partition, hop.offset)
        if len(self._known) < _MOST_KNOWN and hop.topic not in self._openers and hop.topic not in self._targets:
            self._known.add(hop.topic)

    def process(self, record: InputRecord, hops: HopWriter) -> list[Outgoing]:
        """Return all outputs of a record, or raise an error and return none.

        Args:
            record: The record.
            hops: Writer for its partition.

        Raises:
            EnvelopeError: With the reason code for its dead letter.
            NotOurs: It is redriven, and another application rejected it.
        """
        self.open(record)
        return self.transformed(record, hops)

    def transformed(self, record: InputRecord, hops: HopWriter) -> list[Outgoing]:
        """Return all outputs of a record that `open` has parsed, as `process` does."""
        try:
            made = self._transform(record)
            if made is None:
                return []
            several = not isinstance(made, OutputRecord) and hasattr(made, "__iter__")
            outputs: list[Any] = list(islice(made, self._max_outputs + 1)) if several else [made]
        except EnvelopeError:
            raise
        except Exception as error:
            failed = TransformError(type(error).__name__)
            failed.raised = Raised.of(error)
            raise failed from error
        if wrong := next((type(one).__name__ for one in outputs if not isinstance(one, OutputRecord)), ""):
            detail = f"the transform returned {wrong}; it returns None, an OutputRecord, or several"
            raise TransformError(TypeError.__name__, detail)
        if len(outputs) > self._max_outputs:
            raise EnvelopeError(Reason.TOO_MANY_OUTPUTS, f"more than {self._max_outputs} outputs of one input")
        count, rewriter = len(outputs), Rewriter(record.message, self._limits)
        return [self._outgoing(record, rewriter, hops, output, index, count) for index, output in enumerate(outputs)]

    def detour(self, record: InputRecord, hops: HopWriter, topic: str, headers: Headers) -> Outgoing:
        """Return the record for a retry topic: the payload unchanged, with a pass-through hop appended to the chain.

        Args:
            record: A record that `open` has parsed.
            hops: Writer for its partition.
            topic: The retry topic.
            headers: Headers with the number of attempts.

        Raises:
            EnvelopeError: The retry topic, or an envelope, does not take it.
        """
        hop = hops.write(record.offset, record.timestamp_ms, record.leader_epoch, pass_through=True)
        destination = topic if record.message.destination else ""
        if record.wrapped is None:
            value = rewrite(record.message, hop, self._limits)
        else:
            value = append_hop(record.wrapped, hop, destination=destination, limits=self._limits)
        return self._fitting(Outgoing(topic, record.key, value, [*_plain(record.headers), *headers]))

    def _fitting(self, made: Outgoing) -> Outgoing:
        """The record, if its topic takes it."""
        topic, key, value, headers = made
        if len(value) > self._limits.message_bytes or size_of(key, value, headers) > self._sizes[topic]:
            what = f"an output of {len(value)} bytes, {topic} takes {self._sizes[topic]}"
            raise EnvelopeError(Reason.PAYLOAD_TOO_LARGE, what)
        return made

    def _outgoing(
        self, record: InputRecord, rewriter: Rewriter, hops: HopWriter, output: OutputRecord, index: int, count: int
    ) -> Outgoing:
        topic = output.topic or self.target
        if topic not in self._targets:
            raise EnvelopeError(
                Reason.BAD_TOPIC, "the transform chose a topic that is not a target of this republisher"
            )
        key = record.key if output.key is KEEP else output.key
        rekeyed = key != record.key
        # A root has one place, whatever its key. A message sent without a key may be sent again to another partition.
        keyless = key is None or (record.key is None and len(record.way) > 1)
        hop = hops.write(
            record.offset,
            record.timestamp_ms,
            record.leader_epoch,
            index=index,
            count=count,
            rekeyed=rekeyed,
            keyless=keyless,
        )
        message, wrapped = record.message, record.wrapped
        if topic in record.way and any(
            node.topic == topic and node.cluster == self._target_cluster for node in record.lineage.reduced().nodes
        ):
            raise EnvelopeError(Reason.CHAIN_LOOP, "the target is a topic that the event came through")
        destination = topic if self._mark or message.destination else ""
        changes = output.changes()
        if wrapped is None or changes or (rekeyed and key is None):
            if rekeyed:
                changes["key"] = key
            if destination:
                changes["destination"] = destination
            value = rewriter.write(hop, changes)
        else:
            value = append_hop(wrapped, hop, key=key if rekeyed else None, destination=destination, limits=self._limits)
        plain = not record.headers and output.headers is KEEP and not self._mirror
        headers = () if plain else self._headers(record, output, value)
        return self._fitting(Outgoing(topic, key, value, headers))

    def _headers(self, record: InputRecord, output: OutputRecord, value: bytes) -> Headers:
        headers = _plain(record.headers if output.headers is KEEP else output.headers)
        if self._cloudevents and output.headers is KEEP:  # the envelope stores them
            headers = [header for header in headers if not is_cloudevents(header[0])]
        if self._mirror:
            kept = [header for header in headers if header[0].lower() not in MIRRORED]
            return kept + mirror(decode(value, self._limits), str(record.root), self._via)
        return headers


def _plain(headers: Headers) -> list[tuple[str, bytes | None]]:
    """The headers without those of retries and earlier dead letters."""
    return [header for header in headers if not header[0].startswith((RETRY_PREFIX, DEAD_PREFIX))]
