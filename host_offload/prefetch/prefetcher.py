"""What is fetched ahead, into which rows, and what became of it.

One `Prefetcher` serves one cache. At each decode event it hands out the rows that were fetched for it (`serve`), and
later, while the device computes, it asks the predictor for the layer ahead and starts copies of what is neither cached
nor in the reserve (`ahead`). The *reserve* is a number of rows of the bank beside the cache's: a prefetched row waits
there for its event and takes nobody's slot, so the cache's hits and decisions are those without prefetch. The rules of
the reserve are those of `host_offload.prefetch_sim`.
"""

import dataclasses
import logging
import time

import numpy as np

from host_offload.prefetch.books import CANCELLED, HARMFUL, ISSUED, LATE, ON_TIME, WASTED, Books
from host_offload.prefetch.experience import Experience
from host_offload.prefetch.live import GATES, LivePredictor
from host_offload.prefetch.shutoff import ShutOff
from host_offload.prefetch.windows import Windows

logger = logging.getLogger(__name__)

# Decode steps that a prefetcher sleeps when no layer gains by it, twice as many each time up to the most, and for how
# many at most it then stays awake, until every layer has tried again.
NAP, NAP_MOST, AWAKE_MOST = 256, 1024, 64


@dataclasses.dataclass(frozen=True)
class PrefetchSettings:
    """What to prefetch. predictor: registered name, class or instance. budget: most bytes that an event may issue, or
    None: as many rows as begin to move before they are needed. shutoff: layers that do not gain by it switch it off.
    reserve: rows of the bank for prefetched experts. experience: what predictors learn from."""

    predictor: object
    budget: int | None
    shutoff: bool
    reserve: int
    experience: Experience

    def live(self, seed) -> LivePredictor:
        """The predictor at work. Raises ValueError for one that cannot learn while a model runs."""
        return LivePredictor(self.predictor, self.experience, seed)

    @property
    def gate(self) -> int:
        """How many layers ahead the device's routers have to guess; 0: they do not."""
        name = getattr(self.predictor, "name", self.predictor)
        return GATES.get(name, 0)


def reserve_rows(L, E, K, lead=1) -> int:
    """Rows for what is on its way, for what each of `lead` layers ahead may need, and for as many wrong guesses."""
    return min(L * E, 2 * K * (lead + 1))


@dataclasses.dataclass(eq=False)
class _Held:
    """A prefetched row: whose it is, where, the event it is for, its copy; issued: the books know that it began."""

    layer: int
    expert: int
    row: int
    deadline: int
    copy: object
    issued: bool = False
    used: bool = False


