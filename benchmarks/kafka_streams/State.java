import java.nio.ByteBuffer;
import java.util.Arrays;

/**
 * The state of one key as bytes: count, sum and maximum, then the highest position that was folded of each lane.
 *
 * <p>`count:8 sum:8 maximum:4`, then for each lane `laneBytes:2 lane positionBytes:2 position`.
 */
final class State {
    private static final int FOLD = 20;

    private State() {}

    /** Return the state with the event folded in, or `state` itself if the event was folded before. */
    static byte[] add(byte[] state, Envelope event) {
        int known = find(state, event.lane);
        byte[] next;
        if (known >= 0) {
            int at = known + 2 + event.lane.length;
            int size = ByteBuffer.wrap(state).getShort(at);
            if (Arrays.compareUnsigned(event.position, 0, event.position.length, state, at + 2, at + 2 + size) <= 0) {
                return state;
            }
            next = state.clone(); // positions of a lane have one length: as many hops
            System.arraycopy(event.position, 0, next, at + 2, size);
        } else {
            int from = Math.max(state.length, FOLD);
            ByteBuffer grown = ByteBuffer.allocate(from + 4 + event.lane.length + event.position.length);
            grown.put(state).position(from);
            grown.putShort((short) event.lane.length).put(event.lane);
            grown.putShort((short) event.position.length).put(event.position);
            next = grown.array();
            if (state.length == 0) {
                grown.putInt(16, Integer.MIN_VALUE);
            }
        }
        ByteBuffer fold = ByteBuffer.wrap(next);
        fold.putLong(0, fold.getLong(0) + 1);
        fold.putLong(8, fold.getLong(8) + event.minutes);
        fold.putInt(16, Math.max(fold.getInt(16), event.delay));
        return next;
    }

    /** `count TAB sum TAB maximum`. */
    static String text(byte[] state) {
        ByteBuffer fold = ByteBuffer.wrap(state);
        return fold.getLong(0) + "\t" + fold.getLong(8) + "\t" + fold.getInt(16);
    }

    private static int find(byte[] state, byte[] lane) {
        ByteBuffer read = ByteBuffer.wrap(state);
        for (int at = FOLD; at < state.length; ) {
            int size = read.getShort(at);
            if (Arrays.equals(state, at + 2, at + 2 + size, lane, 0, lane.length)) {
                return at;
            }
            at += 2 + size;
            at += 2 + read.getShort(at);
        }
        return -1;
    }
}
