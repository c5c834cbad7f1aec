----------------------------- MODULE RoundRobin -----------------------------
(* An intermediate topic whose records have no key: a republisher distributes
   them over the partitions arbitrarily, and a copy may take another partition
   than the first delivery.

   The stage's key differs from the record's, so a lane includes the partition
   of the intermediate topic and has its own history. A position counts as held
   if any lane of the group holds it. The republisher crashes once before it
   commits, sends its last R records again, and continues. The flow reads the
   partitions in any interleaving, so up to Ahead new records are read before
   the last copy. Every event is folded once if a history holds R + Ahead
   positions, and not with one less.                                           *)
EXTENDS Naturals, Sequences, FiniteSets

CONSTANTS
    R,      \* maximum number of records sent again
    Ahead,  \* maximum number of records sent after them
    W,      \* positions that the history of a lane holds
    Broken  \* "none", or the name of a broken variant

N == R + Ahead + 1
Partitions == 1..2
Greatest(S) == CHOOSE x \in S : \A y \in S : x >= y

VARIABLES
    log,    \* partition of the intermediate topic -> root offsets in it
    sent,   \* root offsets sent once
    again,  \* next root offset to send again; 0: no crash yet; N + 1: all are sent again
    read,   \* how far each partition is read
    n,      \* root offset -> times folded
    lanes   \* partition -> [held, floor]

vars == <<log, sent, again, read, n, lanes>>

Init ==
    /\ log = [p \in Partitions |-> <<>>] /\ sent = 0 /\ again = 0
    /\ read = [p \in Partitions |-> 0]
    /\ n = [e \in 1..N |-> 0]
    /\ lanes = [p \in Partitions |-> [held |-> {}, floor |-> 0]]

To(p, e) == log' = [log EXCEPT ![p] = Append(@, e)]

Send ==
    /\ again \in {0, N + 1} /\ sent < N /\ sent' = sent + 1
    /\ again = 0 => sent < N - Ahead
    /\ \E p \in Partitions : To(p, sent + 1)
    /\ UNCHANGED <<again, read, n, lanes>>

Die ==
    /\ again = 0 /\ sent = N - Ahead
    /\ again' = sent - R + 1
    /\ UNCHANGED <<log, sent, read, n, lanes>>

SendAgain ==
    /\ again \in 1..N
    /\ \E p \in Partitions : To(p, again)
    /\ again' = IF again = sent THEN N + 1 ELSE again + 1
    /\ UNCHANGED <<sent, read, n, lanes>>

HeldAnywhere(p, e) ==
    IF Broken = "lanes_by_themselves" THEN e \in lanes[p].held ELSE \E q \in Partitions : e \in lanes[q].held

Read ==
    /\ \E p \in Partitions :
         /\ read[p] < Len(log[p]) /\ read' = [read EXCEPT ![p] = @ + 1]
         /\ LET e     == log[p][read[p] + 1]
                folds == ~HeldAnywhere(p, e) /\ e > lanes[p].floor
                every == lanes[p].held \cup {e}
                keep  == {x \in every : Cardinality({y \in every : y > x}) < W}
            IN  IF folds
                THEN /\ n' = [n EXCEPT ![e] = @ + 1]
                     /\ lanes' = [lanes EXCEPT ![p] = [held |-> keep, floor |-> Greatest({@.floor} \cup (every \ keep))]]
                ELSE UNCHANGED <<n, lanes>>
    /\ UNCHANGED <<log, sent, again>>

Next == Send \/ Die \/ SendAgain \/ Read

Spec == Init /\ [][Next]_vars
------------------------------------------------------------------------------
Above == INSTANCE Once WITH times <- <<n>>

AllRead == sent = N /\ again = N + 1 /\ \A p \in Partitions : read[p] = Len(log[p])

FinallyOnce == AllRead => \A e \in 1..N : n[e] = 1
=============================================================================