class Prefetcher:
    """Owner: the thread that makes the host calls.

    Args:
      spec: `RowSpec`. rows: of the bank. settings: `PrefetchSettings`. lane: see `lanes.py`; its owner closes it.
      tier: the `DiskTier` that the lane copies from, None for a pool of all rows. first: decode steps run the layers
      first..L-1. clock: seconds; seed: of the predictor and of the order of trials.

    Attributes:
      taken [rows] bool: rows of the bank that are the prefetcher's now.
      asleep: every layer's shut-off says no, so events are only noted (`note`) until it is worth trying again.
    """

    def __init__(self, spec, rows, settings, lane, *, tier=None, first=0, clock=time.perf_counter, seed=0):
        self.spec, self.settings, self._lane, self._tier = spec, settings, lane, tier
        self._first, self._clock = first, clock
        self._live = settings.live(seed)
        self._lead = self._live.predictor.lead_layers
        if self._lead > spec.L - first:
            raise ValueError(f"lead_layers: {self._lead}, but a step has {spec.L - first} MoE layers")
        self.books = Books(spec.L, spec.row_bytes)
        self.windows = Windows(first, spec.L)
        self.shutoffs = [ShutOff(seed * spec.L + layer, settings.shutoff) for layer in range(spec.L)]
        self.taken = np.zeros((rows,), bool)
        self._held: dict[tuple[int, int], _Held] = {}
        self._queued: list[_Held] = []  # of these, the ones that are not known to have begun
        self._evicted_by: dict[tuple[int, int], _Held] = {}
        self._claimed: list[_Held] = []  # in use by the running event
        self._unseen: tuple | None = None  # an event that is still to be observed
        self._loans: list[tuple] = []  # (copy, row of the tier, its `finish`)
        self._event, self._step = 0, -1
        self._trials: dict[int, tuple] = {}  # target layer -> (on, when its prefetch was decided), until it was timed
        self._timed: dict[int, tuple] = {}  # layer whose event has begun -> the same, until the next event begins
        self._now = 0.0  # when the running event began
        self._banks: tuple | None = None
        self.asleep, self._steps_left, self._nap, self._slept = False, 0, NAP, 0
        self._steps, self._asked = 0, [0] * spec.L  # decode steps so far; at which one a layer was asked for last
        self._noted: list[tuple] = []  # events of this sleep
        self._rested: int | None = None  # steps that passed by since `rest`; None: the last one did not

    # ----------------------------------------------------------------------------------------------------------- events

    def begin(self, script=None):
        """A run begins, see `LivePredictor.begin`. What the reserve holds stays: it may be used."""
        self._end_rest()
        self.catch_up()
        self._take_noted()
        self._noted = []  # of a step that did not end
        self._pause()
        self._live.begin(script)

    @property
    def ready(self) -> bool:
        """Whether there is something to predict from."""
        return self._live.ready

    def rest(self) -> bool:
        """A decode step begins of which the prefetcher sees nothing: False, as of `wakes`."""
        if self._rested is None:
            self.catch_up()
            self._take_noted()
            self.drop()
            self._rested = 0
        self._rested += 1
        return False

    def _end_rest(self):
        """Takes up again after steps that it knows nothing of but their number."""
        if self._rested is None:
            return
        rested, self._rested = self._rested, None
        self._step += rested
        self._live.pass_steps(rested)
        if rested > AWAKE_MOST:  # the times of before are of another stretch of the run
            for shutoff in self.shutoffs:
                shutoff.wake()

    def wakes(self) -> bool:
        """A decode step begins: whether its events are to be served; else `note` is all that they need."""
        self._end_rest()
        self._steps_left -= 1
        watched = range(self.spec.L)[self._watched]
        if self.asleep:
            if self._steps_left <= 0:
                self.asleep, self._steps_left = False, AWAKE_MOST
                self._take_noted()
                for layer in watched:
                    self.shutoffs[layer].wake()
        elif self._steps_left > 0 and not all(self.shutoffs[layer].tried for layer in watched):
            pass  # woken to try again, which takes events that copy
        elif self.settings.shutoff and not any(self._hopes(layer) for layer in watched):
            self.catch_up()
            self.drop()
            self.asleep, self._steps_left, self._nap = True, self._nap, min(2 * self._nap, NAP_MOST)
        elif any(self.shutoffs[layer].decided and self.shutoffs[layer].state for layer in watched):
            self._nap = NAP
        self._slept += self.asleep
        self._steps += 1
        return not self.asleep

    def _hopes(self, layer) -> bool:
        """Whether a layer gains or may yet turn out to: not one that nobody asked for long, as its events copy too
        seldom."""
        shutoff = self.shutoffs[layer]
        return shutoff.state if shutoff.decided else self._steps - self._asked[layer] < NAP

    def note(self, layer, listed):
        """An event passes in sleep: listed [n] int, the experts that it needed."""
        self._noted.append((layer, listed))

    def _take_noted(self):
        """Learns from the steps that passed in sleep."""
        ends = [index for index, (layer, _) in enumerate(self._noted) if layer == self.spec.L - 1]
        if not ends:
            return
        need = np.zeros((len(ends), self.spec.L, self.spec.E), bool)
        step = 0
        for layer, listed in self._noted[: ends[-1] + 1]:
            need[step, layer, listed] = True
            step += layer == self.spec.L - 1
        self._noted = self._noted[ends[-1] + 1 :]
        self._step += len(ends)
        self._live.skip(need, self._first, np.int32(self._step * self.spec.L))

    def place(self, banks: tuple):
        """Tells where the banks lie. If they were moved, what was prefetched is lost, and nothing is under way
        there."""
        if banks != self._banks:
            if self._banks is not None and self._held:
                logger.warning("the slot banks were moved: %d prefetched rows are dropped", len(self._held))
            self.drop()
            self._banks = banks

    @property
    def now(self) -> float:
        """Time by the prefetcher's clock."""
        return self._clock()

    def serve(self, layer, missing, now=None):
        """An event begins: {expert: row} of those `missing` that were prefetched; their copies may be in flight.

        missing: ids. What follows on the device must be told by `wait` before it reads the rows. The rows are the
        caller's from now on. now: when the event began, if that was before.
        """
        if now is None:
            now = self._clock()
        else:
            self._drop_overdue(self._event + 1)  # before `_notice` starts what nobody needs any more
        self._notice()
        self._time(layer, now)
        self._event += 1
        claimed = {}
        for expert in missing:
            held = self._held.get((layer, expert))
            if held is None:
                taker = self._evicted_by.pop((layer, expert), None)
                if taker is not None and not taker.used and taker.copy.begun:
                    self.books.add(taker.layer, HARMFUL)
                continue
            if not self._drop_queued(held):  # it moves or has moved
                held.used = True
                self.books.add(layer, ON_TIME if held.copy.done else LATE)
                self._release(held)
                claimed[expert] = held.row
                self._claimed.append(held)
        self._drop_overdue(self._event)
        return claimed

    def _drop_overdue(self, event):
        """Cancels what is queued for events up to `event`."""
        for held in [held for held in self._queued if held.deadline <= event]:
            self._drop_queued(held)

    def wait(self, ctx):
        """What follows sees the early tensors of the rows that `serve` handed out."""
        for held in self._claimed:
            self._lane.wait(ctx, held.copy)

    @property
    def waits(self) -> bool:
        """Whether a row that `serve` handed out is still on its way."""
        return any(not held.copy.done for held in self._claimed)

    def wait_rest(self, ctx):
        """What follows sees all tensors of these rows."""
        for held in self._claimed:
            self._lane.wait_rest(ctx, held.copy)
        self._claimed = []

    def ahead(self, layer, listed, scores, banks, slot_of, free, guess=None):
        """After the event's own copies: observes it, and starts copies for the layer ahead.

        Args:
          listed: ids that the event needed, [n] int. scores: [E] float32.
          banks: as the host call got them. slot_of: [L, E] int32 of the cache.
          free: `free()` -> [rows] bool, rows that neither cache nor running event nor reserve uses.
          guess: see `LivePredictor.observe`.
        """
        self.saw(layer, listed, scores, guess)
        target = self._target(layer)
        if target is None:
            return
        on = self.shutoffs[target].ask()
        self._asked[target] = self._steps
        if target not in self._trials:
            self._trials[target] = on, self._now
        if not on:  # the event is observed when there is time, see `catch_up`
            return
        self.catch_up()
        likely = self._live.predict(layer, target, max(1, len(listed)))
        likely = likely[slot_of[target, likely] < 0].tolist()
        absent = []
        if self._tier is not None and likely:
            present = self._tier.present(target, likely)
            absent = [expert for expert, here in zip(likely, present, strict=True) if not here]
            likely = [expert for expert, here in zip(likely, present, strict=True) if here]
        self._request(target, likely, self._room(layer, target), banks, free)
        absent = [expert for expert in absent if (target, expert) not in self._held]
        if absent:  # not before: what is copied from now on keeps its host row
            self._tier.read_ahead(target, absent)

    def saw(self, layer, listed, scores, guess=None):
        """An event after which nothing is prefetched; arguments as of `ahead`."""
        self.catch_up()
        self._unseen = layer, listed, scores, guess

    def catch_up(self):
        """Observes the last event, if that is still to do."""
        if self._unseen is None:
            return
        (layer, listed, scores, guess), self._unseen = self._unseen, None
        need = np.zeros((self.spec.E,), bool)
        need[listed] = True
        first, last = layer == self._first, layer == self.spec.L - 1
        self._step += first
        t = np.int32(self._step * self.spec.L + layer)
        self._live.observe(layer, need, scores, t, first=first, last=last, guess=guess)

    @property
    def _wraps(self) -> bool:
        """Whether the last layers prefetch for the first ones of the next step: these do not follow in an
        encoder-decoder, and a gate knows nothing of the next token."""
        return self._first == 0 and not self.settings.gate

    @property
    def _watched(self) -> slice:
        """The layers that are prefetched for, see `_target`."""
        return slice(self._first + (0 if self._wraps else self._lead), None)

    def _target(self, layer):
        """The layer that is prefetched for at the event of `layer`; None if nothing can be said of it."""
        target = layer + self._lead
        if target < self.spec.L:
            return target
        return target - self.spec.L if self._wraps else None

    def _room(self, layer, target):
        """(rows, bytes or None): what may be issued, and up to how many bytes may wait in the lane meanwhile."""
        caps = [cap for cap in (self.settings.budget, self._live.predictor.byte_cap) if cap is not None]
        rows = min(cap // self.spec.row_bytes for cap in caps) if caps else self.spec.E
        if self.settings.budget is not None:
            return rows, None
        seconds, rate = self.windows.seconds(layer, target), self._lane.rate
        return rows, (0 if seconds is None or rate is None else seconds * rate)

    def _request(self, target, experts, room, banks, free):
        """Starts copies of up to so many `experts`, likeliest first, as far as the reserve has room."""
        rows, most = room
        free_rows = victims = None  # asked for once there is something to put there
        deadline = self._event + self._lead
        # A copy that begins before its row is needed helps, even if it arrives late; the first one always may.
        waiting = 0 if most is None else self._lane.waiting_bytes
        for expert in experts:
            held = self._held.get((target, expert))
            if held is not None:
                held.deadline = max(held.deadline, deadline)
                continue
            if rows == 0 or (most is not None and waiting > most):
                return
            victim = None
            if len(self._held) >= self.settings.reserve:
                victims = self._victims(deadline) if victims is None else victims
                victim = next(victims, None)
                if victim is None:
                    return
                self._waste(victim)
            if free_rows is None:
                free_rows = np.flatnonzero(free()).tolist()
            row = free_rows.pop(0) if victim is None else victim.row
            if victim is not None and row in free_rows:
                free_rows.remove(row)
            copy = self._lane.copy(banks, target, expert, row)
            held = _Held(target, expert, row, deadline, copy)
            if victim is not None:
                self._evicted_by[victim.layer, victim.expert] = held
            self._evicted_by.pop((target, expert), None)
            self._held[target, expert] = held
            self._queued.append(held)
            self.taken[row] = True
            if self._tier is not None:
                self._borrow(held)
            self._lane.submit(copy)
            rows -= 1
            waiting += self.spec.row_bytes

    def _victims(self, deadline):
        """Whose places new rows may take when the reserve is full, one after another: arrived ones whose event is over,
        the oldest first, then those that are needed later than the new ones, the latest first."""
        arrived = [held for held in self._held.values() if held.copy.done]
        over = [held for held in arrived if held.deadline <= self._event]
        later = [held for held in arrived if held.deadline > deadline]
        order = [*sorted(over, key=lambda held: held.deadline), *sorted(later, key=lambda held: -held.deadline)]
        for held in order:
            if held.deadline <= self._event or held.deadline > deadline:  # else it was predicted again meanwhile
                yield held

    # ------------------------------------------------------------------------------------------------------ bookkeeping

    def _notice(self):
        """What has begun or ended since the last event."""
        self._lane.poll()
        for held in list(self._queued):
            self._note_issued(held)
        for copy, row, finish in self._loans:
            if copy.done:
                self._tier.give_back(row, finish)
        self._loans = [loan for loan in self._loans if not loan[0].done]

    def _note_issued(self, held):
        if held.copy.begun and not held.issued:
            held.issued = True
            self._queued.remove(held)
            self.books.add(held.layer, ISSUED)

    def _borrow(self, held):
        """The row that a copy reads stays in host memory until it has ended."""

        def finish():
            if not self._drop_queued(held):
                self._lane.finish(held.copy)

        self._loans.append((held.copy, self._tier.lend(held.layer, held.expert, finish), finish))

    def _drop_queued(self, held) -> bool:
        """Cancels a copy that has not begun; whether it had not."""
        if held.copy.begun or not self._lane.cancel(held.copy):
            self._note_issued(held)
            return False
        self.books.add(held.layer, CANCELLED)
        for loan in [loan for loan in self._loans if loan[0] is held.copy]:
            self._tier.give_back(*loan[1:])
            self._loans.remove(loan)
        self._release(held)
        return True

    def _release(self, held):
        """The reserve has no more to do with a row."""
        self.taken[held.row] = False
        if not held.issued:
            self._queued.remove(held)
        del self._held[held.layer, held.expert]

    def _waste(self, held):
        """Gives up a row whose copy has ended."""
        self._note_issued(held)
        self.books.add(held.layer, WASTED)
        self._release(held)

    def _time(self, layer, now):
        """The event of `layer` begins: what the layer before took is a sample of its shut-off."""
        for timed, (on, since) in self._timed.items():
            self.shutoffs[timed].tell(on, now - since)
        self._timed = {layer: self._trials.pop(layer)} if layer in self._trials else {}
        self.windows.mark(layer, now)
        self._now = now

    def _pause(self):
        """Time that passes now belongs to no layer."""
        self._trials, self._timed = {}, {}
        self.windows.pause()

    # --------------------------------------------------------------------------------------------------------- lifetime

    def drop(self):
        """Empties the reserve: before a prompt, which needs most experts, and when the banks are emptied or gone.

        Safe after a fault: it asks nothing of the copies but that none is under way.
        """
        self._pause()
        for held in list(self._held.values()):
            self._drop_queued(held)
        self._lane.drain()
        for held in list(self._held.values()):
            self._waste(held)
        for _, row, finish in self._loans:
            self._tier.give_back(row, finish)
        self._loans, self._claimed = [], []
        self._evicted_by.clear()

    def verify(self, banks, pool):
        """Raises RuntimeError unless every row that has arrived holds the bytes that `pool` has of its expert."""
        for held in self._held.values():
            if not held.copy.done or held.copy.error is not None:  # which the next event raises
                continue
            for name, bank in banks.items():
                if np.asarray(bank[held.row]).tobytes() != pool.stored(held.layer, name, held.expert).tobytes():
                    where = f"prefetched row {held.row}: layer {held.layer} expert {held.expert}"
                    raise RuntimeError(f"bank {name!r} {where} differs from host memory")

    @property
    def scripted(self) -> bool:
        """Whether a run needs its steps told ahead of time."""
        return self._live.scripted

    @property
    def reads(self) -> tuple[str, ...]:
        """See `Predictor.reads`."""
        return self._live.predictor.reads

    def end(self):
        """The model is being closed: what it has seen counts."""
        self.catch_up()
        self._take_noted()
        self._live.end()

    def stats(self) -> dict:
        """Predictor, budget, state by layer, and what became of the rows since this predictor was chosen; whether it is
        asleep, which `steps_asleep` counts (what passes then is learned when it wakes)."""
        for held in list(self._queued):
            self._note_issued(held)
        waiting = len(self._held) - len(self._queued)
        budget = self.settings.budget
        return {
            "predictor": self._live.predictor.name,
            "ready": self._live.ready,
            "lead_layers": self._lead,
            "budget": "auto" if budget is None else budget,
            "reserve_rows": self.settings.reserve,
            "asleep": self.asleep,
            "steps_asleep": self._slept,
            "learned_tokens": self.settings.experience.counts.tokens,
            "learned_requests": self.settings.experience.requests,
            "link_gbps": None if self._lane.rate is None else self._lane.rate / 1e9,
            "layers": [shutoff.to_dict() for shutoff in self.shutoffs],
            **self.books.to_dict(waiting),
        }
