"""Long prompts that move rows of the next layer ahead of its router: same tokens, same counts, books that add up."""

import numpy as np
import pytest

from moe_jax import MoE
from moe_jax.errors import ConfigError

# Qwen3-MoE tiny: enough tokens that each layer is taken to need all of its experts, and a short prompt for contrast.
LONG, SHORT = 160, 6


def run(directory, transport, rows, scope="layer", **config):
    sizes = {} if transport == "resident" else {"cache_rate": 0.5, "lookahead_rows": rows, "scope": scope}
    settings = {"transport": transport, "dtype": "float32", "progress": False, "max_sequence_length": 256}
    with MoE(directory, settings | sizes | config) as moe:
        prompts = [np.arange(n) * 7 % 97 + 3 for n in (SHORT, LONG, SHORT, LONG)]
        out = [moe.generate(prompt[None], max_new_tokens=3, eos_token_id=[]) for prompt in prompts]
        if transport != "resident":
            moe.verify_slots()
        stats = moe.stats()
        counts = {key: stats["total"]["prefill"][key] for key in ("hits", "misses", "bypasses", "evictions")}
        return [ids.tolist() for ids in out], counts, stats


@pytest.fixture(scope="module")
def reference(tiny):
    """The tokens with all experts resident."""
    return run(tiny("qwen3_moe"), "resident", 0)[0]


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("transport", ["device", "callback"])
def test_rows_moved_ahead_change_no_token_and_no_count(tiny, reference, transport, scope):
    directory = tiny("qwen3_moe")
    without, counts, stats = run(directory, transport, 0, scope)
    assert stats["lookahead"] is None and stats["memory"]["staging_bytes"] == 0
    ahead, counts_ahead, stats = run(directory, transport, 2, scope)
    assert without == ahead == reference
    assert counts == counts_ahead
    found, row_bytes = stats["lookahead"], stats["experts"]["bytes_each"]
    assert stats["memory"]["staging_bytes"] == 2 * row_bytes
    # One event a layer but the first for each of the two long prompts, at most two rows each; the short ones none.
    assert 0 < found["rows_used"] <= found["rows_moved"] <= 2 * 2 * (stats["experts"]["layers"] - 1)
    assert found["bytes_wasted"] <= (found["rows_moved"] - found["rows_used"]) * row_bytes


def test_no_rows_ahead_where_host_memory_lacks_them_or_none_are_missing(tiny):
    directory = tiny("qwen3_moe")
    with MoE(directory, {"progress": False, "transport": "resident", "lookahead_rows": 2}) as moe:
        row_bytes = moe.stats()["experts"]["bytes_each"]
        assert moe.stats()["lookahead"] is None and moe.stats()["memory"]["staging_bytes"] == 0
    config = {"progress": False, "lookahead_rows": 2, "cache_rate": 0.25, "host_memory_bytes": 24 * row_bytes}
    with MoE(directory, config) as moe:
        assert moe.stats()["disk"] is not None
        assert moe.stats()["lookahead"] is None and moe.stats()["memory"]["staging_bytes"] == 0


def test_rows_ahead_must_be_a_whole_number(tiny):
    with pytest.raises(ConfigError, match="lookahead_rows=-1 is not allowed"):
        MoE(tiny("qwen3_moe"), {"lookahead_rows": -1})
