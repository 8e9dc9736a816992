"""The pieces of the transports: what an event needs, how outputs are combined, settings, verification, faults."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from host_offload.capacity import resolve_slots
from host_offload.plan import check_invariants, plan_event
from host_offload.policy import LFU, LRU, Policy, PolicySet, StaticPin, get_policy, list_policies
from host_offload.pool import ExpertPool
from host_offload.slots import control_vector, round_group, spare_rows
from host_offload.store import RowSpec
from host_offload.transport import TRANSPORTS, CallbackTransport, GraphTransport, ResidentTransport, callback
from host_offload.transport.base import StateLost, combine_prefill, event_need, event_scores
from host_offload.transport.host_calls import HostCalls, NumpyMover, RoundMoves
from pallas_kernels.expert_ffn import ExpertSpec
from pallas_kernels.formats import INT4, MXFP4

L, E, D, F = 2, 4, 4, 3
SPEC = RowSpec(L=L, E=E, tensors={"gate_up": ((2 * F, D), np.dtype("float32")), "down": ((D, F), np.dtype("float32"))})


@pytest.fixture(scope="module")
def pool():
    pool = ExpertPool(SPEC)
    rng = np.random.default_rng(0)
    for layer in range(L):
        for name in SPEC.tensors:
            view = pool.view(layer, name)
            view[...] = rng.standard_normal(view.shape)
    yield pool
    pool.close()


def budget(slots=4, scope="layer"):
    return resolve_slots(L=L, E=E, row_bytes=SPEC.row_bytes, expert_slots=slots, scope=scope)


def make(kind, pool, policy=None, slots=4, spec=SPEC, **options):
    options = {"forced_admit": False, "max_pairs": 2, "implementation": "xla"} | options
    return TRANSPORTS[kind](spec, pool, budget(slots), policy or LRU(), **options)


# ---------------------------------------------------------------------------------------------- pieces of an event


def test_need_is_the_distinct_experts_of_live_rows():
    ids = jnp.array([[0, 2], [2, 3], [1, 0]], jnp.int32)
    live = jnp.array([True, True, False])
    assert np.asarray(event_need(ids, live, 5)).tolist() == [True, False, True, True, False]
    many = jnp.tile(ids, (2000, 1))
    assert np.asarray(event_need(many, jnp.tile(live, 2000), 5)).tolist() == [True, False, True, True, False]
    assert not np.asarray(event_need(ids, jnp.zeros(3, bool), 5)).any()


def test_scores_are_rounded_as_traces_store_them():
    scores = jnp.array([[0.1, 0.9], [1 / 3, 2 / 3], [5.0, 5.0]], jnp.float32)
    got = np.asarray(event_scores(scores, jnp.array([True, True, False])))
    halves = np.asarray(scores, np.float16).astype(np.float32)
    assert got.tolist() == (halves[0] + halves[1]).tolist()
    assert got.tolist() != np.asarray(scores[0] + scores[1]).tolist()


def test_outputs_are_summed_in_the_order_of_a_tokens_experts():
    """(1e8 + 1) - 1e8 is 0 in float32 and (1e8 - 1e8) + 1 is 1: the order of the k outputs shows."""
    y = jnp.zeros((3, 1, 1), jnp.float32).at[:, 0, 0].set(jnp.array([1e8, 1.0, -1e8]))
    ones, live = jnp.ones((1, 3)), jnp.array([True])
    assert float(combine_prefill(y[:, 0], ones, live)[0, 0]) == 0.0
    assert float(combine_prefill(y[jnp.array([0, 2, 1]), 0], ones, live)[0, 0]) == 1.0


# ---------------------------------------------------------------------------------------------- sizes and settings


def test_rounds_are_about_64_mib_and_at_most_half_a_layer():
    def spec(floats, experts):
        return RowSpec(L=1, E=experts, tensors={"a": ((floats,), np.dtype("float32"))})

    mib = (1 << 20) // 4
    assert round_group(spec(mib, 1000)) == 64
    assert round_group(spec(mib, 100)) == 50
    assert round_group(spec(100 * mib, 8)) == 1
    assert round_group(spec(1, 1)) == 1


def test_spare_rows_hold_a_decode_step_and_two_rounds():
    assert spare_rows(SPEC, pairs=3, group=1) == 3
    assert spare_rows(SPEC, pairs=100, group=1) == E
    assert spare_rows(SPEC, pairs=1, group=2) == 4


def test_control_vector_names_capacities_scope_and_contract():
    assert control_vector(budget(3), False).tolist() == [2, 1, 0, 0]
    assert control_vector(budget(3, "global"), True).tolist() == [3, 3, 1, 1]


@pytest.mark.parametrize("kind", ("device", "callback"))
def test_more_slots_than_the_bank_holds_are_refused(kind, pool):
    transport = make(kind, pool, slots=3)
    transport.configure(budget(2), True, transport.policy)
    assert transport.budget.total == 2 and transport.forced_admit
    with pytest.raises(
        ValueError, match=f"8 slots and {transport.spare} spare rows need more than the {transport.rows}"
    ):
        transport.configure(budget(8), False, transport.policy)
    assert transport.budget.total == 2 and transport.forced_admit  # as before
    assert make(kind, pool, slots=3, bank_rows=50).rows == 50


class Own(Policy):
    name = "own"

    def __init__(self, weight=1.0):
        self.weight = weight

    def init(self, xp, L, E, seed):
        return {"none": xp.zeros((), xp.int32)}

    def observe(self, xp, state, layer, need, scores, t):
        return state

    def priority(self, xp, state, layer, expert, t):
        return self.weight * expert.astype(xp.float32)


def test_which_policies_the_compiled_programs_serve(pool):
    table = np.ones((L, E), np.float32)
    half = 0.5
    graph = make("device", pool, Own(half))
    assert graph.serves(graph.policy) and graph.serves(Own(half))
    assert not graph.serves(Own(0.25)) and not graph.serves(LRU())
    both = make("device", pool, PolicySet([LRU(), StaticPin(table)]))
    assert both.serves(PolicySet([LRU(), StaticPin(both.policy.policies[1].frequency)]))
    assert not both.serves(PolicySet([LRU(), StaticPin(table * 2)]))
    assert not both.serves(PolicySet([LRU()]))
    host = make("callback", pool, LRU())
    assert host.serves(LFU()) and host.serves(StaticPin())
    assert not host.serves(Own())  # wants the router's scores, which the programs of LRU do not send
    assert make("resident", None).serves(Own())


@pytest.mark.parametrize("kind", ("device", "callback"))
def test_emptying_keeps_the_chosen_member_of_a_set(kind, pool):
    transport = make(kind, pool, PolicySet(["lru", "lfu"]), select="lfu")
    state = transport.create_state()
    for _ in range(2):
        policy = state.policy if kind == "device" else transport._policy_state
        assert int(policy["select"]) == 1
        state = transport.empty(state)


# ---------------------------------------------------------------------------------------------- state and verification


def occupied(transport, pool, layer=1, expert=2, row=3):
    """A state with one expert in a slot, its bytes in place."""
    state = transport.create_state()
    banks = {name: bank.at[row].set(pool.view(layer, name)[expert]) for name, bank in state.banks.items()}
    if isinstance(transport, CallbackTransport):
        transport._slot_of[layer, expert] = row
        transport._owner[row] = layer * E + expert
        return replace(state, banks=banks)
    slot_of = state.slot_of.at[layer, expert].set(row)
    return replace(state, banks=banks, slot_of=slot_of, owner=state.owner.at[row].set(layer * E + expert))


@pytest.mark.parametrize("kind", ("device", "callback"))
def test_verify_finds_a_single_wrong_byte(kind, pool):
    transport = make(kind, pool)
    state = occupied(transport, pool)
    transport.verify(state, pool)
    wrong = state.banks["down"].at[3, 1, 1].add(1e-3)
    with pytest.raises(RuntimeError, match="bank 'down' row 3 differs from layer 1 expert 2"):
        transport.verify(replace(state, banks=state.banks | {"down": wrong}), pool)


@pytest.mark.parametrize("kind", ("device", "callback"))
def test_verify_finds_tables_that_are_not_inverse(kind, pool):
    transport = make(kind, pool)
    state = occupied(transport, pool)
    if kind == "callback":
        transport._owner[2] = 0
    else:
        state = replace(state, owner=state.owner.at[2].set(0))
    with pytest.raises(ValueError, match="layer 0 expert 0"):
        transport.verify(state, pool)


@pytest.mark.parametrize("kind", ("device", "callback"))
def test_emptying_frees_all_slots_over_the_same_banks(kind, pool):
    transport = make(kind, pool)
    state = occupied(transport, pool)
    after = transport.empty(state)
    slot_of, owner = transport.tables(after)
    assert (slot_of == -1).all() and (owner == -1).all()
    assert all(after.banks[name] is state.banks[name] for name in SPEC.tensors)
    assert not transport.read_counters(transport.counters(after)).any()


def test_resident_holds_every_expert_and_is_rebuilt_from_the_pool(pool):
    transport = make("resident", None, slots=L * E)

    def fill(layer, name, out):
        out[...] = pool.view(layer, name)

    state = transport.load(transport.create_state(), fill, again=True)
    transport.verify(state, pool)
    assert (transport.tables(state)[0] >= 0).all()
    for leaf in jax.tree.leaves(state.banks):
        leaf.delete()
    transport.verify(transport.empty(transport.rebuild()), pool)

    transport.load(transport.create_state(), fill, again=False)
    with pytest.raises(StateLost, match="load the model again"):
        transport.rebuild()


# ---------------------------------------------------------------------------------------------- the host's side


def test_the_mover_copies_rows_and_writes_tables(pool):
    mover = NumpyMover(pool)
    banks = {name: np.zeros((6, *shape), dtype) for name, (shape, dtype) in SPEC.tensors.items()}
    mover.move(None, banks, 1, [(2, 0), (0, 5)])
    mover.move_ahead(None, banks, 0, [(3, 1)], 0)
    for name, bank in banks.items():
        for row, (layer, expert) in {0: (1, 2), 5: (1, 0), 1: (0, 3)}.items():
            np.testing.assert_array_equal(bank[row], pool.view(layer, name)[expert])
        assert not bank[[2, 3, 4]].any()
    table = np.ones(3, np.int32)
    mover.store(None, table, [4, 5, 6])
    assert table.tolist() == [4, 5, 6]


def test_rounds_are_started_one_ahead_and_waited_for():
    """Round r + 1 is started by the call of round r, round 1 by `begin`; only rounds that move rows are waited for."""
    log = []

    class Mover:
        def move_ahead(self, ctx, banks, layer, moves, turn, staged=()):
            log.append(("start", turn, moves))

        def wait(self, ctx, turn):
            log.append(("wait", turn))

    class Order:  # 2 hits, then rounds of 2, 0 and 1 missing experts
        rounds, bounds = np.int32(4), np.array([0, 2, 4, 4, 5, 5])
        src, row = np.array([-1, -1, 7, 5, 3]), np.array([0, 1, 8, 9, 2])

    rounds = RoundMoves(Mover())
    rounds.begin(None, 0, None, Order)
    assert log == [("start", 1, [(7, 8), (5, 9)])]
    log.clear()
    for _ in range(4):
        rounds.on_round(0, None, None, None, None)
        log.append("compute")
    assert log == ["compute", ("wait", 1), "compute", ("start", 3, [(3, 2)]), "compute", ("wait", 3), "compute"]


@pytest.mark.parametrize("scope", ("layer", "global"))
def test_a_decode_event_without_misses_is_counted_and_observed_but_not_planned(scope, pool, monkeypatch):
    transport = TRANSPORTS["callback"](
        SPEC, pool, budget(2 * L, scope), LRU(), forced_admit=False, max_pairs=2, implementation="xla"
    )
    planned = []

    def plan(*args, **kwargs):
        planned.append(kwargs["layer"])
        return plan_event(*args, **kwargs)

    monkeypatch.setattr(callback, "plan_event", plan)
    banks = {name: np.zeros((transport.rows, *shape), dtype) for name, (shape, dtype) in SPEC.tensors.items()}

    def step(*experts):
        for layer in range(L):
            out = {"rows": np.full(2, -1, np.int32)}
            transport._on_decode(layer, None, out, {"ids": np.array([experts], np.int32)}, banks)
            for expert, row in zip(experts, out["rows"], strict=True):
                assert all(np.array_equal(banks[name][row], pool.view(layer, name)[expert]) for name in SPEC.tensors)
        return transport.read_counters(None)[:, :2].tolist()  # hits, misses

    assert step(2, 0) == [[0, 2]] * L and planned == list(range(L))
    assert step(0, 2) == [[2, 0]] * L and planned == list(range(L))  # no further plan
    assert transport._policy_state["last"][:, [0, 2]].min() >= L  # clock of the second step
    assert step(0, 1) == [[1, 1]] * L and planned == [*range(L)] * 2
    assert (transport._slot_of[:, [0, 1]] >= 0).all() and (transport._slot_of[:, 2] < 0).all()
    check_invariants(transport._slot_of, transport._owner)


ON_THE_DEVICE = [name for name in list_policies() if not get_policy(name).host_only]


@pytest.mark.parametrize(
    ("policy", "implementation"),
    [(name, "xla") for name in ON_THE_DEVICE] + [(name, "interpret") for name in ("lru", "lfu-decayed", "least-stale")],
)
def test_an_event_without_live_rows_leaves_everything_as_it_is(policy, implementation, pool):
    transport = make("device", pool, get_policy(policy), slots=4, implementation=implementation, max_pairs=4)
    transport.ffn_implementation = "xla"  # these experts are too small for tiles
    rng = np.random.default_rng(5)
    operands = transport.operands()

    @jax.jit
    def step(state, ids, live):
        experts = transport.bind(operands, prefill=False)
        for layer in range(L):
            x, scores = jnp.ones((2, D)), jnp.full((2, E), 1 / E)
            out, state = experts(layer, x, ids, jnp.ones((2, 2)), scores, live, None, state)
        return out, transport.finish_step(state, jnp.any(live))[0]

    def tokens():
        return jnp.asarray([rng.permutation(E)[:2] for _ in range(2)], jnp.int32)

    state = transport.create_state()
    for _ in range(3):
        _, state = step(state, tokens(), jnp.array([True, False]))
    out, after = step(state, tokens(), jnp.zeros(2, bool))
    assert not np.asarray(out).any()
    assert np.asarray(state.counters).sum() > 0 and int(state.step) == 3
    same = jax.tree.map(lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(), state, after)
    assert jax.tree.all(same), same


def guarded(calls, body, outputs):
    """Calls the guard as XLA does: a table `rows`, then the error word, then no banks."""
    calls._guarded(body, 0, ["rows"], [], [], None, outputs)


@pytest.mark.parametrize("fault", (ValueError("bad policy"), KeyboardInterrupt()))
def test_a_callback_never_raises_and_stops_after_a_fault(fault, pool):
    host = HostCalls(NumpyMover(pool))
    calls = []

    def body(layer, ctx, small, values, banks):
        calls.append(layer)
        raise fault

    rows, error = np.full(4, 9, np.int32), np.zeros(1, np.int32)
    guarded(host, body, (rows, error))
    assert error.tolist() == [1] and rows.tolist() == [0, 0, 0, 0]  # row numbers that are safe to use
    rows[:], error[:] = 9, 0
    guarded(host, body, (rows, error))
    assert error.tolist() == [1] and rows.tolist() == [0, 0, 0, 0]
    assert calls == [0], "after a fault nothing is tried again in the same call"
    assert host.take_error() is fault
    assert host.take_error() is None


def test_graph_transports_name_their_code_path(pool):
    assert make("device", pool).kernel == "device/xla"
    assert make("device", pool, implementation="pallas").kernel == "device/pallas-triton"
    assert make("resident", None, implementation="interpret").kernel == "resident/pallas-interpret"


def test_experts_without_a_kernel_say_so_and_rows_must_fit_them(pool):
    """The path of the expert products and the reason; slot plans stay kernels. Rows of other tensors are an error."""
    dense, packed = ExpertSpec(), ExpertSpec(gate_up=MXFP4(), down=MXFP4())
    assert make("device", pool, implementation="pallas", experts=dense).kernel == "device/pallas-triton"
    with pytest.raises(
        ValueError, match="rows of gate_up, down: these experts need gate_up, gate_up_scale, down, down_scale"
    ):
        make("device", pool, experts=packed)
    words = RowSpec(
        {name: ((4, 4), np.uint32) for name in ("gate_up", "gate_up_scale", "down", "down_scale")}, L=2, E=4
    )
    transport = make("resident", None, implementation="pallas", experts=packed, spec=words)
    assert transport.kernel == "resident/pallas-triton"
    assert make("resident", None, experts=packed, spec=words).kernel == "resident/xla"
    ordered = ExpertSpec(down=INT4(32, order=True))
    tensors = {name: ((4, 4), np.uint32) for name in ("gate_up", "down", "down_scale", "down_order")}
    transport = make("resident", None, implementation="pallas", experts=ordered, spec=RowSpec(tensors, L=2, E=4))
    assert transport.kernel == "resident/xla (no kernel undoes the column order of int4 rows)"
    assert (transport.implementation, transport.ffn_implementation) == ("pallas", "xla")
    assert issubclass(ResidentTransport, GraphTransport) and not ResidentTransport.plans
