"""Drives a policy through events by the engine's own plan, in NumPy or compiled, without a model."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from host_offload.plan import apply, plan_event
from host_offload.policy import fresh_state, get_policy


def event(xp, policy, state, slot_of, owner, need, scores, layer, t, capacity, global_scope, forced):
    state = policy.observe(xp, state, layer, need, scores, t)
    plan = plan_event(
        xp,
        need=need,
        slot_of=slot_of,
        owner=owner,
        priority=partial(policy.priority, xp, state),
        layer=layer,
        capacity=capacity,
        global_scope=global_scope,
        forced_admit=forced,
        t=t,
    )
    slot_of, owner = apply(xp, plan, slot_of, owner)
    if policy.in_cache:
        state = policy.commit(xp, state, layer, slot_of >= 0, t)
    return state, slot_of, owner, plan.hit


class Replay:
    """One cache; `step(layer, need, scores)` returns the hits [E] of the next event."""

    def __init__(self, policy, *, L, E, capacity, global_scope=False, forced=True, xp=np, seed=0, compiled=None):
        self.policy, self.xp, self.capacity = get_policy(policy), xp, capacity
        self.global_scope, self.forced, self.t = global_scope, forced, 0
        self.state = fresh_state(self.policy, xp, L, E, seed, np.full(L, capacity), xp.asarray(global_scope))
        self.slot_of = xp.full((L, E), -1, xp.int32)
        self.owner = xp.full((L * E + E,), -1, xp.int32)
        self.run = partial(event, np, self.policy) if xp is np else (compiled or compile_event(self.policy))

    def step(self, layer, need, scores):
        tables = self.state, self.slot_of, self.owner
        settings = np.int32(self.capacity), self.global_scope, self.forced
        where = np.int32(layer), np.int32(self.t)
        *tables, hit = self.run(*tables, self.xp.asarray(need), self.xp.asarray(scores, np.float32), *where, *settings)
        self.state, self.slot_of, self.owner = tables
        self.t += 1
        return np.asarray(hit)


def compile_event(policy):
    return jax.jit(partial(event, jnp, get_policy(policy)))


def hits_of(policy, experts, *, E=3, capacity=2, scores=None, forced=True, reset_before=()):
    """Indices of the events that hit, for one layer with one needed expert an event."""
    cache = Replay(policy, L=1, E=E, capacity=capacity, forced=forced)
    hits = []
    for index, expert in enumerate(experts):
        if index in reset_before:
            cache.state = cache.policy.reset(np, cache.state)
        need = np.arange(E) == expert
        if cache.step(0, need, need if scores is None else scores[expert])[expert]:
            hits.append(index)
    return hits
