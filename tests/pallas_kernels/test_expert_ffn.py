"""Expert FFN through slots: all implementations against a float64 definition; deposited rows keep every byte."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import SingleDeviceSharding

from pallas_kernels.expert_ffn import decode, expert_ffn_decode, expert_ffn_round, group_pairs, grouped

IMPLEMENTATIONS = ["interpret", "xla"]
NAMES = ("gate_up", "down")


# ---------------------------------------------------------------------------------------------------------- the subject


def random_rows(rng, count, D, F, dtype):
    """Expert rows of unit gain, as NumPy arrays."""
    dtype = jnp.dtype(dtype)
    return {
        "gate_up": (rng.normal(size=(count, 2 * F, D)) / np.sqrt(D)).astype(dtype),
        "down": (rng.normal(size=(count, D, F)) / np.sqrt(F)).astype(dtype),
    }


def rounded(w, dtype):
    """Weights as they are multiplied in compute dtype `dtype`, in float64."""
    return w.astype(dtype).astype(np.float64)


def definition(x, weights, expert):
    """down(silu(gate x) * up x) in float64, with weights and hidden vector rounded to the compute dtype of x [B, D]."""
    exact = {name: rounded(w[expert], x.dtype) for name, w in weights.items()}
    gate, up = np.split(x.astype(np.float64) @ exact["gate_up"].T, 2, axis=1)
    h = (gate / (1 + np.exp(-gate)) * up).astype(x.dtype).astype(np.float64)
    return h @ exact["down"].T


def tolerance(dtype):
    """Absolute, for outputs of about 1: fp32 sums, or single hidden values that round the other way."""
    return 1e-5 if dtype == np.float32 else 1e-2


def in_host_memory(rows):
    sharding = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    return {name: jax.device_put(w, sharding) for name, w in rows.items()}


def to_numpy(tree):
    return {name: np.asarray(value) for name, value in tree.items()}


def same_bytes(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


class Case(NamedTuple):
    B: int
    D: int
    F: int
    row_dtype: str
    compute: str


CASES = [
    Case(1, 96, 48, "bfloat16", "bfloat16"),
    Case(1, 512, 32, "bfloat16", "float32"),
    Case(3, 96, 48, "float32", "float32"),
    Case(3, 64, 32, "float16", "float32"),
    Case(16, 96, 48, "float16", "bfloat16"),
    Case(17, 64, 64, "bfloat16", "bfloat16"),
]
E, ROWS = 6, 9


class Problem:
    """Pool, tokens and a bank full of other bytes, for one case."""

    def __init__(self, case):
        rng = np.random.default_rng([case.B, case.D, case.F])
        self.case = case
        self.weights = random_rows(rng, E, case.D, case.F, case.row_dtype)
        self.pool = in_host_memory(self.weights)
        self.x = rng.normal(size=(case.B, case.D)).astype(jnp.dtype(case.compute))
        self.junk = random_rows(rng, ROWS, case.D, case.F, case.row_dtype)

    def banks(self, row_of):
        """Banks [ROWS, ...] in which expert e lies in row row_of[e]."""
        banks = {name: w.copy() for name, w in self.junk.items()}
        for expert, row in row_of.items():
            for name in NAMES:
                banks[name][row] = self.weights[name][expert]
        return banks

    def run(self, implementation, entries, banks, distinct=5, pool=True, **options):
        """entries: [(expert, row, missing, deposit)]. Returns y [count, B, D] and the banks as NumPy."""
        padding = [(0, 0, False, False)] * (distinct - len(entries))
        expert, row, missing, deposit = np.array([*entries, *padding]).T
        y, after = expert_ffn_decode(
            jnp.asarray(self.x),
            jnp.asarray(row, jnp.int32),
            jnp.asarray(np.where(missing, expert, -1), jnp.int32),
            jnp.asarray(deposit, jnp.int32),
            jnp.full(1, len(entries), jnp.int32),
            {name: jnp.asarray(b) for name, b in banks.items()},
            self.pool if pool else None,
            distinct=distinct,
            implementation=implementation,
            **options,
        )
        assert y.shape == (distinct, self.case.B, self.case.D) and y.dtype == jnp.float32
        return np.asarray(y)[: len(entries)], to_numpy(after)


@pytest.fixture(scope="module", params=CASES, ids=lambda c: "-".join(map(str, c)))
def problem(request):
    return Problem(request.param)


# --------------------------------------------------------------------------------------------------------------- decode


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_decode_of_hits_deposits_and_bypasses(problem, implementation):
    """Four of at most five distinct experts: two hits, a miss that is kept, a miss that is bypassed."""
    hit, miss = (False, False), (True, True)
    entries = [(0, 7, *hit), (2, 3, *miss), (3, 0, True, False), (5, 1, *hit)]
    banks = problem.banks({0: 7, 5: 1})
    y, after = problem.run(implementation, entries, banks)
    for u, (expert, *_) in enumerate(entries):
        expected = definition(problem.x, problem.weights, expert)
        np.testing.assert_allclose(y[u], expected, rtol=0, atol=tolerance(problem.x.dtype), err_msg=f"expert {expert}")
    # plain XLA passes a bypassed expert through its row, which is free
    free_to_change = {0} if implementation == "xla" else set()
    for name in NAMES:
        assert same_bytes(after[name][3], problem.weights[name][2]), f"{name}: the deposited row is not the pool's"
        for row in set(range(ROWS)) - {3} - free_to_change:
            assert same_bytes(after[name][row], banks[name][row]), f"{name}: row {row} changed"


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_decode_does_not_depend_on_what_was_resident_or_where(problem, implementation):
    """Bit for bit: any rows, any subset of hits, any deposits, and no offloading at all."""
    experts = (0, 2, 3, 5)
    rows = dict(zip(experts, (0, 1, 2, 3), strict=True))
    resident = [(e, rows[e], False, False) for e in experts]
    expected, _ = problem.run(implementation, resident, problem.banks(rows), pool=False)

    @settings(deadline=None, max_examples=8)
    @given(
        st.permutations(range(ROWS)),
        st.lists(st.tuples(st.booleans(), st.booleans()), min_size=len(experts), max_size=len(experts)),
    )
    def run(rows, fate):
        entries = [(e, rows[i], *fate[i]) for i, e in enumerate(experts)]
        banks = problem.banks({e: row for e, row, missing, _ in entries if not missing})
        y, after = problem.run(implementation, entries, banks)
        assert same_bytes(y, expected)
        for expert, row, missing, deposit in entries:
            if missing and deposit:
                assert all(same_bytes(after[name][row], problem.weights[name][expert]) for name in NAMES)

    run()


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_of_down_may_arrive_between_the_kernels(problem, implementation):
    """`between` comes after gate and up and before down: what it does to the down bank is used, bit for bit."""
    rows = {0: 7, 2: 3, 5: 1}
    entries = [(e, row, False, False) for e, row in rows.items()]
    banks = problem.banks(rows)
    expected, _ = problem.run(implementation, entries, banks, pool=False)
    seen = []

    def between(h, late):
        assert h.shape[0] == 5 and h.shape[-1] == problem.case.F and h.dtype == problem.x.dtype
        assert set(late) == set(NAMES)
        seen.append(np.asarray(h).reshape(5, -1, problem.case.F)[: len(rows), : problem.case.B])
        return late | {"down": jnp.asarray(banks["down"])}

    y, after = problem.run(implementation, entries, banks | {"down": problem.junk["down"]}, pool=False, between=between)
    assert same_bytes(y, expected)
    assert all(same_bytes(after[name], banks[name]) for name in NAMES)
    # The hidden vectors are whole by then.
    for h, expert in zip(seen[0], rows, strict=True):
        gate_up = rounded(problem.weights["gate_up"][expert], problem.x.dtype)
        gate, up = np.split(problem.x.astype(np.float64) @ gate_up.T, 2, axis=1)
        hidden = gate / (1 + np.exp(-gate)) * up
        np.testing.assert_allclose(h.astype(np.float64), hidden, rtol=2**-7, atol=tolerance(problem.x.dtype))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_decode_of_no_expert_touches_nothing(implementation):
    problem = Problem(CASES[0])
    banks = problem.banks({})
    y, after = problem.run(implementation, [], banks)
    assert len(y) == 0
    assert all(same_bytes(after[name], banks[name]) for name in NAMES)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_decode_of_as_many_experts_as_allowed(implementation):
    problem = Problem(CASES[2])
    entries = [(e, 8 - e, e % 2 == 1, True) for e in range(5)]
    y, _ = problem.run(implementation, entries, problem.banks({0: 8, 2: 6, 4: 4}))
    for u in range(5):
        np.testing.assert_allclose(y[u], definition(problem.x, problem.weights, u), rtol=0, atol=1e-5)


def test_a_row_of_padding_never_reaches_a_token():
    """Tokens are padded to 16 for the tensor cores; what a token gets does not depend on its neighbours."""
    problem = Problem(CASES[2])
    entries = [(1, 4, True, False)]
    y, _ = problem.run("interpret", entries, problem.banks({}))
    problem.x = np.concatenate([problem.x[:2], np.full_like(problem.x[:1], np.inf)])
    other, _ = problem.run("interpret", entries, problem.banks({}))
    assert same_bytes(y[:, :2], other[:, :2])


# -------------------------------------------------------------------------------------------------------------- prefill


class Prefill(NamedTuple):
    T: int
    K: int
    D: int
    F: int
    block_rows: int
    row_dtype: str
    compute: str


PREFILLS = [
    Prefill(40, 2, 96, 48, 16, "bfloat16", "bfloat16"),
    Prefill(33, 3, 64, 32, 32, "bfloat16", "float32"),
    Prefill(24, 2, 128, 64, 16, "float16", "bfloat16"),
    Prefill(7, 1, 64, 96, 16, "float32", "float32"),
]
# (expert, bank row) in processing order, round by round. Expert 4 is needed by no token, and row 2 is used twice: the
# expert that comes last is moved there when the one before it has been computed.
ROUNDS = [[(3, 8), (0, 6)], [(6, 2), (1, 3)], [(5, 5), (7, 4)], [(2, 2)]]
EXPERTS, BANK_ROWS = 8, 9


class Chunk:
    """A prefill chunk of ragged expert loads with dead tokens, and the order of its experts."""

    def __init__(self, case):
        self.case = case
        rng = np.random.default_rng([case.T, case.D, case.F])
        self.weights = random_rows(rng, EXPERTS, case.D, case.F, case.row_dtype)
        self.junk = random_rows(rng, BANK_ROWS, case.D, case.F, case.row_dtype)
        self.x = rng.normal(size=(case.T, case.D)).astype(jnp.dtype(case.compute))
        self.live = rng.random(case.T) < 0.8
        self.live[[0, -1]] = True, False
        # Expert 3 takes most tokens, expert 2 only one of them, the experts in between some.
        odds = np.array([2, 1, 0, 12, 0, 1, 1, 1]) / 18
        ids = [rng.choice(EXPERTS, case.K, replace=False, p=odds) for _ in range(case.T)]
        self.ids = np.array(ids, np.int32)
        self.ids[0, 0] = 2
        order = [pair for round_ in ROUNDS for pair in round_] + [(4, 0)]
        self.expert_at, self.row_at = np.array(order, np.int32).T
        self.bounds = np.cumsum([0] + [len(round_) for round_ in ROUNDS])

    def layout(self, row_at):
        """What the kernel takes, with the bank row of each position, and the first block after each position."""
        position_of_expert = np.argsort(self.expert_at).astype(np.int32)
        layout = group_pairs(
            *map(jnp.asarray, (self.ids, self.live, position_of_expert)), EXPERTS, self.case.block_rows
        )
        position = np.minimum(np.asarray(layout.pop("block_position")), EXPERTS - 1)
        ends = np.concatenate([[0], np.asarray(layout.pop("block_end"))])
        return layout | {"block_row": jnp.asarray(row_at[position])}, ends

    def outputs(self):
        """Outputs before the first round: a value that no expert gives."""
        return jnp.full((self.case.T * self.case.K, self.case.D), 7, self.x.dtype)

    def pair_is_live(self):
        return np.repeat(self.live, self.case.K)

    def check(self, y):
        live = self.pair_is_live()
        for pair in np.flatnonzero(live):
            token, k = divmod(pair, self.case.K)
            expected = definition(self.x[token : token + 1], self.weights, self.ids[token, k])[0]
            np.testing.assert_allclose(
                y[pair].astype(np.float64),
                expected,
                rtol=2**-8 if y.dtype != np.float32 else 0,
                atol=tolerance(self.x.dtype),
                err_msg=f"token {token}, expert {self.ids[token, k]}",
            )
        np.testing.assert_array_equal(y[~live], 7)


@pytest.fixture(scope="module", params=PREFILLS, ids=lambda c: "-".join(map(str, c)))
def chunk(request):
    return Chunk(request.param)


def in_rounds(chunk, run_round):
    """Runs all rounds over a bank in which only the experts of the running round lie; returns y as NumPy."""
    layout, ends = chunk.layout(chunk.row_at)
    y = chunk.outputs()
    for r, round_ in enumerate(ROUNDS):
        banks = {name: w.copy() for name, w in chunk.junk.items()}
        for expert, row in round_:
            for name in NAMES:
                banks[name][row] = chunk.weights[name][expert]
        span = jnp.asarray(ends[chunk.bounds[r : r + 2]], jnp.int32)
        before = np.asarray(y)
        y = run_round(
            jnp.asarray(chunk.x),
            y,
            layout,
            span,
            {name: jnp.asarray(b) for name, b in banks.items()},
            block_rows=chunk.case.block_rows,
        )
        served = np.isin(chunk.ids.reshape(-1), [expert for expert, _ in round_]) & chunk.pair_is_live()
        assert same_bytes(np.asarray(y)[~served], before[~served]), f"round {r} writes outputs of other rounds"
        assert (np.asarray(y)[served] != before[served]).any(axis=1).all(), f"round {r} leaves outputs out"
    chunk.check(np.asarray(y))
    return np.asarray(y)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_prefill_in_rounds_and_with_everything_resident_gives_the_same_bits(chunk, implementation):
    """Rounds, each over its own experts only, against one round over a bank that holds expert e in row e."""
    run_round = functools.partial(expert_ffn_round, implementation=implementation)
    expected = in_rounds(chunk, run_round)
    layout, ends = chunk.layout(chunk.expert_at)
    y = run_round(
        jnp.asarray(chunk.x),
        chunk.outputs(),
        layout,
        jnp.array([0, ends[-1]], jnp.int32),
        {name: jnp.asarray(w) for name, w in chunk.weights.items()},
        block_rows=chunk.case.block_rows,
    )
    assert same_bytes(np.asarray(y), expected)


@pytest.mark.parametrize("programs", [1, 7, 300])
def test_prefill_does_not_depend_on_how_programs_share_the_work(programs):
    """One program computes everything; three hundred are more than a round has tiles."""
    chunk = Chunk(PREFILLS[0])
    expected = in_rounds(chunk, functools.partial(expert_ffn_round, implementation="interpret"))
    run_round = functools.partial(grouped.expert_ffn_round, programs=programs, interpret=True)
    assert same_bytes(in_rounds(chunk, run_round), expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_prefill_of_an_empty_round_touches_nothing(implementation):
    """A round whose experts have no live token has no blocks: y comes back as it was."""
    chunk = Chunk(PREFILLS[3])
    layout, ends = chunk.layout(chunk.row_at)
    banks = {name: jnp.full(b.shape, jnp.nan, b.dtype) for name, b in chunk.junk.items()}
    span = jnp.full(2, ends[3], jnp.int32)
    args = (jnp.asarray(chunk.x), chunk.outputs(), layout, span, banks)
    y = expert_ffn_round(*args, block_rows=chunk.case.block_rows, implementation=implementation)
    assert same_bytes(np.asarray(y), np.asarray(chunk.outputs()))


# ------------------------------------------------------------------------------------------------------------- grouping


@st.composite
def groupings(draw):
    """(ids [T, K], live [T], position_of_expert [E], positions, block_rows) of few static shapes."""
    T, K, experts = draw(st.sampled_from([(1, 1, 4), (9, 1, 4), (6, 2, 4), (20, 3, 7)]))
    ids = [draw(st.permutations(range(experts)))[:K] for _ in range(T)]
    some, every, none = st.lists(st.booleans(), min_size=T, max_size=T), st.just([True] * T), st.just([False] * T)
    return (
        np.array(ids, np.int32),
        np.array(draw(some | every | none)),
        np.array(draw(st.permutations(range(experts))), np.int32),
        experts,
        draw(st.sampled_from([2, 16])),
    )


grouped_pairs = jax.jit(group_pairs, static_argnums=(3, 4))


@settings(deadline=None, max_examples=60)
@given(groupings())
def test_grouping_puts_every_live_pair_in_a_block_of_its_expert(grouping):
    ids, live, position_of_expert, positions, block_rows = grouping
    T, K = ids.shape
    layout = to_numpy(grouped_pairs(*grouping[:3], positions, block_rows))
    assert all(value.dtype == np.int32 for value in layout.values())
    pair, blocks = layout["pair"], len(layout["block_position"])
    assert pair.shape == layout["token"].shape == (blocks * block_rows,)

    filled = pair[pair >= 0]
    assert sorted(filled) == [t * K + k for t in range(T) if live[t] for k in range(K)]
    assert (pair[pair < 0] == -1).all()
    np.testing.assert_array_equal(layout["token"], np.where(pair >= 0, pair // K, 0))
    # A block's pairs are those of the expert at its position, real ones before padding, in the order of the tokens.
    for block, position in zip(pair.reshape(blocks, block_rows), layout["block_position"], strict=True):
        real = block[block >= 0]
        assert (block[: len(real)] == real).all() and (np.diff(real) > 0).all()
        assert (position_of_expert[ids.reshape(-1)[real]] == position).all()
        assert (len(real) > 0) == (position < positions), "a block without pairs belongs to no expert"

    load = np.bincount(position_of_expert[ids[live]].reshape(-1), minlength=positions)
    np.testing.assert_array_equal(layout["block_end"], np.cumsum(-(-load // block_rows)))
    used = np.repeat(np.arange(positions), -(-load // block_rows))
    np.testing.assert_array_equal(layout["block_position"][: len(used)], used)
    assert (layout["block_position"][len(used) :] == positions).all()


# -------------------------------------------------------------------------------------------------------------- refusal


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="implementation = 'cuda': must be one of pallas, interpret, xla"):
        Problem(CASES[0]).run("cuda", [], Problem(CASES[0]).junk)


def test_widths_that_tensor_cores_cannot_tile_are_refused():
    case = Case(1, 40, 24, "float32", "float32")
    problem = Problem(case)
    entries = [(1, 4, True, True)]
    y, _ = problem.run("interpret", entries, problem.banks({}))
    np.testing.assert_allclose(y[0], definition(problem.x, problem.weights, 1), rtol=0, atol=1e-5)
    problem.x, problem.case = np.repeat(problem.x, 2, axis=0), case._replace(B=2)
    with pytest.raises(ValueError, match="F = 24, D = 40: must be a power of two >= 16 that divides 24"):
        problem.run("interpret", entries, problem.banks({}))


@pytest.mark.parametrize(
    ("tiles", "message"),
    [
        ({"gate": {"block_out": 16}}, "kernels are"),
        ({"down": {"rows": 16}}, "parameters"),
        ({"down": {"block_out": 64}}, "divides 96"),
        ({"gate_up": {"block_in": 48}}, "power of two"),
        ({"gate_up": {"unroll": 7}}, r"\['unroll'\] = 7 .* that many tiles of \d+ columns must divide"),
        ({"down": {"unroll_missing": 0}}, r"\['unroll_missing'\] = 0"),
    ],
)
def test_tiles_that_do_not_fit_are_refused(tiles, message):
    problem = Problem(CASES[0])
    none = jnp.zeros(1, jnp.int32)
    banks = {name: jnp.asarray(b) for name, b in problem.junk.items()}
    with pytest.raises(ValueError, match=message):
        decode.expert_ffn_decode(
            jnp.asarray(problem.x), none, none, none, none, banks, None, distinct=1, tiles=tiles, interpret=True
        )


@pytest.mark.parametrize("block_rows", [8, 24])
def test_blocks_of_impossible_size_are_refused(block_rows):
    chunk = Chunk(PREFILLS[3])
    layout, _ = chunk.layout(chunk.row_at)
    banks = {name: jnp.asarray(b) for name, b in chunk.junk.items()}
    args = (jnp.asarray(chunk.x), chunk.outputs(), layout, jnp.zeros(2, jnp.int32), banks)
    with pytest.raises(ValueError, match=f"block_rows = {block_rows}: must be a power of two >= 16"):
        grouped.expert_ffn_round(*args, block_rows=block_rows, interpret=True)


def test_a_round_refuses_tiles_that_do_not_fit():
    chunk = Chunk(PREFILLS[3])
    layout, _ = chunk.layout(chunk.row_at)
    banks = {name: jnp.asarray(b) for name, b in chunk.junk.items()}
    args = (jnp.asarray(chunk.x), chunk.outputs(), layout, jnp.zeros(2, jnp.int32), banks)
    with pytest.raises(ValueError, match="must be a power of two >= 16 that divides 64"):
        grouped.expert_ffn_round(*args, block_rows=16, tiles={"down": {"block_out": 8}}, interpret=True)
