import headwater.envelope.v1.EnvelopeOuterClass.Envelope;
import headwater.envelope.v1.EnvelopeOuterClass.Hop;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashSet;
import java.util.List;

/**
 * Where a record comes from: its lane and its position, by which a reader recognises a record that was sent again.
 *
 * <p>The lineage is the chain, followed by the record's own coordinates. Hops through retry and dead-letter topics are left
 * out, with the record after each.
 */
final class Lineage {
    /** Bits of an offset in a position. Above them is the leader epoch: a log that lost its end gives an offset twice. */
    static final int OFFSET_BITS = 45;

    private record Node(String cluster, String topic, int partition, long offset, String topicId) {
        String name() {
            return cluster.isEmpty() ? topic : quoted(cluster, "/") + "/" + topic;
        }
    }

    private final List<Node> nodes = new ArrayList<>();
    private final List<Hop> edges = new ArrayList<>();
    private final boolean rekeyed;
    private final String eventId;

    /**
     * @param envelope the record's envelope
     * @param topic the record's own coordinates
     * @param partition its partition
     * @param offset its offset
     * @param rekeyed the reader aggregates by another key than the record's
     */
    Lineage(Envelope envelope, String topic, int partition, long offset, boolean rekeyed) {
        this.rekeyed = rekeyed;
        eventId = envelope.getEventId();
        List<Node> all = new ArrayList<>();
        for (Hop hop : envelope.getChainList()) {
            long number = (long) Math.max(hop.getLeaderEpoch(), 0) << OFFSET_BITS | hop.getOffset();
            all.add(new Node(hop.getCluster(), hop.getTopic(), hop.getPartition(), number, hop.getTopicId()));
        }
        all.add(new Node("", topic, partition, offset, ""));
        nodes.add(all.get(0));
        for (int i = 0; i < envelope.getChainCount(); i++) {
            if (!envelope.getChain(i).getPassThrough()) {
                edges.add(envelope.getChain(i));
                nodes.add(all.get(i + 1));
            }
        }
    }

    /** Whether the record came through one topic twice: a republisher that writes such a record would never end. */
    boolean loops() {
        HashSet<String> topics = new HashSet<>();
        return !nodes.stream().allMatch(node -> topics.add(node.name()));
    }

    /** Within a lane, first deliveries arrive in ascending positions: the partitions up to the last change of the key count. */
    String lane() {
        int last = 0;
        for (int i = 0; i < edges.size(); i++) {
            last = edges.get(i).getRekeyed() ? i : last; // the record that it read is the last whose partition counts
        }
        return named(rekeyed ? edges.size() : last);
    }

    /** The lane without the partitions after the root's: lanes of one group hold positions together. */
    String group() {
        return named(0);
    }

    /** Offset of the root with its leader epoch, then the index of every hop, -1 where there is none; then the event id, if one is needed. */
    List<Object> position() {
        List<Object> position = new ArrayList<>(List.of(nodes.get(0).offset()));
        boolean missing = false;
        for (Hop edge : edges) {
            position.add(edge.hasIndex() ? Integer.toUnsignedLong(edge.getIndex()) : -1L);
            missing |= !edge.hasIndex();
        }
        if (missing && !eventId.isEmpty()) {
            position.add(eventId);
        }
        return position;
    }

    private String named(int partitions) {
        Node root = nodes.get(0);
        StringBuilder name = new StringBuilder(root.name() + ":" + root.partition() + "#" + quoted(root.topicId(), "/+="));
        for (int i = 1; i < nodes.size(); i++) {
            name.append('>').append(quoted(edges.get(i - 1).getVia(), "/")).append('>').append(nodes.get(i).name());
            if (i <= partitions) {
                name.append(':').append(nodes.get(i).partition());
            }
        }
        return name.toString();
    }

    /** Percent-encoding of everything but letters, digits, `_.-~` and some more. */
    private static String quoted(String name, String safe) {
        StringBuilder found = new StringBuilder();
        for (byte one : name.getBytes(StandardCharsets.UTF_8)) {
            boolean plain = one > 0 && (Character.isLetterOrDigit(one) || ("_.-~" + safe).indexOf(one) >= 0);
            found.append(plain ? String.valueOf((char) one) : String.format("%%%02X", one));
        }
        return found.toString();
    }
}
