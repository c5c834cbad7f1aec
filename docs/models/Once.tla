-------------------------------- MODULE Once --------------------------------
(* The specification that the other models refine: times[s][e] is how often
   state s has folded event e. Every state folds every event at most once, and
   a folded event stays folded.                                               *)
EXTENDS Naturals

VARIABLE times

OInit == \A s \in DOMAIN times : \A e \in DOMAIN times[s] : times[s][e] = 0

ONext == \A s \in DOMAIN times : \A e \in DOMAIN times[s] :
            times'[s][e] = times[s][e] \/ (times[s][e] = 0 /\ times'[s][e] = 1)
=============================================================================
