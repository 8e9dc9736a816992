"""Every policy in the live engine: the tokens are LRU's, and device and callback transport count the same hits."""

import pytest

from host_offload.policy import get_policy, list_policies
from moe_jax import MoE
from moe_jax.config import ConfigError

NAMES = [name for name in list_policies() if type(get_policy(name)).__module__.startswith("host_offload.")]
PROMPT = [3, 5, 7, 9, 11]


@pytest.fixture(scope="module")
def moe(tiny):
    with MoE(tiny("mixtral"), {"cache_rate": 0.5, "progress": False}) as model:
        yield model


def run(moe, policy, transport):
    moe.set_cache(policy, transport=transport)
    tokens = [row.tolist() for row in moe.generate([PROMPT], max_new_tokens=8)]
    decode = moe.stats()["last"]["decode"]
    return tokens, (decode["hits"], decode["misses"], decode["bypasses"], decode["evictions"])


@pytest.fixture(scope="module")
def on_the_host(moe):
    """What `run` returns of each policy under the callback transport, whose programs are the same for all of them."""
    return {name: run(moe, name, "callback") for name in NAMES}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_lru(moe, on_the_host, name):
    ours = on_the_host[name]
    assert ours[0] == on_the_host["lru"][0]
    if get_policy(name).host_only:
        with pytest.raises(ConfigError, match=f"{name}.*on the host only"):
            moe.set_cache(name, transport="device")
    else:
        assert run(moe, name, "device") == ours
