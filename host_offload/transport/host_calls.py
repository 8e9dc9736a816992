"""Calls from the XLA program to the host: in place on the banks, never raising, in the program's order.

`HostCalls` wraps `jax.experimental.buffer_callback`. A callback that raised would make XLA delete the donated banks, so
a fault is kept here instead, the cache's error word is set, later calls do nothing, and the engine raises it after the
program has ended. `RoundMoves` uses it to move the rows of a prefill event ahead of need, round by round
(`schedule.py`).
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.buffer_callback import buffer_callback


class NumpyMover:
    """Moves rows between host arrays: the CPU backend's buffers are NumPy views. Same interface as `cuda.CudaMover`."""

    def __init__(self, pool, staging_rows=0):
        self._pool = pool
        self._staged = {name: np.zeros((staging_rows, *s), d) for name, (s, d) in pool.spec.tensors.items()}

    def fetch(self, ctx, layer, buffers, meanwhile):
        """The buffers as arrays; runs `meanwhile()` first."""
        meanwhile()
        return {name: np.asarray(buffer) for name, buffer in buffers.items()}

    def store(self, ctx, buffer, value):
        """Writes a small array."""
        np.asarray(buffer)[...] = value

    def move(self, ctx, banks, layer, moves):
        """Copies (expert, row) pairs; what follows on XLA's stream sees the early row tensors, see `wait_rest`."""
        views = {name: np.asarray(buffer) for name, buffer in banks.items()}
        for expert, row in moves:
            for name, bank in views.items():
                bank[row] = self._pool.row(layer, name, expert)

    def wait_rest(self, ctx):
        """What follows sees all tensors of the rows of the last `move`. Nothing to wait for here."""

    def stage(self, layer, moves):
        """Copies (place, expert) pairs into staging memory."""
        for place, expert in moves:
            for name, staged in self._staged.items():
                staged[place] = self._pool.row(layer, name, expert)

    def move_ahead(self, ctx, banks, layer, moves, turn, staged=()):
        """Copies at once the rows of round `turn`, and (place, row) pairs of `staged` from staging memory: no compute
        still to come reads what they replace."""
        self.move(ctx, banks, layer, moves)
        for place, row in staged:
            for name, bank in banks.items():
                np.asarray(bank)[row] = self._staged[name][place]

    def wait(self, ctx, turn):
        """Nothing to wait for."""

    def finish(self, turn):
        """Nothing to wait for on the host either."""

    def drain(self):
        """Nothing is ever under way."""

    def close(self):
        """Nothing to free."""


def make_mover(pool, early=1, staging_rows=0):
    """The mover of the default device's platform; `early`: how many row tensors arrive before the others;
    `staging_rows`: rows of its staging memory."""
    if jax.devices()[0].platform == "gpu":
        from host_offload.transport.cuda import CudaMover

        return CudaMover(pool, early, staging_rows)
    return NumpyMover(pool, staging_rows)


