"""The `callback` transport: each MoE layer calls the host, which runs any Python policy and issues the copies.

The cache tables and the policy live on the host in NumPy; the device holds the banks only. A decode call gets the
router's ids, starts copying the missing rows at once (which rows are free does not depend on who will leave), and hands
back row numbers; the event itself is decided while the device computes.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from host_offload.disk_tier import DiskTier
from host_offload.plan import apply, plan_event
from host_offload.schedule import Schedule, max_rounds, schedule_rounds
from host_offload.slots import HITS, SlotCache, empty_banks
from host_offload.transport.base import Transport, event_need, event_scores, joined, record
from host_offload.transport.host_calls import HostCalls, RoundMoves, make_mover
from host_offload.transport.lookahead import looks_ahead
from host_offload.transport.rounds import serve_rounds
from pallas_kernels.expert_ffn import expert_ffn_decode

NOTHING = np.zeros((0,), np.int64)


class CallbackTransport(Transport):
    """Host-side cache. Its pool may be a `DiskTier`.

    Owner of the tables: XLA's execution thread while a jitted call runs, else the engine's thread.
    """

    name = "callback"
    policy_path = "host"

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._tier = self.pool if isinstance(self.pool, DiskTier) else None
        self._every_event = self._tier is not None  # whether `_bring` is called without a miss, too
        if self._tier is not None:  # what host memory lacks cannot be moved ahead of need
            self.staging_rows = 0
        self.mover = make_mover(self.pool, len(self.experts.parts("gate_up")), self.staging_rows)
        self._calls = HostCalls(self.mover)
        self._rounds = RoundMoves(self.mover, self._tier, self._look_ahead(self.mover))
        self._clear()

    def _clear(self):
        L, E = self.spec.L, self.spec.E
        self._slot_of = np.full((L, E), -1, np.int32)
        self._owner = np.full((self.rows,), -1, np.int32)
        self._counters = np.zeros((L, 4), np.int32)
        self._policy_state = self.fresh_policy(np)
        self._step = -1
        self._unsettled = None
        self._capacities = self.budget.capacities.tolist()
        self._global = self.budget.scope == "global"

    def create_state(self):
        return SlotCache(
            banks=empty_banks(self.spec, self.rows),
            slot_of=None,
            owner=None,
            resident=None,
            counters=None,
            policy=None,
            step=jnp.zeros((), jnp.int32),
            error=jnp.zeros((1,), jnp.int32),
        )

    def serves(self, policy):
        """Any policy: it runs on the host. Only whether the scores are sent there is compiled."""
        return policy.uses_scores == self.policy.uses_scores

    def operands(self):
        return {}

    def empty(self, state):
        self._clear()
        return replace(state, step=jnp.zeros((), jnp.int32), error=jnp.zeros((1,), jnp.int32))

    def tables(self, state):
        return self._slot_of.copy(), self._owner.copy()

    def begin(self, state, program=None):
        return state

    def read_counters(self, state):
        counters, self._counters = self._counters, np.zeros_like(self._counters)
        return counters if self._tier is None else np.hstack([counters, self._tier.take_counters()])

    def reset_policy(self, state):
        self._policy_state = self.policy.reset(np, self._policy_state)
        if self._tier is not None:
            self._tier.reset_policy()
        return state

    def take_error(self):
        return self._calls.take_error()

    def close(self):
        self.mover.close()

    def bind(self, operands, *, prefill, block_rows=None):
        def experts(layer, x, ids, weights, scores, live, token_ids, state, **onward):
            del token_ids
            if prefill:
                y, new = self._prefill(layer, x, ids, weights, scores, live, state, block_rows)
                y = joined(y, **onward)
            else:
                y, new = self._decode(layer, x, ids, weights, scores, live, state, **onward)
            return y, record(new, ids, weights, scores)

        if not prefill:
            experts.read_by_kernels = self._reads_rows
        return experts

    # --------------------------------------------------------------------------------------------- traced into the step

    def _scores(self, scores, live):
        return {"scores": event_scores(scores, live)} if self.policy.uses_scores else {}

    def _decode(self, layer, x, ids, weights, scores, live, state, more=None, **onward):
        """`more`: name -> array that rides to the host with the event."""
        pairs = ids.size
        distinct = min(self.spec.E, pairs)
        single = ids.shape[0] == 1
        # One row: its K experts are distinct and stand in the router's order, so only row numbers come back.
        tables = {"rows": (distinct,)} if single else {"rows": (distinct,), "count": (1,), "entry": (pairs,)}
        values = {"ids": ids, **({} if single else {"live": live}), **self._scores(scores, live), **(more or {})}
        with jax.named_scope("callback"):
            out, state = self._calls.call(self._on_decode, layer, tables, values, state)
        if single:
            count, entry = jnp.full((1,), pairs, jnp.int32), None
        else:
            count, entry = out["count"], out["entry"].reshape(ids.shape)

        def await_down(h, banks):
            # h only orders this call after its kernel; without it the in-place banks would have to be copied.
            _, waited = self._calls.call(self._on_down, layer, {}, {"h": h}, replace(state, banks=banks))
            waits.append(waited)
            return waited.banks

        waits = []
        with jax.named_scope("expert_ffn"):
            y, banks = expert_ffn_decode(
                x,
                out["rows"],
                None,
                None,
                count,
                state.banks,
                None,
                distinct=distinct,
                between=await_down,
                spec=self.experts,
                implementation=self.ffn_implementation,
                feeds_kernels=self._sum_implementation(x.shape[0], **onward) != "xla",
            )
            out = self._combine(y, entry, weights, live, **onward)
        return out, replace(waits[0], banks=banks)

    def _prefill(self, layer, x, ids, weights, scores, live, state, block_rows):
        E = self.spec.E
        tables = {"position": (E,), "row": (E,), "bounds": (max_rounds(E, self.group) + 3,), "rounds": (1,)}
        values = {"need": event_need(ids, live, E), **self._scores(scores, live)}
        ahead = looks_ahead(self.lookahead, ids.size, self.spec, layer, self.starts)
        with jax.named_scope("callback"):
            order, state = self._calls.call(partial(self._on_prefill, ahead=ahead), layer, tables, values, state)
        order = Schedule(src=None, dest=None, **order)
        return serve_rounds(self, layer, x, ids, weights, live, order, state, self._rounds, self._calls, block_rows)

    # ------------------------------------------------------------------------------------------- run by XLA's thread

    def _observe(self, layer, need, values):
        """Clock and policy state after the event's observation; `values` are NumPy arrays."""
        if layer in self.starts:
            self._step += 1
        t = np.int32(self._step * self.spec.L + layer)
        scores = values.get("scores")
        if scores is None:
            scores = np.zeros((self.spec.E,), np.float32)
        self._policy_state = self.policy.observe(np, self._policy_state, layer, need, scores, t)
        return t

    def _plan(self, layer, need, t, assign_rows):
        plan = plan_event(
            np,
            need=need,
            slot_of=self._slot_of,
            owner=self._owner,
            priority=partial(self.policy.priority, np, self._policy_state),
            layer=layer,
            capacity=self._capacities[layer],
            global_scope=self._global,
            forced_admit=self.forced_admit,
            t=t,
            assign_rows=assign_rows,
        )
        missed, bypassed = np.count_nonzero(plan.miss), np.count_nonzero(plan.bypass)
        self._counters[layer] += (np.count_nonzero(plan.hit), missed, bypassed, plan.n_evicted)
        return plan

    def _apply(self, plan, t):
        apply(np, plan, self._slot_of, self._owner)
        self._commit(plan.layer, t)

    def _commit(self, layer, t):
        """The policy at the end of the event, if it follows what the cache holds."""
        if self.policy.in_cache:
            self._policy_state = self.policy.commit(np, self._policy_state, layer, self._slot_of >= 0, t)

    def _settle(self):
        """Decides the decode event that was served last, if that is still to do: who stays, who leaves.

        An event's decision is only needed at the next one, so it is taken there while the host waits for the device.
        """
        if self._unsettled is None:
            return
        (layer, listed, missing, rows, arrays), self._unsettled = self._unsettled, None
        need = np.zeros((self.spec.E,), bool)
        need[listed] = True
        t = self._observe(layer, need, arrays)
        if len(missing):
            plan = self._plan(layer, need, t, False)
            plan.dest[missing] = rows
            self._apply(plan, t)
            return
        # Nobody comes, so nobody leaves: residents are never more than the slots. Ranking them would take the host
        # longer than the device takes for such a layer.
        self._counters[layer, HITS] += listed.size
        self._commit(layer, t)

    def _on_decode(self, layer, ctx, out, values, banks):
        arrays = self.mover.fetch(ctx, layer, values, self._settle)
        ids = arrays["ids"]
        live = arrays.get("live")
        # A copy: the ring of `fetch` reuses its memory before `_settle` reads it.
        listed = ids[0].copy() if live is None else np.unique(ids[live])
        row_of_listed = self._slot_of[layer, listed]
        absent = row_of_listed < 0
        all_hit = not absent.any()
        missing = free = NOTHING if all_hit else np.sort(listed[absent])
        if self._every_event or not all_hit:
            free = self._bring(layer, ctx, banks, listed, missing, arrays)
        if not all_hit:
            row_of_listed[absent] = free[np.searchsorted(missing, listed[absent])]
        rows = np.zeros(out["rows"].shape, np.int32)
        rows[: listed.size] = row_of_listed
        self.mover.store(ctx, out["rows"], rows)
        if live is not None:
            entry = np.zeros((self.spec.E,), np.int32)
            entry[listed] = np.arange(listed.size)
            self.mover.store(ctx, out["count"], listed.size)
            self.mover.store(ctx, out["entry"], np.where(live[:, None], entry[ids], 0).reshape(-1))
        kept = {name: array.copy() for name, array in arrays.items() if name == "scores"}
        self._unsettled = layer, listed, missing, free, kept
        if layer == self.spec.L - 1:  # a fault must show in its own step
            self._settle()

    def _bring(self, layer, ctx, banks, listed, missing, arrays):
        """Has the missing experts [n] moved, ascending, and returns their rows [n]: free ones, who leaves is decided
        later. `listed`: all that are needed; arrays: what came with the event."""
        if self._tier is not None:
            self._tier.event(layer, missing)
            self._tier.ensure(layer, missing)
        free = np.flatnonzero(self._owner < 0)[: missing.size]
        if missing.size:
            self.mover.move(ctx, banks, layer, list(zip(missing.tolist(), free.tolist(), strict=True)))
        return free

    def _on_down(self, layer, ctx, out, values, banks):
        self.mover.wait_rest(ctx)

    def _on_prefill(self, layer, ctx, out, values, banks, ahead=False):
        arrays = self.mover.fetch(ctx, layer, values, self._settle)
        need = arrays["need"].astype(bool)
        t = self._observe(layer, need, arrays)
        plan = self._plan(layer, need, t, False)
        order = schedule_rounds(np, plan, need, self._slot_of, self._owner, group=self.group)
        missing = np.flatnonzero(self._slot_of[layer + 1] < 0).tolist() if ahead else None
        self._rounds.begin(ctx, layer, banks, order, missing)
        self._apply(plan._replace(dest=order.dest), t)
        for name in ("position", "row", "bounds", "rounds"):
            self.mover.store(ctx, out[name], getattr(order, name))
