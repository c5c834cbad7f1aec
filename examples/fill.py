"""Creates the topics of the example and puts flights into the first one, and a record that is none.

python fill.py [FLIGHTS]     into the local stack, or where HEADWATER_KAFKA_BOOTSTRAP says
"""

import sys

from jobs.demo import flights
from jobs.settings import kafka
from persistence.kafka import AcknowledgedProducer, Topics

broker = kafka()
for topic in ("flights.raw", "flights.legs", "flights.dead"):
    Topics(broker).create(topic, partitions=4)
records = flights.messages(flights.load(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000))
with AcknowledgedProducer(broker) as producer:
    producer.send_many("flights.raw", records)
    producer.send("flights.raw", b"no flight")
    producer.flush()
print(f"{len(records):,} flights and one record of nonsense in flights.raw")
