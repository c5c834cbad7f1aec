-------------------------------- MODULE Once --------------------------------
(* What the models below look like from above: times[s][e] is how often state s
   has folded event e. Every event is folded at most once by every state, and
   what is folded stays folded.                                               *)
EXTENDS Naturals

VARIABLE times

OInit == \A s \in DOMAIN times : \A e \in DOMAIN times[s] : times[s][e] = 0

ONext == \A s \in DOMAIN times : \A e \in DOMAIN times[s] :
            times'[s][e] = times[s][e] \/ (times[s][e] = 0 /\ times'[s][e] = 1)
=============================================================================
