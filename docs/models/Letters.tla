------------------------------ MODULE Letters -------------------------------
(* Dead letters, redrive, holes, the ledger of the manifest, and healed elements.

   One flow of two stages reads one log. Each stage has one key, so every
   event moves every history. `next` is the state of the next flow, which reads
   the outputs as they are published. `Other` is another flow on the same log.

   The events in Bad can fail in one of the ways in Codes. Each batch draws the
   way, as if new code had been deployed before it or the failure were
   transient. Nothing is written before the whole batch is folded in memory.
   Then it is written step by step, and a crash keeps the steps written.      *)
EXTENDS Naturals, FiniteSets, Sequences

CONSTANTS
    N,        \* events, first delivered in the order 1..N
    Bad,      \* events that can fail
    Codes,    \* ways in which they fail: subset of {"map", "fold1", "map2", "fold2"}
    W,        \* positions that a history holds
    H,        \* healed positions that a state remembers
    Copies,   \* number of plain copies that the republisher sends, of events in Bad
    Redrives, \* number of dead letters redriven while the code may still fail
    Asserts,  \* number of unproven dead letters that an operator asserts meanwhile
    Crashes,  \* number of crashes
    Broken    \* "none", or the name of a broken variant

Events == 1..N
Least(S) == CHOOSE x \in S : \A y \in S : x <= y
Greatest(S) == CHOOSE x \in S : \A y \in S : x >= y

VARIABLES
    log,        \* the topic: [e: event, stage: that rejected the dead letter, or 0, at: offset of the rejection, or 0,
                \* said: the operator asserts that this stage has not folded it]
    crashes,    \* crashes so far
    s1, s2,     \* states on disk, by stage
    next,       \* state of the next flow
    man,        \* manifest on disk
    dlt,        \* dead letters in their topic: [e, stage, at, asks: it is unproven]
    unproven    \* <<stage, event>> rejected as UNPROVEN; stage 3 is the next flow

vars == <<log, crashes, s1, s2, next, man, dlt, unproven>>

Empty == [n |-> [e \in Events |-> 0],        \* how often each event is folded: the result to verify
          held |-> {}, floor |-> 0,          \* the history
          holes |-> {}, doubted |-> {},      \* dead letters; those whose event later stages may hold
          healed |-> {}, healedFloor |-> 0]  \* positions folded because of a redrive, a hole or a mark

(* dead: the ledger by <<stage, position>>; coords: the ledger by <<stage, offset>>; seen: the highest position read.
   Three fields are written before anything of a batch is published, and kept until an attempt at it commits:
   `begun`, the offset after the batch; `sure` and `unsure`, its rejected records, by <<stage, position>> or by
   offset.                                                                                                      *)
NoManifest == [next |-> 1, seen |-> 0, dead |-> {}, coords |-> {}, sure |-> {}, unsure |-> {}, begun |-> 1]
------------------------------------------------------------------------------
(* One state *)

Below(s, e) == e <= s.floor
Holds(s, e) == e \in s.held \/ e \in s.healed

(* Fold e and add it to the history. An event that the ledger lists, or that is healed, is also added to the healed
   positions, even above the floor: the rest of the batch may push it out of the history before stage 1 is persisted. *)
Fold(s, e, mark, kind) ==
    LET held   == IF Below(s, e) THEN s.held ELSE s.held \cup {e}
        gone   == IF Cardinality(held) > W THEN {Least(held)} ELSE {}
        listed == mark = "healed" \/ (kind \in {"letter", "asserted"} /\ e \notin s.holes)
        keeps  == /\ listed /\ Broken # "healed_not_remembered"
                  /\ ~(Broken = "healed_remembered_below_the_floor_only" /\ ~Below(s, e))
        healed == IF keeps THEN s.healed \cup {e} ELSE s.healed
        lost   == IF Cardinality(healed) > H THEN {Least(healed)} ELSE {}
    IN  [s EXCEPT !.n[e] = IF @ = 2 THEN 2 ELSE @ + 1,
                  !.held = held \ gone, !.floor = Greatest({@} \cup gone),
                  !.healed = healed \ lost, !.healedFloor = Greatest({@} \cup lost),
                  !.holes = @ \ {e}, !.doubted = @ \ {e}]

