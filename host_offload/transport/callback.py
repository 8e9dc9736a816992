"""The `callback` transport: each MoE layer calls the host, which runs any Python policy and issues the copies.

The cache tables and the policy live on the host in NumPy; the device holds the banks only. A callback gets the router's ids, starts copying
the missing rows at once (the rows that are free do not depend on who will leave), decides the event while they fly, and hands back row numbers.
Callbacks never raise (XLA would delete the donated banks): a fault is kept, the error word is set, later callbacks do nothing,
and the engine raises it after the call with everything generated before the faulty step.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.buffer_callback import buffer_callback

from host_offload.plan import apply, plan_event
from host_offload.schedule import max_rounds, schedule_rounds
from host_offload.slots import SlotCache, empty_banks
from host_offload.transport.base import (
    Transport,
    combine_decode,
    combine_prefill,
    device_platform,
    event_need,
    event_scores,
    record,
)
from pallas_kernels.expert_ffn import expert_ffn_decode, expert_ffn_round, group_pairs


class NumpyMover:
    """Moves rows between host arrays: the CPU backend's buffers are NumPy views. Same interface as `cuda.CudaMover`."""

    def __init__(self, pool):
        self._pool = pool

    def fetch(self, ctx, buffers, meanwhile):
        """The buffers as arrays; runs `meanwhile()` first."""
        meanwhile()
        return {name: np.asarray(buffer) for name, buffer in buffers.items()}

    def store(self, ctx, buffer, value):
        """Writes a small array."""
        np.asarray(buffer)[...] = value

    def banks(self, buffers):
        """Views of the banks in this call."""
        return {name: np.asarray(buffer) for name, buffer in buffers.items()}

    def move(self, ctx, banks, layer, moves):
        """Copies (expert, row) pairs."""
        for expert, row in moves:
            for name, bank in banks.items():
                bank[row] = self._pool.view(layer, name)[expert]

    def move_ahead(self, ctx, banks, layer, now, ahead, turn):
        """Copies the next round's rows now: this round's compute has not read them, see `schedule.py`."""
        self.move(ctx, banks, layer, ahead)

    def close(self):
        """Nothing to free."""


