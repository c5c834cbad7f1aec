import headwater.envelope.v1.EnvelopeOuterClass.Envelope;
import java.util.ArrayList;
import java.util.Comparator;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.StringJoiner;

/** Passes on a message if its sequence number is greater than the highest one of its producer and partition. */
final class ProducerFilter {
    private static final int MISSING = 32; // ranges of missing numbers that are remembered for a producer

    enum Gaps {
        REPORT,
        HOLD,
        REFUSE
    }

    /** What a producer says about a message; `first` and `last` differ for a batch. */
    record Stamp(String producer, long first, long last, long epoch, boolean contiguous) {
        /** That of an envelope; null without one, and for a republished message, which its lineage recognises. */
        static Stamp of(Envelope envelope) {
            if (envelope.getProducer().isEmpty() || !envelope.hasSequence() || envelope.getChainCount() > 0) {
                return null;
            }
            long first = envelope.getSequence();
            long last = envelope.hasLastSequence() ? envelope.getLastSequence() : first;
            return new Stamp(
                    envelope.getProducer(), first, last, envelope.getProducerEpoch(), envelope.getSequencePerPartition());
        }
    }

    private record Held(long first, long last, long offset) {
        private static final Comparator<Held> ORDER =
                Comparator.comparingLong(Held::first).thenComparingLong(Held::last).thenComparingLong(Held::offset);

        @Override
        public String toString() {
            return "[" + first + ", " + last + ", " + offset + "]";
        }
    }

    private static final class Producer {
        private long highest;
        private long exactFrom; // from here to the highest, every number that is not missing was passed on
        private long epoch;
        private long seenMs;
        private final List<Ruling.Range> missing = new ArrayList<>();
        private final List<Held> held = new ArrayList<>();

        /** Pass on numbers although some before them are missing. */
        void skipTo(long first, long last) {
            missing.add(new Ruling.Range(highest + 1, first - 1));
            highest = last;
            trim();
        }

        void trim() {
            while (missing.size() > MISSING) {
                exactFrom = missing.remove(0).last() + 1;
            }
        }

        @Override
        public String toString() {
            return "{\"highest\": " + highest + ", \"exact_from\": " + exactFrom + ", \"seen_ms\": " + seenMs
                    + (epoch == 0 ? "" : ", \"epoch\": " + epoch)
                    + (missing.isEmpty() ? "" : ", \"missing\": " + missing)
                    + (held.isEmpty() ? "" : ", \"held\": " + held) + "}";
        }
    }

    /** What is remembered of a partition: its producers, the one that sent nothing for the longest time first. */
    static final class State {
        private Long streamTimeMs;
        private final Map<String, Producer> producers = new LinkedHashMap<>();

        @Override
        public String toString() {
            StringJoiner names = new StringJoiner(", ", "{", "}");
            producers.forEach((name, known) -> names.add("\"" + name + "\": " + known));
            return "{\"stream_time_ms\": " + streamTimeMs + ", \"producers\": " + names + "}";
        }
    }

    private final Gaps gaps;
    private final long expiryMs;
    private final int limit;
    private final int hold;

    /**
     * @param gaps what happens to a message of a contiguous producer if numbers before it have not arrived
     * @param expiryMs a producer that sent nothing for this long, in stream time, is forgotten
     * @param limit producers that a partition remembers
     * @param hold messages that are held back for a producer
     */
    ProducerFilter(Gaps gaps, long expiryMs, int limit, int hold) {
        this.gaps = gaps;
        this.expiryMs = expiryMs;
        this.limit = limit;
        this.hold = hold;
    }

    /** Decide about a message of a partition, which changes the partition's state; a rejected one does not. */
    Ruling judge(State state, long offset, long timeMs, Stamp stamp) {
        if (stamp != null && (stamp.producer().isEmpty() || stamp.last() < stamp.first())) {
            return Ruling.rejected("bad_sequence");
        }
        long now = state.streamTimeMs == null ? timeMs : Math.max(state.streamTimeMs, timeMs);
        String name = stamp == null ? null : stamp.producer();
        List<String> forgotten = forgotten(state, now, name);
        Producer known = stamp == null || forgotten.contains(name) ? null : state.producers.get(name);
        Ruling ruling =
                stamp == null
                        ? Ruling.passed("unidentified")
                        : known == null
                                ? Ruling.passed("accepted")
                                : stamp.epoch() < known.epoch ? Ruling.dropped("fenced") : judge(known, stamp, offset);
        if (ruling.verdict().equals("rejected")) {
            return ruling;
        }
        state.streamTimeMs = now;
        List<Long> released = new ArrayList<>();
        for (String gone : forgotten) {
            state.producers.remove(gone).held.forEach(one -> released.add(one.offset()));
        }
        released.addAll(ruling.released());
        if (stamp != null && known == null) {
            known = new Producer();
            known.highest = stamp.last();
            known.exactFrom = stamp.first();
        }
        if (known != null && !ruling.verdict().equals("fenced")) {
            known.epoch = stamp.epoch();
            known.seenMs = now;
            state.producers.remove(name);
            state.producers.put(name, known);
        }
        return ruling.releasing(released);
    }

