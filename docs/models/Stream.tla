------------------------------- MODULE Stream -------------------------------
(* A flow that Spark Structured Streaming calls with its batches.

   Spark writes the range of a batch to its checkpoint, calls the flow, and then
   commits the batch in the checkpoint. A restart repeats a batch that is not
   committed. But it may find another checkpoint than the last run left, and a
   driver that was taken for dead may come back. So the flow trusts positions
   alone: the offsets of the rows, and the next offset of each partition in the
   manifest.

   A batch is read and folded in memory. Then its states are written, in any
   order, and the manifest after them. Every write is fenced by the epoch. A
   driver may die after any step.                                             *)
EXTENDS Naturals, FiniteSets

CONSTANTS
    P,           \* partitions
    N,           \* offsets in each
    K,           \* keys in each
    W,           \* positions that a history holds
    Markers,     \* offsets without a record, such as transaction markers
    Source,      \* "rows": a batch has the records; "ranges": it has offsets, and workers read the records
    Checkpoints, \* what a restart finds: subset of {"kept", "uncommitted", "older", "earliest", "latest", "other"}
    Restarts,    \* number of restarts
    World,       \* what else happens: subset of {"produce", "frozen", "leaves", "delete", "compact", "recreate", "accept"}
    Later,       \* records that follow in each partition after the end that is computed
    Watch,       \* whether Spark's position is also compared with the manifest when there is no batch
    Broken       \* "none", or the name of a broken variant

Partitions == 1..P
Records == Partitions \X (0..N)
Keys == Partitions \X (0..(K - 1))
KeyOf(r) == <<r[1], r[2] % K>>
Anywhere == [Partitions -> 0..N]
Min(left, right) == IF left < right THEN left ELSE right
Max(left, right) == IF left > right THEN left ELSE right
Least(S) == CHOOSE x \in S : \A y \in S : x <= y
Greatest(S) == CHOOSE x \in S : \A y \in S : x >= y

VARIABLES
    log,      \* Kafka: [topic: 1, or 2 after it was created again, low, end: by partition, gone: records compacted]
    ckpt,     \* Spark's checkpoint: [start, end: range of the last batch, id, done: it is committed]
    n,        \* record -> times folded
    history,  \* key -> [held, floor]: positions that its state remembers; those below the floor are dropped
    man,      \* manifest: [next: offset by partition, lost: records accepted as lost, id: of the last batch]
    epoch,    \* of the stores
    driver,   \* 1: the current driver, 2: one that was taken for dead
    restarts  \* restarts so far

vars == <<log, ckpt, n, history, man, epoch, driver, restarts>>

Zero == [p \in Partitions |-> 0]
NoRows == [p \in Partitions |-> {}]
NoHistory == [held |-> {}, floor |-> 0]
Nothing == [n |-> [r \in Records |-> 0], history |-> [k \in Keys |-> NoHistory]]
------------------------------------------------------------------------------
(* Kafka *)

Holds(p, o) == o >= log.low[p] /\ o < log.end[p] /\ o \notin Markers /\ <<p, o>> \notin log.gone

Produce ==
    /\ \E p \in Partitions : log.end[p] < N /\ log' = [log EXCEPT !.end[p] = @ + 1]
    /\ UNCHANGED <<ckpt, n, history, man, epoch, driver, restarts>>

Delete ==
    /\ "delete" \in World
    /\ \E p \in Partitions : \E o \in (log.low[p] + 1)..log.end[p] : log' = [log EXCEPT !.low[p] = o]
    /\ UNCHANGED <<ckpt, n, history, man, epoch, driver, restarts>>

Compact ==
    /\ "compact" \in World
    /\ \E r \in Records : Holds(r[1], r[2]) /\ log' = [log EXCEPT !.gone = @ \cup {r}]
    /\ UNCHANGED <<ckpt, n, history, man, epoch, driver, restarts>>

Recreate ==
    /\ "recreate" \in World /\ log.topic = 1 /\ man.next # Zero
    /\ log' = [topic |-> 2, low |-> Zero, end |-> Zero, gone |-> {}]
    /\ UNCHANGED <<ckpt, n, history, man, epoch, driver, restarts>>
------------------------------------------------------------------------------
(* The rule, for a batch b. It has rows: offsets by partition, since neither their order nor copies matter; next: the
   manifest's; read: how far it was read; end: of Spark's range; foreign: rows are of topic 2; asked: what the broker said
   before they were read.                                                                                              *)