class CallbackTransport(Transport):
    """Host-side cache. Owner of the tables: XLA's execution thread while a jitted call runs, else the engine's thread."""

    name = "callback"

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if device_platform() == "gpu":
            from host_offload.transport.cuda import CudaMover

            self.mover = CudaMover(self.pool)
        else:
            self.mover = NumpyMover(self.pool)
        self._error: BaseException | None = None
        self._clear()

    def _clear(self):
        L, E = self.spec.L, self.spec.E
        self._slot_of = np.full((L, E), -1, np.int32)
        self._owner = np.full((self.rows,), -1, np.int32)
        self._counters = np.zeros((L, 4), np.int32)
        self._policy_state = self.fresh_policy(np)
        self._step = -1
        self._rounds: list[list[tuple[int, int]]] = []
        self._round = 0
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

    def begin(self, state):
        return state

    def read_counters(self, state):
        counters, self._counters = self._counters, np.zeros_like(self._counters)
        return counters

    def reset_policy(self, state):
        self._policy_state = self.policy.reset(np, self._policy_state)
        return state

    def take_error(self):
        error, self._error = self._error, None
        return error

    def close(self):
        self.mover.close()

    def bind(self, operands, *, prefill, block_rows=None):
        def experts(layer, x, ids, weights, scores, live, token_ids, state):
            del token_ids
            if prefill:
                y, new = self._prefill(layer, x, ids, weights, scores, live, state, block_rows)
            else:
                y, new = self._decode(layer, x, ids, weights, scores, live, state)
            return y, record(new, ids, weights, scores)

        return experts

    # ------------------------------------------------------------------------------------------------ traced into the step

    def _call(self, body, layer, tables, values, state):
        """buffer_callback of body(layer, ctx, mover outputs...) with banks and error word updated in place."""
        names = list(state.banks)
        # Flat arguments and results: that is how buffer_callback numbers its aliases.
        results = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in tables.values()]
        kept = [state.error, *state.banks.values()]
        results += [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in kept]
        call = buffer_callback(
            partial(self._guarded, body, layer, list(tables), list(values), names),
            results,
            has_side_effect=True,
            input_output_aliases={len(values) + i: len(tables) + i for i in range(len(kept))},
        )
        *small, error = (out := call(*values.values(), *kept))[: len(tables) + 1]
        banks = dict(zip(names, out[len(tables) + 1 :], strict=True))
        return dict(zip(tables, small, strict=True)), replace(state, error=error, banks=banks)

    def _scores(self, scores, live):
        return {"scores": event_scores(scores, live)} if self.policy.uses_scores else {}

    def _decode(self, layer, x, ids, weights, scores, live, state):
        pairs = ids.size
        distinct = min(self.spec.E, pairs)
        single = ids.shape[0] == 1
        # One row: its K experts are distinct and stand in the router's order, so only row numbers come back.
        tables = {"rows": (distinct,)} if single else {"rows": (distinct,), "count": (1,), "entry": (pairs,)}
        values = {"ids": ids, **({} if single else {"live": live}), **self._scores(scores, live)}
        with jax.named_scope("callback"):
            out, state = self._call(self._on_decode, layer, tables, values, state)
        if single:
            count, entry = jnp.full((1,), pairs, jnp.int32), jnp.arange(pairs, dtype=jnp.int32)
        else:
            count, entry = out["count"], out["entry"]
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
                implementation=self.implementation,
            )
            return combine_decode(y, entry.reshape(ids.shape), weights, live), replace(state, banks=banks)

    def _prefill(self, layer, x, ids, weights, scores, live, state, block_rows):
        E = self.spec.E
        tables = {"position": (E,), "row": (E,), "bounds": (max_rounds(E, self.group) + 3,), "rounds": (1,)}
        values = {"need": event_need(ids, live, E), **self._scores(scores, live)}
        with jax.named_scope("callback"):
            order, state = self._call(self._on_prefill, layer, tables, values, state)
        with jax.named_scope("plan"):
            layout = group_pairs(ids, live, order["position"], E, block_rows)
            layout["block_row"] = order["row"][jnp.minimum(layout["block_position"], E - 1)]
            ends = jnp.concatenate([jnp.zeros((1,), jnp.int32), layout["block_end"]])

        def compute(r, carry):
            y, state = carry
            _, state = self._call(self._on_round, layer, {}, {}, state)
            lo, hi = order["bounds"][r], order["bounds"][r + 1]
            span = jnp.stack([ends[lo], ends[hi], hi, hi])
            y, banks = expert_ffn_round(
                x, y, layout, span, state.banks, None, block_rows=block_rows, implementation=self.implementation
            )
            return y, replace(state, banks=banks)

        with jax.named_scope("expert_ffn"):
            y = jnp.zeros((ids.size, x.shape[1]), x.dtype)
            y, state = jax.lax.fori_loop(0, order["rounds"][0], compute, (y, state))
            return combine_prefill(y, weights, live), state

    # ---------------------------------------------------------------------------------------------- run by XLA's thread

    def _guarded(self, body, layer, tables, value_names, bank_names, ctx, outputs, *inputs):
        small = dict(zip(tables, outputs, strict=False))
        error = outputs[len(tables)]
        banks = dict(
            zip(bank_names, outputs[len(tables) + 1 :], strict=True)
        )  # the inputs of these are the same memory
        values = dict(zip(value_names, inputs, strict=False))
        if self._error is None:
            try:
                body(layer, ctx, small, values, banks)
                return
            except BaseException as fault:  # kept for the engine: raising here would delete the donated banks
                self._error = fault
        try:
            for buffer in small.values():
                self.mover.store(ctx, buffer, 0)
            self.mover.store(ctx, error, 1)
        except BaseException as fault:  # the device itself is gone; the first fault is still the one to report
            self._error.add_note(f"while reporting it: {fault!r}")

    def _observe(self, layer, need, values):
        """Clock and policy state after the event's observation; `values` are NumPy arrays."""
        if layer == 0:
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

    def _settle(self):
        """Decides the decode event that was served last, if that is still to do: who stays, who leaves.

        An event's decision is only needed at the next one, so it is taken there while the host waits for the device.
        """
        if self._unsettled is not None:
            (layer, need, arrays), self._unsettled = self._unsettled, None
            t = self._observe(layer, need, arrays)
            apply(np, self._plan(layer, need, t, True), self._slot_of, self._owner)

    def _on_decode(self, layer, ctx, out, values, banks):
        E = self.spec.E
        arrays = self.mover.fetch(ctx, values, self._settle)
        ids = arrays["ids"]
        live = arrays.get("live")
        listed = ids[0] if live is None else np.unique(ids[live])
        row_of = self._slot_of[layer].copy()
        missing = np.sort(listed[row_of[listed] < 0])
        if missing.size:  # free rows now, in the order that `plan_event` assigns them
            row_of[missing] = np.flatnonzero(self._owner < 0)[: missing.size]
            moves = list(zip(missing.tolist(), row_of[missing].tolist(), strict=True))
            self.mover.move(ctx, self.mover.banks(banks), layer, moves)
        rows = np.zeros(out["rows"].shape, np.int32)
        rows[: listed.size] = row_of[listed]
        self.mover.store(ctx, out["rows"], rows)
        if live is not None:
            entry = np.zeros((E,), np.int32)
            entry[listed] = np.arange(listed.size)
            self.mover.store(ctx, out["count"], listed.size)
            self.mover.store(ctx, out["entry"], np.where(live[:, None], entry[ids], 0).reshape(-1))
        need = np.zeros((E,), bool)
        need[listed] = True
        kept = {name: array.copy() for name, array in arrays.items() if name == "scores"}  # the ring reuses its memory
        self._unsettled = layer, need, kept
        if layer == self.spec.L - 1:  # a fault must show in its own step
            self._settle()

    def _on_prefill(self, layer, ctx, out, values, banks):
        arrays = self.mover.fetch(ctx, values, self._settle)
        need = arrays["need"].astype(bool)
        t = self._observe(layer, need, arrays)
        plan = self._plan(layer, need, t, False)
        order = schedule_rounds(np, plan, need, self._slot_of, self._owner, group=self.group)
        count = int(order.rounds)
        self._rounds = []
        for r in range(count + 1):
            span = slice(order.bounds[r], order.bounds[r + 1])
            moves = zip(order.src[span].tolist(), order.row[span].tolist(), strict=True)
            self._rounds.append([(src, row) for src, row in moves if src >= 0])
        self._round = 0
        apply(np, plan._replace(dest=order.dest), self._slot_of, self._owner)
        for name in ("position", "row", "bounds", "rounds"):
            self.mover.store(ctx, out[name], getattr(order, name))

    def _on_round(self, layer, ctx, out, values, banks):
        r, self._round = self._round, self._round + 1
        now, ahead = bool(self._rounds[r]), self._rounds[r + 1]
        self.mover.move_ahead(ctx, self.mover.banks(banks), layer, now, ahead, r)
