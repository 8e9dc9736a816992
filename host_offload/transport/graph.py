"""The transports whose cache lives in the XLA program: `device` (experts at rest in host memory) and `resident`."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from host_offload.plan import apply, plan_event
from host_offload.policy import PolicySet, is_elementwise
from host_offload.schedule import Schedule, schedule_rounds
from host_offload.slots import BYPASSES, EVICTIONS, HITS, MISSES, SlotCache, control_vector, empty_banks
from host_offload.transport.base import StateLost, Transport, event_need, event_scores, joined, record
from host_offload.transport.host_calls import HostCalls, RoundMoves, make_mover
from host_offload.transport.lookahead import looks_ahead
from host_offload.transport.rounds import serve_rounds
from pallas_kernels.expert_ffn import expert_ffn_decode
from pallas_kernels.slot_plan import slot_plan


class GraphTransport(Transport):
    """Lookup, plan, move and compute in one program; the policy runs in the graph.

    Decode has no host in its loop: on an NVIDIA GPU the plan of an event is one kernel, and the expert kernels read
    missing rows straight from pinned memory ("read-use-deposit"); elsewhere the same steps are plain XLA. A prefill
    event is planned in the graph too, but its rows are moved by the copy engine, which a host call starts: it is a
    tenth faster than loads by the multiprocessors and leaves them to compute (docs/measurements.md). The cache tables
    are part of the donated `SlotCache`.
    """

    name = "device"
    runs_ahead = True

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.pool is not None:
            self._calls = HostCalls(make_mover(self.pool, staging_rows=self.staging_rows))
            self._rounds = RoundMoves(self._calls.mover, lookahead=self._look_ahead(self._calls.mover))

    def take_error(self):
        return None if self.pool is None else self._calls.take_error()

    def close(self):
        if self.pool is not None:
            self._calls.mover.close()

    def create_state(self) -> SlotCache:
        return self._fresh(empty_banks(self.spec, self.rows))

    def empty(self, state):
        """The same banks with nobody in them and a policy that has seen nothing."""
        return self._fresh(state.banks)

    def _fresh(self, banks):
        L, E = self.spec.L, self.spec.E
        return SlotCache(
            banks=banks,
            slot_of=jnp.full((L, E), -1, jnp.int32),
            owner=jnp.full((self.rows,), -1, jnp.int32),
            resident=jnp.zeros((1,), jnp.int32),
            counters=jnp.zeros((L, 4), jnp.int32),
            policy=self.fresh_policy(jnp),
            step=jnp.zeros((), jnp.int32),
            error=jnp.zeros((1,), jnp.int32),
        )

    @property
    def _policy_fused(self) -> bool:
        """Whether the plan's kernel keeps the policy's accounts too; other policies are XLA before it."""
        return self.plans and self.implementation != "xla" and is_elementwise(self.policy)

    @property
    def policy_path(self):
        return "plan kernel" if self._policy_fused else "xla" if self.plans else "none"

    def serves(self, policy):
        """The policy is part of the program: the same, or one made alike. Which member of a set decides is a value."""
        return _alike(policy, self.policy)

    def operands(self):
        control = control_vector(self.budget, self.forced_admit)
        return {"pool": self.pool.slabs if self.pool else None, "control": jnp.asarray(control)}

    def tables(self, state):
        return np.asarray(state.slot_of), np.asarray(state.owner)

    def counters(self, state):
        return state.counters

    def read_counters(self, counters):
        return np.asarray(counters)

    def begin(self, state, program=None):
        return replace(state, counters=jnp.zeros_like(state.counters))

    def reset_policy(self, state):
        return replace(state, policy=self.policy.reset(jnp, state.policy))

    def bind(self, operands, *, prefill, block_rows=None):
        """The `experts` callable for one traced step (see docs/architecture.md, "Model and experts")."""
        pool, control = operands["pool"], operands["control"]

        def experts(layer, x, ids, weights, scores, live, token_ids, state, **onward):
            del token_ids
            if prefill:  # its rows are moved by the copy engine, see `_on_schedule`
                y, new = self._prefill(layer, x, ids, weights, scores, live, state, control, block_rows)
                y = joined(y, **onward)
            else:
                rows = pool[layer] if pool else None
                y, new = self._decode(layer, x, ids, weights, scores, live, state, rows, control, **onward)
            return y, record(new, ids, weights, scores)

        if not prefill:
            experts.read_by_kernels = self._reads_rows | ({"ids"} if self._policy_fused else set())
        return experts

    # ------------------------------------------------------------------------------------------------------- one event

    def _observe(self, layer, need, scores, live, state):
        t = state.step * self.spec.L + layer
        if not self.plans:
            return t, state
        with jax.named_scope("policy"):
            seen = self.policy.observe(jnp, state.policy, layer, need, event_scores(scores, live), t)
        return t, replace(state, policy=_if_any(need, seen, state.policy))

    def _priority_grid(self, state, t):
        L, E = self.spec.L, self.spec.E
        if not self.plans:
            return jnp.zeros((L * E,), jnp.float32)
        grid = jnp.arange(L * E, dtype=jnp.int32)
        return self.policy.priority(jnp, state.policy, grid // E, grid % E, t)

    def _plan(self, layer, need, state, control, t, assign_rows=True):
        L = self.spec.L
        return plan_event(
            jnp,
            need=need,
            slot_of=state.slot_of,
            owner=state.owner,
            priority=lambda layers, experts, t: self.policy.priority(jnp, state.policy, layers, experts, t),
            layer=layer,
            capacity=control[layer],
            global_scope=control[L] != 0,
            forced_admit=control[L + 1] != 0,
            t=t,
            assign_rows=assign_rows,
        )

    def _apply(self, plan, state):
        slot_of, owner = apply(jnp, plan, state.slot_of, state.owner)
        change = jnp.zeros((4,), jnp.int32)
        for index, mask in ((HITS, plan.hit), (MISSES, plan.miss), (BYPASSES, plan.bypass)):
            change = change.at[index].set(jnp.sum(mask, dtype=jnp.int32))
        change = change.at[EVICTIONS].set(plan.n_evicted)
        admitted = jnp.sum(plan.admit, dtype=jnp.int32) - plan.n_evicted
        return replace(
            state,
            slot_of=slot_of,
            owner=owner,
            resident=state.resident + admitted,
            counters=state.counters.at[plan.layer].add(change, mode="promise_in_bounds"),
        )

    def _commit(self, layer, need, t, state):
        """The policy at the end of the event, if it follows what the cache holds; otherwise nothing is traced."""
        if not (self.plans and self.policy.in_cache):
            return state
        with jax.named_scope("policy"):
            after = self.policy.commit(jnp, state.policy, layer, state.slot_of >= 0, t)
            return replace(state, policy=_if_any(need, after, state.policy))

    def _decode(self, layer, x, ids, weights, scores, live, state, pool, control, **onward):
        E = self.spec.E
        pairs = ids.reshape(-1)
        fused = self._policy_fused
        if fused:
            t, need = None, None
        else:
            need = event_need(ids, live, E)
            t, state = self._observe(layer, need, scores, live, state)
        with jax.named_scope("plan"):
            if self.implementation != "xla":
                listed, tables, policy = slot_plan(
                    pairs,
                    jnp.repeat(live, ids.shape[1]).astype(jnp.int32),
                    control,
                    None if fused else self._priority_grid(state, t),
                    state.slot_of.reshape(-1),
                    state.owner,
                    state.counters.reshape(-1),
                    state.resident,
                    layer=layer,
                    policy=self.policy if fused else None,
                    state=state.policy if fused else None,
                    step=state.step if fused else None,
                    # A policy outside of the kernel, and the sum over several tokens, are XLA's and read this plan.
                    feeds_kernels=fused and x.shape[0] == 1 and self.ffn_implementation != "xla",
                    interpret=self.implementation == "interpret",
                )
                rows, src, deposit, count, entry = (listed[k] for k in ("rows", "src", "deposit", "count", "entry"))
                slot_of, owner, counters, resident = tables
                state = replace(
                    state,
                    slot_of=slot_of.reshape(state.slot_of.shape),
                    owner=owner,
                    counters=counters.reshape(state.counters.shape),
                    resident=resident,
                    policy=policy if fused else state.policy,
                )
            else:
                plan = self._plan(layer, need, state, control, t)
                order = jnp.argsort(~need, stable=True).astype(jnp.int32)
                expert = jnp.arange(E, dtype=jnp.int32)
                rows = jnp.where(plan.miss, plan.dest, state.slot_of[layer])[order]
                src = jnp.where(plan.miss, expert, -1)[order]
                deposit = plan.admit[order].astype(jnp.int32)
                count = jnp.sum(need, dtype=jnp.int32)[None]
                entry = (jnp.cumsum(need, dtype=jnp.int32) - 1)[pairs]
                entry = jnp.where(jnp.repeat(live, ids.shape[1]), entry, 0)
                state = self._apply(plan, state)
        state = self._commit(layer, need, t, state)
        distinct = min(E, pairs.shape[0])
        with jax.named_scope("expert_ffn"):
            feeds = self._sum_implementation(x.shape[0], **onward) != "xla"
            y, state = self._serve(layer, x, (rows, src, deposit, count), distinct, state, pool, feeds)
            out = self._combine(y, entry.reshape(ids.shape), weights, live, **onward)
        return out, state

    def _experts(self, x, listed, distinct, banks, pool, feeds, **staged):
        """`expert_ffn_decode` of the `listed` entries: their rows, sources, deposits and count; `feeds`: kernels."""
        return expert_ffn_decode(
            x,
            *listed,
            banks,
            pool,
            distinct=distinct,
            spec=self.experts,
            implementation=self.ffn_implementation,
            fetch=self.implementation,
            feeds_kernels=feeds,
            **staged,
        )

    def _serve(self, layer, x, listed, distinct, state, pool, feeds):
        """Outputs [U, B, D] of the experts of an event, and the state with the banks that they left."""
        y, banks = self._experts(x, listed, distinct, state.banks, pool, feeds)
        return y, replace(state, banks=banks)

    def _prefill(self, layer, x, ids, weights, scores, live, state, control, block_rows):
        E = self.spec.E
        need = event_need(ids, live, E)
        t, state = self._observe(layer, need, scores, live, state)
        with jax.named_scope("plan"):
            plan = self._plan(layer, need, state, control, t, assign_rows=False)
            order = schedule_rounds(jnp, plan, need, state.slot_of, state.owner, group=self.group)
            state = self._apply(plan._replace(dest=order.dest), state)
        state = self._commit(layer, need, t, state)
        if self.pool is None:
            order = order._replace(rounds=jnp.ones((), jnp.int32))
            return serve_rounds(self, layer, x, ids, weights, live, order, state, None, None, block_rows)
        with jax.named_scope("moves"):
            values = {name: getattr(order, name) for name in ("src", "row", "bounds")}
            values["rounds"] = order.rounds[None]
            if looks_ahead(self.lookahead, ids.size, self.spec, layer, self.starts):
                values["ahead"] = (state.slot_of[layer + 1] < 0).astype(jnp.int32)
            _, state = self._calls.call(self._on_schedule, layer, {}, values, state)
        return serve_rounds(self, layer, x, ids, weights, live, order, state, self._rounds, self._calls, block_rows)

    def _on_schedule(self, layer, ctx, out, values, banks):
        arrays = self._calls.mover.fetch(ctx, layer, values, lambda: None)
        ahead = arrays.pop("ahead", None)
        if ahead is not None:
            ahead = np.flatnonzero(ahead).tolist()
        self._rounds.begin(ctx, layer, banks, Schedule(position=None, dest=None, **arrays), ahead)


def _if_any(need, new, old):
    """The policy's state `new` after an event, or `old` if no expert was needed: no live token, and no event."""
    happened = jnp.any(need)
    return jax.tree.map(lambda a, b: a if a is b else jnp.where(happened, a, b), new, old)


