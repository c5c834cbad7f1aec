"""A deduplicating writer in a separate process, for tests that kill it: it writes batches of numbered messages."""

import json
import sys

from envelope import Envelope
from envelope.filters import DedupPolicy
from persistence.kafka import DeduplicatingWriter, KafkaSettings


def messages(count: int) -> list[Envelope]:
    """What three producers send, with holes, and again what they are not sure of; every fifth has no producer."""
    sent = []
    for number in range(count):
        again = 3 if number % 7 == 6 else 0
        sent.append(Envelope(b"m%d" % number, producer=f"till-{number % 3}", sequence=2 * (number // 3 - again)))
        if number % 5 == 4:
            sent.append(Envelope(b"plain %d" % number, key=b"%d" % number))
    return [one for one in sent if one.sequence is None or one.sequence >= 0]


def main() -> None:
    arguments = json.loads(sys.argv[1])
    settings, topic, every = KafkaSettings(arguments["bootstrap"]), arguments["topic"], arguments["every"]
    policy = DedupPolicy(default=False, namespaces={"orders": True})
    with DeduplicatingWriter("gateway", [topic], settings, arguments["store"], every=every, policy=policy) as writer:
        partitions = arguments["partitions"]
        print(json.dumps([writer.persisted(topic, one) for one in range(partitions)]), flush=True)
        sent = messages(arguments["count"])
        # After a crash the producers send everything again: they know nothing of what was stored.
        for first in range(0, len(sent), 10):
            verdicts = writer.write(topic, sent[first : first + 10])
            print(json.dumps({one: verdicts.count(one) for one in sorted(set(verdicts))}), flush=True)
        print(json.dumps([writer.covered(topic, one) for one in range(partitions)]), flush=True)


if __name__ == "__main__":
    main()
