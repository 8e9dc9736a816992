"""The weight map: every tensor of the file and every target of the model is accounted for."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from host_offload.parts import Part, even_columns, odd_columns, transposed
from moe_jax.checkpoint.logical import LogicalTensor
from moe_jax.checkpoint.mapping import ExpertRule, Ignore, Rule, map_checkpoint
from moe_jax.checkpoint.reader import Checkpoint
from moe_jax.errors import CheckpointError
from pallas_kernels.expert_ffn import SILU

D, F, E, MOE_LAYERS = 4, 3, 2, [1, 3]
LAYER = r"model\.layers\.(\d+)\."
TABLE = [
    Rule(r"embed\.weight", "embed"),
    Rule(r"head\.weight", "head"),
    *[Rule(LAYER + rf"{name}\.weight", r"layers.\1.qkv", part=(i, 3)) for i, name in enumerate("qkv")],
    Rule(LAYER + r"qkv\.weight", r"layers.\1.qkv"),
    ExpertRule(LAYER + r"experts\.(\d+)\.gate", "gate_up", part=(0, 2)),
    ExpertRule(LAYER + r"experts\.(\d+)\.up", "gate_up", part=(1, 2)),
    ExpertRule(LAYER + r"experts\.(\d+)\.down", "down"),
    ExpertRule(LAYER + r"experts\.gate_up", "gate_up", stacked=True),
    ExpertRule(LAYER + r"experts\.gates", "gate_up", part=(0, 2), stacked=True),
    ExpertRule(LAYER + r"experts\.ups", "gate_up", part=(1, 2), stacked=True),
    ExpertRule(LAYER + r"experts\.downs", "down", stacked=True),
    Ignore(r"mtp\..*", "multi-token prediction is not used"),
    Ignore(LAYER + r"q\.weight\.old", "left over"),
]
TARGETS = {"embed": (5, D), "head": (5, D), "layers.0.qkv": (8, D)}
EXPERTS = {"gate_up": (2 * F, D), "down": (D, F)}


def dense():
    return {
        "embed.weight": ones(5, D),
        "head.weight": ones(5, D),
        "model.layers.0.v.weight": ones(2, D),
        "model.layers.0.k.weight": ones(2, D),
        "model.layers.0.q.weight": ones(4, D),
    }


def one_by_one():
    experts = {}
    for layer in MOE_LAYERS:
        for e in range(E):
            prefix = f"model.layers.{layer}.experts.{e}."
            experts |= {prefix + "gate": ones(F, D), prefix + "up": ones(F, D), prefix + "down": ones(D, F)}
    return experts


def stacked():
    return {
        f"model.layers.{layer}.experts.{name}": ones(E, *EXPERTS[tensor])
        for layer in MOE_LAYERS
        for name, tensor in (("gate_up", "gate_up"), ("downs", "down"))
    }


def ones(*shape):
    return np.ones(shape, np.float32)


@pytest.fixture
def mapped(tmp_path):
    """`mapped(tensors, **changes)` writes the tensors and maps them with the table above."""

    def run(tensors, table=TABLE, **changes):
        (tmp_path / "config.json").write_text(json.dumps({}))
        save_file(tensors, tmp_path / "model.safetensors")
        arguments = dict(targets=TARGETS, expert_tensors=EXPERTS, moe_layers=MOE_LAYERS, num_experts=E) | changes
        return map_checkpoint(Checkpoint.open(tmp_path), table, **arguments)

    return run


@pytest.fixture
def refused(mapped):
    def run(*args, **kwargs):
        with pytest.raises(CheckpointError) as raised:
            mapped(*args, **kwargs)
        return str(raised.value)

    return run


def test_parts_are_in_the_order_of_the_rules(mapped):
    found = mapped(dense() | one_by_one())
    sizes = {"q": 4, "k": 2, "v": 2}
    qkv = tuple(LogicalTensor.plain(f"model.layers.0.{name}.weight", (size, D)) for name, size in sizes.items())
    assert found.params["layers.0.qkv"] == qkv
    assert found.params["embed"] == (LogicalTensor.plain("embed.weight", (5, D)),)
    prefix = "model.layers.3.experts.1."
    assert found.expert_sources["gate_up"][1][1] == (Part(prefix + "gate"), Part(prefix + "up"))
    assert found.expert_sources["down"][0][0] == (Part("model.layers.1.experts.0.down"),)
    assert found.expert_shapes == EXPERTS and found.ignored == {} and found.packed == frozenset()
    assert found.experts == SILU


def test_other_layouts_of_the_same_table(mapped):
    tensors = dense() | stacked()
    for name in "qkv":
        del tensors[f"model.layers.0.{name}.weight"]
    found = mapped(tensors | {"model.layers.0.qkv.weight": ones(8, D)})
    assert found.params["layers.0.qkv"] == (LogicalTensor.plain("model.layers.0.qkv.weight", (8, D)),)
    assert found.expert_sources["gate_up"][1][1] == (Part("model.layers.3.experts.gate_up", 1),)

    halves = {f"model.layers.{layer}.experts.{n}s": ones(E, F, D) for layer in MOE_LAYERS for n in ("gate", "up")}
    downs = {name: array for name, array in stacked().items() if name.endswith("downs")}
    found = mapped(dense() | halves | downs)
    assert found.expert_sources["gate_up"][0][1] == (
        Part("model.layers.1.experts.gates", 1),
        Part("model.layers.1.experts.ups", 1),
    )


def test_layers_may_use_different_layouts(mapped):
    tensors = dense() | {n: a for n, a in one_by_one().items() if ".1." in n.split("experts")[0]}
    found = mapped(tensors | {n: a for n, a in stacked().items() if "layers.3." in n})
    assert found.expert_sources["down"][0][0][0].index is None and found.expert_sources["down"][1][0][0].index == 0


def test_ignored_tensors_keep_their_reason_and_win_over_rules(mapped):
    table = [Rule(r".*\.old", "embed"), *TABLE]
    found = mapped(dense() | one_by_one() | {"mtp.0.w": ones(1), "model.layers.0.q.weight.old": ones(1)}, table)
    assert found.ignored == {
        "mtp.0.w": "multi-token prediction is not used",
        "model.layers.0.q.weight.old": "left over",
    }


def test_everything_that_does_not_fit_is_in_one_error(refused):
    tensors = dense() | one_by_one()
    del tensors["head.weight"], tensors["model.layers.0.k.weight"], tensors["model.layers.1.experts.1.down"]
    tensors["embed.weight"] = ones(5, D + 1)
    tensors["model.layers.3.experts.0.up"] = ones(F + 1, D)
    tensors |= {
        "stray": ones(1),
        "model.layers.3.experts.9.down": ones(D, F),
        "model.layers.2.experts.0.up": ones(F, D),
    }
    message = refused(tensors)
    for part in (
        "6 problems",
        "embed: has shape [5, 4] in the model, but the file has embed.weight [5, 5]",
        "1 parameter with no tensor in the file: head",
        "layers.0.qkv: part 1 (counted from 0) has no tensor",
        "1 expert tensor with no tensor in the file: down of expert 1 in decoder layer 1",
        "gate_up has shape [3, 4] + [4, 4] where the model has [6, 4]: model.layers.3.experts.0.gate",
        "3 tensors of the file with no place",
    ):
        assert part in message
    for name in ("stray", "model.layers.3.experts.9.down", "model.layers.2.experts.0.up"):
        assert name in message


def test_target_filled_by_two_layouts(refused):
    message = refused(dense() | one_by_one() | {"model.layers.0.qkv.weight": ones(8, D)})
    assert "layers.0.qkv: filled more than once, by model.layers.0.k.weight" in message
    message = refused(dense() | one_by_one() | stacked())
    assert "down of expert 0 in decoder layer 1: filled more than once" in message


def test_two_rules_for_one_part(refused):
    message = refused(
        dense() | one_by_one() | {"extra": ones(4, D)}, [*TABLE, Rule("extra", "layers.0.qkv", part=(0, 3))]
    )
    assert "layers.0.qkv: filled more than once, by extra" in message
    message = refused(
        dense() | one_by_one() | {"extra": ones(4, D)}, [*TABLE, Rule("extra", "layers.0.qkv", part=(3, 4))]
    )
    assert "layers.0.qkv: filled more than once" in message


def test_name_that_two_patterns_match(refused):
    message = refused(dense() | one_by_one(), [*TABLE, Rule(r"emb.*", "head")])
    assert "embed.weight matches 2 patterns" in message and "make them disjoint" in message


def test_stacked_tensor_with_the_wrong_number_of_experts_is_one_line(refused):
    tensors = dense() | stacked()
    tensors["model.layers.3.experts.downs"] = ones(E + 1, D, F)
    message = refused(tensors)
    assert "1 problem " in message and "the first axis must be 2 experts: model.layers.3.experts.downs" in message


def test_target_the_config_does_not_have_names_the_file_tensor(refused):
    targets = {path: shape for path, shape in TARGETS.items() if path != "layers.0.qkv"}
    message = refused(dense() | one_by_one(), targets=targets)
    assert "3 tensors of the file with no place" in message and "model.layers.0.q.weight" in message


def test_tied_head(mapped, refused):
    targets = {path: shape for path, shape in TARGETS.items() if path != "head"}
    tensors = dense() | one_by_one()
    found = mapped(tensors, targets=targets, tied=[("head", "embed")])
    assert found.ignored == {"head.weight": "tied: same as embed"} and "head" not in found.params
    del tensors["head.weight"]
    assert mapped(tensors, targets=targets, tied=[("head", "embed")]).ignored == {}
    message = refused(tensors | {"head.weight": 2 * ones(5, D)}, targets=targets, tied=[("head", "embed")])
    assert "head.weight differs from embed.weight though the config ties them" in message
    assert "no place" in refused(dense() | one_by_one(), targets=targets)
    with pytest.raises(ValueError, match="not among the targets"):
        mapped(tensors, targets=targets, tied=[("head", "nothing")])


def test_tied_pair_of_an_untied_model_has_no_effect(mapped):
    assert "head" in mapped(dense() | one_by_one(), tied=[("head", "embed")]).params


@pytest.mark.parametrize(
    "make",
    [
        lambda: Rule("a", "b", part=(2, 2)),
        lambda: Rule("a", "b", part=(-1, 2)),
        lambda: ExpertRule(r"(\d+)", "down"),
        lambda: ExpertRule(r"(\d+)\.(\d+)", "down", stacked=True),
        lambda: ExpertRule(r"(\d+)\.(\d+)", "down", part=(1, 1)),
    ],
)
def test_rules_check_themselves(make):
    with pytest.raises(ValueError, match=r"part must be|groups"):
        make()


@st.composite
def tables(draw):
    """Random parameters, each split into random parts; (file tensors, table, targets)."""
    tensors, table, targets = {}, [], {}
    for i in range(draw(st.integers(1, 4))):
        heights = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
        width = draw(st.integers(1, 3))
        targets[f"p.{i}"] = (sum(heights), width)
        for j, height in enumerate(heights):
            part = (j, len(heights)) if len(heights) > 1 else None
            tensors[f"t{i}.{j}"] = np.full((height, width), 10 * i + j, np.float32)
            table.append(Rule(rf"t({i})\.{j}", r"p.\1", part))
    return tensors, draw(st.permutations(table)), targets


@given(tables(), st.data())
@settings(max_examples=40)
def test_random_tables(tmp_path_factory, case, data):
    tensors, table, targets = case
    directory = tmp_path_factory.mktemp("table")
    (directory / "config.json").write_text("{}")

    def attempt(tensors):
        save_file(tensors, directory / "model.safetensors")
        with Checkpoint.open(directory) as checkpoint:
            params = map_checkpoint(
                checkpoint, table, targets=targets, expert_tensors={}, moe_layers=[], num_experts=0
            ).params
            return {path: [tensor.name for tensor in found] for path, found in params.items()}

    params = attempt(tensors)
    assert set(params) == set(targets)
    assert sorted(name for names in params.values() for name in names) == sorted(tensors)
    for path, names in params.items():
        values = np.concatenate([tensors[name] for name in names])
        assert values.shape == targets[path] and (np.diff(values[:, 0]) >= 0).all()

    victim = data.draw(st.sampled_from(sorted(tensors)))
    path = next(path for path, names in params.items() if victim in names)
    if len(tensors) > 1:  # the safetensors package writes no empty file
        with pytest.raises(CheckpointError, match=path):
            attempt({name: array for name, array in tensors.items() if name != victim})
    with pytest.raises(CheckpointError, match=f"with no place in the model.*: x{victim}"):
        attempt(tensors | {"x" + victim: tensors[victim]})
    with pytest.raises(CheckpointError, match=rf"{path}: has shape"):
        attempt(tensors | {victim: np.ones((7, 1), np.float32)})


# ---------------------------------------------------------------------------------- experts in other layouts

OTHER = [
    ExpertRule(r"(\d+)\.w1", "gate_up", part=(0, 2), stacked="rows"),
    ExpertRule(r"(\d+)\.v1", "gate_up", part=(1, 2), stacked="rows"),
    ExpertRule(r"(\d+)\.w2", "down", stacked="rows", views=(transposed,)),
    ExpertRule(r"(\d+)\.mixed", "gate_up", stacked=True, views=(even_columns, odd_columns)),
]


def test_rows_of_all_experts_in_one_tensor(mapped):
    tensors = {f"{layer}.{name}": ones(E * F, D) for layer in MOE_LAYERS for name in ("w1", "v1", "w2")}
    found = mapped(tensors, OTHER, targets={})
    rows = slice(F, 2 * F)
    assert found.expert_sources["gate_up"][1][1] == (Part("3.w1", rows), Part("3.v1", rows))
    assert found.expert_sources["down"][0][0] == (Part("1.w2", slice(0, F), transposed),)


def test_several_views_of_one_tensor(mapped):
    tensors = {f"{layer}.{name}": ones(E * F, D) for layer in MOE_LAYERS for name in ("w2",)}
    tensors |= {f"{layer}.mixed": ones(E, D, 2 * F) for layer in MOE_LAYERS}
    found = mapped(tensors, OTHER, targets={})
    assert found.expert_sources["gate_up"][0][1] == (Part("1.mixed", 1, even_columns), Part("1.mixed", 1, odd_columns))


def test_what_does_not_fit_a_layout_is_listed(refused):
    tensors = {f"{layer}.w2": ones(E * F, D) for layer in MOE_LAYERS}
    tensors |= {"1.mixed": ones(E, D, 2 * F), "3.mixed": ones(E, D, 2 * F + 1)}
    message = refused(tensors, OTHER, targets={})
    assert f"3.mixed is float32 [{D}, {2 * F + 1}]: must hold gate and up in turn" in message
    tensors |= {"3.mixed": ones(E, D, 2 * F), "3.w2": ones(E * F + 1, D)}
    assert f"[{E * F + 1}, {D}] where the first axis must divide by the {E} experts: 3.w2" in refused(
        tensors, OTHER, targets={}
    )


def test_rules_with_impossible_layouts():
    with pytest.raises(ValueError, match="stacked must be False, True or 'rows'"):
        ExpertRule(r"(\d+)\.w", "down", stacked="columns")
    with pytest.raises(ValueError, match="views must not be empty"):
        ExpertRule(r"(\d+)\.w", "down", stacked=True, views=())
