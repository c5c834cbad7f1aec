import com.datastax.oss.driver.api.core.CqlSession;
import dev.thriving.oss.kafka.streams.cassandra.state.store.CassandraStores;
import java.net.InetSocketAddress;
import java.util.Properties;
import org.apache.kafka.streams.state.KeyValueBytesStoreSupplier;

/** States in Cassandra, with logging and caching off, as the library's documentation asks for. */
public final class OnCassandra {
    private OnCassandra() {}

    public static KeyValueBytesStoreSupplier supplier(String store, Properties settings) {
        String[] address = settings.getProperty("bench.cassandra").split(":");
        CqlSession session = CqlSession.builder()
                .addContactPoint(new InetSocketAddress(address[0], Integer.parseInt(address[1])))
                .withLocalDatacenter("datacenter1")
                .withKeyspace(settings.getProperty("bench.keyspace"))
                .build();
        return CassandraStores.builder(session, store).partitionedKeyValueStore();
    }
}
