import java.util.Map;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/** Settings on which exactness depends. */
final class Settings {
    private Settings() {}

    /**
     * No record is overtaken by a later one, and none is given up: first deliveries then ascend within each partition. The
     * default partitioner places a key where headwater's producers place it.
     */
    static Map<String, Object> producer(String bootstrap) {
        return Map.of(
                "bootstrap.servers", bootstrap,
                "acks", "all",
                "enable.idempotence", true,
                "retries", Integer.MAX_VALUE,
                "delivery.timeout.ms", Integer.MAX_VALUE,
                "linger.ms", 5,
                "compression.type", "lz4",
                "key.serializer", ByteArraySerializer.class,
                "value.serializer", ByteArraySerializer.class);
    }

    /** Offsets are committed by the republisher alone, and a group without offsets begins at the beginning. */
    static Map<String, Object> consumer(String bootstrap, String group) {
        return Map.of(
                "bootstrap.servers", bootstrap,
                "group.id", group,
                "enable.auto.commit", false,
                "auto.offset.reset", "earliest",
                "isolation.level", "read_committed",
                "max.poll.records", 200,
                "key.deserializer", ByteArrayDeserializer.class,
                "value.deserializer", ByteArrayDeserializer.class);
    }
}
