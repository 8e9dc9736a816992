"""Measured tiles replace the formulas of their class and card only, and a table that does not fit is refused."""

import functools
import json
import re
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import tile_table
from pallas_kernels.dequant_gemm.kernel import gemm_key, gemm_tiles
from pallas_kernels.expert_ffn import ExpertSpec
from pallas_kernels.expert_ffn.decode import decode_key, decode_tiles
from pallas_kernels.expert_ffn.grouped import grouped_key, grouped_tiles
from pallas_kernels.formats import FP8, INT4
from pallas_kernels.paged_attention.kernel import paged_decode_attention, partial_key, partial_tiles

OPS = ("dequant_gemm", "expert_ffn", "expert_ffn_prefill", "paged_attention", "row_linear")


@pytest.fixture
def write(tmp_path, monkeypatch):
    def write(entries):
        monkeypatch.setattr(tile_table, "FILE", path := tmp_path / f"{len(list(tmp_path.iterdir()))}.json")
        path.write_text(json.dumps(entries))

    return write


def test_the_table_of_the_package_fits_the_kernels():
    for key, entry in json.loads(tile_table.FILE.read_text()).items():
        op, found = key.split(" ", 1)
        assert op in OPS and re.fullmatch(r"\S.* \[.*\] \S.*", found), key
        assert entry["tiles"] and entry["us"] > 0
    root = Path(__file__).resolve().parents[2]
    data = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert data["pallas_kernels"] == [tile_table.FILE.name]


def test_an_entry_replaces_what_it_names_in_its_class(write):
    spec = ExpertSpec(gate_up=INT4(128), down=FP8(128))
    formula, prefill = decode_tiles(768, 2048, 1, 2, spec), grouped_tiles(768, 2048, 2, spec)
    down = {"down": {"block_out": 32, "num_warps": 2}}
    write({decode_key(768, 2048, 1, 2, spec): {"tiles": down}})
    found = decode_tiles(768, 2048, 1, 2, spec)
    assert found == {"gate_up": formula["gate_up"], "down": formula["down"] | down["down"]} != formula
    for other in ((768, 2048, 2, 2, spec), (768, 4096, 1, 2, spec), (768, 2048, 1, 4, spec), (768, 2048, 1, 2)):
        assert decode_tiles(*other)["down"] != found["down"]
    assert grouped_tiles(768, 2048, 2, spec) == prefill
    write({grouped_key(768, 2048, 2, spec): {"tiles": {"gate_up": {"num_warps": 4}}}})
    assert grouped_tiles(768, 2048, 2, spec)["gate_up"] == prefill["gate_up"] | {"num_warps": 4}
    assert decode_tiles(768, 2048, 1, 2, spec) == formula


def test_dense_matrices_by_size_and_padded_rows(write):
    formula = gemm_tiles(4096, 4096, 8, INT4(128))
    write({gemm_key(4096, 4096, 16, INT4(128)): {"tiles": {"splits": 2, "num_warps": 2}}})
    assert gemm_tiles(4096, 4096, 8, INT4(128)) == formula | {"splits": 2, "num_warps": 2} != formula
    for other in ((4096, 4096, 17, INT4(128)), (2048, 4096, 8, INT4(128)), (4096, 4096, 8, FP8(128))):
        assert gemm_tiles(*other)["num_warps"] != 2
    assert gemm_tiles(4096, 4096, 8, INT4(128), 4)["num_warps"] != 2


def test_batches_that_are_padded_alike_share_a_class():
    keys = [decode_key(768, 2048, batch) for batch in (1, 2, 16, 17, 32)]
    assert keys[1] == keys[2] and keys[3] == keys[4] and len(set(keys)) == 3


def attention(batch, pages):
    shape = jax.ShapeDtypeStruct
    queries = (shape((batch, 32, 128), jnp.bfloat16),)
    return queries, shape((999, 64, 4, 128), jnp.bfloat16), shape((batch, pages), jnp.int32)


def test_attention_by_powers_of_two(write):
    formula = partial_tiles(*attention(1, 500))
    assert formula["splits"] is None
    write({partial_key(*attention(1, 512)): {"tiles": {"splits": 32, "tokens": 32}}})
    assert partial_tiles(*attention(1, 500)) == formula | {"splits": 32, "tokens": 32}
    assert partial_tiles(*attention(1, 513)) == partial_tiles(*attention(2, 512)) == formula


@pytest.mark.parametrize(
    ("tiles", "message"),
    [
        ({"block_out": 16}, "no parameter block_out"),
        ({"tokens": 128}, "of two from 1 to 64"),
        ({"splits": 3}, "= 3"),
        ({"splits": 512}, "of two from 1 to 256"),
        ({"unroll": 8}, "of two from 1 to 4"),
    ],
)
def test_attention_refuses_tiles(tiles, message):
    queries, pool, table = attention(1, 4)
    run = functools.partial(paged_decode_attention, scale=1.0, window=None, softcap=None, tiles=tiles)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(run, queries, (pool,), pool, table, jax.ShapeDtypeStruct((1,), jnp.int32), None)


def test_an_entry_of_other_kernels_is_refused(write):
    write({decode_key(768, 2048, 1): {"tiles": {"down": {"units": 4}}}})
    with pytest.raises(ValueError, match="no units among block_out, .*tune it again"):
        decode_tiles(768, 2048, 1)
