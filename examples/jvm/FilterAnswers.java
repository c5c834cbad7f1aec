import java.util.HashMap;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;
import java.util.StringJoiner;
import java.util.TreeMap;

/** Answers the conformance vectors of the sequence and the producer filter; `Conformance` says how it is asked. */
final class FilterAnswers {
    private static final HexFormat HEX = HexFormat.of();

    private final Map<String, SequenceFilter.State> sequences = new TreeMap<>();
    private final Map<String, ProducerFilter.State> producers = new TreeMap<>();
    private final boolean byKey;
    private final SequenceFilter sequence;
    private final ProducerFilter producer;

    FilterAnswers(List<String> parts) {
        Map<String, String> settings = named(parts);
        byKey = settings.getOrDefault("scope", "").equals("key");
        boolean forward = settings.getOrDefault("unusable", "").equals("forward");
        boolean bySequence = settings.get("type").equals("sequence");
        sequence =
                bySequence
                        ? new SequenceFilter(forward, settings.getOrDefault("decreasing", "").equals("reject"))
                        : null;
        producer =
                new ProducerFilter(
                        ProducerFilter.Gaps.valueOf(settings.getOrDefault("gaps", "report").toUpperCase()),
                        Long.parseLong(settings.getOrDefault("expiry_ms", "604800000")),
                        Integer.parseInt(settings.getOrDefault("limit", "10000")),
                        Integer.parseInt(settings.getOrDefault("hold", "100")));
    }

    String judge(List<String> parts) {
        Map<String, String> record = named(parts);
        String place = record.get("topic") + ":" + record.get("partition");
        try {
            return line(sequence == null ? judgeProducer(place, record) : judgeSequence(place, record));
        } catch (Envelopes.Invalid error) {
            return line(Ruling.rejected(error.reason));
        }
    }

    private Ruling judgeSequence(String place, Map<String, String> record) {
        byte[] key = record.containsKey("key") ? HEX.parseHex(record.get("key")) : null;
        if (byKey && key == null) {
            return Ruling.passed("unidentified");
        }
        String scope = byKey ? new String(key, java.nio.charset.StandardCharsets.UTF_8) : place;
        SequenceFilter.State before = sequences.getOrDefault(scope, SequenceFilter.State.ZERO);
        SequenceFilter.Judged judged = sequence.judge(before, key, record.get("id"));
        sequences.put(scope, judged.state());
        return judged.ruling();
    }

    private Ruling judgeProducer(String place, Map<String, String> record) throws Envelopes.Invalid {
        ProducerFilter.State state = producers.computeIfAbsent(place, one -> new ProducerFilter.State());
        ProducerFilter.Stamp stamp;
        if (record.containsKey("value")) {
            stamp = ProducerFilter.Stamp.of(Envelopes.decode(HEX.parseHex(record.get("value"))));
        } else {
            stamp = stamp(record);
        }
        return producer.judge(state, Long.parseLong(record.get("offset")), Long.parseLong(record.get("time")), stamp);
    }

    /** The stamp of a vector; its fields are JSON texts. */
    private static ProducerFilter.Stamp stamp(Map<String, String> record) throws Envelopes.Invalid {
        if (!record.containsKey("producer")) {
            return null;
        }
        try {
            long first = Long.parseLong(record.get("sequence"));
            String last = record.getOrDefault("last", "null");
            return new ProducerFilter.Stamp(
                    record.get("producer").replace("\"", ""),
                    first,
                    last.equals("null") ? first : Long.parseLong(last),
                    Long.parseLong(record.getOrDefault("epoch", "0")),
                    record.getOrDefault("contiguous", "false").equals("true"));
        } catch (NumberFormatException error) {
            throw new Envelopes.Invalid("bad_sequence");
        }
    }

    /** The states as JSON, by scope. */
    String states() {
        StringJoiner found = new StringJoiner(", ", "{", "}");
        (sequence == null ? producers : sequences).forEach((scope, state) -> found.add("\"" + scope + "\": " + state));
        return found.toString();
    }

    private static String line(Ruling ruling) {
        StringJoiner found = new StringJoiner(", ", "{", "}");
        found.add("\"verdict\": \"" + ruling.verdict() + "\"").add("\"forward\": " + ruling.forward());
        if (ruling.reason() != null) {
            found.add("\"reason\": \"" + ruling.reason() + "\"");
        }
        if (ruling.missing() != null) {
            found.add("\"missing\": " + ruling.missing());
        }
        if (!ruling.released().isEmpty()) {
            found.add("\"released\": " + ruling.released());
        }
        if (ruling.warning()) {
            found.add("\"warning\": true");
        }
        return found.toString();
    }

    private static Map<String, String> named(List<String> parts) {
        Map<String, String> found = new HashMap<>();
        for (String part : parts) {
            String[] pair = part.split("=", 2);
            found.put(pair[0], pair[1]);
        }
        return found;
    }
}