(* Judge e at a stage. kind: "plain"; "letter", redriven to the stage that rejected it, `at` the offset of the
   rejection; "asserted", the same, and the operator asserts that this stage has not folded it; "healed", certainly not
   passed on before; "retried", possibly passed on before. The result is "drop", "unproven", or the mark with which it
   is passed on after it is folded. An assertion says nothing about later stages.                                      *)
Judge(s, stage, e, kind, at, ledger, coords) ==
    IF Holds(s, e) THEN "drop"
    ELSE IF e \in s.holes THEN (IF e \in s.doubted THEN "retried" ELSE "healed")
    ELSE IF <<stage, e>> \in ledger THEN "healed"
    ELSE CASE kind = "plain" -> IF Below(s, e) THEN "drop" ELSE "plain"
           [] kind = "letter" ->
                (IF Broken = "letter_by_stage_and_flag" THEN "healed"
                 ELSE IF <<stage, at>> \notin coords THEN "drop"
                 ELSE IF ~Below(s, e) THEN "retried"
                 ELSE IF Broken = "coordinates_fold_below_the_floor" THEN "healed" ELSE "unproven")
           [] kind = "asserted" ->
                (IF <<stage, at>> \notin coords THEN "drop"
                 ELSE IF Broken = "asserted_for_later_stages" THEN "healed" ELSE "retried")
           [] kind = "healed" ->
                (IF Broken = "healed_by_window" /\ Below(s, e) THEN "drop"
                 ELSE IF e <= s.healedFloor /\ Below(s, e) /\ Broken # "healed_folds_below_its_floor" THEN "unproven"
                 ELSE "healed")
           [] kind = "retried" -> IF Below(s, e) THEN "unproven" ELSE "retried"
------------------------------------------------------------------------------
(* One batch, folded in memory. b is what it will write.
   sure: neither this stage nor a later one can have folded the event before. *)

(* A rejection at a stage is in doubt if an earlier attempt may have folded the event at that stage or a later one.
   It has not if that attempt also rejected the event, at this stage or an earlier one.                            *)
Doubt(o, e, stage) ==
    /\ Broken # "replay_taken_for_the_first_attempt"
    /\ o < man.begun
    /\ \A k \in 1..stage : <<k, e>> \notin man.sure

Letter(e, stage, at, asks) == [e |-> e, stage |-> stage, at |-> at, asks |-> asks]

Keyless(b, stage, o, e, sure) ==
    [b EXCEPT !.dlt = @ \cup {Letter(e, stage, o, FALSE)},
              !.dead = IF sure THEN @ \cup {<<stage, e>>} ELSE @,
              !.coords = IF sure THEN @ ELSE @ \cup {<<stage, o>>},
              !.sure = IF sure THEN @ \cup {<<stage, e>>} ELSE @,
              !.unsure = IF sure THEN @ ELSE @ \cup {<<stage, o>>}]

InFold(b, stage, o, e, sure) ==
    [b EXCEPT !.dlt = @ \cup {Letter(e, stage, o, FALSE)},
              !.sure = IF sure THEN @ \cup {<<stage, e>>} ELSE @,
              !.unsure = IF sure THEN @ ELSE @ \cup {<<stage, o>>}]

(* An unproven event stays listed where it was rejected first. *)
Unproven(b, stage, e, place) ==
    [b EXCEPT !.unproven = @ \cup {<<stage, e>>}, !.dlt = @ \cup {Letter(e, stage, place, TRUE)},
              !.coords = @ \cup {<<stage, place>>}, !.unsure = @ \cup {<<stage, place>>}]

(* An event that is folded is no longer listed. *)
Done(b, stage, e, place) == [b EXCEPT !.dead = @ \ {<<stage, e>>}, !.coords = @ \ {<<stage, place>>}]

