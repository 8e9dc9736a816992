"""The `device` transport with prefetch: the first part of what the next layer will miss is staged beside its slots.

After the expert kernels of a layer, one copy kernel reads the prefix (`pallas_kernels/expert_ffn/staging.py`) of the
likeliest experts of the next layer that have no slot, into a few *staging rows* that are nobody's slot. It depends on
the prediction and on the staging rows alone, so it runs beside the attention and the router of the next layer, when the
link is idle. The expert kernels of the next layer take a missing expert's first blocks from there and the others from
the pool: the same bytes, deposited in the same slots. Plan, policy and counters know nothing of it.

There are two decode programs, with and without all this, for even what stages nothing takes time, and so does the
routing that is handed out for the predictor to learn from. Which one runs is decided between calls, by the clock
(`prefetch/time_trial.py`); while nothing is staged nothing is learned.

No host takes part in a step. The prediction is traced (`prefetch/staging.py`): tables, counts and the rule which layers
stage are values that the host hands over between the calls, learned from the routing that they return.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from host_offload.prefetch.staging import GraphPredictor, LayerRows, StagingBooks, StagingSettings, StagingShutOff
from host_offload.prefetch.time_trial import PLAIN, STAGING, TimeTrial
from host_offload.transport.base import event_need, event_scores, record
from host_offload.transport.graph import GraphTransport
from pallas_kernels.choose_rows import choose_rows
from pallas_kernels.expert_ffn import Staging
from pallas_kernels.expert_ffn.staging import prefix_bytes, regions
from pallas_kernels.fetch_rows import fetch_rows


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["staging", "predictor", "began", "counts", "notes"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Ahead:
    """What a step keeps of its prefetch.

    staging: `Staging` of the layer that runs next. predictor: its state, without what it learned. began: int32 scalar,
    `SlotCache.step` at the run's first decode step. counts: [L, 2] int32, rows issued and useful since the last call.
    notes: while a step is traced, (ids [P] that were staged for it, live [B]) of each event; empty between steps.
    """

    staging: Staging
    predictor: dict[str, Any]
    began: jax.Array
    counts: jax.Array
    notes: tuple = ()


class StagedTransport(GraphTransport):
    """`GraphTransport` and staging rows; owner as there.

    Args:
      prefetch: `StagingSettings`; the others as for `Transport`, with experts that the kernels serve. Raises ValueError
      for a predictor that cannot run in a compiled step.
    """

    watches = True

    def __init__(self, *args, prefetch, **kwargs):
        super().__init__(*args, **kwargs)
        shapes = {name: shape for name, (shape, _) in self.spec.tensors.items()}
        self._covered = regions(prefetch.prefix, self.experts, shapes)
        self._first = self.starts[-1]  # decode steps run the layers from here on
        self._script, self._predictor = None, None
        try:
            if why := self.without_kernel:
                raise ValueError(f"prefetch in transport='device' is the work of its expert kernels: {why}")
            self.use(prefetch)
        except BaseException:
            self.close()
            raise

    def use(self, settings):
        """Another budget or predictor for the same programs: books and trials begin anew."""
        if self._predictor is not None:
            self._predictor.end()
        self.settings = settings
        self._predictor = GraphPredictor(settings.predictor, settings.experience, self.seed)
        self.gate = self._predictor.gate
        self.books = StagingBooks(self.spec.L, prefix_bytes(settings.prefix, self.experts, self.spec.tensors))
        self.shutoff, self.trial = StagingShutOff(self.spec.L, settings.shutoff), TimeTrial(settings.shutoff)
        self._waiting, self.changed = 0, True

    def prefetches(self, settings) -> bool:
        mine = self.settings
        return isinstance(settings, StagingSettings) and (
            (settings.predictor, settings.rows, settings.prefix) == (mine.predictor, mine.rows, mine.prefix)
        )

    @property
    def prefetch_bytes(self) -> int:
        return self.settings.rows * sum(self.spec.nbytes(name) for name in self._covered)

    def choose_program(self):
        """`STAGING`, also to learn while there is nothing to predict from; `PLAIN` where the time trial wants it."""
        return STAGING if not self._predictor.ready or self.trial.choose() else PLAIN

    def reads_routing(self, program):
        return program == STAGING

    def decode_options(self, program):
        """On a GPU independent kernels of a step run side by side: one after the other, each copy adds its whole time
        (1.8 MB beside kernels of 69 us: 76.8 us so, 112 otherwise, docs/measurements.md)."""
        if program == PLAIN or self.implementation != "pallas":
            return None
        return {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}

    @property
    def scripted(self) -> bool:
        return self._predictor.scripted

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the arrays that the predictor reads from a recorded run."""
        return self._predictor.predictor.reads

    def expect(self, script):
        """The decode steps of the next run, `predictors.replay.Step`s, for a predictor that reads a recorded run."""
        self._script = script

    # ------------------------------------------------------------------------------------------------- cache and values

    def _fresh(self, banks):
        P, tensors = self.settings.rows, self.spec.tensors
        rows = {name: jnp.zeros((P, *tensors[name][0]), tensors[name][1]) for name in self._covered}
        self._waiting = 0
        ahead = Ahead(
            staging=Staging(jnp.full((P,), -1, jnp.int32), rows, self.settings.prefix),
            predictor=self._predictor.fresh(),
            began=jnp.zeros((), jnp.int32),
            counts=jnp.zeros((self.spec.L, 2), jnp.int32),
        )
        return replace(super()._fresh(banks), ahead=ahead)

    def operands(self):
        self.changed = False
        ahead = {
            "on": jnp.asarray(self.shutoff.on & self._predictor.ready, jnp.int32),
            "learned": self._predictor.learned,
        }
        if self.scripted:
            ahead["script"] = self._predictor.script
        return {**super().operands(), "ahead": ahead}

    def begin(self, state, program=None):
        state = super().begin(state, program)
        ahead = replace(state.ahead, counts=jnp.zeros_like(state.ahead.counts))
        if program == PLAIN:  # nobody will look at what is staged, nor stage
            ahead = replace(ahead, staging=replace(ahead.staging, ids=jnp.full_like(ahead.staging.ids, -1)))
        return replace(state, ahead=ahead)

    def reset_policy(self, state):
        """Also the predictor's. What waits in staging is dropped: it was for the last request, and the prompt that
        comes now may give it a slot, so that its use would not be known to be a miss."""
        script, self._script = self._script, None
        held, changed = self._predictor.begin(state.ahead.predictor, script)
        self.changed |= changed
        staging = replace(state.ahead.staging, ids=jnp.full((self.settings.rows,), -1, jnp.int32))
        self._waiting = 0
        ahead = replace(state.ahead, staging=staging, predictor=held)
        return super().reset_policy(replace(state, ahead=ahead))

    def report(self, state):
        return state.ahead.counts, state.ahead.staging.ids

    def decoded(self, call, report, ids, good):
        """A `DecodeCall` is over.

        Args:
          report: what `report` named, as NumPy arrays.
          ids: [steps, layers, B, K] of the layers that a decode step runs, None of `PLAIN`; good: [steps, B] bool, the
            live rows.
        """
        counts, waiting = report
        self._waiting = int((waiting >= 0).sum())
        self.books.add(counts)
        predicted = self._predictor.ready
        if ids is not None:
            need = np.zeros((call.steps, self.spec.L, self.spec.E), bool)
            step, row = np.nonzero(good)
            layers = np.arange(self._first, self.spec.L)
            need[step[:, None, None], layers[None, :, None], ids[step, :, row]] = True
            self.changed |= self._predictor.passed(need)
        self.changed |= self.shutoff.tell(counts, call.steps)
        if predicted:
            self.trial.tell(call.program == STAGING, call.seconds, call.steps, call.misses, call.timed)

    def close(self):
        if self._predictor is not None:
            self._predictor.end()
        super().close()

    def prefetch_stats(self) -> dict:
        """Predictor, budget, what is staged of a row, state by layer, and what became of the rows since this predictor
        was chosen."""
        settings, predictor = self.settings, self._predictor
        seen = settings.experience
        return {
            "predictor": predictor.predictor.name,
            "ready": predictor.ready,
            "lead_layers": 1,
            "budget": "auto" if settings.auto else settings.budget,
            "staging_rows": settings.rows,
            "prefix": {
                "gate_up_rows": settings.prefix.gate_up,
                "down_rows": settings.prefix.down,
                "bytes": prefix_bytes(settings.prefix, self.experts, self.spec.tensors),
            },
            "learned_tokens": seen.counts.tokens,
            "learned_requests": seen.requests,
            "trial": self.trial.to_dict(),
            "layers": [self.shutoff.to_dict(layer) for layer in range(self.spec.L)],
            **self.books.to_dict(self._waiting, self._first),
        }

    def verify(self, state, pool):
        """Compares the rows that wait in staging, too."""
        super().verify(state, pool)
        staging = state.ahead.staging
        for p, expert in enumerate(np.asarray(staging.ids).tolist()):
            for name, spans in self._covered.items() if expert >= 0 else ():
                held, wanted = np.asarray(staging.rows[name][p]), pool.stored(self._first, name, expert)
                for start, stop in spans:
                    if held[start:stop].tobytes() != np.asarray(wanted[start:stop]).tobytes():
                        where = f"staging row {p}: layer {self._first} expert {expert}"
                        raise RuntimeError(f"{where} differs from host memory in {name!r} from {start} to {stop}")

    # ----------------------------------------------------------------------------------------------- traced into a step

    def bind(self, operands, *, prefill, block_rows=None, guess=None, program=None):
        """guess: as of `PrefetchTransport.bind`; program: of a decode step, see `choose_program`."""
        if prefill:
            return self._bind_prefill(super().bind(operands, prefill=prefill, block_rows=block_rows))
        if program == PLAIN:
            return self._bind_plain(super().bind(operands, prefill=prefill))
        pool, control, values = operands["pool"], operands["control"], operands["ahead"]

        def experts(layer, x, ids, weights, scores, live, token_ids, state, **onward):
            note, happened = (state.ahead.staging.ids, live), jnp.any(live)
            if layer == self._first:
                state = replace(state, ahead=self._by_layer(state.ahead, LayerRows))
            y, new = self._decode(layer, x, ids, weights, scores, live, state, pool[layer], control, **onward)
            target, width = self._target(layer), min(self.spec.E, ids.size)  # as many as an event may need
            with jax.named_scope("prefetch"):
                ahead, likely = new.ahead, None
                if not self.gate:
                    t = new.step * self.spec.L + layer
                    need = event_need(ids, live, self.spec.E)
                    seen = self._predictor.observe(
                        ahead.predictor, values["learned"], layer, need, event_scores(scores, live), t
                    )
                    ahead = replace(ahead, predictor=seen)
                if target is not None:
                    if self.gate:
                        likely = self._of_guess(guess(target, x, token_ids), live)
                    elif self.scripted:
                        likely = values["script"][new.step - ahead.began, int(target <= layer), target]
                    else:
                        likely = self._predictor.scores(ahead.predictor, values["learned"], layer, target)
                on = values["on"] * happened  # after an idle step comes a new run, which resets the predictor
                staging, slot_of = self._stage(target, likely, width, new.slot_of, on, ahead.staging, pool)
                ahead = replace(ahead, staging=staging, notes=(*ahead.notes, note))
            return y, record(replace(new, ahead=ahead, slot_of=slot_of), ids, weights, scores)

        return experts

    def _bind_prefill(self, plain):
        """`experts` of `GraphTransport`; decode begins after the last of these steps."""

        def experts(*args, **onward):
            y, new = plain(*args, **onward)
            return y, replace(new, ahead=replace(new.ahead, began=new.step + 1))

        return experts

    def _bind_plain(self, plain):
        """`experts` of `GraphTransport`, beside which nothing is staged and the predictor sees nothing."""

        def experts(layer, x, ids, weights, scores, live, token_ids, state, **onward):
            ahead, state = state.ahead, replace(state, ahead=None)
            y, new = plain(layer, x, ids, weights, scores, live, token_ids, state, **onward)
            return y, replace(new, ahead=ahead)

        experts.read_by_kernels = plain.read_by_kernels
        return experts

    def _target(self, layer):
        """The layer that is staged for after the event of `layer`; None if nothing can be said of it: past the last
        layer a gate knows nothing, and in an encoder-decoder the first layer is not the next one."""
        if layer + 1 < self.spec.L:
            return layer + 1
        return None if self.gate or self._first else 0

    def _of_guess(self, guess, live):
        """[E] float32 of ids [B, K] by falling weight: K - rank, the best over the live rows, -inf for the others."""
        K = guess.shape[1]
        value = jnp.where(live[:, None], K - jnp.arange(K, dtype=jnp.float32), -jnp.inf)
        chosen = guess[:, :, None] == jnp.arange(self.spec.E, dtype=guess.dtype)
        return jnp.max(jnp.where(chosen, value[:, :, None], -jnp.inf), axis=(0, 1))

    def _stage(self, target, likely, width, slot_of, on, staging, pool):
        """(Staging for layer `target`: of the `width` experts of the highest scores `likely` [E] those without a slot;
        slot_of in the order of its uses)."""
        P = self.settings.rows
        if target is None:
            return replace(staging, ids=jnp.full((P,), -1, jnp.int32)), slot_of
        how = self.implementation
        ids, slot_of = choose_rows(likely, slot_of, on, layer=target, count=P, width=width, implementation=how)
        rows = fetch_rows(
            jnp.arange(P, dtype=jnp.int32),
            ids,
            jnp.full((1,), P, jnp.int32),
            staging.rows,
            {name: pool[target][name] for name in staging.rows},
            distinct=P,
            implementation=how,
            regions=self._covered,
        )
        return replace(staging, ids=ids, rows=rows), slot_of

    def _by_layer(self, ahead, how):
        """With `how` of the entries that the predictor reads and writes by layer alone."""
        rows = self._predictor.predictor.by_layer
        held = {name: how(value) if name in rows else value for name, value in ahead.predictor.items()}
        return replace(ahead, predictor=held)

    def _serve(self, layer, x, listed, distinct, state, pool, feeds):
        if state.ahead is None:
            return super()._serve(layer, x, listed, distinct, state, pool, feeds)
        y, banks, staging = self._experts(x, listed, distinct, state.banks, pool, feeds, staging=state.ahead.staging)
        return y, replace(state, banks=banks, ahead=replace(state.ahead, staging=staging))

    def finish_step(self, state, live=True):
        ahead = state.ahead
        if ahead.notes:
            staged = jnp.stack([ids for ids, _ in ahead.notes])  # [layers, P]
            ids = jnp.stack([ids for ids, _, _ in state.record])  # [layers, B, K]
            found = (ids[:, None] == staged[:, :, None, None]) & ahead.notes[0][1][:, None]
            # Staged experts had no slot and got none before their event, so what was needed of them was a miss.
            useful = jnp.sum(jnp.any(found, axis=(2, 3)), axis=1, dtype=jnp.int32)
            # What was staged for a layer of this step is in its note, what was for the next step's first is not yet.
            issued = jnp.concatenate([ahead.staging.ids[None], staged[1:]])
            issued = jnp.sum(issued >= 0, axis=1, dtype=jnp.int32)
            counts = ahead.counts.at[self._first :].add(jnp.stack([issued, useful], axis=1))
            ahead = self._by_layer(ahead, LayerRows.whole)
            ahead = replace(ahead, counts=counts, notes=())
        return super().finish_step(replace(state, ahead=ahead), live)
