import com.google.protobuf.ByteString;
import headwater.envelope.v1.EnvelopeOuterClass.Envelope;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.concurrent.atomic.AtomicReference;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;

/**
 * Produces each line of standard input as an event, in order: `Produce BOOTSTRAP TOPIC [PRODUCER [FIRST]]`.
 *
 * <p>The event id of a line is made of its number, which counts from FIRST, by default 0. With a PRODUCER, the name of one
 * program at a time, the number is also the sequence id. After a crash, begin again with the first line that may be missing,
 * and with its number: readers drop what was already sent, by event id or by producer and sequence.
 */
public final class Produce {
    public static void main(String[] arguments) throws Exception {
        String topic = arguments[1];
        AtomicReference<Exception> failed = new AtomicReference<>();
        String name = arguments.length > 2 ? arguments[2] : "";
        long first = arguments.length > 3 ? Long.parseLong(arguments[3]) : 0;
        long number = first;
        try (KafkaProducer<byte[], byte[]> producer = new KafkaProducer<>(Settings.producer(arguments[0]));
                BufferedReader lines =
                        new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8))) {
            for (String line = lines.readLine(); line != null && failed.get() == null; line = lines.readLine()) {
                byte[] key = ("line-" + number % 7).getBytes(StandardCharsets.UTF_8);
                Envelope.Builder event =
                        Envelope.newBuilder()
                                .setEventId("line-" + number)
                                .setEventTimeUs(System.currentTimeMillis() * 1000)
                                .setKey(ByteString.copyFrom(key))
                                .setPayload(ByteString.copyFromUtf8(line))
                                .setContentType("text/plain")
                                .setDestination(topic);
                if (!name.isEmpty()) {
                    event.setProducer(name).setSequence(number);
                }
                number++;
                producer.send(
                        new ProducerRecord<>(topic, key, Envelopes.seal(event)),
                        (done, error) -> failed.compareAndSet(null, error));
            }
            producer.flush();
        }
        if (failed.get() != null) {
            throw failed.get();
        }
        System.out.println(number - first);
    }
}
