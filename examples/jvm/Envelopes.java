import com.google.protobuf.ByteString;
import com.google.protobuf.InvalidProtocolBufferException;
import headwater.envelope.v1.EnvelopeOuterClass.Envelope;
import headwater.envelope.v1.EnvelopeOuterClass.Hop;
import java.io.ByteArrayOutputStream;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.Arrays;
import java.util.regex.Pattern;
import java.util.zip.CRC32C;

/** Writes and reads sealed envelopes, and appends hops by concatenation; see envelope.proto. */
final class Envelopes {
    static final int FORMAT = 1;
    static final int MAX_HOPS = 32;
    static final int MAX_PAYLOAD_BYTES = 1 << 20;
    static final int MAX_MESSAGE_BYTES = MAX_PAYLOAD_BYTES + (1 << 16);

    private static final byte[] HEAD = {0x08, FORMAT, 0x10, 1}; // format = 1, sealed = true
    private static final byte[] SEAL_TAG = {(byte) 0xfd, 0x7f}; // field 2047, fixed32
    private static final int SEAL_BYTES = 6;
    private static final int CHAIN_TAG = 0x4a;
    private static final Pattern TOPIC = Pattern.compile("(?!\\.\\.?$)[a-zA-Z0-9._-]{1,249}");

    /** An envelope that breaks a rule. */
    static final class Invalid extends Exception {
        /** Reason code, as in headwater's dead letters. */
        final String reason;

        Invalid(String reason) {
            super(reason);
            this.reason = reason;
        }
    }

    private Envelopes() {}

    /** Serialize and seal an envelope; `format`, `sealed` and `checksum` of the builder are ignored. */
    static byte[] seal(Envelope.Builder envelope) {
        Envelope.Builder fields = envelope.clone().clearFormat().clearSealed().clearChecksum();
        return sealed(HEAD, fields.build().toByteArray());
    }

    /**
     * Append a hop to a serialized envelope.
     *
     * <p>Protobuf merges repeated fields of concatenated messages, and of a singular field the last value counts. Unknown
     * fields and the payload stay as they are.
     *
     * @param value the envelope, sealed or not, as it was read
     * @param hop the hop
     * @param key the output's key; null keeps that of the envelope
     * @param destination the output's topic; empty keeps that of the envelope
     */
    static byte[] append(byte[] value, Hop hop, byte[] key, String destination) throws Invalid {
        byte[] envelope = unframed(value);
        parse(envelope); // damage stays detectable: the new checksum would cover it
        Envelope.Builder changed = Envelope.newBuilder().setDestination(destination);
        if (key != null) {
            changed.setKey(ByteString.copyFrom(key));
        }
        ByteArrayOutputStream tail = new ByteArrayOutputStream();
        tail.writeBytes(changed.build().toByteArray());
        byte[] body = hop.toByteArray();
        tail.write(CHAIN_TAG);
        for (int size = body.length; ; size >>>= 7) {
            tail.write(size > 0x7f ? size & 0x7f | 0x80 : size);
            if (size <= 0x7f) {
                break;
            }
        }
        tail.writeBytes(body);
        if (!startsWith(envelope, HEAD)) {
            // An envelope without a checksum gets one.
            byte[] rest = Arrays.copyOfRange(envelope, 2, envelope.length);
            return sealed(HEAD, rest, tail.toByteArray());
        }
        return sealed(Arrays.copyOf(envelope, envelope.length - SEAL_BYTES), tail.toByteArray());
    }

    /** Parse and check an envelope, with or without the framing of a schema registry. */
    static Envelope decode(byte[] value) throws Invalid {
        Envelope found = parse(unframed(value));
        for (Hop hop : found.getChainList()) {
            if (hop.getTopic().isEmpty() || !hop.hasPartition() || !hop.hasOffset()) {
                throw new Invalid("missing_field");
            }
            if (!TOPIC.matcher(hop.getTopic()).matches()) {
                throw new Invalid("bad_topic");
            }
            if (hop.getPartition() < 0 || hop.getOffset() < 0 || hop.getOffset() == Long.MAX_VALUE) {
                throw new Invalid("bad_coordinates");
            }
            long epoch = Math.max(hop.getLeaderEpoch(), 0);
            if (epoch >= 1 << (63 - Lineage.OFFSET_BITS) || (epoch > 0 && hop.getOffset() >> Lineage.OFFSET_BITS != 0)) {
                throw new Invalid("bad_coordinates");
            }
        }
        return found;
    }

