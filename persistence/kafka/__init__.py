"""Access to Kafka: settings, an acknowledged producer, and facts about topics and consumer groups."""

from persistence.kafka.errors import BrokerError, BrokerRefused, BrokerUnavailable, TopicMissing
from persistence.kafka.producer import AcknowledgedProducer, Message
from persistence.kafka.settings import KafkaSettings, SettingsError
from persistence.kafka.topics import Topics

__all__ = [
    "AcknowledgedProducer",
    "BrokerError",
    "BrokerRefused",
    "BrokerUnavailable",
    "KafkaSettings",
    "Message",
    "SettingsError",
    "TopicMissing",
    "Topics",
]