New(b, p) == {o \in b.rows[p] : o >= b.next[p]}

(* What is folded. *)
Taken(b, p) ==
    CASE Broken = "checkpoint_believed" -> b.rows[p]
      [] Broken = "overlap_folded_whole" -> IF New(b, p) = {} THEN {} ELSE b.rows[p]
      [] Broken = "overlap_dropped_whole" -> IF New(b, p) = b.rows[p] THEN b.rows[p] ELSE {}
      [] OTHER -> New(b, p)

(* Where the manifest continues: after the last row, or where workers have read to. *)
To(b, p) ==
    IF Source = "ranges" THEN Max(b.next[p], IF Broken = "range_beyond_the_log" THEN b.end[p] ELSE b.read[p])
    ELSE IF Broken = "moves_to_sparks_end" THEN Max(b.next[p], b.end[p])
    ELSE IF Taken(b, p) = {} THEN b.next[p]
    ELSE Greatest(Taken(b, p)) + 1

(* Offsets that the manifest would pass without a row. *)
Missing(b, p) ==
    LET all == {o \in b.next[p]..(To(b, p) - 1) : o \notin b.rows[p] /\ <<p, o>> \notin man.lost}
        new == New(b, p)
    IN  CASE Broken \in {"checkpoint_believed", "gap_accepted", "range_beyond_the_log"} -> {}
          [] Broken = "first_row_checked" -> {o \in all : \A x \in new : o < x}
          [] Broken = "moves_to_sparks_end" -> {o \in all : \E x \in new : o < x}
          [] OTHER -> all

