"""input -> filter -> output: copies the records of a topic without those that a producer has sent again.

python without_duplicates.py INPUT OUTPUT STORE

Records have a header `sequence`, strictly increasing in each partition of INPUT. OUTPUT has as many partitions. The
program ends when it has read INPUT to its end; run it again after a crash, or whenever there are new records. After a
crash some records may be in OUTPUT twice, with the same sequence: a reader drops them with the same filter.
"""

import sys

from confluent_kafka import Consumer, TopicPartition

from aggregations import Record
from envelope.filters import SequenceFilter, from_header
from jobs import kafka
from persistence import Filtered, StoredFilter
from persistence.kafka import AcknowledgedProducer, Topics

BATCH = 1000


def run(bootstrap: str | None, source: str, target: str, store: str) -> None:
    settings = kafka(bootstrap)
    stored = StoredFilter(SequenceFilter(from_header("sequence"), name=f"{source}-to-{target}"), store)
    consumer = Consumer({"bootstrap.servers": settings.bootstrap, "group.id": stored.filter.name})
    places = [TopicPartition(source, part) for part in consumer.list_topics(source).topics[source].partitions]
    topic_id = Topics(settings).topic_ids([source])[source]
    offsets = {}  # of what is not read yet: the next one to read, and the end
    for place in places:
        first, end = consumer.get_watermark_offsets(place)
        place.offset = max(first, stored.start.get((source, place.partition), first))
        if place.offset < end:
            offsets[place.partition] = end
    consumer.assign([place for place in places if place.partition in offsets])

    with AcknowledgedProducer(settings) as producer:

        def publish(made: Filtered) -> None:
            for record, _ in made.passed:
                producer.send(target, record.value, record.key, record.headers, record.partition)
            producer.flush()

        while offsets:
            batch = []
            for message in consumer.consume(BATCH, timeout=1):
                if message.error():
                    raise SystemExit(str(message.error()))
                place, offset = message.partition(), message.offset()
                headers = tuple(message.headers() or ())
                batch.append(Record(source, place, offset, message.key(), message.value(), 0, headers, topic_id))
                if offset + 1 >= offsets.get(place, 0):
                    offsets.pop(place, None)
            made = stored.process(batch, publish)
            print(dict(made.verdicts), *made.warnings)
    consumer.close()
    stored.close()


if __name__ == "__main__":
    run(None, *sys.argv[1:])
