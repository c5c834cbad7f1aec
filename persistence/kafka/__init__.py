"""Access to Kafka: settings, an acknowledged producer, and facts about topics and consumer groups."""

from persistence.kafka.errors import BrokerError, BrokerRefused, BrokerUnavailable, TopicMissing
from persistence.kafka.producer import AcknowledgedProducer, Message
from persistence.kafka.reading import assign
from persistence.kafka.settings import SECRET_NAMES, KafkaSettings, SettingsError
from persistence.kafka.topics import TopicFacts, Topics, Watermarks

__all__ = [
    "SECRET_NAMES",
    "AcknowledgedProducer",
    "BrokerError",
    "BrokerRefused",
    "BrokerUnavailable",
    "KafkaSettings",
    "Watermarks",
    "Message",
    "SettingsError",
    "TopicFacts",
    "TopicMissing",
    "Topics",
    "assign",
]