(* The ledger entry of an event that the state holds is no longer needed. *)
Settled(b, s, stage, e) == IF Holds(s, e) THEN [b EXCEPT !.dead = @ \ {<<stage, e>>}] ELSE b

Stage2(b, o, e, kind, at, how) ==
    LET mark == Judge(b.s2, 2, e, kind, at, b.dead, b.coords) IN
    IF mark = "drop" THEN Settled(b, b.s2, 2, e)
    ELSE IF mark = "unproven" THEN Unproven(b, 2, e, IF at > 0 THEN at ELSE o)
    ELSE IF e \in Bad /\ how = "fold2"
         THEN InFold([b EXCEPT !.s2.holes = @ \cup {e}], 2, o, e, TRUE)
    ELSE [Done(b, 2, e, at) EXCEPT !.s2 = Fold(@, e, mark, kind), !.out = Append(@, <<e, mark>>)]

Stage1(b, o, e, kind, at, how, first) ==
    IF e \in Bad /\ how = "map"
    THEN Keyless(b, 1, o, e, (first /\ ~Doubt(o, e, 1)) \/ <<1, e>> \in b.dead)
    ELSE LET judged == Judge(b.s1, 1, e, kind, at, b.dead, b.coords)
             mark == IF judged = "plain" /\ ~first /\ Broken # "late_unmarked" THEN "retried" ELSE judged IN
    IF mark = "drop" THEN Settled(b, b.s1, 1, e)
    ELSE IF mark = "unproven" THEN Unproven(b, 1, e, IF at > 0 THEN at ELSE o)
    ELSE IF e \in Bad /\ how = "fold1"
         THEN (IF Doubt(o, e, 1) \/ mark = "retried"
               THEN InFold([b EXCEPT !.s1.holes = @ \cup {e}, !.s1.doubted = @ \cup {e}], 1, o, e, FALSE)
               ELSE InFold([b EXCEPT !.s1.holes = @ \cup {e}], 1, o, e, TRUE))
    ELSE LET folded == [Done(b, 1, e, at) EXCEPT !.s1 = Fold(@, e, mark, kind)] IN
         IF e \in Bad /\ how = "map2"
         THEN Keyless(folded, 2, o, e, mark = "healed" \/ (first /\ ~Doubt(o, e, 2)))
         ELSE Stage2(folded, o, e, mark, 0, how)

(* An event above everything read before is a first delivery. *)
First(L, o) == L[o].stage = 0 /\ L[o].e > man.seen /\ \A p \in man.next..(o - 1) : L[p].e < L[o].e

RECURSIVE Batch(_, _, _, _)
Batch(b, L, todo, how) ==    \* in the order of positions
    IF todo = {} THEN b
    ELSE LET o == CHOOSE x \in todo : \A y \in todo : L[x].e < L[y].e \/ (L[x].e = L[y].e /\ x <= y)
             r == L[o]
             kind == IF r.said THEN "asserted" ELSE IF r.stage > 0 THEN "letter" ELSE IF \E k \in 1..2 : <<k, o>> \in b.coords THEN "retried" ELSE "plain"
         IN  Batch(IF r.stage = 2 THEN Stage2(b, o, r.e, kind, r.at, how)
                   ELSE Stage1(b, o, r.e, kind, r.at, how, First(L, o)), L, todo \ {o}, how)

Loaded == [s1 |-> s1, s2 |-> s2, dead |-> man.dead \cup man.sure, coords |-> man.coords \cup man.unsure,
           dlt |-> {}, sure |-> {}, unsure |-> {}, unproven |-> {}, out |-> <<>>]

(* The next flow folds by its own history. It rejects an event with a mark below its floor instead of dropping it. *)
RECURSIVE Reads(_, _)
Reads(s, out) ==
    IF out = <<>> THEN s
    ELSE LET e == out[1][1] IN
         Reads(IF Holds(s, e) \/ Below(s, e) THEN s ELSE Fold(s, e, "plain", "plain"), Tail(out))
