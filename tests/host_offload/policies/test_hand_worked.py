"""Each policy on a trace that was worked through by hand, and on which LRU does something else.

One layer, one expert an event, two slots, contract `atomic-forced-admit`, unless said otherwise. Hits are given as
the indices of the events that hit.
"""

import numpy as np
import pytest
from policy_replay import Replay, hits_of

from host_offload.policies import (
    HOBBIT,
    MRS,
    DecayedLFU,
    FineMoE,
    LayerAwareLRU,
    MoEInfinityPaper,
)
from host_offload.policy import StaticPin

# A favourite, then a loop over one expert more than there are slots. LRU loses the favourite when 2 comes (event 4)
# and from then on always the one that comes next: it hits at 1 and 2 only.
LOOP = [0, 0, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
# Whoever keeps 0 throughout hits at each of its later uses, and only there: 1 and 2 take turns in the other slot.
KEEPS_0 = [1, 2, 5, 8, 11]
# A router that always sees something in 0: its scores when expert 0, 1 or 2 is the one chosen.
SCORES = np.array([[1, 0, 0], [0.5, 1, 0], [0.5, 0, 1]], np.float32)


def test_lru_on_the_loop():
    assert hits_of("lru", LOOP) == [1, 2]


@pytest.mark.parametrize(
    "policy",
    [
        # 0 has count 3 before 1 and 2 have 1 each; every later use of 0 raises it, 1 and 2 start anew or stay behind.
        "lfu",
        "lfu-persistent",
        "lfu-incache",
        "lfu-incache-persistent",
        "moeinf_code",
        # Keys: 0 has 3; 1 leaves with key 1, so age 1 and 2 enters with 2; 0 is hit: 4 + 1; 2 leaves with 2, 1 enters
        # with 3 and leaves with it, 2 enters with 4, 0 has 5 + 3: it is always ahead.
        "lfu-da",
        # At event 4 the sum of 0 is 0.9^4 + 0.9^3 + 0.9^2 = 2.2, that of 1 is 0.9. Hits of 0 at every third event
        # keep it above 1 / (1 - 0.9^3) * 0.9^2 = 3, newcomers have at most 1 + 0.9^3 + ... * 0.9 of one third of
        # the uses less.
        "lfu-decayed",
        "lrfu",
        # Event 4: 3 / (2 + 1) against 1 / (1 + 1); event 6: 4 / (1 + 1) against 1 / (2 + 1); and so on.
        "lfru",
        # Low ids stay.
        "static",
        StaticPin([[5, 1, 1]]),
        # 0 is promoted at event 1 to the one protected slot (floor of 0.8 * 2); the others pass through probation.
        "slru",
        # small and main hold one each. Event 4: 0 was hit twice and moves to main, 1 leaves as a ghost. Event 6: 1
        # comes to main, 2 leaves small. Event 7: 0 was hit at 5 and passes, 1 leaves main. So 0 always has a hit to
        # its credit.
        "s3-fifo",
        # Event 4: 0 has 3/5 + 3/5 + 3/5, 1 has 4/5 + 1/5 + 1/5, in quarters. Event 6: 6/7 + 4/7 + 4/7 against 5/7 +
        # 1/7 + 1/7.
        "hobbit",
        HOBBIT(weights=(0, 1, 0, 0)),
        # Both shares are those of counts, in which 0 leads.
        "moeinf_priority",
        # One earlier request used 0 three times, 1 once: pEAM 3/4, 1/4, 0.
        MoEInfinityPaper(collection=np.array([[[3, 1, 0]]])),
        # Without an earlier request its own counts stand in.
        "moeinf_paper",
    ],
    ids=lambda policy: policy if isinstance(policy, str) else f"{policy.name}-given",
)
def test_policies_that_keep_the_favourite(policy):
    assert hits_of(policy, LOOP) == KEEPS_0


def test_mrs():
    # S of 0: 1/2, 3/4, 7/8; event 3: 7/16 + 1/4 = 0.69; event 4: 0.34 + 1/4 = 0.59 against 1/4 of expert 1, who
    # leaves. Event 6: 0.65 against 1/8 of expert 2. The 1/2 that 0 always scores holds it above 1/4 + 0.
    assert hits_of("mrs", LOOP, scores=SCORES) == KEEPS_0
    # If only the highest score counts, 0 has 7/32 at event 4, expert 1 has 1/4: as LRU.
    assert hits_of(MRS(top=1), LOOP, scores=SCORES) == [1, 2]


def test_finemoe():
    # Event 4 (scores 1/2, 0, 1) is most like the maps of 0 (cosine 0.45, against 0.2): p = 1, 0, 0, so 1 leaves.
    # Event 6 finds the map of event 3, p = 1/2, 1, 0: 0 has 1/2 * 4, 2 has 0. Event 7 that of event 4, and so on.
    assert hits_of(FineMoE(), LOOP, scores=SCORES) == KEEPS_0


def test_arc():
    # 0 goes to T2 at event 1. 4: p = 0 < |T1|, so 1 leaves T1 for B1. 5: hit. 6: 1 is in B1, p = 1, |T1| = 1 is not
    # above, so 0 leaves T2 for B2; 1 enters T2. 7: 2 is still in T1: hit. 8, 9, 10, 11: each is in B2 and T2 loses
    # its oldest.
    assert hits_of("arc", LOOP) == [1, 2, 5, 7]


def test_two_queue():
    # A1in should hold one, A1out remembers one. 0 stays first in A1in in spite of its hits: at 4 it leaves. 5:
    # remembered, so it enters Am, and 1 leaves A1in. 6: 1 is remembered and enters Am, from which 0 leaves. 7: 2 is
    # still in A1in: hit. 8: 0 is unknown, enters A1in, 1 leaves Am. 9: A1in has two, 2 leaves. 10: 2 enters Am, 0
    # leaves A1in. 11: 0 enters Am.
    assert hits_of("2q", LOOP) == [1, 2, 7]


# Both are hit before 2 comes, the older one last.
TURN = [0, 1, 1, 0, 2, 0, 1, 0, 2, 0, 1, 0]


@pytest.mark.parametrize(
    ("policy", "hits"),
    [
        # 4: 1 leaves; then 0 is hit each time, 1 and 2 take turns.
        ("lru", [2, 3, 5, 7, 9, 11]),
        # 4: 0 leaves, 5: 1, 6: 2, 8: 0, 9: 1, 10: 2.
        ("fifo", [2, 3, 7, 11]),
        # 4: both have their bit; it is cleared, and in the second round 0, the older, leaves. 5: 1 leaves, 6: 2
        # leaves. 7: 0 gets its bit, so 8 takes 1, 10 takes 2.
        ("clock", [2, 3, 7, 9, 11]),
        # 4: the hand clears both, turns and takes 0; it stands before 1. 5: takes 1; 6: takes 2. 7: 0 is visited.
        # 8: the hand clears 0, takes 1, the newest: it begins anew. 9: visited again, so 10 clears 0 and takes 2.
        ("sieve", [2, 3, 7, 9, 11]),
    ],
)
def test_queues_with_a_hand(policy, hits):
    assert hits_of(policy, TURN) == hits


def test_sieve_leaves_the_spared_in_place_where_clock_moves_them():
    # Three slots; 0 is hit at 3. 4 (3 comes): both hands clear 0 and take 1. CLOCK has moved 0 behind 2: 2, 0, 3;
    # SIEVE stands before 2 in 0, 2, 3. 5 (1 comes): both take 2. 6 (2 comes): CLOCK, with 0, 3, 1, takes 0; SIEVE,
    # past 0, takes 3. 7 (0 comes): a miss in CLOCK, which takes 3; a hit in SIEVE, whose hand stands before 1 in 0,
    # 1, 2. 8 (3 comes): CLOCK, with 1, 2, 0, takes 1; SIEVE takes 1.
    trace = [0, 1, 2, 0, 3, 1, 2, 0, 3]
    assert hits_of("sieve", trace, E=4, capacity=3) == [3, 7]
    assert hits_of("clock", trace, E=4, capacity=3) == [3]


def test_layer_aware_lru_spares_the_layers_that_come_next():
    # Four layers with one expert each, three slots for all, one layer ahead spared. 3: of layers 1 and 2 the older,
    # 1, leaves. 4: hit of 0. 5: 1 comes, 1 and 2 are spared, of 0 and 3 the older, 3, leaves. 6: hit of 2. 7: 3
    # comes, 1 leaves, as at 3; from here it repeats. LRU always drops the layer that comes next.
    def hits(policy):
        cache = Replay(policy, L=4, E=1, capacity=3, global_scope=True)
        return [t for t in range(12) if cache.step(t % 4, np.array([True]), np.ones(1))[0]]

    assert hits("lru") == []
    assert hits(LayerAwareLRU(ahead=1)) == [4, 6, 8, 10]


def test_random_hits_in_a_loop_where_lru_cannot():
    loop = [0, 1, 2] * 20
    assert hits_of("lru", loop) == []
    hits = hits_of("random", loop)
    # An expert left at random survives each of two events with chance 1/2: a quarter of 57.
    assert 4 <= len(hits) <= 28 and hits == hits_of("random", loop)


def test_variants_of_lfu_differ_in_what_they_forget():
    # 0 is needed three times, then a request begins, then 1 twice and 2.
    trace = [0, 0, 0, 1, 1, 2, 0]
    assert hits_of("lfu", trace, reset_before=[3]) == [1, 2, 4]  # 0 has none of the new request: it leaves
    assert hits_of("lfu-incache", trace, reset_before=[3]) == [1, 2, 4]
    for name in ("lfu-persistent", "lfu-incache-persistent"):
        assert hits_of(name, trace, reset_before=[3]) == [1, 2, 4, 6]
    # 4: 0 and 1 have two each, the higher id leaves. 5: 2 leaves. 6: perfect counts know 3 uses of 1, so 0 leaves; in
    # the cache it has one, and leaves. moeinf_code takes the first of equals: 0 goes at 4, and 1 and 2 stay until 8.
    trace = [0, 0, 1, 1, 2, 1, 2, 1, 0]
    assert hits_of("lfu", trace) == [1, 3, 7]
    assert hits_of("lfu-incache", trace) == [1, 3, 8]
    assert hits_of("moeinf_code", trace) == [1, 3, 5, 6, 7]


def test_aging_lets_an_old_favourite_go():
    # 0 has 4 and is never needed again; 1 and 2 alternate. LFU keeps 0 as long as its 4 lead: to the end of this.
    trace = [0, 0, 0, 0, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2]
    assert hits_of("lfu", trace[:8]) == [1, 2, 3]
    # A decay of 1/2: 0 has 15/8 at 3, 15/16 at 4, 15/32 at 5, where 1 has 1/2: 0 leaves.
    assert hits_of(DecayedLFU(decay=0.5), trace)[3:] == [6, 7, 8, 9, 10, 11, 12, 13]
    # 5: 1 leaves with key 1, 2 enters with 1 + 1. 6: 2 leaves with 2, 1 enters with 3. 7: 1 leaves, 2 enters with 4.
    # 8: 0 and 2 have 4, the higher id leaves, 1 enters with 5. 9: 0 leaves.
    assert hits_of("lfu-da", trace)[3:] == [10, 11, 12, 13]
