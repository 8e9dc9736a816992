"""The order in which a prefill event processes its experts: rounds that overlap moving the next with computing these.

A prefill chunk may need every expert of a layer, far more than the spare rows can hold. So it runs in rounds. While
round r computes, the missing experts of round r + 1 are moved into bank rows; round 0 has no misses. Bypassed experts
use 2G scratch rows in turn (G a round, two rounds in flight); admitted ones go to the row that they keep. Evicted
experts that this chunk still needs are computed in round 0, and their rows are written from round 1 on at the earliest,
so nothing leaves before its use.
"""

from typing import Any, NamedTuple


class Schedule(NamedTuple):
    """Processing order of one event; positions 0..E-1 are needed experts in order, then the others.

    `position` [E] int32: each expert's position. `row`, `src` [E] int32 by position: bank row, and expert number to
    fetch (-1: resident). `bounds` [max_rounds + 3] int32: round r covers positions bounds[r]:bounds[r+1]. `rounds`:
    int32 scalar. `dest` [E] int32 by expert: the row that a missing expert is written to, -1 for the others.
    """

    position: Any
    row: Any
    src: Any
    bounds: Any
    rounds: Any
    dest: Any


def max_rounds(E: int, group: int) -> int:
    """Upper bound of `Schedule.rounds`: the hits' round, one more that a late admission may skip, and the misses."""
    return 2 + -(-E // group)


def schedule_rounds(xp, plan, need, slot_of, owner, *, group: int) -> Schedule:
    """Orders the experts of a planned event.

    Args:
        xp: numpy or jax.numpy.
        plan: the `Plan` of this event (its `dest` is not used: an event this large reuses rows while it runs).
        need: [E] bool; slot_of [L, E], owner [rows] int32: the state at the start of the event.
        group: G, missing experts a round; at least 2G rows must be free.
    """
    L, E = slot_of.shape
    i32 = xp.int32
    layer = plan.layer
    row = slot_of[layer]
    count = lambda mask: xp.sum(mask, dtype=i32)  # noqa: E731
    rank = lambda mask: xp.cumsum(mask, dtype=i32) - 1  # noqa: E731
    expert = xp.arange(E, dtype=i32)

    # Rows by when they may be written: free now, freed by an expert that this event does not need, freed by an evicted
    # hit.
    owned = owner >= 0
    id_ = xp.maximum(owner, 0)
    leaves = owned & plan.evict[id_]
    in_use = (id_ // E == layer) & need[id_ % E]
    kind = xp.where(~owned, 0, xp.where(leaves, xp.where(in_use, 2, 1), 3))
    rows = xp.argsort(kind, stable=True).astype(i32)
    early = count(kind <= 1)

    n_bypass = count(plan.bypass)
    nth_bypass, nth_admit = rank(plan.bypass), rank(plan.admit)
    turn = ((1 + nth_bypass // group) % 2) * group + nth_bypass % group
    place = xp.where(plan.bypass, turn, 2 * group + nth_admit)
    dest = xp.where(plan.miss, rows[xp.clip(place, 0, rows.shape[0] - 1)], -1)

    miss_round = 1 + xp.where(plan.bypass, nth_bypass, n_bypass + nth_admit) // group
    late = plan.admit & (2 * group + nth_admit >= early)  # its row is that of an evicted hit
    miss_round = xp.where(late, xp.maximum(miss_round, 2), miss_round)
    rounds = 1 + xp.max(xp.where(plan.miss, miss_round, 0)).astype(i32)

    leaving_hit = plan.hit & plan.evict.reshape(L, E)[layer]
    kept_hit = plan.hit & ~leaving_hit
    # The other hits fill all rounds evenly: their work hides the moves.
    spread = rank(kept_hit) * rounds // xp.maximum(count(kept_hit), 1)
    round_ = xp.where(plan.miss, miss_round, xp.where(leaving_hit, 0, spread))
    last = max_rounds(E, group) + 2
    round_ = xp.where(need, round_, last)

    order = xp.argsort(round_, stable=True).astype(i32)
    bounds = xp.sum(round_[None, :] < xp.arange(last + 1, dtype=i32)[:, None], axis=1, dtype=i32)
    return Schedule(
        position=xp.argsort(order).astype(i32),
        row=xp.where(plan.miss, dest, row)[order],
        src=xp.where(plan.miss, expert, -1)[order],
        bounds=bounds,
        rounds=rounds,
        dest=dest,
    )
