------------------------------ MODULE Redriven ------------------------------
(* What a dead letter of a later stage stands for when it comes back.

   Stage 1 counts the events 1..N and puts each into two windows. Some windows
   are closed for an event, and it is not passed on there. What stage 1 makes
   of an event depends on its count, and it passes on the counts in Emits only.
   While the code is broken, stage 2 rejects the events in Bad. After it is
   fixed, their dead letters are redriven, in any order and any number of
   times, while further events arrive. In the end stage 2 has what it would
   have if the code had never been broken.                                   *)
EXTENDS Naturals, FiniteSets

CONSTANTS
    N,       \* events
    Bad,     \* events that stage 2 rejects while its code is broken
    Closed,  \* <<event, window>>: closed when the event arrives
    Emits,   \* counts of stage 1 that it passes on
    Broken   \* "none", or the name of a broken variant

Windows == 1..2

VARIABLES
    count,  \* events that stage 1 has folded, which is its state
    kept,   \* event -> state of stage 1 from before it, plus 1; 0: it is not kept
    ledger, \* <<event, window>> that stage 2 has rejected and not folded since
    dead,   \* dead letters: events
    fixed,  \* the code of stage 2 is fixed
    got     \* <<event, window, count>> -> times folded by stage 2

vars == <<count, kept, ledger, dead, fixed, got>>

Open(e) == {w \in Windows : <<e, w>> \notin Closed}

(* What stage 1 passes on of event e if e is the n-th event. *)
Passed(e, n) == IF n \in Emits THEN {<<e, w, n>> : w \in Open(e)} ELSE {}

Init ==
    /\ count = 0 /\ fixed = FALSE
    /\ kept = [e \in 1..N |-> 0] /\ ledger = {} /\ dead = {}
    /\ got = [x \in (1..N) \X Windows \X (1..N) |-> 0]

With(bag, items) == [x \in DOMAIN bag |-> IF x \in items THEN bag[x] + 1 ELSE bag[x]]

Read ==
    /\ count < N /\ count' = count + 1
    /\ LET e     == count + 1
           items == Passed(e, count + 1)
           dies  == e \in Bad /\ ~fixed /\ items # {}
           lists == dies /\ ~(Broken = "closed_item_settles" /\ Open(e) # Windows)
       IN  /\ got' = IF dies THEN got ELSE With(got, items)
           /\ dead' = IF dies THEN dead \cup {e} ELSE dead
           /\ ledger' = IF lists THEN ledger \cup {<<e, w>> : w \in Open(e)} ELSE ledger
           /\ kept' = [x \in 1..N |->
                         IF dies /\ x = e THEN e
                         ELSE IF Broken = "kept_until_the_next_write" THEN 0 ELSE kept[x]]
    /\ UNCHANGED fixed

Fix == ~fixed /\ fixed' = TRUE /\ UNCHANGED <<count, kept, ledger, dead, got>>

Listed(e) == {w \in Windows : <<e, w>> \in ledger}

(* What stage 1 passes on again of a redriven event, and what of it stage 2 folds. *)
Again(e) ==
    LET n       == IF Broken = "state_as_it_is_now" \/ kept[e] = 0 THEN count ELSE kept[e]
        windows == IF Broken = "whole_record" THEN Windows ELSE Listed(e)
        folds   == Listed(e) # {} \/ Broken = "letters_are_not_settled"
    IN  IF n \in Emits /\ folds THEN {<<e, w, n>> : w \in IF Broken = "letters_are_not_settled" THEN Open(e) ELSE windows} ELSE {}

Redrive ==
    /\ \E e \in dead :
         /\ fixed
         /\ got' = [x \in DOMAIN got |-> IF x \in Again(e) /\ got[x] < 2 THEN got[x] + 1 ELSE got[x]]
         /\ ledger' = {x \in ledger : x[1] # e}
    /\ UNCHANGED <<count, kept, dead, fixed>>

Next == Read \/ Fix \/ Redrive

Spec == Init /\ [][Next]_vars
------------------------------------------------------------------------------
(* Stage 2 has what it would have of the events so far, if every dead letter that waits came back now. *)
NeverBroken == UNION {Passed(e, e) : e \in 1..count}

Waiting == {e \in dead : Listed(e) # {}}

AsNeverBroken ==
    \A x \in DOMAIN got :
      got[x] + Cardinality({e \in Waiting : x \in Again(e)}) = IF x \in NeverBroken THEN 1 ELSE 0
=============================================================================
