import com.google.protobuf.ByteString;
import headwater.envelope.v1.EnvelopeOuterClass.Envelope;
import headwater.envelope.v1.EnvelopeOuterClass.Hop;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.concurrent.atomic.AtomicReference;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.errors.WakeupException;

/**
 * Forwards a topic: splits each payload into words, and sends each word under itself as key.
 *
 * <p>`Republish BOOTSTRAP FROM TO VIA [--until-caught-up]`. VIA is its name in the chain and its consumer group, and must not
 * change. It keeps no state: what it has not committed when it dies, it sends again, with the same chain.
 */
public final class Republish {
    private final KafkaConsumer<byte[], byte[]> consumer;
    private final KafkaProducer<byte[], byte[]> producer;
    private final String target;
    private final String via;
    private final String topicId;
    private final AtomicReference<Exception> failed = new AtomicReference<>();

    private Republish(String bootstrap, String source, String target, String via) throws Exception {
        this.target = target;
        this.via = via;
        try (Admin admin = Admin.create(Map.of("bootstrap.servers", bootstrap))) {
            topicId = admin.describeTopics(List.of(source)).allTopicNames().get().get(source).topicId().toString();
        }
        consumer = new KafkaConsumer<>(Settings.consumer(bootstrap, via));
        producer = new KafkaProducer<>(Settings.producer(bootstrap));
        consumer.subscribe(List.of(source));
    }

    public static void main(String[] arguments) throws Exception {
        Republish service = new Republish(arguments[0], arguments[1], arguments[2], arguments[3]);
        Thread main = Thread.currentThread();
        Runtime.getRuntime().addShutdownHook(new Thread(() -> stop(service, main))); // SIGTERM
        service.run(Arrays.asList(arguments).contains("--until-caught-up"));
    }

    private static void stop(Republish service, Thread main) {
        service.consumer.wakeup();
        try {
            main.join(10_000);
        } catch (InterruptedException error) {
            Thread.currentThread().interrupt();
        }
    }

    private void run(boolean untilCaughtUp) throws Exception {
        long consumed = 0;
        try (consumer;
                producer) {
            do {
                ConsumerRecords<byte[], byte[]> records = consumer.poll(Duration.ofMillis(200));
                for (ConsumerRecord<byte[], byte[]> record : records) {
                    forward(record);
                }
                // In this order: acknowledged, then committed. A crash between the two sends again, and loses nothing.
                producer.flush();
                if (failed.get() != null) {
                    throw failed.get();
                }
                consumer.commitSync();
                if (!records.isEmpty()) {
                    System.out.println(consumed += records.count());
                }
            } while (!(untilCaughtUp && caughtUp()));
        } catch (WakeupException error) {
            System.err.println("stopped");
        }
    }

    /** Produce the outputs of one record, in an order that is the same in every run. */
    private void forward(ConsumerRecord<byte[], byte[]> record) {
        Envelope envelope = read(record);
        String[] words = envelope.getPayload().toStringUtf8().trim().split("\\s+");
        for (int index = 0; index < words.length; index++) {
            byte[] key = words[index].getBytes(StandardCharsets.UTF_8);
            boolean rekeyed = !Arrays.equals(key, record.key());
            Hop.Builder hop =
                    Hop.newBuilder()
                            .setTopic(record.topic())
                            .setPartition(record.partition())
                            .setOffset(record.offset())
                            .setVia(via)
                            .setIndex(index)
                            .setCount(words.length)
                            .setRekeyed(rekeyed)
                            .setKeyless(record.key() == null && envelope.getChainCount() > 0)
                            .setTopicId(topicId)
                            .setTimestampMs(record.timestamp());
            record.leaderEpoch().ifPresent(hop::setLeaderEpoch);
            Envelope.Builder output =
                    envelope.toBuilder()
                            .setKey(ByteString.copyFrom(key))
                            .setPayload(ByteString.copyFrom(key))
                            .setDestination(target)
                            .addChain(hop);
            producer.send(
                    new ProducerRecord<>(target, null, key, Envelopes.seal(output), record.headers()),
                    (done, error) -> failed.compareAndSet(null, error));
        }
    }

    /** The record's envelope. A service of yours sends records that it cannot use to a dead-letter topic. */
    private Envelope read(ConsumerRecord<byte[], byte[]> record) {
        String place = record.topic() + ":" + record.partition() + ":" + record.offset();
        try {
            Envelope envelope = Envelopes.decode(record.value());
            if (envelope.getChainCount() >= Envelopes.MAX_HOPS) {
                throw new Envelopes.Invalid("too_many_hops");
            }
            boolean passed = envelope.getChainList().stream().anyMatch(hop -> hop.getTopic().equals(target));
            if (passed || new Lineage(envelope, record.topic(), record.partition(), record.offset(), false).loops()) {
                throw new Envelopes.Invalid("chain_loop");
            }
            return envelope;
        } catch (Envelopes.Invalid error) {
            throw new IllegalStateException(place + ": " + error.reason, error);
        }
    }

    private boolean caughtUp() {
        if (consumer.assignment().isEmpty()) {
            return false;
        }
        Map<TopicPartition, Long> ends = consumer.endOffsets(consumer.assignment());
        return ends.entrySet().stream().allMatch(end -> consumer.position(end.getKey()) >= end.getValue());
    }
}
