"""Every policy in the live engine: the tokens are LRU's, and device and callback transport count the same hits."""

import pytest

from host_offload.policy import get_policy, list_policies
from moe_jax import MoE
from moe_jax.config import ConfigError

NAMES = [name for name in list_policies() if type(get_policy(name)).__module__.startswith("host_offload.")]
PROMPT = [3, 5, 7, 9, 11]


@pytest.fixture(scope="module")
def models(tiny):
    """One model a transport: what the callback transport compiled serves every policy, the host decides."""
    config = {"cache_rate": 0.5, "progress": False}
    with (
        MoE(tiny("mixtral"), config | {"transport": "callback"}) as callback,
        MoE(tiny("mixtral"), config | {"transport": "device"}) as device,
    ):
        yield {"callback": callback, "device": device}


def run(moe, policy):
    moe.set_cache(policy)
    tokens = [row.tolist() for row in moe.generate([PROMPT], max_new_tokens=8)]
    decode = moe.stats()["last"]["decode"]
    return tokens, (decode["hits"], decode["misses"], decode["bypasses"], decode["evictions"])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_lru(models, name):
    tokens, _ = run(models["callback"], "lru")
    ours = run(models["callback"], name)
    assert ours[0] == tokens
    if get_policy(name).host_only:
        with pytest.raises(ConfigError, match=f"{name}.*on the host only"):
            models["device"].set_cache(name, transport="device")
    else:
        assert run(models["device"], name) == ours
