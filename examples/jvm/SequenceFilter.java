import java.nio.charset.StandardCharsets;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

/** Passes on a record if its sequence number is greater than every number before it in its partition or of its key. */
final class SequenceFilter {
    private static final int KEYED = 8; // keys in a row that contain their number, after which the filter warns
    private static final Pattern NUMBER = Pattern.compile("[+-]?[0-9]{1,19}");
    private static final Pattern DIGITS = Pattern.compile("[0-9]+");

    /** The last number of a partition or key, and how many keys in a row contained their number. */
    record State(Long seen, int keyed) {
        static final State ZERO = new State(null, 0);

        @Override
        public String toString() {
            return "{\"seen\": " + seen + (keyed == 0 ? "" : ", \"keyed\": " + keyed) + "}";
        }
    }

    /** A ruling and the state after it. */
    record Judged(Ruling ruling, State state) {}

    private final boolean forwardUnusable;
    private final boolean rejectDecreasing;

    /**
     * @param forwardUnusable pass on records without a usable number, instead of rejecting them
     * @param rejectDecreasing reject lower numbers, instead of dropping them as duplicates
     */
    SequenceFilter(boolean forwardUnusable, boolean rejectDecreasing) {
        this.forwardUnusable = forwardUnusable;
        this.rejectDecreasing = rejectDecreasing;
    }

    /** Decide about a record by the state of its partition or key, its key, and its number as text; null without one. */
    Judged judge(State state, byte[] key, String text) {
        Long number = text == null ? null : number(text);
        if (number == null) {
            Ruling unusable = Ruling.rejected(text == null ? "missing_field" : "bad_sequence");
            return new Judged(forwardUnusable ? Ruling.passed("unidentified") : unusable, state);
        }
        if (state.seen() == null || number > state.seen()) {
            int keyed = state.keyed() == KEYED ? KEYED : contains(key, number) ? state.keyed() + 1 : 0;
            Ruling accepted = Ruling.passed("accepted");
            return new Judged(
                    keyed == KEYED && state.keyed() < KEYED ? accepted.warned() : accepted, new State(number, keyed));
        }
        if (number.equals(state.seen())) {
            return new Judged(Ruling.dropped("duplicate"), state);
        }
        return new Judged(
                rejectDecreasing ? Ruling.rejected("out_of_sequence") : Ruling.dropped("below_floor"), state);
    }

    private static Long number(String text) {
        try {
            return NUMBER.matcher(text).matches() ? Long.valueOf(text) : null;
        } catch (NumberFormatException error) {
            return null; // more than 64 bits
        }
    }

    private static boolean contains(byte[] key, long number) {
        String digits = Long.toString(number).replace("-", "");
        Matcher found = DIGITS.matcher(key == null ? "" : new String(key, StandardCharsets.ISO_8859_1));
        return found.results().anyMatch(one -> one.group().equals(digits));
    }
}
