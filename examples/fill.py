"""Creates the topics of the example, then produces flights and one malformed record.

python fill.py [FLIGHTS]     to the local stack, or to the broker in HEADWATER_KAFKA_BOOTSTRAP
"""

import sys

from jobs import kafka
from jobs.demo import flights
from persistence.kafka import AcknowledgedProducer, Topics

broker = kafka()
for topic in ("flights.raw", "flights.legs", "flights.dead"):
    Topics(broker).create(topic, partitions=4)
records = flights.messages(flights.load(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000))
with AcknowledgedProducer(broker) as producer:
    producer.send_many("flights.raw", records)
    producer.send("flights.raw", b"no flight")
    producer.flush()
print(f"{len(records):,} flights and one malformed record in flights.raw")
