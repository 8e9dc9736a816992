"""What all transports share: their settings, and the pieces of an event that do not depend on how rows move."""

import abc
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from host_offload.plan import check_invariants
from host_offload.policy import fresh_state
from host_offload.slots import round_group, spare_rows
from host_offload.transport.lookahead import Lookahead
from pallas_kernels.combine import combine
from pallas_kernels.expert_ffn import SILU
from pallas_kernels.formats import Dense


class StateLost(RuntimeError):
    """A fault consumed the banks and there is nothing to fill them from again."""


@dataclass(frozen=True)
class DecodeCall:
    """A call of a decode program that is over: what `choose_program` said, how long it took and how many experts were
    missing. timed: `seconds` is the time of all `steps` that a call has, and of nothing else."""

    program: str | None
    seconds: float
    steps: int
    misses: int
    timed: bool


class Transport(abc.ABC):
    """How a missing expert reaches the device, and where the cache's decisions are made.

    Args:
      spec: `RowSpec` of the experts.
      pool: `ExpertPool` or, in the transport `callback` alone, `DiskTier`; None when every expert is resident.
      budget: `SlotBudget`, the slots of this cache.
      policy: `Policy`; select: the member in charge when that is a `PolicySet`.
      forced_admit: contract `atomic-forced-admit` instead of `atomic-bypass`.
      max_pairs: most token-expert pairs of a decode step (B * K).
      implementation: "pallas", "interpret" or "xla", see `pallas_kernels.expert_ffn`.
      experts: `ExpertSpec`, what an expert computes and how its row is stored. The products of experts that the kernels
        do not serve are plain XLA, and `kernel` says why.
      bank_rows: rows to allocate at least (a bank kept from a larger cache).
      reserve: rows beside slots and spare ones, for prefetched experts.
      starts: MoE layers that begin a step: the first, and in an encoder-decoder the decoder's first.
      lookahead_rows: rows of the next layer that a long prompt moves before its router has run, see `lookahead.py`.

    Owner thread: the engine's. The cache state is a pytree made by `create_state`, passed through the jitted step and
    donated.
    """

    name: str
    plans = True  # whether a policy decides
    gate = 0  # how many layers ahead the model's routers have to guess for `bind`; 0: they do not
    # Whether a call of decode may start before the host has read what the last one returned, and a step without live
    # rows leaves slots, policy and counters as they are.
    runs_ahead = False
    scripted = False  # whether a run needs its steps told ahead of time
    watches = False  # whether `decoded` wants to know of calls of decode
    changed = False  # whether `operands` has news for the next call of a program
    prefetch_bytes = 0  # device memory for what is fetched ahead, beside the banks

    def __init__(
        self, spec, pool, budget, policy, *, forced_admit, max_pairs, implementation, experts=SILU, select=None, seed=0,
        bank_rows=0, starts=(0,), reserve=0, lookahead_rows=0,
    ):  # fmt: skip
        self.spec, self.pool, self.policy, self.select = spec, pool, policy, select
        self.implementation, self.seed, self.starts = implementation, seed, starts
        self.staging_rows, self.lookahead = (0 if pool is None else lookahead_rows), None
        # In this order: what gate and up need arrives first where rows come in two steps (callback transport).
        wanted = (*experts.parts("gate_up"), *experts.parts("down"))
        if tuple(spec.tensors) != wanted:
            raise ValueError(
                f"rows of {', '.join(spec.tensors)}: these experts need {', '.join(wanted)}, in this order"
            )
        self.experts, self.without_kernel = experts, experts.without_kernel()
        self.ffn_implementation = "xla" if self.without_kernel else implementation
        self.group = round_group(spec)
        self.spare = spare_rows(spec, max_pairs, self.group) + reserve
        self.budget, self.forced_admit = budget, forced_admit
        self.rows = max(bank_rows, budget.total + self.spare)

    def _sum_implementation(self, rows, residual=None, feeds_kernels=False):
        """What sums the expert outputs of a decode event, an implementation of `combine`.

        A kernel where it leaves nothing to do before the next kernel; XLA joins the sum with what else is to be done.
        """
        del feeds_kernels
        return self.ffn_implementation if rows == 1 and residual is not None else "xla"

    @property
    def _reads_rows(self) -> frozenset[str]:
        """{"x"} where a kernel reads the row of one token, as `Experts.read_by_kernels` says it; else nothing."""
        # Packed weights take it by lanes, into which XLA brings it.
        reads = self.ffn_implementation != "xla" and isinstance(self.experts.gate_up, Dense)
        return frozenset({"x"} if reads else ())

    def _combine(self, y, entry, weights, live, **onward):
        """`combine` of y [U, B, D], entry (or None) and weights [B, K], live [B]; `onward` as of `bind`."""
        how = self._sum_implementation(len(live), **onward)
        return combine(y, entry, weights, live, **onward, implementation=how)

    def configure(self, budget, forced_admit, policy, select=None):
        """New quotas, scope, contract and policy over the same banks; the caller then empties the state.

        Nothing is compiled again. `policy` must be one that `serves` accepts.

        Raises:
          ValueError: the bank has too few rows.
        """
        if budget.total + self.spare > self.rows:
            raise ValueError(
                f"{budget.total} slots and {self.spare} spare rows need more than the {self.rows} rows of this bank"
            )
        self.budget, self.forced_admit = budget, forced_admit
        self.policy, self.select = policy, select

    def prefetches(self, settings) -> bool:
        """Whether the compiled programs and banks would serve these `PrefetchSettings` (None: no prefetch)."""
        return settings is None

    def serves(self, policy) -> bool:
        """Whether the compiled programs would serve `policy` as they stand."""
        return policy is self.policy

    def fresh_policy(self, xp):
        """The policy's state before the first event."""
        spec, budget = self.spec, self.budget
        scope = xp.asarray(budget.scope == "global")  # an array: `set_cache` may change it under a compiled step
        state = fresh_state(self.policy, xp, spec.L, spec.E, self.seed, budget.capacities, scope)
        return state if self.select is None else self.policy.with_selected(state, self.select)

    def _look_ahead(self, mover):
        """The `Lookahead` over the mover's staging memory, kept for stats too; None without such memory."""
        self.lookahead = Lookahead(mover, self.staging_rows) if self.staging_rows else None
        return self.lookahead

    @property
    def kernel(self) -> str:
        """Names the code path of the expert FFN for stats, and why it is not the kernels where those would run."""
        how = {"pallas": "pallas-triton", "interpret": "pallas-interpret", "xla": "xla"}[self.ffn_implementation]
        why = f" ({self.without_kernel})" if self.ffn_implementation != self.implementation else ""
        return f"{self.name}/{how}{why}"

    @property
    @abc.abstractmethod
    def policy_path(self) -> str:
        """Where the policy of a decode event runs, for stats."""

    @abc.abstractmethod
    def create_state(self):
        """A new, empty cache state with banks on the device."""

    def rebuild(self):
        """A state as after loading, when a fault consumed the banks. Raises StateLost."""
        return self.create_state()

    @abc.abstractmethod
    def operands(self):
        """Arrays that a jitted step takes beside the state and never donates: pool slabs and control values."""

    @abc.abstractmethod
    def bind(self, operands, *, prefill, block_rows=None):
        """The `experts` callable of one traced step: `Experts` of docs/architecture.md, "Model and experts".

        Its keywords `residual` and `feeds_kernels` are called `onward` where they are only handed on.
        """

    @abc.abstractmethod
    def empty(self, state):
        """The state with free slots and a fresh policy, over the same banks."""

    @abc.abstractmethod
    def tables(self, state):
        """(slot_of [L, E], owner [rows]) as NumPy arrays."""

    def occupancy(self, state) -> dict:
        """For stats: resident_experts {layer: experts, ascending} and the number of occupied_slots."""
        slot_of, owner = self.tables(state)
        return {
            "resident_experts": {layer: np.flatnonzero(row >= 0).tolist() for layer, row in enumerate(slot_of)},
            "occupied_slots": int((owner >= 0).sum()),
        }

    @abc.abstractmethod
    def begin(self, state, program=None):
        """Zeroes the counters (traced, at the start of a jitted call)."""

    def counters(self, state):  # noqa: B027
        """What the state holds of the counters of a jitted call: arrays on the device, or None if the host counts."""

    @abc.abstractmethod
    def read_counters(self, counters):
        """[L, 4] NumPy counters of the last jitted call, with those of `DiskTier.take_counters` after them if there is
        a tier; of what `counters` gave for that call."""

    @abc.abstractmethod
    def reset_policy(self, state):
        """The policy at the start of a request (`Policy.reset`)."""

    def finish_step(self, state, live=True):
        """Advances the clock, if the step had `live` rows (bool or a scalar of it), and hands out the routing of the
        step: (state, (ids, weights, scores) a layer)."""
        return replace(state, step=state.step + live, record=()), state.record

    def choose_program(self) -> str | None:  # noqa: B027
        """Which decode program the call that begins now runs, for `bind`; None if there is one alone."""

    def reads_routing(self, program) -> bool:
        """Whether `decoded` wants the routing of calls of that decode program."""
        return False

    def decode_options(self, program) -> dict | None:  # noqa: B027
        """Of XLA for a decode program: {name: value}."""

    def report(self, state):  # noqa: B027
        """Arrays on the device that `decoded` wants on the host, or None."""

    def decoded(self, call, report, ids, good):  # noqa: B027 (most transports learn nothing of it)
        """A `DecodeCall` is over, if the transport `watches`; see `StagedTransport.decoded`."""

    def prefetch_stats(self) -> dict | None:
        """Predictor, settings and books of prefetch, None without."""
        return None

    def quiesce(self):  # noqa: B027 (most transports move nothing between programs)
        """No copy into the banks is under way after this: to be called before they are freed."""

    def take_error(self):
        """The exception of a callback since the last call, or None."""
        return None

    def close(self):  # noqa: B027 (a transport may hold nothing)
        """Releases what the transport holds beside the state and the pool."""

    def verify(self, state, pool):
        """Raises ValueError unless the tables are inverse, and RuntimeError unless every occupied row holds the bytes
        that `pool` has of its expert (those on disk, if it is a `DiskTier`)."""
        slot_of, owner = self.tables(state)
        check_invariants(slot_of, owner)
        for name in self.spec.tensors:
            bank = state.banks[name]
            if device_platform() == "cpu":  # a view; elsewhere row by row, for a bank may exceed host memory
                bank = np.asarray(bank)
            for row in np.flatnonzero(owner >= 0):
                layer, expert = divmod(int(owner[row]), self.spec.E)
                wanted = pool.stored(layer, name, expert)
                if np.asarray(bank[row]).tobytes() != wanted.tobytes():
                    raise RuntimeError(f"bank {name!r} row {row} differs from layer {layer} expert {expert}, its owner")


