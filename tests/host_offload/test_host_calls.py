"""Host calls inside a program, and the moves of prefill rounds: on CPU, and on a played CUDA runtime."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from played_cuda import DeviceBuffer, PlayedCuda, Timeline, cuda_module_on

from host_offload.plan import apply, plan_event
from host_offload.schedule import Schedule, schedule_rounds
from host_offload.slots import SlotCache
from host_offload.store import RowSpec
from host_offload.transport.host_calls import HostCalls, NumpyMover, RoundMoves
from host_offload.transport.lookahead import Lookahead

L, E = 2, 6
SPEC = RowSpec(L=L, E=E, tensors={"a": ((3,), np.dtype("float32")), "b": ((2, 2), np.dtype("int32"))})


class FakePool:
    """Rows that say whose they are: every element of expert e of layer l is l * E + e + 1."""

    spec, adjacent = SPEC, True

    def __init__(self):
        label = np.arange(1, L * E + 1).reshape(L, E)
        self.slabs = [
            {
                name: np.broadcast_to(label[layer].reshape(E, *[1] * len(shape)), (E, *shape)).astype(dtype)
                for name, (shape, dtype) in SPEC.tensors.items()
            }
            for layer in range(L)
        ]

    def view(self, layer, name):
        return self.slabs[layer][name]

    def row(self, layer, name, expert):
        return self.slabs[layer][name][expert]

    def address(self, layer, name, expert):
        return self.row(layer, name, expert).ctypes.data


def empty_state(rows):
    nothing = dict.fromkeys(("slot_of", "owner", "resident", "counters", "policy"))
    banks = {name: jnp.zeros((rows, *shape), dtype) for name, (shape, dtype) in SPEC.tensors.items()}
    return SlotCache(banks=banks, step=jnp.zeros((), jnp.int32), error=jnp.zeros((1,), jnp.int32), **nothing)


def holds(banks, row, layer, expert):
    """Whether a bank row has the bytes of an expert, in all its tensors."""
    return all((np.asarray(bank)[row] == layer * E + expert + 1).all() for bank in banks.values())


def decide(
    need, table, slot_of, owner, *, layer, capacity, group, global_scope=False, forced_admit=False, decode=False
):
    """(plan, schedule) of an event whose priorities are `table` [L, E]; the plan alone gives rows if it is `decode`."""
    plan = plan_event(
        np,
        need=need,
        slot_of=slot_of,
        owner=owner,
        priority=lambda layer, expert, t: table[layer, expert],
        layer=layer,
        capacity=capacity,
        global_scope=global_scope,
        forced_admit=forced_admit,
        t=0,
        assign_rows=decode,
    )
    return plan, schedule_rounds(np, plan, need, slot_of, owner, group=group)


def an_event(need=range(E), residents=(0, 1), capacity=2, group=1):
    """An event of layer 1 with hits 0 and 1 in rows 0 and 1, both evicted: its schedule, and the bank's rows."""
    rows = capacity + 2 * group
    slot_of, owner = np.full((L, E), -1, np.int32), np.full(rows, -1, np.int32)
    for row, expert in enumerate(residents):
        slot_of[1, expert], owner[row] = row, E + expert
    wanted = np.zeros(E, bool)
    wanted[list(need)] = True
    table = np.tile(np.arange(E, dtype=np.float32), (L, 1))
    return decide(wanted, table, slot_of, owner, layer=1, capacity=capacity, group=group)[1], rows


# ------------------------------------------------------------------------------------------------ in a program, on CPU


class Recorder(NumpyMover):
    """Writes down what it is asked for, and fails when it comes to `fail_at`."""

    def __init__(self, pool):
        super().__init__(pool)
        self.log, self.fail_at = [], None

    def note(self, entry):
        if entry == self.fail_at:
            raise OSError(f"cannot do {entry}")
        self.log.append(entry)

    def move_ahead(self, ctx, banks, layer, moves, turn, staged=()):
        self.note(("move", turn))
        super().move_ahead(ctx, banks, layer, moves, turn, staged)

    def wait(self, ctx, turn):
        self.note(("wait", turn))