    private static Envelope parse(byte[] value) throws Invalid {
        checkHead(value);
        boolean sealed = startsWith(value, HEAD);
        if (sealed) {
            checkSeal(value);
        }
        Envelope found;
        try {
            found = Envelope.parseFrom(value);
        } catch (InvalidProtocolBufferException error) {
            throw new Invalid("malformed");
        }
        if (found.getFormat() != FORMAT) {
            throw new Invalid("unsupported_format");
        }
        if (sealed || found.getSealed() || found.hasChecksum()) {
            if (!sealed) {
                checkSeal(value); // another writer's order of fields: what claims a seal must have it
            }
            if (found.getChecksum() != littleEndian(value, value.length - 4)) {
                throw new Invalid("truncated");
            }
        }
        if (found.getChainCount() > MAX_HOPS) {
            throw new Invalid("too_many_hops");
        }
        if (found.getPayload().size() > MAX_PAYLOAD_BYTES) {
            throw new Invalid("payload_too_large");
        }
        return found;
    }

    private static void checkHead(byte[] value) throws Invalid {
        if (value.length == 0) {
            throw new Invalid("empty");
        }
        if (value.length > MAX_MESSAGE_BYTES) {
            throw new Invalid("payload_too_large");
        }
        if (value[0] != HEAD[0] || value.length == 1 || value[1] == 0) {
            throw new Invalid("not_an_envelope");
        }
        if (value[1] != FORMAT) {
            throw new Invalid("unsupported_format");
        }
        if (value.length == 2) {
            throw new Invalid("truncated");
        }
    }

    private static void checkSeal(byte[] value) throws Invalid {
        int end = value.length - SEAL_BYTES;
        if (end < HEAD.length || value[end] != SEAL_TAG[0] || value[end + 1] != SEAL_TAG[1]) {
            throw new Invalid("truncated");
        }
        if (littleEndian(value, end + 2) != crc(value, end)) {
            throw new Invalid("checksum_mismatch");
        }
    }

    /** Confluent's framing: a zero byte, a schema id of four bytes, and the indexes of the message as zigzag varints. */
    private static byte[] unframed(byte[] value) {
        if (value == null) {
            return new byte[0];
        }
        if (value.length == 0 || value[0] != 0) {
            return value;
        }
        ByteBuffer rest = ByteBuffer.wrap(value);
        try {
            rest.position(5);
            for (long count = zigzag(rest); count > 0; count--) {
                zigzag(rest);
            }
        } catch (IllegalArgumentException | java.nio.BufferUnderflowException error) {
            return value;
        }
        return Arrays.copyOfRange(value, rest.position(), value.length);
    }

    private static long zigzag(ByteBuffer from) {
        long number = 0;
        for (int shift = 0; shift < 64; shift += 7) {
            byte one = from.get();
            number |= (long) (one & 0x7f) << shift;
            if (one >= 0) {
                return number >>> 1 ^ -(number & 1);
            }
        }
        throw new IllegalArgumentException("not a varint");
    }

    private static byte[] sealed(byte[]... parts) {
        ByteArrayOutputStream out = new ByteArrayOutputStream();
        for (byte[] part : parts) {
            out.writeBytes(part);
        }
        byte[] body = out.toByteArray();
        out.writeBytes(SEAL_TAG);
        out.writeBytes(ByteBuffer.allocate(4).order(ByteOrder.LITTLE_ENDIAN).putInt(crc(body, body.length)).array());
        return out.toByteArray();
    }

    private static int crc(byte[] value, int end) {
        CRC32C crc = new CRC32C();
        crc.update(value, 0, end);
        return (int) crc.getValue();
    }

    private static int littleEndian(byte[] value, int at) {
        return ByteBuffer.wrap(value, at, 4).order(ByteOrder.LITTLE_ENDIAN).getInt();
    }

    private static boolean startsWith(byte[] value, byte[] head) {
        return value.length >= head.length && Arrays.equals(value, 0, head.length, head, 0, head.length);
    }
}