def _alike(a, b) -> bool:
    """Whether two policies trace to the same program: one class, the very same attributes; sets by their members."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, PolicySet):
        return len(a.policies) == len(b.policies) and all(map(_alike, a.policies, b.policies))
    mine, other = vars(a), vars(b)
    return mine.keys() == other.keys() and all(mine[key] is other[key] for key in mine)


class ResidentTransport(GraphTransport):
    """Every expert in a slot from the start: nothing moves, no policy runs. The reference for the other transports."""

    name = "resident"
    plans = False
    _refill = None

    def load(self, state, fill, again: bool):
        """Fills all slots, one layer at a time through a host buffer; `fill(layer, name, out)` reads a layer.

        again: `fill` stays usable, so that `rebuild` may call it.
        """
        self._refill = fill if again else None
        L, E = self.spec.L, self.spec.E
        put = jax.jit(lambda bank, rows, at: jax.lax.dynamic_update_slice_in_dim(bank, rows, at, 0), donate_argnums=0)
        banks = dict(state.banks)
        for name, (shape, dtype) in self.spec.tensors.items():
            for layer in range(L):
                rows = np.empty((E, *shape), dtype)
                fill(layer, name, rows)
                banks[name] = jax.block_until_ready(put(banks[name], rows, np.int32(layer * E)))
        slots = jnp.arange(L * E, dtype=jnp.int32)
        owner = jnp.full((self.rows,), -1, jnp.int32).at[: L * E].set(slots)
        return replace(
            state,
            banks=banks,
            slot_of=slots.reshape(L, E),
            owner=owner,
            resident=jnp.full((1,), L * E, jnp.int32),
        )

    def serves(self, policy):
        return True

    def rebuild(self):
        if self._refill is None:
            raise StateLost(
                "the fault took the experts on the device with it, and transport='resident' keeps no copy of them in "
                "host memory: load the model again"
            )
        return self.load(self.create_state(), self._refill, again=True)

    def empty(self, state):
        return replace(state, counters=jnp.zeros_like(state.counters), step=jnp.zeros((), jnp.int32))

    def reset_policy(self, state):
        return state