RECURSIVE Refused(_, _)
Refused(s, out) ==
    IF out = <<>> \/ Broken = "mark_not_forwarded" THEN {}
    ELSE LET e == out[1][1] IN
         (IF out[1][2] # "plain" /\ Below(s, e) /\ ~Holds(s, e) THEN {<<3, e>>} ELSE {})
         \cup Refused(Reads(s, <<out[1]>>), Tail(out))
------------------------------------------------------------------------------
Plain(e) == [e |-> e, stage |-> 0, at |-> 0, said |-> FALSE]
Redriven(d) == [e |-> d.e, stage |-> d.stage, at |-> d.at, said |-> d.asks]

Init ==
    /\ log = [e \in Events |-> Plain(e)] /\ crashes = 0
    /\ s1 = Empty /\ s2 = Empty /\ next = Empty
    /\ man = NoManifest /\ dlt = {} /\ unproven = {}

Came(letters) == Cardinality({o \in (N + 1)..Len(log) : (log[o].stage > 0) = letters /\ ~log[o].said})
Asserted == {o \in 1..Len(log) : log[o].said}

Copy ==
    /\ Came(FALSE) < Copies
    /\ \E e \in Bad : log' = Append(log, Plain(e))
    /\ UNCHANGED <<crashes, s1, s2, next, man, dlt, unproven>>

Redrive ==
    /\ Came(TRUE) < Redrives
    /\ \E d \in dlt : ~d.asks /\ log' = Append(log, Redriven(d))
    /\ UNCHANGED <<crashes, s1, s2, next, man, dlt, unproven>>

(* The operator knows what a stage has folded, and redrives an event once, until it is read. *)
Missing(one, two, d) == (IF d.stage = 1 THEN one ELSE two).n[d.e] = 0

Awaited(e) == \E o \in Asserted : log[o].e = e /\ o >= man.next

Vouch ==
    /\ Cardinality(Asserted) < Asserts
    /\ \E d \in {x \in dlt : x.asks /\ Missing(s1, s2, x) /\ ~Awaited(x.e)} : log' = Append(log, Redriven(d))
    /\ UNCHANGED <<crashes, s1, s2, next, man, dlt, unproven>>

(* One attempt at a batch. It is folded in memory and then written in five steps, `steps` of which are taken:
   1  its dead letters are sent, and its end and its rejected records are written to the manifest;
   2  its outputs are published;
   3  stage 2 is persisted;
   4  stage 1 is persisted;
   5  the manifest commits it.
   Fewer than five: the run crashed, or a newer run has fenced it.                                              *)
Attempt(to, how, steps) ==
    LET b == Batch(Loaded, log, man.next..(to - 1), how)
        begun == Greatest({man.begun, to})
        settled == [man EXCEPT !.dead = b.dead, !.coords = b.coords]
        ahead == IF Broken = "deaths_not_written_ahead" THEN [man EXCEPT !.begun = begun]
                 ELSE [man EXCEPT !.begun = begun, !.sure = @ \cup b.sure, !.unsure = @ \cup b.unsure]
    IN  /\ dlt' = dlt \cup b.dlt
        /\ unproven' = unproven \cup b.unproven \cup (IF steps >= 2 THEN Refused(next, b.out) ELSE {})
        /\ next' = IF steps >= 2 THEN Reads(next, b.out) ELSE next
        /\ s2' = IF steps >= 3 THEN b.s2 ELSE s2
        /\ s1' = IF steps >= 4 THEN b.s1 ELSE s1
        /\ man' = IF steps = 5
                    THEN [next |-> to, seen |-> Greatest({log[o].e : o \in 1..(to - 1)}),
                          dead |-> b.dead, coords |-> b.coords, sure |-> {}, unsure |-> {}, begun |-> begun]
                  ELSE IF Broken = "ledger_settled_before_the_states" /\ steps >= 3 THEN settled
                  ELSE ahead

Commit == /\ \E to \in (man.next + 1)..(Len(log) + 1), how \in Codes \cup {"ok"} : Attempt(to, how, 5)
          /\ UNCHANGED <<log, crashes>>

Crash == /\ crashes < Crashes /\ crashes' = crashes + 1
         /\ \E to \in (man.next + 1)..(Len(log) + 1), how \in Codes \cup {"ok"}, steps \in 1..4 : Attempt(to, how, steps)
         /\ UNCHANGED log

Next == Copy \/ Redrive \/ Vouch \/ Commit \/ Crash

Spec == Init /\ [][Next]_vars
------------------------------------------------------------------------------
(* Above: at most once. *)
Above == INSTANCE Once WITH times <- <<s1.n, s2.n, next.n>>

(* Finally exactly once: from any state on disk, a run of fixed code that reads the log to its end, and then every
   dead letter one by one, has folded each event in each state, or has rejected it as unproven.                   *)
RECURSIVE WithLetters(_, _)
WithLetters(L, D) == IF D = {} THEN L ELSE LET d == CHOOSE x \in D : TRUE IN WithLetters(Append(L, Redriven(d)), D \ {d})

RECURSIVE OneByOne(_, _, _)
OneByOne(b, L, o) == IF o > Len(L) THEN b ELSE OneByOne(Batch(b, L, {o}, "ok"), L, o + 1)

Mended == LET L == WithLetters(log, {d \in dlt : ~d.asks}) IN OneByOne(Batch(Loaded, L, man.next..Len(log), "ok"), L, Len(log) + 1)

ExactOrUnproven ==
    LET b     == Mended
        after == Reads(next, b.out)
        said  == unproven \cup b.unproven \cup Refused(next, b.out)
    IN  \A e \in Events :
          /\ b.s1.n[e] = 1 \/ (b.s1.n[e] = 0 /\ <<1, e>> \in said)
          /\ b.s2.n[e] = 1 \/ (b.s2.n[e] = 0 /\ {<<1, e>>, <<2, e>>} \cap said # {})
          /\ after.n[e] = 1 \/ (after.n[e] = 0 /\ {<<1, e>>, <<2, e>>, <<3, e>>} \cap said # {})

(* An operator who knows what each stage has folded gets every event folded once at both stages: unproven dead letters
   of stage 1 are asserted first, then those of stage 2.                                                             *)
RECURSIVE Asserting(_, _)
Asserting(b, D) ==
    IF D = {} THEN b
    ELSE LET d == CHOOSE x \in D : \A y \in D : x.stage <= y.stage
             o == Len(log) + Cardinality(dlt) + d.e     \* anywhere behind what was read
             then == IF ~Missing(b.s1, b.s2, d) THEN b
                      ELSE IF d.stage = 2 THEN Stage2(b, o, d.e, "asserted", d.at, "ok")
                      ELSE Stage1(b, o, d.e, "asserted", d.at, "ok", FALSE)
             new == {x \in then.dlt \ b.dlt : x.asks}
         IN  Asserting(then, (D \ {d}) \cup new)

ExactWhenAsserted ==
    LET b == Mended
        a == Asserting(b, {d \in dlt \cup b.dlt : d.asks})
    IN  \A e \in Events : a.s1.n[e] = 1 /\ a.s2.n[e] = 1

(* Nothing is unproven in this flow without a crash, a plain copy, or more healed positions than a state remembers. *)
ExactWithoutCrash ==
    (crashes = 0 /\ Came(FALSE) = 0 /\ Cardinality(Bad) <= H) =>
      \A e \in Events : {<<1, e>>, <<2, e>>} \cap (unproven \cup Mended.unproven) = {}

(* Another flow on this log, a new generation, an audit: the dead letters are not its own. *)
RECURSIVE Other(_, _)
Other(s, o) ==
    IF o > Len(log) THEN s
    ELSE LET mark == Judge(s, 1, log[o].e, IF log[o].stage = 0 THEN "plain" ELSE "letter", log[o].at, {}, {})
         IN  Other(IF mark \in {"drop", "unproven"} THEN s ELSE Fold(s, log[o].e, mark, "plain"), o + 1)

OtherFlowExact == LET s == Other(Empty, 1) IN \A e \in Events : s.n[e] = 1
=============================================================================