def record(state, ids, weights, scores):
    """Appends a layer's routing to the running step's record."""
    return replace(state, record=(*state.record, (ids, weights, scores)))


def event_need(ids, live, E):
    """[E] bool: distinct experts of the live rows; ids [T, K], live [T]."""
    # Comparing all pairs is one fused reduction; marking by scatter is many small kernels or atomics.
    hit = (ids[:, :, None] == jnp.arange(E, dtype=jnp.int32)) & live[:, None, None]
    return jnp.any(hit, axis=(0, 1))


def event_scores(scores, live):
    """[E] f32: router scores of the live rows, each rounded through float16 as traces store them, summed."""
    rounded = scores.astype(jnp.float16).astype(jnp.float32)
    return jnp.sum(jnp.where(live[:, None], rounded, 0), axis=0)


def combine_prefill(y, weights, live):
    """Weighted sum [T, D] f32 as of `pallas_kernels.combine` for y [T*K, D] in pair order."""
    T, K = weights.shape
    y = y.reshape(T, K, -1)
    out = jnp.zeros((T, y.shape[-1]), jnp.float32)
    for k in range(K):
        out = out + weights[:, k, None].astype(jnp.float32) * y[:, k].astype(jnp.float32)
    return jnp.where(live[:, None], out, 0)


def joined(y, residual=None, feeds_kernels=False):
    """The sum y [T, D] f32, rounded and added to `residual` [T, D] if there is one, as `combine` does."""
    del feeds_kernels  # XLA computes it
    return y if residual is None else residual + y.astype(residual.dtype)


def device_platform() -> str:
    """Platform of the default device: "gpu" or "cpu"."""
    return jax.devices()[0].platform
