------------------------------- MODULE Marks --------------------------------
(* Detecting a store that goes back.

   A flow has two stages. The later stage's bucket is on a server that may
   come back without its last saves, after a failover to a lagging replica or
   with a file that was not synced. It then has another run id. The earlier
   stage and the manifest are on servers that lose nothing.

   The bucket stores its mark in the same atomic write as the states: the
   number of saves that changed it, and the run id of each. The mark of the
   last acknowledged save is written with the earlier stage's save and in the
   manifest. The bucket holds a mark if its save of that number was made under
   that run id. Every load and every save compares.                           *)
EXTENDS Naturals, Sequences

CONSTANTS
    Batches,    \* batches
    Spare,      \* saves unknown to the runs of the flow: by an older run, or by an operator
    Failovers,  \* how often the server comes back, with all its saves or without the last ones
    Broken      \* "none", or the name of a broken variant

VARIABLES
    saves,      \* the bucket: [id: run id, batch: that it added, or 0, number: identifies a save in the model]
    id,         \* run id of its server
    upstream,   \* the earlier stage: [batch: the last one it holds, mark]
    manifest,   \* [batch: the last one committed, mark]
    ack,        \* mark acknowledged to the current batch
    pc,         \* progress of the current batch: 0 none, 1 later stage persisted, 2 earlier stage persisted too
    number, spare, refused

vars == <<saves, id, upstream, manifest, ack, pc, number, spare, refused>>

NoMark == [count |-> 0, id |-> 0, number |-> 0]

Last == IF saves = <<>> THEN NoMark
        ELSE [count |-> Len(saves), id |-> saves[Len(saves)].id, number |-> saves[Len(saves)].number]

Init ==
    /\ saves = <<>> /\ id = 1
    /\ upstream = [batch |-> 0, mark |-> NoMark] /\ manifest = [batch |-> 0, mark |-> NoMark]
    /\ ack = NoMark /\ pc = 0 /\ number = 0 /\ spare = 0 /\ refused = FALSE

Held(m) ==
    \/ m.count = 0
    \/ /\ m.count <= Len(saves)
       /\ Broken = "no_run_id" \/ saves[m.count].id = m.id
       /\ Broken # "alarm_on_ahead" \/ m.count = Len(saves)

Alarm == ~Held(manifest.mark) \/ (Broken # "marks_in_the_manifest_only" /\ ~Held(upstream.mark))

Batch == manifest.batch + 1
Has(b) == \E i \in 1..Len(saves) : saves[i].batch = b

(* Events that the state holds are dropped, without a save. A batch that the earlier stage holds never arrives here. *)
Changes == upstream.batch < Batch /\ ~Has(Batch)

Persist2 ==
    /\ pc = 0 /\ Batch <= Batches /\ ~Alarm /\ pc' = 1
    /\ saves' = IF Changes THEN Append(saves, [id |-> id, batch |-> Batch, number |-> number + 1]) ELSE saves
    /\ ack' = IF Changes THEN [count |-> Len(saves) + 1, id |-> id, number |-> number + 1] ELSE Last
    /\ number' = IF Changes THEN number + 1 ELSE number
    /\ UNCHANGED <<id, upstream, manifest, spare, refused>>

Persist1 ==
    /\ pc = 1 /\ pc' = 2
    /\ upstream' = IF upstream.batch < Batch THEN [batch |-> Batch, mark |-> ack] ELSE upstream
    /\ UNCHANGED <<saves, id, manifest, ack, number, spare, refused>>

Commit ==
    /\ pc = 2 /\ pc' = 0
    /\ manifest' = [batch |-> Batch, mark |-> ack] /\ ack' = NoMark
    /\ UNCHANGED <<saves, id, upstream, number, spare, refused>>

Crash == pc > 0 /\ pc' = 0 /\ ack' = NoMark /\ UNCHANGED <<saves, id, upstream, manifest, number, spare, refused>>

SpareSave ==
    /\ spare < Spare /\ spare' = spare + 1 /\ number' = number + 1
    /\ saves' = Append(saves, [id |-> id, batch |-> 0, number |-> number + 1])
    /\ UNCHANGED <<id, upstream, manifest, ack, pc, refused>>

ComesBack ==
    /\ id <= Failovers /\ id' = id + 1
    /\ \E kept \in 0..Len(saves) : saves' = SubSeq(saves, 1, kept)
    /\ UNCHANGED <<upstream, manifest, ack, pc, number, spare, refused>>

Refuse == pc = 0 /\ Alarm /\ ~refused /\ refused' = TRUE /\ UNCHANGED <<saves, id, upstream, manifest, ack, pc, number, spare>>

Next == Persist2 \/ Persist1 \/ Commit \/ Crash \/ SpareSave \/ ComesBack \/ Refuse

Spec == Init /\ [][Next]_vars
------------------------------------------------------------------------------
(* A batch that the earlier stage holds is not passed on again: if the later stage lacks it, it is lost. *)
Lost == \E b \in 1..upstream.batch : ~Has(b)

LossNoticed == (pc = 0 /\ Lost) => Alarm

(* Every alarm is caused by an acknowledged save that is lost. *)
Gone(m) == m.count > 0 /\ ~\E i \in 1..Len(saves) : saves[i].number = m.number
NoFalseAlarm == (pc = 0 /\ Alarm) => (Gone(manifest.mark) \/ Gone(upstream.mark))
=============================================================================