class Program:
    """A jitted prefill event as transports trace it, whose compute is a host call that looks into the banks."""

    def __init__(self):
        self.mover = Recorder(FakePool())
        self.calls, self.rounds = HostCalls(self.mover), RoundMoves(self.mover)
        self.addresses = set()
        self.run = jax.jit(self._run, donate_argnums=0)

    def _begin(self, layer, ctx, out, values, banks):
        arrays = self.mover.fetch(ctx, layer, values, lambda: self.mover.note("meanwhile"))
        self.mover.note("begin")
        self.rounds.begin(ctx, layer, banks, Schedule(position=None, dest=None, **arrays))
        self.mover.store(ctx, out["twice"], 2 * arrays["row"])
        self._look(banks)

    def _compute(self, layer, ctx, out, values, banks):
        r = int(np.asarray(values["r"])[0])
        self.mover.note(("compute", r))
        for p in range(self.order.bounds[r], self.order.bounds[r + 1]):
            expert = int(np.argsort(self.order.position)[p])
            assert holds(banks, self.order.row[p], layer, expert), f"round {r}, expert {expert}"
        self._look(banks)

    def _look(self, banks):
        self.addresses.add(tuple(np.asarray(bank).ctypes.data for bank in banks.values()))

    def _run(self, state, values):
        out, state = self.calls.call(self._begin, 1, {"twice": (E,), "unwritten": (2,)}, values, state)

        def step(r, state):
            _, state = self.calls.call(self.rounds.on_round, 1, {}, {}, state)
            return self.calls.call(self._compute, 1, {}, {"r": r[None]}, state)[1]

        return out, jax.lax.fori_loop(0, values["rounds"][0], step, state)

    def event(self, state, order):
        self.order = order
        values = {name: jnp.asarray(getattr(order, name)) for name in ("src", "row", "bounds")}
        return self.run(state, values | {"rounds": jnp.asarray(order.rounds, jnp.int32).reshape(1)})


@pytest.fixture(scope="module")
def compiled():
    return Program()


@pytest.fixture
def program(compiled):
    """The program, with nothing noted."""
    compiled.mover.log, compiled.mover.fail_at, compiled.addresses = [], None, set()
    compiled.calls.take_error()
    return compiled


def loaded(rows, residents=(0, 1)):
    """A state with experts of layer 1 in the rows from 0 on."""
    state, pool = empty_state(rows), FakePool()
    banks = dict(state.banks)
    for row, expert in enumerate(residents):
        banks = {name: bank.at[row].set(pool.view(1, name)[expert]) for name, bank in banks.items()}
    return replace(state, banks=banks)


def pointers(state):
    return tuple(bank.unsafe_buffer_pointer() for bank in state.banks.values())


def test_rounds_move_ahead_of_their_compute(program):
    """The first round's rows start in `begin`; each later round's right before the compute that they run beside."""
    order, rows = an_event()
    _, state = program.event(loaded(rows), order)
    assert program.calls.take_error() is None and not np.asarray(state.error).any()
    expected = ["meanwhile", "begin", ("move", 1), ("compute", 0)]
    for r in range(1, order.rounds):
        expected += [*([("move", r + 1)] if r + 1 < order.rounds else []), ("wait", r), ("compute", r)]
    assert order.rounds == 5 and program.mover.log == expected


def test_tables_and_values_pass_between_program_and_host(program):
    order, rows = an_event()
    out, _ = program.event(loaded(rows), order)
    assert {name: (a.shape, a.dtype) for name, a in out.items()} == {
        "twice": ((E,), np.int32),
        "unwritten": ((2,), np.int32),
    }
    assert np.asarray(out["twice"]).tolist() == (2 * order.row).tolist()


