------------------------------ MODULE Truncation ------------------------------
(* A log that loses its end: the leader lost power before it had synced, an
   unclean election made a replica the leader that was behind, or a disk was
   restored. New records get the offsets of the lost ones, in a higher leader
   epoch.

   A flow reads the log directly. Its manifest holds the next offset, the leader
   epoch as of which it was read, and a branch by offset: the leader epoch that
   was noticed when records of a later epoch than those before them were found.
   The position of a record in a state is <<branch, offset>>, since not every
   reader learns the epoch of a record. A republisher reads the same log and
   writes the epoch of each record into its hop; a second flow reads what it
   sends, and its positions are <<epoch, offset>>. Both compare what they have
   read with the log when the leader epoch has changed.

   A state remembers its highest position and drops what is at or below it. The
   flow may crash after any step, the republisher may go back to any offset.    *)
EXTENDS Naturals

CONSTANTS
    N,       \* offsets
    E,       \* highest leader epoch
    Rows,    \* the rows of a batch have no epochs: the leader epoch is asked for again after they are read
    Broken   \* "none", or the name of a broken variant

Offsets == 0..(N - 1)
Epochs == 1..E
Max(left, right) == IF left > right THEN left ELSE right

VARIABLES
    log,    \* offset -> epoch of the record; 0: none
    epoch,  \* of the leader
    n,      \* what the flow folded: epoch -> offset -> times
    top,    \* highest position in its state
    man,    \* manifest: [next, epoch, branch: by offset]
    run,    \* [pc, to, new: epoch by offset of the records read, man: the manifest of the run]
    sender, \* the republisher: [next, epoch]
    m,      \* what the second flow folded: epoch -> offset -> times
    last    \* highest position in its state

vars == <<log, epoch, n, top, man, run, sender, m, last>>