class HostCalls:
    """Owner of `mover` and `error`: XLA's execution thread while a program runs, else the engine's thread.

    drains: what to call after a fault, so that no copy that was started may land in what a later program puts there.
    """

    def __init__(self, mover):
        self.mover = mover
        self.drains = [mover.drain]
        self.error: BaseException | None = None

    def take_error(self):
        """The fault since the last call of this, or None."""
        error, self.error = self.error, None
        return error

    def call(self, body, layer, tables, values, state):
        """Traces a call of `body(layer, ctx, out, values, banks)`.

        Args:
          tables: name -> shape of the int32 arrays that the body writes with `mover.store(ctx, out[name], value)`.
          values: name -> array that it may read with `mover.fetch`.
          state: `SlotCache`; its banks and error word are updated in place.

        Returns:
          (tables as arrays, state).
        """
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
        out = call(*values.values(), *kept)
        small, error, banks = out[: len(tables)], out[len(tables)], out[len(tables) + 1 :]
        banks = dict(zip(names, banks, strict=True))
        return dict(zip(tables, small, strict=True)), replace(state, error=error, banks=banks)

    def _guarded(self, body, layer, tables, value_names, bank_names, ctx, outputs, *inputs):
        small = dict(zip(tables, outputs, strict=False))
        error = outputs[len(tables)]
        # The inputs of error word and banks are the same memory as these outputs.
        banks = dict(zip(bank_names, outputs[len(tables) + 1 :], strict=True))
        values = dict(zip(value_names, inputs, strict=False))
        if self.error is None:
            try:
                body(layer, ctx, small, values, banks)
                return
            except BaseException as fault:  # kept for the engine: raising here would delete the donated banks
                self.error = fault
        try:
            for buffer in small.values():
                self.mover.store(ctx, buffer, 0)
            self.mover.store(ctx, error, 1)
            for drain in self.drains:
                drain()
        except BaseException as fault:  # the device itself is gone; the first fault is still the one to report
            self.error.add_note(f"while reporting it: {fault!r}")


class RoundMoves:
    """The moves of one prefill event at a time.

    `begin` starts round 1; each `on_round` but the first starts the round after its own. So the moves of round r + 1
    are enqueued after the compute of round r - 1 and run beside that of round r, as `schedule.py` allows.

    tier: the `DiskTier` that the mover copies from, None if it is a pool of all rows. The tier reads the rows of the
    rounds to come while those before them move.
    lookahead: `Lookahead` that moves rows of the next layer once all of this one are on their way, or None.
    """

    def __init__(self, mover, tier=None, lookahead=None):
        self._mover, self._tier, self.lookahead = mover, tier, lookahead
        self._moves: list[list[tuple[int, int]]] = []
        self._ahead: list[int] | None = None
        self._round = self._last = 0

    def begin(self, ctx, layer, banks, order, ahead=None):
        """Takes the `Schedule` of the event (NumPy) and starts the first moves: their rows are free already.

        ahead: experts that the next layer lacks and will need, None if that cannot be told.
        """
        count = int(np.reshape(order.rounds, ()))
        self._moves = []
        for r in range(count + 1):
            span = slice(order.bounds[r], order.bounds[r + 1])
            moves = zip(order.src[span].tolist(), order.row[span].tolist(), strict=True)
            self._moves.append([(src, row) for src, row in moves if src >= 0])
        self._round = 0
        self._ahead = ahead
        self._last = max((r for r, moves in enumerate(self._moves) if moves), default=0)
        if self._tier is not None:
            missing = self._missing(1)
            self._tier.event(layer, missing)
            self._tier.read_ahead(layer, missing)
        self._start(ctx, layer, banks, 1)
        if self._last == 0:
            self._stage(layer)

    def on_round(self, layer, ctx, out, values, banks):
        """Host call before the compute of a round."""
        r, self._round = self._round, self._round + 1
        if r > 0:
            self._start(ctx, layer, banks, r + 1)
        if self._moves[r]:
            self._mover.wait(ctx, r)

    def _start(self, ctx, layer, banks, r):
        if not (r < len(self._moves) and self._moves[r]):
            return
        if self._tier is not None:
            experts = [expert for expert, _ in self._moves[r]]
            self._tier.ensure(layer, experts, self._mover.finish)
            self._tier.moving(layer, experts, r)
        moves, staged = self._moves[r], ()
        if self.lookahead is not None:
            moves, staged = self.lookahead.split(layer, moves)
        self._mover.move_ahead(ctx, banks, layer, moves, r, staged)
        if r == self._last:
            self._stage(layer)
        if self._tier is not None:
            self._tier.read_ahead(layer, self._missing(r + 1))

    def _stage(self, layer):
        if self._ahead:
            self.lookahead.stage(layer + 1, self._ahead)

    def _missing(self, r):
        """The experts that round `r` and those after it move, in order."""
        return [expert for moves in self._moves[r:] for expert, _ in moves]
