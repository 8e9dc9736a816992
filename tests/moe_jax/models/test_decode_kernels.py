"""One token of one sequence through the kernels that a GPU runs (interpreted) equals the plain path, layer by layer.

The kernels of a decode step are chosen by the platform, so nothing else on a CPU comes by them in a model.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _compat

FAMILIES = (
    "qwen3_moe",
    "olmoe",
    "gpt_oss",
    "dbrx",
    "deepseek_v2_lite",
    "jamba",
    "qwen3_5_moe",
)


def run(tiny, tokens, attention):
    """(logits of the last token [V], jaxpr of the last step) of `tokens` one by one."""
    kv = tiny.cache([len(tokens)])
    one = jnp.ones((1, 1), bool)

    def step(params, slabs, token, position, kv):
        return tiny.apply(params, slabs, token, position, one, kv, attention=attention)[:2]

    compiled = jax.jit(step)  # a new function: traced for the implementation of the moment
    for position, token in enumerate(tokens):
        args = tiny.params, tiny.slabs, jnp.full((1, 1), token, jnp.int32), jnp.full((1, 1), position, jnp.int32), kv
        logits, kv = compiled(*args)
    return np.asarray(logits[0, 0]), str(jax.make_jaxpr(step)(*args))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_token_through_the_kernels(name, load_tiny, monkeypatch):
    tiny = load_tiny(name)
    plain, text = run(tiny, [5, 3], "xla")
    assert "pallas_call" not in text
    monkeypatch.setattr(_compat, "default_implementation", lambda: "interpret")
    attention = "interpret" if tiny.cfg.attention_kernel else "xla"
    through, text = run(tiny, [5, 3], attention)
    np.testing.assert_allclose(through, plain, atol=5e-4 if name.startswith("qwen3_5_moe") else 1e-4)
    assert "name=row_linear" in text
    assert ("name=turn_heads" in text) == (attention == "interpret" and not name.startswith("deepseek"))
