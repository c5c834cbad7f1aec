"""Access to Kafka: settings, producers, and facts about topics and consumer groups."""

from persistence.kafka.errors import BrokerError, BrokerRefused, BrokerUnavailable, TopicMissing
from persistence.kafka.producer import AcknowledgedProducer, Message
from persistence.kafka.session import ProducerSession, SequenceLost
from persistence.kafka.settings import KafkaSettings, SettingsError
from persistence.kafka.topics import Topics
from persistence.kafka.transactions import ProducerFenced
from persistence.kafka.writer import DeduplicatingWriter

__all__ = [
    "AcknowledgedProducer",
    "BrokerError",
    "BrokerRefused",
    "BrokerUnavailable",
    "DeduplicatingWriter",
    "KafkaSettings",
    "Message",
    "ProducerFenced",
    "ProducerSession",
    "SequenceLost",
    "SettingsError",
    "TopicMissing",
    "Topics",
]
