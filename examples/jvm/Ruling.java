import java.util.List;

/**
 * What a filter decided about a record.
 *
 * @param verdict the verdict, by headwater's name
 * @param forward whether the record is passed on
 * @param reason reason code of a rejected record; otherwise null
 * @param missing first and last number that are missing before this record; null if none is
 * @param released offsets of records that were held back until now, passed on after this one, or with it in their place
 * @param warning the keys contain the sequence numbers, so records of different partitions lose their order
 */
record Ruling(
        String verdict, boolean forward, String reason, Range missing, List<Long> released, boolean warning) {
    /** Numbers, ends included. */
    record Range(long first, long last) {
        boolean overlaps(long from, long to) {
            return first <= to && from <= last;
        }

        @Override
        public String toString() {
            return "[" + first + ", " + last + "]";
        }
    }

    static Ruling passed(String verdict) {
        return new Ruling(verdict, true, null, null, List.of(), false);
    }

    static Ruling dropped(String verdict) {
        return new Ruling(verdict, false, null, null, List.of(), false);
    }

    static Ruling rejected(String reason) {
        return new Ruling("rejected", false, reason, null, List.of(), false);
    }

    Ruling missing(long first, long last) {
        return new Ruling(verdict, forward, reason, new Range(first, last), released, warning);
    }

    Ruling releasing(List<Long> offsets) {
        return new Ruling(verdict, forward, reason, missing, offsets, warning);
    }

    Ruling warned() {
        return new Ruling(verdict, forward, reason, missing, released, true);
    }
}
