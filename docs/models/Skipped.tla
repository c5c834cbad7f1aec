------------------------------- MODULE Skipped -------------------------------
(* A filter by number, and records that come back to it from the dead-letter
   topic.

   A producer sends the numbers 1..A, fails, and sends R..N: from A + 1 on they
   are new. Some records cannot be read at their place, so the filter does not
   see their numbers. Their dead letters are fixed and redriven in any order,
   while further records are read. The filter keeps the highest number that it
   has passed on, and, while dead letters wait, the numbers that it skips.
   Every number is passed on once.                                           *)
EXTENDS Naturals, Sequences, FiniteSets

CONSTANTS
    N,      \* numbers
    Most,   \* most records that cannot be read
    Broken  \* "none", or the name of a broken variant

VARIABLES
    log,      \* the numbers in the topic
    bad,      \* places in it that cannot be read
    read,     \* how far it is read
    waiting,  \* places of dead letters
    before,   \* place of a dead letter -> highest number when it was rejected
    highest,  \* highest number passed on
    skipped,  \* numbers that were skipped while dead letters waited
    n         \* number -> times passed on

vars == <<log, bad, read, waiting, before, highest, skipped, n>>

Init ==
    /\ \E a \in 0..N, r \in 1..N :
         /\ r <= a + 1
         /\ log = [i \in 1..(a + N - r + 1) |-> IF i <= a THEN i ELSE r + i - a - 1]
    /\ bad \in SUBSET (1..Len(log)) /\ Cardinality(bad) <= Most
    /\ read = 0 /\ waiting = {} /\ highest = 0 /\ skipped = {}
    /\ before = [i \in 1..(2 * N) |-> 0]
    /\ n = [e \in 1..N |-> 0]

(* The skipped numbers after a number above the highest one. *)
Noted(e, noting) == IF noting /\ Broken # "nothing_noted" THEN skipped \cup ((highest + 1)..(e - 1)) ELSE skipped

Passed(e) == [n EXCEPT ![e] = @ + 1]

Read ==
    /\ read < Len(log) /\ read' = read + 1
    /\ LET i     == read + 1
           e     == log[i]
           dies  == i \in bad
           rises == ~dies /\ e > highest
       IN  /\ waiting' = IF dies THEN waiting \cup {i} ELSE waiting
           /\ before' = IF dies THEN [before EXCEPT ![i] = highest] ELSE before
           /\ highest' = IF rises THEN e ELSE highest
           /\ skipped' = IF rises THEN Noted(e, waiting # {}) ELSE skipped
           /\ n' = IF rises THEN Passed(e) ELSE n
    /\ UNCHANGED <<log, bad>>

Missing(i, e) ==
    CASE Broken = "rejected_is_missing" -> TRUE
      [] Broken = "judged_by_the_state_at_its_place" -> e > before[i]
      [] OTHER -> e \in skipped

Back ==
    /\ \E i \in waiting :
         LET e     == log[i]
             rises == e > highest
         IN  /\ waiting' = waiting \ {i}
             /\ highest' = IF rises THEN e ELSE highest
             /\ skipped' = IF rises THEN Noted(e, TRUE)
                           ELSE IF Broken = "passed_on_is_still_skipped" THEN skipped ELSE skipped \ {e}
             /\ n' = IF rises \/ Missing(i, e) THEN Passed(e) ELSE n
    /\ UNCHANGED <<log, bad, read, before>>

Next == Read \/ Back

Spec == Init /\ [][Next]_vars
------------------------------------------------------------------------------
Above == INSTANCE Once WITH times <- <<n>>

FinallyOnce == (read = Len(log) /\ waiting = {}) => \A e \in 1..N : n[e] = 1
=============================================================================