    private List<String> forgotten(State state, long now, String arriving) {
        List<String> found = new ArrayList<>();
        int needed = state.producers.size() + (arriving == null || state.producers.containsKey(arriving) ? 0 : 1);
        for (Map.Entry<String, Producer> one : state.producers.entrySet()) {
            if (one.getValue().seenMs >= now - expiryMs && needed <= limit) {
                break;
            }
            found.add(one.getKey());
            needed -= one.getKey().equals(arriving) ? 0 : 1;
        }
        return found;
    }

    private Ruling judge(Producer known, Stamp stamp, long offset) {
        long first = stamp.first();
        long last = stamp.last();
        if (last <= known.highest) {
            return within(known, first, last);
        }
        if (first <= known.highest) {
            return Ruling.rejected("out_of_sequence");
        }
        for (Held one : known.held) {
            if (one.first() <= last && first <= one.last()) {
                boolean same = one.first() == first && one.last() == last;
                return one.offset() == offset
                        ? Ruling.dropped("held")
                        : same ? Ruling.dropped("duplicate") : Ruling.rejected("out_of_sequence");
            }
        }
        if (!stamp.contiguous()) {
            return freed(known, first, last);
        }
        if (first == known.highest + 1) {
            known.highest = last;
            List<Long> ready = new ArrayList<>();
            while (!known.held.isEmpty() && known.held.get(0).first() == known.highest + 1) {
                known.highest = known.held.get(0).last();
                ready.add(known.held.remove(0).offset());
            }
            return Ruling.passed("accepted").releasing(ready);
        }
        long missingFrom = known.highest + 1;
        switch (gaps) {
            case REFUSE -> {
                return Ruling.rejected("out_of_sequence");
            }
            case HOLD -> {
                return held(known, new Held(first, last, offset)).missing(missingFrom, first - 1);
            }
            default -> known.skipTo(first, last);
        }
        return Ruling.passed("gap").missing(missingFrom, first - 1);
    }

    /** A number that is not the highest: it was missing, or it is a copy, or too long ago to tell. */
    private static Ruling within(Producer known, long first, long last) {
        List<Ruling.Range> near = known.missing.stream().filter(one -> one.overlaps(first, last)).toList();
        if (near.isEmpty()) {
            return Ruling.dropped(first >= known.exactFrom ? "duplicate" : "below_floor");
        }
        Ruling.Range range = near.get(0);
        if (near.size() > 1 || first < range.first() || last > range.last()) {
            return Ruling.rejected("out_of_sequence");
        }
        known.missing.remove(range);
        if (range.first() < first) {
            known.missing.add(new Ruling.Range(range.first(), first - 1));
        }
        if (last < range.last()) {
            known.missing.add(new Ruling.Range(last + 1, range.last()));
        }
        known.missing.sort(Comparator.comparingLong(Ruling.Range::first));
        known.trim();
        return Ruling.passed("late");
    }

    /** The producer no longer numbers without gaps: nothing is missing, and nothing is waited for. */
    private static Ruling freed(Producer known, long first, long last) {
        List<Long> ready = known.held.stream().map(Held::offset).toList();
        known.highest = ready.isEmpty() ? last : Math.max(last, known.held.get(known.held.size() - 1).last());
        known.exactFrom = ready.isEmpty() ? first : known.highest;
        known.missing.clear();
        known.held.clear();
        return Ruling.passed("accepted").releasing(ready);
    }

    private Ruling held(Producer known, Held early) {
        known.held.add(early);
        known.held.sort(Held.ORDER);
        if (known.held.size() <= hold) {
            return Ruling.dropped("held");
        }
        for (Held one : known.held) {
            if (one.first() > known.highest + 1) {
                known.skipTo(one.first(), one.last());
            }
            known.highest = one.last();
        }
        List<Long> released = known.held.stream().map(Held::offset).toList();
        known.held.clear();
        return Ruling.dropped("gap").releasing(released);
    }
}