(* Those that the broker does not show to be without a record. It is asked after the rows are read. *)
Skipped(b, p) ==
    LET low == IF Broken = "broker_asked_before_the_rows" THEN b.asked.low[p] ELSE log.low[p]
    IN  {o \in Missing(b, p) : Holds(p, o) \/ (o < low /\ Broken # "deleted_taken_for_empty")}

(* The manifest has the id of topic 1. *)
Recreated(b) ==
    CASE Broken = "topic_id_not_compared" -> FALSE
      [] Broken = "topic_id_asked_before_the_rows" -> b.asked.topic = 2
      [] OTHER -> log.topic = 2

Refuses(b) == Recreated(b) \/ \E p \in Partitions : Skipped(b, p) # {}

Remember(h, offsets) ==
    LET every == h.held \cup offsets
        keep  == {o \in every : Cardinality({x \in every : x > o}) < W}
    IN  [held |-> keep, floor |-> Greatest({h.floor} \cup {o + 1 : o \in every \ keep})]

(* s, [n, history], after the batch. A state drops what its history holds, and what is below the floor. *)
Fold(s, b) ==
    LET taken == [p \in Partitions |-> Taken(b, p)]
        new   == {r \in Records : /\ r[2] \in taken[r[1]]
                                  /\ r[2] \notin s.history[KeyOf(r)].held /\ r[2] >= s.history[KeyOf(r)].floor}
    IN  [n |-> [r \in Records |-> IF r \notin new THEN s.n[r] ELSE IF b.foreign THEN 2 ELSE Min(s.n[r] + 1, 2)],
         history |-> [k \in Keys |-> Remember(s.history[k], {r[2] : r \in {x \in new : KeyOf(x) = k}})]]
------------------------------------------------------------------------------
(* Checkpoints and drivers *)

At(offsets) == [start |-> offsets, end |-> offsets, id |-> 0, done |-> TRUE]

Found(how) ==
    CASE how = "kept" -> {ckpt}
      [] how = "uncommitted" -> {[ckpt EXCEPT !.done = FALSE]}
      [] how = "older" -> {At(offsets) : offsets \in {f \in Anywhere : \A p \in Partitions : f[p] <= ckpt.start[p]}}
      [] how = "earliest" -> {At(log.low)}
      [] how = "latest" -> {At(log.end)}
      [] how = "other" -> {At(offsets) : offsets \in Anywhere}
                          \cup {[At(Zero) EXCEPT !.end = [p \in Partitions |-> N], !.done = FALSE]}

(* pc: "new", "idle", "reading", "folded" in memory, "written", "refused", "gone". start: where the batch, or the next one,
   begins. from: Spark may have skipped what is before it. to, todo, new: the manifest's next offset after the batch, the
   states to write, and what they will be.                                                                             *)
Idle(start) ==
    [pc |-> "idle", epoch |-> 0, id |-> 1, from |-> start, start |-> start, end |-> start, next |-> Zero, read |-> Zero,
     rows |-> NoRows, foreign |-> FALSE, asked |-> [low |-> Zero, topic |-> 1], to |-> Zero, todo |-> {}, new |-> Nothing,
     wrote |-> FALSE, lenient |-> FALSE]

Gone == [Idle(Zero) EXCEPT !.pc = "gone"]

(* Ids are counted only where they matter. *)
Id(x) == IF Broken = "batch_id_believed" \/ "frozen" \in World THEN x ELSE 1

Driver(c) ==
    LET again == ~c.done /\ c.start # c.end
    IN  [Idle(IF again THEN c.start ELSE c.end) EXCEPT !.pc = "new", !.end = c.end,
           !.id = Id(IF again THEN c.id ELSE c.id + 1),
           !.next = IF Broken = "manifest_read_before_the_fence" THEN man.next ELSE Zero]

Unknown == N + 1    \* broken variant: the manifest does not have the start of a partition

Init ==
    /\ log = [topic |-> 1, low |-> Zero, end |-> IF "produce" \in World THEN Zero ELSE [p \in Partitions |-> N], gone |-> {}]
    /\ ckpt = At(Zero)
    /\ n = Nothing.n /\ history = Nothing.history
    /\ man = [next |-> IF Broken = "start_with_the_first_rows" THEN [p \in Partitions |-> Unknown] ELSE Zero,
              lost |-> {}, id |-> 0]
    /\ epoch = 0 /\ restarts = 0
    /\ driver = <<Driver(At(Zero)), Gone>>

Restart ==
    /\ restarts < Restarts /\ restarts' = restarts + 1
    /\ \E how \in Checkpoints : \E c \in Found(how) :
         /\ ckpt' = c
         /\ \/ driver' = <<Driver(c), driver[2]>>
            \/ "frozen" \in World /\ driver[2].pc = "gone" /\ driver' = <<Driver(c), driver[1]>>
    /\ UNCHANGED <<log, n, history, man, epoch>>
------------------------------------------------------------------------------
(* The steps of a driver *)

(* Rows are read from the start of Spark's range. Workers read from the manifest's next offset. *)
Reading(d) ==
    [d EXCEPT !.pc = "reading", !.rows = NoRows, !.foreign = FALSE, !.wrote = FALSE,
       !.read = IF Source = "ranges" /\ Broken # "ranges_from_the_checkpoint" THEN d.next ELSE d.start,
       !.asked = IF Broken \in {"broker_asked_before_the_rows", "topic_id_asked_before_the_rows"}
                 THEN [low |-> log.low, topic |-> log.topic] ELSE [low |-> Zero, topic |-> 1]]

(* A run takes the epoch, and then reads the manifest. *)
Taking == IF Broken = "epoch_of_the_process" THEN 1 ELSE epoch + 1

Began(d) ==
    LET ready == [d EXCEPT !.pc = "idle", !.epoch = Taking,
                    !.next = IF Broken = "manifest_read_before_the_fence" THEN d.next ELSE man.next]
    IN  IF d.start = d.end THEN ready ELSE Reading(ready)

Begin(i) ==
    /\ driver[i].pc = "new" /\ epoch' = Taking
    /\ driver' = [driver EXCEPT ![i] = Began(driver[i])]
    /\ UNCHANGED <<log, ckpt, n, history, man, restarts>>

(* Spark takes the range of the next batch. If the log ends before the range begins, Spark resumes at the log's end. *)
Plan(i) ==
    /\ driver[i].pc = "idle"
    /\ \E end \in Anywhere :
         /\ end # driver[i].start
         /\ \A p \in Partitions : \/ end[p] >= driver[i].start[p] /\ end[p] <= log.end[p]
                                  \/ driver[i].start[p] > log.end[p] /\ end[p] = log.end[p]
         /\ driver' = [driver EXCEPT ![i] = Reading([driver[i] EXCEPT !.end = end])]
         /\ ckpt' = [start |-> driver[i].start, end |-> end, id |-> driver[i].id, done |-> FALSE]
    /\ UNCHANGED <<log, n, history, man, epoch, restarts>>

(* There is no next batch, but Spark's position is compared. *)
Behind(d) == {r \in Records : /\ r[2] >= d.next[r[1]] /\ r[2] < d.start[r[1]] /\ r \notin man.lost
                              /\ Holds(r[1], r[2]) \/ r[2] < log.low[r[1]]}

Look(i) ==
    /\ Watch /\ driver[i].pc = "idle" /\ Behind(driver[i]) # {}
    /\ driver' = [driver EXCEPT ![i] = [@ EXCEPT !.pc = "refused"]]
    /\ UNCHANGED <<log, ckpt, n, history, man, epoch, restarts>>

(* Some of the batch is read. With failOnDataLoss=false, what is deleted meanwhile and what is beyond the log is left out. *)
Until(d) == [p \in Partitions |-> Max(d.read[p], Min(d.end[p], log.end[p]))]

Parts(d) ==
    IF {"delete", "recreate"} \cap World = {} THEN {Until(d)}
    ELSE {f \in Anywhere : f # d.read /\ \A p \in Partitions : f[p] >= d.read[p] /\ f[p] <= Until(d)[p]}

Read(i) ==
    /\ driver[i].pc = "reading" /\ Until(driver[i]) # driver[i].read
    /\ \E part \in Parts(driver[i]) :
         driver' = [driver EXCEPT ![i] = [@ EXCEPT !.read = part, !.foreign = @ \/ log.topic = 2,
                      !.rows = [p \in Partitions |-> @[p] \cup {o \in driver[i].read[p]..(part[p] - 1) : Holds(p, o)}]]]
    /\ UNCHANGED <<log, ckpt, n, history, man, epoch, restarts>>

LateCheck == Broken \in {"gap_after_the_states", "partition_by_partition"}
ReadTwice == Broken = "checked_in_another_read"

Started(b) ==
    IF Broken # "start_with_the_first_rows" THEN b
    ELSE [b EXCEPT !.next = [p \in Partitions |-> IF @[p] = Unknown /\ b.rows[p] # {} THEN Least(b.rows[p]) ELSE @[p]]]

ReadAgain(d) == IF ReadTwice THEN [d EXCEPT !.rows = [p \in Partitions |-> {o \in @[p] : o >= log.low[p]}]] ELSE d

Ends(b) ==
    IF Broken # "ends_at_the_last_arrival" THEN {[p \in Partitions |-> To(b, p)]}
    ELSE {f \in Anywhere : \A p \in Partitions :
            IF New(b, p) = {} THEN f[p] = b.next[p] ELSE \E o \in New(b, p) : f[p] = o + 1}

(* How a driver continues that has read batch b. *)
Judged(b) ==
    LET s    == Fold([n |-> n, history |-> history], b)
        todo == {k \in Keys : s.history[k] # history[k] \/ \E r \in Records : KeyOf(r) = k /\ s.n[r] # n[r]}
    IN  IF Broken = "batch_id_believed" /\ b.id <= man.id THEN {[b EXCEPT !.pc = "written"]}
        ELSE IF Refuses(b) /\ ~LateCheck /\ ~ReadTwice /\ ~b.lenient THEN {[b EXCEPT !.pc = "refused"]}
        ELSE {[b EXCEPT !.pc = IF todo = {} /\ to = b.next THEN "written" ELSE "folded", !.to = to, !.todo = todo, !.new = s]
              : to \in Ends(b)}

Judge(i) ==
    /\ driver[i].pc = (IF ReadTwice THEN "checked" ELSE "reading") /\ Until(driver[i]) = driver[i].read
    /\ Broken = "fence_at_the_start_of_a_batch" => driver[i].epoch = epoch
    /\ \E d \in Judged(Started(ReadAgain(driver[i]))) : driver' = [driver EXCEPT ![i] = d]
    /\ UNCHANGED <<log, ckpt, n, history, man, epoch, restarts>>

Fenced(d) == d.epoch # epoch /\ Broken # "fence_at_the_start_of_a_batch"

(* One state is written. *)
Write(i) ==
    /\ driver[i].pc = (IF Broken = "manifest_before_the_states" THEN "noted" ELSE "folded") /\ ~Fenced(driver[i])
    /\ \E k \in driver[i].todo :
         /\ Broken = "partition_by_partition" => Skipped(driver[i], k[1]) = {}
         /\ n' = [r \in Records |-> IF KeyOf(r) = k THEN driver[i].new.n[r] ELSE n[r]]
         /\ history' = [history EXCEPT ![k] = driver[i].new.history[k]]
         /\ driver' = [driver EXCEPT ![i] = [@ EXCEPT !.todo = @ \ {k}, !.wrote = TRUE]]
    /\ UNCHANGED <<log, ckpt, man, epoch, restarts>>

SkippedBy(d) == {r \in Records : r[2] \in Skipped(d, r[1])}

(* The manifest is written. Then states may leave the store with their histories, as those of closed windows do. *)
Manifest(i) ==
    /\ driver[i].pc = "folded" /\ ~Fenced(driver[i])
    /\ driver[i].todo = {} \/ Broken = "manifest_before_the_states"
    /\ ~(LateCheck /\ Refuses(driver[i]))
    /\ man' = [next |-> driver[i].to, id |-> IF Broken = "batch_id_believed" THEN Max(man.id, driver[i].id) ELSE 0,
               lost |-> IF driver[i].lenient THEN man.lost \cup SkippedBy(driver[i]) ELSE man.lost]
    /\ \/ UNCHANGED history
       \/ "leaves" \in World /\ history' = [k \in Keys |-> IF \A o \in history[k].held : o < driver[i].to[k[1]]
                                                           THEN NoHistory ELSE history[k]]
    /\ driver' = [driver EXCEPT ![i] = [@ EXCEPT !.next = driver[i].to,
                    !.pc = IF Broken = "manifest_before_the_states" THEN "noted" ELSE "written"]]
    /\ UNCHANGED <<log, ckpt, n, epoch, restarts>>

(* The flow has returned, and Spark commits the batch. *)
From(d) == [p \in Partitions |-> IF d.read[p] < d.end[p] THEN d.end[p] ELSE d.from[p]]

Commit(i) ==
    /\ \/ driver[i].pc = "written"
       \/ driver[i].pc = "noted" /\ driver[i].todo = {}
       \/ driver[i].pc = "folded" /\ Broken = "returns_after_an_error"
    /\ ckpt' = IF ckpt.id = driver[i].id THEN [ckpt EXCEPT !.done = TRUE] ELSE ckpt
    /\ driver' = [driver EXCEPT ![i] = [Idle(driver[i].end) EXCEPT !.epoch = driver[i].epoch, !.next = driver[i].next,
                                          !.id = Id(driver[i].id + 1), !.from = From(driver[i])]]
    /\ UNCHANGED <<log, n, history, man, epoch, restarts>>