Empty == [o \in Offsets |-> 0]
Never == [e \in Epochs |-> Empty]
End(l) == CHOOSE x \in 0..N : (\A o \in Offsets : (o < x) = (l[o] # 0))
Above(one, other) == one[1] > other[1] \/ (one[1] = other[1] /\ one[2] > other[2])
Twice(x) == IF x < 2 THEN x + 1 ELSE 2

First == [next |-> 0, epoch |-> 1, branch |-> [o \in Offsets |-> 1]]
Idle == [pc |-> "idle", to |-> 0, new |-> Empty, man |-> First]

Init ==
    /\ log = Empty /\ epoch = 1
    /\ n = Never /\ top = <<0, 0>>
    /\ man = First /\ run = Idle
    /\ sender = [next |-> 0, epoch |-> 1]
    /\ m = Never /\ last = <<0, 0>>
------------------------------------------------------------------------------
(* Kafka *)

Produce ==
    /\ End(log) < N
    /\ log' = [log EXCEPT ![End(log)] = epoch]
    /\ UNCHANGED <<epoch, n, top, man, run, sender, m, last>>

(* A new leader, with all records or with the first ones. *)
Elect ==
    /\ epoch < E /\ epoch' = epoch + 1
    /\ \E end \in 0..End(log) : log' = [o \in Offsets |-> IF o < end THEN log[o] ELSE 0]
    /\ UNCHANGED <<n, top, man, run, sender, m, last>>

(* The broker's answer: the end of the records of this epoch and of earlier ones. *)
EndOf(e) == CHOOSE x \in 0..N : (\A o \in Offsets : (o < x) = (log[o] # 0 /\ log[o] <= e))

EndSeen(e) == IF Broken = "end_of_the_log_compared" THEN End(log) ELSE EndOf(e)
Kept(next, e) == IF EndSeen(e) < next THEN EndSeen(e) ELSE next
------------------------------------------------------------------------------
(* The flow. When the epoch has changed, the manifest is written anew before anything else is folded. If it goes back, that
   is a loss, which an operator accepts.                                                                                 *)

Branches(d, end) ==
    LET from == IF Broken = "branch_from_the_next_offset" THEN d.next ELSE end
        loss == end < d.next
    IN  IF Broken = "no_branch" \/ (Broken = "branch_after_a_loss_only" /\ ~loss) THEN d.branch
        ELSE [o \in Offsets |-> IF o >= from THEN epoch ELSE d.branch[o]]

Renewed(d) ==
    LET end == EndSeen(d.epoch)
    IN  [next |-> IF end >= d.next THEN d.next ELSE IF Broken = "goes_on_at_the_end" THEN End(log) ELSE end,
         epoch |-> epoch, branch |-> Branches(d, end)]

Lazy == Broken = "accepted_with_the_commit"

Notice ==
    /\ run.pc = "idle" /\ man.epoch # epoch /\ ~Lazy
    /\ man' = Renewed(man)
    /\ UNCHANGED <<log, epoch, n, top, run, sender, m, last>>

(* What a run goes by. *)
Now == IF Lazy /\ man.epoch # epoch THEN Renewed(man) ELSE man

Plan ==
    /\ run.pc = "idle" /\ Now.epoch = epoch /\ End(log) > Now.next
    /\ run' = [pc |-> "planned", to |-> End(log), new |-> Empty, man |-> Now]
    /\ UNCHANGED <<log, epoch, n, top, man, sender, m, last>>

InRange(o) == o >= run.man.next /\ o < run.to

(* The records of the range are read, some before a loss and the others after it. *)
Read ==
    /\ run.pc = "planned"
    /\ \E mid \in 0..N :
         /\ mid >= run.man.next /\ mid <= run.to
         /\ \A o \in Offsets : o >= run.man.next /\ o < mid => log[o] # 0
         /\ run' = [run EXCEPT !.pc = "half", !.new = [o \in Offsets |-> IF InRange(o) /\ o < mid THEN log[o] ELSE 0]]
    /\ UNCHANGED <<log, epoch, n, top, man, sender, m, last>>

Rest == [o \in Offsets |-> IF InRange(o) /\ run.new[o] = 0 THEN log[o] ELSE run.new[o]]

(* Epochs never fall within a log, so the last record tells whether all are as old as the plan. *)
Planned ==
    CASE Broken = "range_read_as_it_is" -> TRUE
      [] Rows -> epoch = run.man.epoch
      [] OTHER -> \A o \in Offsets : o = run.to - 1 => Rest[o] <= run.man.epoch

ReadOn ==
    /\ run.pc = "half" /\ \A o \in Offsets : InRange(o) => Rest[o] # 0
    /\ run' = IF Planned
              THEN [run EXCEPT !.pc = "read", !.new = Rest]
              ELSE Idle
    /\ UNCHANGED <<log, epoch, n, top, man, sender, m, last>>

Folds(o) == run.new[o] # 0 /\ Above(<<run.man.branch[o], o + 1>>, top)

Write ==
    /\ run.pc = "read"
    /\ n' = [e \in Epochs |-> [o \in Offsets |-> IF Folds(o) /\ run.new[o] = e THEN Twice(n[e][o]) ELSE n[e][o]]]
    /\ top' = IF \E o \in Offsets : Folds(o) THEN <<run.man.branch[run.to - 1], run.to>> ELSE top
    /\ run' = [run EXCEPT !.pc = "written"]
    /\ UNCHANGED <<log, epoch, man, sender, m, last>>

Commit ==
    /\ run.pc = "written"
    /\ man' = [run.man EXCEPT !.next = run.to, !.epoch = IF Broken = "epoch_as_of_the_commit" THEN epoch ELSE @]
    /\ run' = Idle
    /\ UNCHANGED <<log, epoch, n, top, sender, m, last>>

Crash == run # Idle /\ run' = Idle /\ UNCHANGED <<log, epoch, n, top, man, sender, m, last>>
------------------------------------------------------------------------------
(* The republisher, and what the second flow makes of its output. *)

SenderAccepts ==
    /\ Kept(sender.next, sender.epoch) < sender.next
    /\ sender' = [next |-> Kept(sender.next, sender.epoch), epoch |-> epoch]
    /\ UNCHANGED <<log, epoch, n, top, man, run, m, last>>

Send ==
    /\ Kept(sender.next, sender.epoch) = sender.next /\ sender.next < End(log)
    /\ LET e   == log[sender.next]
           at  == <<IF Broken = "hop_without_epoch" THEN 0 ELSE e, sender.next + 1>>
       IN  /\ m' = IF Above(at, last) THEN [m EXCEPT ![e][sender.next] = Twice(@)] ELSE m
           /\ last' = IF Above(at, last) THEN at ELSE last
    /\ sender' = [next |-> sender.next + 1, epoch |-> epoch]
    /\ UNCHANGED <<log, epoch, n, top, man, run>>

GoBack ==
    /\ \E next \in 0..sender.next : next < sender.next /\ sender' = [sender EXCEPT !.next = next]
    /\ UNCHANGED <<log, epoch, n, top, man, run, m, last>>

Next ==
    \/ Produce \/ Elect
    \/ Notice \/ Plan \/ Read \/ ReadOn \/ Write \/ Commit \/ Crash
    \/ SenderAccepts \/ Send \/ GoBack

Spec == Init /\ [][Next]_vars
------------------------------------------------------------------------------
NeverTwice == \A e \in Epochs : \A o \in Offsets : n[e][o] < 2 /\ m[e][o] < 2

(* A run to the end of the log from here, by the same rule: what it will have folded. *)
Rerun == IF man.epoch # epoch THEN Renewed(man) ELSE man
WillFold(o) == log[o] # 0 /\ o >= Rerun.next /\ Above(<<Rerun.branch[o], o + 1>>, top)

FinallyOnce == \A o \in Offsets : log[o] # 0 => n[log[o]][o] + (IF WillFold(o) THEN 1 ELSE 0) = 1

Resumes == Kept(sender.next, sender.epoch)
WillPass(o) ==
    log[o] # 0 /\ o >= Resumes /\ Above(<<IF Broken = "hop_without_epoch" THEN 0 ELSE log[o], o + 1>>, last)

BehindOnce == \A o \in Offsets : log[o] # 0 => m[log[o]][o] + (IF WillPass(o) THEN 1 ELSE 0) = 1
=============================================================================
