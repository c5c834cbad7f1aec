import java.io.BufferedReader;
import java.io.BufferedWriter;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.Properties;
import org.apache.kafka.common.serialization.Serde;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.common.utils.Bytes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StoreQueryParameters;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.errors.StreamsUncaughtExceptionHandler.StreamThreadExceptionResponse;
import org.apache.kafka.streams.kstream.Consumed;
import org.apache.kafka.streams.kstream.Grouped;
import org.apache.kafka.streams.kstream.KTable;
import org.apache.kafka.streams.kstream.Materialized;
import org.apache.kafka.streams.kstream.Produced;
import org.apache.kafka.streams.state.KeyValueBytesStoreSupplier;
import org.apache.kafka.streams.state.KeyValueIterator;
import org.apache.kafka.streams.state.KeyValueStore;
import org.apache.kafka.streams.state.QueryableStoreTypes;
import org.apache.kafka.streams.state.ReadOnlyKeyValueStore;
import org.apache.kafka.streams.state.Stores;

/**
 * The benchmark's aggregation on Kafka Streams: parse and check each envelope, leave out what was folded before.
 *
 * <p>Its argument is a properties file: settings of Kafka Streams, and `bench.topic`, `bench.sink` (empty for none) and
 * `bench.store` (`rocksdb`, or the name of a class with a method `supplier(Properties)`). It runs until a line comes on
 * standard input: the name of a file, to which it writes `key TAB count TAB sum TAB maximum` for every key of its store.
 */
public final class Aggregate {
    private static final String STORE = "states";

    public static void main(String[] args) throws Exception {
        Properties settings = new Properties();
        try (BufferedReader file = Files.newBufferedReader(Path.of(args[0]))) {
            settings.load(file);
        }
        KafkaStreams streams = new KafkaStreams(topology(settings).build(), settings);
        streams.setUncaughtExceptionHandler(error -> {
            error.printStackTrace();
            return StreamThreadExceptionResponse.SHUTDOWN_CLIENT;
        });
        streams.setStateListener((now, before) -> {
            if (now == KafkaStreams.State.ERROR) {
                Runtime.getRuntime().halt(1);
            }
        });
        streams.start();
        String path = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8)).readLine();
        if (path != null) {
            write(streams, Path.of(path));
        }
        streams.close(Duration.ofSeconds(60));
        System.exit(0); // clients of stores may have threads of their own
    }

    private static StreamsBuilder topology(Properties settings) throws Exception {
        String topic = settings.getProperty("bench.topic");
        String sink = settings.getProperty("bench.sink");
        byte[] destination = topic.getBytes(StandardCharsets.UTF_8);
        Serde<byte[]> bytes = Serdes.ByteArray();
        StreamsBuilder builder = new StreamsBuilder();
        KTable<byte[], byte[]> states = builder.stream(topic, Consumed.with(bytes, bytes))
                .groupByKey(Grouped.with(bytes, bytes))
                .aggregate(
                        () -> new byte[0],
                        (key, value, state) -> State.add(state, new Envelope(value, key, destination)),
                        store(settings).withKeySerde(bytes).withValueSerde(bytes));
        if (!sink.isEmpty()) {
            states.toStream().to(sink, Produced.with(bytes, bytes));
        }
        return builder;
    }

    private static Materialized<byte[], byte[], KeyValueStore<Bytes, byte[]>> store(Properties settings)
            throws Exception {
        String kind = settings.getProperty("bench.store");
        if (kind.equals("rocksdb")) {
            return Materialized.<byte[], byte[]>as(Stores.persistentKeyValueStore(STORE)).withCachingEnabled();
        }
        // A class of its own, compiled only where the store's jars are there.
        Object supplier =
                Class.forName(kind).getMethod("supplier", String.class, Properties.class).invoke(null, STORE, settings);
        return Materialized.<byte[], byte[]>as((KeyValueBytesStoreSupplier) supplier)
                .withLoggingDisabled()
                .withCachingDisabled();
    }

    private static void write(KafkaStreams streams, Path path) throws Exception {
        ReadOnlyKeyValueStore<byte[], byte[]> store =
                streams.store(StoreQueryParameters.fromNameAndType(STORE, QueryableStoreTypes.keyValueStore()));
        try (BufferedWriter out = Files.newBufferedWriter(path);
                KeyValueIterator<byte[], byte[]> all = store.all()) {
            while (all.hasNext()) {
                var one = all.next();
                out.write(new String(one.key, StandardCharsets.UTF_8) + "\t" + State.text(one.value) + "\n");
            }
        }
    }
}