(* An operator accepts a loss. The manifest names the records before anything is folded without them. *)
Accept ==
    /\ "accept" \in World /\ driver[1].pc = "refused" /\ SkippedBy(driver[1]) # {}
    /\ IF Broken = "accepted_with_the_commit"
       THEN /\ driver' = [driver EXCEPT ![1] = [@ EXCEPT !.pc = "reading", !.lenient = TRUE]]
            /\ UNCHANGED man
       ELSE /\ driver' = [driver EXCEPT ![1] = Gone]
            /\ man' = [man EXCEPT !.lost = @ \cup SkippedBy(driver[1])]
    /\ UNCHANGED <<log, ckpt, n, history, epoch, restarts>>

(* Broken variants: the rows are checked before they are read once more, or after states are written. *)
Check(i) ==
    /\ ReadTwice /\ driver[i].pc = "reading" /\ Until(driver[i]) = driver[i].read
    /\ driver' = [driver EXCEPT ![i] = [@ EXCEPT !.pc = IF Refuses(driver[i]) THEN "refused" ELSE "checked"]]
    /\ UNCHANGED <<log, ckpt, n, history, man, epoch, restarts>>

RefuseLate(i) ==
    /\ LateCheck /\ driver[i].pc = "folded" /\ Refuses(driver[i])
    /\ driver[i].todo = {} \/ Broken = "partition_by_partition"
    /\ driver' = [driver EXCEPT ![i] = [@ EXCEPT !.pc = "refused"]]
    /\ UNCHANGED <<log, ckpt, n, history, man, epoch, restarts>>

