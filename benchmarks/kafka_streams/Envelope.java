import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.Arrays;
import java.util.zip.CRC32C;

/**
 * A sealed envelope (proto/headwater/envelope/v1/envelope.proto), parsed and checked by hand: the fastest way in Java.
 *
 * <p>Checked are head, checksum, protobuf structure, destination, key and the coordinates of every hop. An envelope
 * without a hop is refused: its identity would be the record's own coordinates, which an aggregator does not see.
 */
final class Envelope {
    private static final int HEAD = 0x08011001; // format = 1, sealed = true
    private static final int SEAL_BYTES = 6;
    private static final int SEAL_TAG = 0xfd7f; // field 2047, fixed32

    private final byte[] value;
    private int keyFrom = -1, keyTo, destinationFrom = -1, destinationTo, payloadFrom, payloadTo;

    /** Topic id (or name), partition and republisher of every hop: what is ordered among itself. */
    final byte[] lane;
    /** Offset and index of every hop, big-endian, so that positions of one lane compare as unsigned bytes. */
    final byte[] position;

    int minutes;
    int delay;

    Envelope(byte[] value, byte[] key, byte[] topic) {
        this.value = value;
        if (value == null || value.length < 4 + SEAL_BYTES || ByteBuffer.wrap(value).getInt() != HEAD) {
            throw new IllegalArgumentException("not a sealed envelope");
        }
        int end = value.length - SEAL_BYTES;
        ByteBuffer seal = ByteBuffer.wrap(value, end, SEAL_BYTES);
        CRC32C crc = new CRC32C();
        crc.update(value, 0, end);
        if ((seal.getShort() & 0xffff) != SEAL_TAG
                || seal.order(ByteOrder.LITTLE_ENDIAN).getInt() != (int) crc.getValue()) {
            throw new IllegalArgumentException("the checksum does not match");
        }
        byte[] lanes = new byte[64];
        ByteBuffer positions = ByteBuffer.allocate(16 * 12); // 16 hops, as headwater's limit
        int used = 0;
        Wire wire = new Wire(value, 4, end);
        while (wire.more()) {
            int tag = wire.tag();
            switch (tag) {
                case 3 << 3 | 2, 6 << 3 | 2, 8 << 3 | 2, 10 << 3 | 2, 13 << 3 | 2 -> wire.slice(); // texts
                case 5 << 3 | 2 -> {
                    keyTo = wire.slice();
                    keyFrom = wire.from;
                }
                case 7 << 3 | 2 -> {
                    payloadTo = wire.slice();
                    payloadFrom = wire.from;
                }
                case 9 << 3 | 2 -> {
                    int to = wire.slice();
                    Hop hop = new Hop(value, wire.from, to);
                    int size = hop.laneBytes();
                    if (used + size > lanes.length) {
                        lanes = Arrays.copyOf(lanes, 2 * (used + size));
                    }
                    used = hop.writeLane(lanes, used);
                    positions.putLong(hop.offset).putInt(hop.index);
                }
                case 12 << 3 | 2 -> {
                    destinationTo = wire.slice();
                    destinationFrom = wire.from;
                }
                default -> wire.skip(tag);
            }
        }
        if (keyFrom < 0 || !Arrays.equals(value, keyFrom, keyTo, key, 0, key.length)) {
            throw new IllegalArgumentException("the record's key is not the envelope's");
        }
        if (destinationFrom >= 0
                && !Arrays.equals(value, destinationFrom, destinationTo, topic, 0, topic.length)) {
            throw new IllegalArgumentException("produced to another topic");
        }
        if (used == 0) {
            throw new IllegalArgumentException("an envelope without a hop");
        }
        lane = Arrays.copyOf(lanes, used);
        position = Arrays.copyOf(positions.array(), positions.position());
        leg();
    }

    /** The payload: proto/headwater/demo/v1/leg.proto. */
    private void leg() {
        Wire wire = new Wire(value, payloadFrom, payloadTo);
        while (wire.more()) {
            int tag = wire.tag();
            switch (tag) {
                case 1 << 3 | 2, 2 << 3 | 2 -> wire.slice();
                case 5 << 3 -> delay = (int) wire.varint();
                case 6 << 3 -> minutes = (int) wire.varint();
                default -> wire.skip(tag);
            }
        }
    }

    private static final class Hop {
        private final byte[] value;
        private int topicFrom, topicTo, idFrom, idTo, viaFrom, viaTo;
        private int partition = -1;
        long offset = -1;
        int index = -1;

        Hop(byte[] value, int from, int to) {
            this.value = value;
            Wire wire = new Wire(value, from, to);
            while (wire.more()) {
                int tag = wire.tag();
                switch (tag) {
                    case 1 << 3 | 2 -> {
                        topicTo = wire.slice();
                        topicFrom = wire.from;
                    }
                    case 2 << 3 -> partition = (int) wire.varint();
                    case 3 << 3 -> offset = wire.varint();
                    case 4 << 3 | 2 -> {
                        viaTo = wire.slice();
                        viaFrom = wire.from;
                    }
                    case 5 << 3 -> index = (int) wire.varint();
                    case 9 << 3 | 2 -> {
                        idTo = wire.slice();
                        idFrom = wire.from;
                    }
                    default -> wire.skip(tag);
                }
            }
            if (topicTo == topicFrom || partition < 0 || offset < 0) {
                throw new IllegalArgumentException("a hop without valid coordinates");
            }
            if (idTo == idFrom) {
                idFrom = topicFrom;
                idTo = topicTo;
            }
        }

        int laneBytes() {
            return idTo - idFrom + viaTo - viaFrom + 12;
        }

        int writeLane(byte[] lane, int at) {
            ByteBuffer out = ByteBuffer.wrap(lane, at, lane.length - at);
            out.putInt(partition).putInt(idTo - idFrom).put(value, idFrom, idTo - idFrom);
            out.putInt(viaTo - viaFrom).put(value, viaFrom, viaTo - viaFrom);
            return out.position();
        }
    }

    /** Reads protobuf's wire format within bounds. */
    private static final class Wire {
        private final byte[] value;
        private final int end;
        private int at;
        /** Where the last slice began. */
        int from;

        Wire(byte[] value, int from, int to) {
            this.value = value;
            at = from;
            end = to;
        }

        boolean more() {
            return at < end;
        }

        int tag() {
            long tag = varint();
            if (tag >>> 3 == 0 || tag >>> 32 != 0) {
                throw malformed();
            }
            return (int) tag;
        }

        long varint() {
            if (at < end && value[at] >= 0) {
                return value[at++];
            }
            long number = 0;
            for (int shift = 0; shift < 64 && at < end; shift += 7) {
                byte one = value[at++];
                number |= (long) (one & 0x7f) << shift;
                if (one >= 0) {
                    return number;
                }
            }
            throw malformed();
        }

        /** Skip a length-delimited field, and return where it ends; `from` is where it begins. */
        int slice() {
            long length = varint();
            if (length < 0 || length > end - at) {
                throw malformed();
            }
            from = at;
            at += (int) length;
            return at;
        }

        void skip(int tag) {
            switch (tag & 7) {
                case 0 -> varint();
                case 1 -> fixed(8);
                case 2 -> slice();
                case 5 -> fixed(4);
                default -> throw malformed();
            }
        }

        private void fixed(int size) {
            if (end - at < size) {
                throw malformed();
            }
            at += size;
        }

        private static IllegalArgumentException malformed() {
            return new IllegalArgumentException("not valid protobuf");
        }
    }
}
