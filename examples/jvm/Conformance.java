import com.google.protobuf.ByteString;
import com.google.protobuf.Descriptors.FieldDescriptor;
import com.google.protobuf.Message;
import headwater.envelope.v1.EnvelopeOuterClass.Envelope;
import headwater.envelope.v1.EnvelopeOuterClass.Hop;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.StringJoiner;

/**
 * Answers the conformance vectors, line by line, with tabs between the parts of a line.
 *
 * <p>`envelope HEX`: the fields of the envelope as `name=value`, or `reason=CODE`. `hop HEX name=value...`: the envelope with
 * the hop appended. `lineage TOPIC PARTITION OFFSET HEX REKEYED`: lane, group and position of the record.
 * `filter name=value...` begins with a sequence or producer filter of these settings; `judge name=value...` is answered with
 * the ruling about a record, and `states` with the filter's states, both as JSON.
 */
public final class Conformance {
    private static final Set<String> SEAL = Set.of("format", "sealed", "checksum");
    private static final HexFormat HEX = HexFormat.of();

    public static void main(String[] arguments) throws Exception {
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        FilterAnswers filter = null;
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            List<String> parts = List.of(line.split("\t", -1));
            if (parts.get(0).equals("filter")) {
                filter = new FilterAnswers(parts.subList(1, parts.size()));
                continue;
            }
            System.out.println(
                    switch (parts.get(0)) {
                        case "envelope" -> envelope(HEX.parseHex(parts.get(1)));
                        case "hop" -> hop(HEX.parseHex(parts.get(1)), parts.subList(2, parts.size()));
                        case "judge" -> filter.judge(parts.subList(1, parts.size()));
                        case "states" -> filter.states();
                        default -> lineage(parts);
                    });
        }
    }

    private static String envelope(byte[] value) {
        try {
            Envelope found = Envelopes.decode(value);
            StringJoiner line = new StringJoiner("\t");
            add(line, "", found);
            ByteString unknown = found.getUnknownFields().toByteString();
            if (!unknown.isEmpty()) {
                line.add("unknown=" + HEX.formatHex(unknown.toByteArray()));
            }
            return line.toString();
        } catch (Envelopes.Invalid error) {
            return "reason=" + error.reason;
        }
    }

    private static void add(StringJoiner line, String before, Message message) {
        for (Map.Entry<FieldDescriptor, Object> one : message.getAllFields().entrySet()) {
            String name = before + one.getKey().getName();
            if (SEAL.contains(name)) {
                continue;
            }
            if (one.getValue() instanceof List<?> hops) {
                for (int i = 0; i < hops.size(); i++) {
                    add(line, name + "." + i + ".", (Message) hops.get(i));
                }
            } else if (one.getValue() instanceof ByteString bytes) {
                line.add(name + "=" + HEX.formatHex(bytes.toByteArray()));
            } else {
                line.add(name + "=" + one.getValue());
            }
        }
    }

    private static String hop(byte[] value, List<String> fields) throws Envelopes.Invalid {
        Hop.Builder hop = Hop.newBuilder();
        for (String field : fields) {
            String[] pair = field.split("=", 2);
            FieldDescriptor name = Hop.getDescriptor().findFieldByName(pair[0]);
            hop.setField(
                    name,
                    switch (name.getJavaType()) {
                        case INT -> Integer.parseUnsignedInt(pair[1]);
                        case LONG -> Long.parseLong(pair[1]);
                        case BOOLEAN -> pair[1].equals("True");
                        default -> pair[1];
                    });
        }
        return HEX.formatHex(Envelopes.append(value, hop.build(), null, ""));
    }

    private static String lineage(List<String> parts) throws Envelopes.Invalid {
        Envelope envelope = Envelopes.decode(HEX.parseHex(parts.get(4)));
        int partition = Integer.parseInt(parts.get(2));
        long offset = Long.parseLong(parts.get(3));
        Lineage found = new Lineage(envelope, parts.get(1), partition, offset, parts.get(5).equals("True"));
        if (found.loops()) {
            return "reason=chain_loop";
        }
        StringJoiner position = new StringJoiner(",");
        found.position().forEach(one -> position.add(one.toString()));
        return "lane=" + found.lane() + "\tgroup=" + found.group() + "\tposition=" + position;
    }
}