Step(i) ==
    \/ Begin(i) \/ Plan(i) \/ Look(i) \/ Read(i) \/ Judge(i) \/ Write(i) \/ Manifest(i) \/ Commit(i)
    \/ Check(i) \/ RefuseLate(i)

Next == Produce \/ Delete \/ Compact \/ Recreate \/ Restart \/ Accept \/ \E i \in 1..2 : Step(i)

Spec == Init /\ [][Next]_vars
------------------------------------------------------------------------------
(* Every record is folded at most once, and stays folded. *)
Above == INSTANCE Once WITH times <- <<n>>

(* Every record below the manifest's next offset is folded, or named as lost. *)
NothingLost ==
    \A r \in Records : (r[2] < man.next[r[1]] /\ man.next[r[1]] # Unknown /\ r[2] \notin Markers)
                        => (n[r] = 1 \/ r \in man.lost)

(* A batch that is refused has written nothing. *)
RefusedUntouched == \A i \in 1..2 : driver[i].pc = "refused" => ~driver[i].wrote

(* A batch is refused only if the topic is another one, or if an offset is missing that is deleted, or holds a record
   and was skipped by Spark, because the run began after it or a range ended beyond the log.                           *)
NoFalseAlarm ==
    \A i \in 1..2 : driver[i].pc = "refused" =>
      (\/ log.topic = 2
       \/ \E r \in Records : /\ r[2] >= driver[i].next[r[1]] /\ r[2] \notin driver[i].rows[r[1]]
                             /\ \/ r[2] < log.low[r[1]]
                                \/ Source = "rows" /\ Holds(r[1], r[2]) /\ r[2] < driver[i].from[r[1]])

(* If nothing is deleted, a single driver with its checkpoint, or with an older one, is never refused. *)
QuietWithItsCheckpoint ==
    ({"latest", "other"} \cap Checkpoints = {} /\ {"frozen", "delete", "recreate"} \cap World = {})
      => driver[1].pc # "refused"

(* Finally exactly once: a run that has found its checkpoint, and reads everything and Later records more, has folded each
   record once, or is refused.                                                                                         *)
Batch(x, start, end) ==
    LET at == IF Source = "ranges" /\ Broken # "ranges_from_the_checkpoint" THEN x.next ELSE start
        to == [p \in Partitions |-> Min(end[p], log.end[p] + Later)]
    IN  Started([rows |-> [p \in Partitions |-> {o \in at[p]..(to[p] - 1) : Holds(p, o) \/ o >= log.end[p]}],
                 next |-> x.next, read |-> to, end |-> end, foreign |-> log.topic = 2,
                 asked |-> [low |-> log.low, topic |-> log.topic]])

After(x, b, id) ==
    IF x.refused \/ (Broken = "batch_id_believed" /\ id <= man.id) THEN x
    ELSE IF Refuses(b) THEN [x EXCEPT !.refused = TRUE]
    ELSE LET s == Fold([n |-> x.n, history |-> x.history], b)
         IN  [n |-> s.n, history |-> s.history, next |-> [p \in Partitions |-> To(b, p)], refused |-> FALSE]

(* The offsets of ranges name the run, so every run has a batch. Otherwise there is none without new offsets. *)
AtTheEnd(d) ==
    LET now   == [n |-> n, history |-> history, next |-> man.next, refused |-> FALSE]
        start == [p \in Partitions |-> Min(d.end[p], log.end[p])]
        again == IF d.start = d.end THEN now ELSE After(now, Batch(now, d.start, start), d.id)
        end   == [p \in Partitions |-> log.end[p] + Later]
        last  == IF start = end /\ (Source = "rows" \/ Broken = "offsets_without_the_run") THEN again
                 ELSE After(again, Batch(again, start, end), IF d.start = d.end THEN d.id ELSE d.id + 1)
    IN  [last EXCEPT !.refused = @ \/ (Watch /\ Behind([next |-> last.next, start |-> end]) # {})]

Exact(x) ==
    \A r \in Records : \/ r[2] >= log.end[r[1]] + Later
                       \/ r[2] \in Markers /\ r[2] < log.end[r[1]]
                       \/ x.n[r] = 1
                       \/ r \in man.lost

Starts == Broken = "start_with_the_first_rows" /\ n = Nothing.n    \* broken variant: a flow that has not begun

FinallyOnce == (driver[1].pc = "new" /\ ~Starts) => (LET x == AtTheEnd(driver[1]) IN x.refused \/ Exact(x))

(* A run with a new checkpoint, at the manifest's next offsets, is exact. It is refused only if the topic is another one, or
   if offsets that were not read are deleted.                                                                            *)
WayOn ==
    (driver[1].pc = "new" /\ log.topic = 1 /\ Broken # "start_with_the_first_rows") =>
      (LET x == AtTheEnd(Driver(At(man.next))) IN
       IF x.refused THEN \E r \in Records : r[2] >= man.next[r[1]] /\ r[2] < log.low[r[1]] /\ r \notin man.lost
       ELSE Exact(x))
=============================================================================