def test_the_banks_are_updated_in_place(program):
    """All calls of a program see one bank, that which was donated and which comes back."""
    order, rows = an_event()
    state = loaded(rows)
    before = pointers(state)
    _, after = program.event(state, order)
    assert program.calls.take_error() is None
    assert program.addresses == {before} and pointers(after) == before


def test_events_without_misses_move_nothing(program):
    order, rows = an_event(need=(0, 1), residents=(0, 1))
    _, state = program.event(loaded(rows), order)
    assert program.calls.take_error() is None
    assert program.mover.log == ["meanwhile", "begin", ("compute", 0)]
    assert holds(state.banks, 0, 1, 0) and holds(state.banks, 1, 1, 1)


@pytest.mark.parametrize(
    "fail_at", ["meanwhile", ("move", 1), ("compute", 0), ("move", 3), ("wait", 2), ("compute", 4)]
)
def test_after_a_fault_nothing_more_is_done(program, fail_at):
    """The error word is set, the fault is kept, no call raises or acts, and the banks stay for the next program."""
    order, rows = an_event()
    program.mover.fail_at = fail_at
    state = loaded(rows)
    before = pointers(state)
    out, after = program.event(state, order)
    assert np.asarray(after.error).tolist() == [1]
    whole = ["meanwhile", "begin", ("move", 1), ("compute", 0), ("move", 2), ("wait", 1), ("compute", 1), ("move", 3)]
    whole += [("wait", 2), ("compute", 2), ("move", 4), ("wait", 3), ("compute", 3), ("wait", 4), ("compute", 4)]
    assert program.mover.log == whole[: whole.index(fail_at)]
    if whole.index(fail_at) <= whole.index(("move", 1)):  # in the call that has tables
        assert not any(np.asarray(table).any() for table in out.values())
    assert pointers(after) == before

    fault = program.calls.take_error()
    assert isinstance(fault, OSError) and str(fault) == f"cannot do {fail_at}"
    assert program.calls.take_error() is None

    program.mover.fail_at, program.mover.log = None, []
    _, last = program.event(replace(loaded(rows), error=after.error), order)
    assert program.calls.take_error() is None, program.mover.log
    assert program.mover.log == whole
    assert np.asarray(last.error).tolist() == [1], "it is the engine that clears the error word"


def test_a_fault_while_a_fault_is_reported_is_noted_on_the_first():
    class Broken(NumpyMover):
        def store(self, ctx, buffer, value):
            raise ValueError("no device")

    calls = HostCalls(Broken(FakePool()))

    def body(layer, ctx, out, values, banks):
        raise OSError("copy failed")

    _, state = jax.jit(lambda state: calls.call(body, 0, {"rows": (2,)}, {}, state))(empty_state(2))
    fault = calls.take_error()
    assert str(fault) == "copy failed"
    assert fault.__notes__ == ["while reporting it: ValueError('no device')"]
    assert not np.asarray(state.banks["a"]).any()


# --------------------------------------------------------------------------------------------- on a played CUDA runtime


@pytest.fixture(scope="module")
def cuda_module():
    """`host_offload.transport.cuda` on a played runtime."""
    return cuda_module_on(PlayedCuda())


