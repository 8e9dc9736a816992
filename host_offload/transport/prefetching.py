"""The `callback` transport with prefetch: rows of later layers travel while this one is computed.

An event is served as without, but for rows that were fetched ahead: the program waits for those that it really uses,
and they count as misses, for the cache did not hold them. Predictions are made in the call between the two expert
kernels while demanded rows move, and only then: the host's decision takes as long as a layer whose experts are all
there, so after such an event it would cost more than the copies could save. Whether all this pays is decided between
calls, by the clock (`prefetch/time_trial.py`): a call without prefetch passes by the prefetcher, which learns nothing
of it.
"""

import numpy as np

from host_offload.prefetch.lanes import make_lane
from host_offload.prefetch.prefetcher import Prefetcher
from host_offload.prefetch.time_trial import PLAIN, STAGING, TimeTrial
from host_offload.transport.base import record
from host_offload.transport.callback import NOTHING, CallbackTransport


class PrefetchTransport(CallbackTransport):
    """`CallbackTransport` and a `Prefetcher`; owner as there.

    Args:
      prefetch: `PrefetchSettings`; the others as for `Transport`. Raises ValueError for a predictor that cannot be
      live.
    """

    watches = True

    def __init__(self, *args, prefetch, **kwargs):
        self._prefetcher = None
        super().__init__(*args, reserve=prefetch.reserve, **kwargs)
        self._staging = True  # whether the running call of decode prefetches
        self._awake = self._every_event = True
        self._event_rows = None  # rows that the running event reads
        self._copying = False  # whether rows of the running event are on their way
        self._seen: tuple | None = None  # what `Prefetcher.saw` is to be told of it
        self._quiet_since: float | None = None  # when it began, if it needs nothing of the prefetcher
        self._script = None
        self._lane = make_lane(self.mover, self.pool, len(self.experts.parts("gate_up")))
        self._calls.drains.append(self._lane.drain)
        try:
            self.use(prefetch)
        except BaseException:
            self.close()
            raise

    def use(self, settings):
        """Another predictor or budget over the same banks: books, windows and trials begin anew."""
        if self._prefetcher is not None:
            self._prefetcher.drop()
            self._prefetcher.end()
        self.settings, self.gate = settings, settings.gate
        self._prefetcher = Prefetcher(
            self.spec, self.rows, settings, self._lane, tier=self._tier, first=self.starts[-1], seed=self.seed
        )
        self.trial = TimeTrial(settings.shutoff)

    def choose_program(self):
        """`STAGING` or `PLAIN` of a model whose routers guess, which takes time in the step; else one for both."""
        self._staging = not self._prefetcher.ready or self.trial.choose()
        return None if not self.gate else STAGING if self._staging else PLAIN

    def decoded(self, call, report, ids, good):
        """A `DecodeCall` is over."""
        if self._prefetcher.ready:
            self.trial.tell(self._staging, call.seconds, call.steps, call.misses, call.timed)

    def prefetches(self, settings) -> bool:
        return settings is not None and settings.gate == self.gate and settings.reserve == self.settings.reserve

    @property
    def scripted(self) -> bool:
        return self._prefetcher.scripted

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the arrays that the predictor reads from a recorded run."""
        return self._prefetcher.reads

    def expect(self, script):
        """The decode steps of the next run, `predictors.replay.Step`s, for a predictor that reads a recorded run."""
        self._script = script

    def _clear(self):
        super()._clear()
        if self._prefetcher is not None:
            self._prefetcher.drop()

    def reset_policy(self, state):
        script, self._script = self._script, None
        self._seen = self._quiet_since = None  # of a run that ended with a fault
        self._prefetcher.begin(script)
        return super().reset_policy(state)

    def quiesce(self):
        self._lane.drain()

    def close(self):
        self._lane.close()
        if self._prefetcher is not None:
            self._prefetcher.end()
        super().close()

    def prefetch_stats(self) -> dict:
        """See `Prefetcher.stats`; and `trial`, what the clock says."""
        return {**self._prefetcher.stats(), "trial": self.trial.to_dict()}

    def verify(self, state, pool):
        """Compares the rows that wait in the reserve, too."""
        super().verify(state, pool)
        self._prefetcher.verify(state.banks, pool)

    def bind(self, operands, *, prefill, block_rows=None, guess=None, program=None):
        """guess: `guess(layer, x [B, D], token_ids [B]) -> ids [B, K]`, what the router of that layer makes of x.
        program: of a decode step, see `choose_program`."""
        if prefill or not self.gate or program == PLAIN:
            return super().bind(operands, prefill=prefill, block_rows=block_rows)

        def experts(layer, x, ids, weights, scores, live, token_ids, state, **onward):
            more = {}
            if layer + self.gate < self.spec.L:
                more["guess"] = guess(layer + self.gate, x, token_ids)
            y, new = self._decode(layer, x, ids, weights, scores, live, state, more, **onward)
            return y, record(new, ids, weights, scores)

        experts.read_by_kernels = self._reads_rows
        return experts

    # ------------------------------------------------------------------------------------------- run by XLA's thread

    def _on_decode(self, layer, ctx, out, values, banks):
        if layer == self.starts[-1]:  # once a step
            self._awake = self._prefetcher.wakes() if self._staging else self._prefetcher.rest()
            self._every_event = self._awake or self._tier is not None
            if self._awake:  # between programs the banks could be moved
                self._prefetcher.place(self._lane.place(banks))
        super()._on_decode(layer, ctx, out, values, banks)

    def _bring(self, layer, ctx, banks, listed, missing, arrays):
        if not self._awake:
            return super()._bring(layer, ctx, banks, listed, missing, arrays)
        scores, guess = arrays.get("scores"), arrays.get("guess")
        scores = np.zeros((self.spec.E,), np.float32) if scores is None else scores.copy()
        if guess is not None:
            live = arrays.get("live")
            guess = guess.copy() if live is None else guess[live]
        self._seen = layer, listed, scores, guess
        if self._tier is None and not missing.size:  # the program waits: the rest is for `_settle`
            self._quiet_since = self._prefetcher.now
            return NOTHING
        claimed = self._prefetcher.serve(layer, missing.tolist())
        demanded = (
            missing if not claimed else np.array([e for e in missing.tolist() if e not in claimed], missing.dtype)
        )
        if self._tier is not None:
            self._tier.event(layer, demanded, on_their_way=list(claimed))
            self._tier.ensure(layer, demanded)
        free = np.flatnonzero((self._owner < 0) & ~self._prefetcher.taken)
        if claimed:  # their rows are the event's now
            free = free[~np.isin(free, list(claimed.values()))]
        rows = np.empty((missing.size,), np.int64)
        taken = iter(free[: demanded.size].tolist())
        for index, expert in enumerate(missing.tolist()):
            rows[index] = claimed[expert] if expert in claimed else next(taken)
        if demanded.size:
            self.mover.move(
                ctx, banks, layer, list(zip(demanded.tolist(), free[: demanded.size].tolist(), strict=True))
            )
        self._prefetcher.wait(ctx)
        # Those of hits, too: when the last layer of a step is settled, they may have lost their owner already.
        hits = self._slot_of[layer, listed]
        self._event_rows = np.concatenate([rows, hits[hits >= 0]])
        self._copying = demanded.size > 0 or self._prefetcher.waits
        return rows

    def _on_down(self, layer, ctx, out, values, banks):
        super()._on_down(layer, ctx, out, values, banks)
        if self._seen is None or self._quiet_since is not None:
            return
        self._prefetcher.wait_rest(ctx)
        seen, self._seen = self._seen, None
        if self._copying:
            layer, listed, scores, guess = seen
            self._prefetcher.ahead(layer, listed, scores, banks, self._slot_of, self._free_rows, guess=guess)
        else:
            self._prefetcher.saw(*seen)

    def _free_rows(self):
        """[rows] bool: nobody has them, and the running event does not read them."""
        free = (self._owner < 0) & ~self._prefetcher.taken
        free[self._event_rows] = False
        return free

    def _settle(self):
        event = self._unsettled
        super()._settle()
        if self._prefetcher is None:
            return
        if self._awake:
            if self._quiet_since is not None:
                self._prefetcher.serve(self._seen[0], (), self._quiet_since)
                self._prefetcher.saw(*self._seen)
                self._quiet_since = self._seen = None
            self._prefetcher.catch_up()
        elif event is not None and self._staging:
            self._prefetcher.note(*event[:2])

    def _on_prefill(self, layer, ctx, out, values, banks, ahead=False):
        self._lane.poll()  # raises what a copy that nobody used has raised
        self._prefetcher.drop()  # a prompt needs most experts, and the rows
        super()._on_prefill(layer, ctx, out, values, banks, ahead)
