------------------------------- MODULE Growth -------------------------------
(* A topic gets more partitions while a flow lags.

   There is one key. Its events go to partition 1 until its producer learns of
   the growth, and then to partition After: to the new partition 3 or, if the
   new count is not a multiple of the old one, to the old partition 2. The flow
   reads the partitions in any interleaving, so an event from after the growth
   can be read before events from before it.

   When the flow first sees the new count, its states stop evicting positions.
   Five minutes later, when every producer has refreshed its metadata, the flow
   takes the ends of all partitions; eviction resumes when it has read up to
   them. The flow queries the count after it has taken the range of a batch and
   before it folds the batch, so a record that the growth sent to another
   partition is never folded before the growth is seen.                       *)
EXTENDS Naturals, Sequences, FiniteSets

CONSTANTS
    N,       \* events of the key
    W,       \* positions that a history holds
    After,   \* partition that the key moves to
    Broken   \* "none", or the name of a broken variant

Partitions == 1..3
Least(S) == CHOOSE x \in S : \A y \in S : x <= y
Greatest(S) == CHOOSE x \in S : \A y \in S : x >= y

VARIABLES
    log,       \* partition -> its events
    sent,      \* events sent
    topic,     \* "small", "grown", "known" to the producer
    state,     \* the key's state: [n, held, floor]
    man        \* manifest: [next: how far each partition is read; seen: whether the growth was seen; phase: "rest",
               \* "settling" for five minutes, "draining" to the ends]

vars == <<log, sent, topic, state, man>>

Init ==
    /\ log = [p \in Partitions |-> <<>>] /\ sent = 0 /\ topic = "small"
    /\ state = [n |-> [e \in 1..N |-> 0], held |-> {}, floor |-> 0]
    /\ man = [next |-> [p \in Partitions |-> 0], seen |-> FALSE, phase |-> "rest", ends |-> [p \in Partitions |-> 0]]

Ends == [p \in Partitions |-> Len(log[p])]

Send ==
    /\ sent < N /\ sent' = sent + 1
    /\ LET p == IF topic = "known" THEN After ELSE 1 IN log' = [log EXCEPT ![p] = Append(@, sent + 1)]
    /\ UNCHANGED <<topic, state, man>>

Grow == topic = "small" /\ topic' = "grown" /\ UNCHANGED <<log, sent, state, man>>
Hear == topic = "grown" /\ topic' = "known" /\ UNCHANGED <<log, sent, state, man>>

(* The manifest after the count was queried. *)
Sight(m) ==
    IF topic = "small" \/ m.seen THEN m
    ELSE IF Broken = "evicts_while_new_partitions_wait" THEN [m EXCEPT !.seen = TRUE, !.phase = "rest", !.ends = Ends]
    ELSE IF Broken = "ends_as_of_first_sight" THEN [m EXCEPT !.seen = TRUE, !.phase = "draining", !.ends = Ends]
    ELSE [m EXCEPT !.seen = TRUE, !.phase = "settling"]

Drained(m) == IF m.phase = "draining" /\ \A p \in Partitions : m.next[p] >= m.ends[p] THEN [m EXCEPT !.phase = "rest"] ELSE m

Fold(s, e, evicts) ==
    IF e \in s.held \/ e <= s.floor THEN s
    ELSE LET every == s.held \cup {e}
             keep  == IF evicts THEN {x \in every : Cardinality({y \in every : y > x}) < W} ELSE every
         IN  [n |-> [s.n EXCEPT ![e] = @ + 1], held |-> keep, floor |-> Greatest({s.floor} \cup (every \ keep))]

(* New partitions are read once the growth is seen; in the variant, after the records then in the old ones. *)
Readable(p) ==
    /\ p < 3 \/ man.seen
    /\ (Broken = "evicts_while_new_partitions_wait" /\ p = 3) => \A q \in 1..2 : man.next[q] >= man.ends[q]

Read ==
    /\ \E p \in Partitions :
         /\ Readable(p) /\ man.next[p] < Len(log[p])
         /\ LET m == IF Broken = "count_asked_for_by_a_clock" THEN man ELSE Sight(man) IN
            /\ state' = Fold(state, log[p][man.next[p] + 1], m.phase = "rest")
            /\ man' = Drained([m EXCEPT !.next[p] = @ + 1])
    /\ UNCHANGED <<log, sent, topic>>

(* A batch without a record of this key, or a periodic query of the count. *)
Look == man' = Drained(Sight(man)) /\ UNCHANGED <<log, sent, topic, state>>

(* Five minutes after the growth was first seen. *)
Settle ==
    /\ man.phase = "settling" /\ topic = "known"
    /\ man' = Drained([man EXCEPT !.phase = "draining", !.ends = Ends])
    /\ UNCHANGED <<log, sent, topic, state>>

(* Broken variant: the run ends, and the next one does not resume the growth. *)
Restart ==
    /\ Broken = "forgotten_at_a_restart" /\ man.seen
    /\ man' = [man EXCEPT !.phase = "rest"]
    /\ UNCHANGED <<log, sent, topic, state>>

Next == Send \/ Grow \/ Hear \/ Read \/ Look \/ Settle \/ Restart

Spec == Init /\ [][Next]_vars
------------------------------------------------------------------------------
Above == INSTANCE Once WITH times <- <<state.n>>

(* Exactly once: every event that was read is folded. *)
ReadIsFolded == \A p \in Partitions : \A i \in 1..man.next[p] : state.n[log[p][i]] = 1

(* The state does not grow without bound: when all partitions are read to the ends, the next fold evicts again. *)
Rests == (man.phase = "draining") => \E p \in Partitions : man.next[p] < man.ends[p]
=============================================================================