class Device:
    """A `CudaMover` on a runtime of its own, XLA's stream, and banks. tier: a `DiskTier` instead of a pool."""

    def __init__(self, module, rows, early=1, tier=None, staging_rows=0):
        self.early = early
        self.cuda = module.cudart = PlayedCuda()
        self.pool = FakePool() if tier is None else tier
        self.mover = module.CudaMover(self.pool, early, staging_rows)
        self.lookahead = Lookahead(self.mover, staging_rows) if staging_rows else None
        self.calls, self.moves = HostCalls(self.mover), RoundMoves(self.mover, tier, self.lookahead)
        self.stream = Timeline()
        self.ctx = SimpleNamespace(stream=self.stream)
        self.arrays = {name: np.zeros((rows, *shape), dtype) for name, (shape, dtype) in SPEC.tensors.items()}
        self.banks = {name: DeviceBuffer(array) for name, array in self.arrays.items()}

    def compute(self, layer, rows, names=tuple(SPEC.tensors)):
        """A kernel over the tensors `names` of the experts in `rows` (expert -> row): each must be in its row."""
        arrays = {name: self.arrays[name] for name in names}
        for expert, row in rows.items():
            assert holds(arrays, row, layer, expert), f"expert {expert} is not in row {row}"
        reads = [(a[row].ctypes.data, a[row].nbytes) for a in arrays.values() for row in rows.values()]
        return self.cuda.compute(self.stream, reads)

    def prefill(self, layer, order, ahead=None):
        """The calls and computes of a prefill event, as transports enqueue them; (bit, before) of each compute."""
        expert_at = np.argsort(order.position)
        computes = []
        self.moves.begin(self.ctx, layer, self.banks, order, ahead)
        for r in range(int(order.rounds)):
            self.moves.on_round(layer, self.ctx, {}, {}, self.banks)
            span = range(order.bounds[r], order.bounds[r + 1])
            computes.append(self.compute(layer, {int(expert_at[p]): int(order.row[p]) for p in span}))
        return computes

    def decode(self, layer, rows, missing):
        """A decode event of the callback transport: gate and up run while the tensors after the early ones move."""
        ids = DeviceBuffer(np.zeros(1, np.int32))
        self.mover.fetch(self.ctx, layer, {"ids": ids}, lambda: None)
        if missing:
            self.mover.move(self.ctx, self.banks, layer, [(e, rows[e]) for e in missing])
        names = list(SPEC.tensors)
        self.compute(layer, rows, names[: self.early])
        self.mover.wait_rest(self.ctx)
        self.compute(layer, rows, names[self.early :])

    def moved(self):
        """[L, E] how often each expert's row tensors were copied from the pool."""
        count = np.zeros((L, E), int)
        for layer in range(L):
            for name in SPEC.tensors:
                start, nbytes = self.pool.view(layer, name).ctypes.data, SPEC.nbytes(name)
                for copy in self.cuda.copies:
                    if start <= copy.source < start + E * nbytes:
                        first = (copy.source - start) // nbytes
                        count[layer, first : first + copy.nbytes // nbytes] += 1
        assert (count % len(SPEC.tensors) == 0).all()
        return count // len(SPEC.tensors)


@st.composite
def histories(draw):
    """A cache and some events one after another: (decode?, layer, need [E], priorities [L * E], forced admission).

    The cache starts empty or with the first experts of `resident` that fit.
    """
    scores = st.lists(st.integers(0, 3), min_size=L * E, max_size=L * E)
    need = st.lists(st.booleans(), min_size=E, max_size=E)
    event = st.tuples(st.booleans(), st.integers(0, L - 1), need, scores, st.booleans())
    return {
        "group": draw(st.integers(1, E // 2)),
        "capacity": draw(st.integers(1, E)),
        "global_scope": draw(st.booleans()),
        "resident": draw(st.just([]) | st.permutations(range(L * E))),
        "events": draw(st.lists(event, min_size=1, max_size=5)),
    }


# Two hits stay and one leaves; the late admission that takes its row must not reach it before it is computed.
HIT_GIVES_WAY = {
    "group": 1,
    "capacity": 3,
    "global_scope": False,
    "resident": [0, 1, 2, E, E + 1, E + 2],
    "events": [(False, 0, [True] * E, [3, 3, 1, 2, 0, 0] + [0] * E, False)],
}


@settings(deadline=None, max_examples=300)
@given(histories())
@example(history=HIT_GIVES_WAY)
def test_no_copy_can_meet_a_compute_that_reads_its_row(cuda_module, history):
    """Schedule, round moves and the CUDA mover together, over several events, in every order that a GPU may choose.

    Each missing expert moves once, is in its row when it is computed, no copy that could be under way writes there, and
    none is left for what comes after the event.
    """
    group, capacity = history["group"], history["capacity"]
    # As few spare rows as such events may have, so that rows are used again as soon as they can be.
    spare = max(2 * group, E if any(decode for decode, *_ in history["events"]) else 0)
    rows = capacity * (1 if history["global_scope"] else L) + spare
    slot_of, owner = np.full((L, E), -1, np.int32), np.full(rows, -1, np.int32)
    device = Device(cuda_module, rows)
    for layer, expert in (divmod(i, E) for i in history["resident"]):
        taken = np.count_nonzero(owner >= 0) if history["global_scope"] else np.count_nonzero(slot_of[layer] >= 0)
        if taken < capacity:
            row = np.count_nonzero(owner >= 0)
            slot_of[layer, expert], owner[row] = row, layer * E + expert
            for name, array in device.arrays.items():
                array[row] = device.pool.view(layer, name)[expert]
    expected = np.zeros((L, E), int)
    for decode, layer, need, table, forced in history["events"]:
        need, table = np.array(need), np.array(table, np.float32).reshape(L, E)
        options = {"layer": layer, "capacity": capacity, "global_scope": history["global_scope"]}
        plan, order = decide(need, table, slot_of, owner, group=group, forced_admit=forced, decode=decode, **options)
        if decode:
            wanted = np.flatnonzero(need).tolist()
            row = np.where(plan.miss, plan.dest, slot_of[layer])
            device.decode(layer, {e: int(row[e]) for e in wanted}, [e for e in wanted if plan.miss[e]])
        else:
            device.prefill(layer, order)
            plan = plan._replace(dest=order.dest)
        expected[layer] += plan.miss
        assert (device.moved() == expected).all()
        assert device.cuda.none_under_way(device.stream)
        apply(np, plan, slot_of, owner)
        for row in np.flatnonzero(owner >= 0):
            assert holds(device.arrays, row, *divmod(int(owner[row]), E))


@settings(deadline=None, max_examples=200)
@given(histories(), st.integers(1, E))
def test_rows_moved_ahead_meet_no_other_copy_and_no_compute(cuda_module, history, staging_rows):
    """Prefill events of whatever layers, each moving rows of the layer after it: every needed expert is in its row, in
    every order that a GPU may choose, and crosses the link once, at its event or before."""
    group, capacity = history["group"], history["capacity"]
    rows = capacity * (1 if history["global_scope"] else L) + 2 * group
    slot_of, owner = np.full((L, E), -1, np.int32), np.full(rows, -1, np.int32)
    device = Device(cuda_module, rows, staging_rows=staging_rows)
    staged = [array for array in device.mover._staged.values()]
    sizes = [staging_rows * SPEC.nbytes(name) for name in SPEC.tensors]
    into_staging = lambda copy: any(at <= copy.to < at + n for at, n in zip(staged, sizes, strict=True))  # noqa: E731
    needed = 0
    for _, layer, need, table, forced in history["events"]:
        need, table = np.array(need), np.array(table, np.float32).reshape(L, E)
        options = {"layer": layer, "capacity": capacity, "global_scope": history["global_scope"]}
        plan, order = decide(need, table, slot_of, owner, group=group, forced_admit=forced, decode=False, **options)
        ahead = np.flatnonzero(slot_of[layer + 1] < 0).tolist() if layer + 1 < L else None
        device.prefill(layer, order, ahead)
        assert device.cuda.none_under_way(device.stream, but=into_staging)
        apply(np, plan._replace(dest=order.dest), slot_of, owner)
        needed += int(plan.miss.sum())
        for row in np.flatnonzero(owner >= 0):
            assert holds(device.arrays, row, *divmod(int(owner[row]), E))
    found = device.lookahead
    reused = needed - (int(device.moved().sum()) - found.moved)  # misses served without a copy of their own
    assert found.used <= found.moved and reused >= found.used
    device.mover.close()
    assert not device.cuda.open and not device.cuda.memory


@pytest.mark.parametrize("early", range(1, len(SPEC.tensors) + 1))
def test_early_row_tensors_of_a_decode_event_are_there_before_gate_and_up(cuda_module, early):
    device = Device(cuda_module, 4, early)
    device.decode(1, {2: 0, 4: 3}, [2, 4])
    assert device.moved()[1, [2, 4]].tolist() == [1, 1]
    assert device.cuda.none_under_way(device.stream)


def test_moves_overlap_the_compute_before_their_round(cuda_module):
    """What rounds are for: copies of round r + 1 and the compute of round r wait for neither the other."""
    order, rows = an_event(residents=())
    device = Device(cuda_module, rows)
    computes = device.prefill(1, order)
    assert order.rounds == E + 1 == len(computes)
    arrives = {order.src[p]: r for r in range(order.rounds) for p in range(order.bounds[r], order.bounds[r + 1])}
    assert len(device.cuda.copies) == E * len(SPEC.tensors)
    for name in SPEC.tensors:
        address = {device.pool.view(1, name)[e].ctypes.data: e for e in range(E)}
        for copy in device.cuda.copies:
            if copy.source in address:
                r = arrives[address[copy.source]]
                waited = [bool(bit & copy.before) for bit, _ in computes]
                assert waited == [i <= r - 2 for i in range(order.rounds)], f"copies of round {r}"
                waiting = [bool(copy.bit & before) for _, before in computes]
                assert waiting == [i >= r for i in range(order.rounds)], f"computes after the copies of round {r}"


def guarded(device, body):
    """Makes a host call with an error word, as XLA does; returns the word."""
    error = DeviceBuffer(np.zeros(1, np.int32))
    device.calls._guarded(body, 1, [], [], list(device.banks), device.ctx, (error, *device.banks.values()))
    return error.array.tolist()


def test_a_fault_in_a_round_leaves_no_copy_under_way(cuda_module):
    """Rows that were on their way when a round failed must not land in what a later call has put there."""
    order, rows = an_event(residents=())
    device = Device(cuda_module, rows)
    assert guarded(device, lambda layer, ctx, out, values, banks: device.moves.begin(ctx, layer, banks, order)) == [0]
    assert guarded(device, device.moves.on_round) == [0]
    device.compute(1, {})
    # The next round's moves start, the wait for these fails.
    device.cuda.fails = lambda function, stream: function == "cudaStreamWaitEvent" and stream is device.stream
    before = len(device.cuda.copies)
    assert guarded(device, device.moves.on_round) == [1]
    assert len(device.cuda.copies) > before
    fault = device.calls.take_error()
    assert type(fault).__name__ == "CudaError" and str(fault) == "CUDA: out of luck (2)"
    assert device.cuda.none_under_way(device.stream)


def test_a_fault_in_a_decode_call_leaves_no_copy_under_way(cuda_module):
    device = Device(cuda_module, 4)

    def body(layer, ctx, out, values, banks):
        device.mover.move(ctx, banks, layer, [(2, 0), (5, 1)])
        raise ValueError("bad policy")

    assert guarded(device, body) == [1]
    assert guarded(device, lambda layer, ctx, *rest: device.mover.wait_rest(ctx)) == [1]
    assert str(device.calls.take_error()) == "bad policy"
    assert device.cuda.none_under_way(device.stream)


def test_closing_waits_and_gives_everything_back(cuda_module):
    order, rows = an_event(residents=())
    device = Device(cuda_module, rows)
    out = DeviceBuffer(np.zeros(3, np.int32))
    device.mover.store(device.ctx, out, [4, 5, 6])
    fetched = device.mover.fetch(device.ctx, 0, {"out": out}, lambda: out.array.__setitem__(0, 9))
    assert out.array.tolist() == [9, 5, 6] and fetched["out"].tolist() == [4, 5, 6]
    device.moves.begin(device.ctx, 1, device.banks, order)
    assert device.cuda.open and device.cuda.memory
    device.mover.close()
    device.mover.close()
    assert not device.cuda.open and not device.cuda.memory
    assert device.cuda.none_under_way(Timeline())
