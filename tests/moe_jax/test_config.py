"""OffloadConfig: keys, allowed values, messages, JSON round trip."""

import json

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from moe_jax.config import CONTRACTS, DTYPES, SCOPES, TRANSPORTS, OffloadConfig, parse_bytes
from moe_jax.errors import ConfigError, MoEJaxError


def test_defaults():
    config = OffloadConfig.parse(None)
    assert config == OffloadConfig() == OffloadConfig.parse({})
    assert (config.device_memory_ratio, config.policy, config.decode_chunk, config.page_size) == (0.75, "lru", None, 64)


def test_parse_returns_a_config_as_it_is():
    config = OffloadConfig(policy="lfu")
    assert OffloadConfig.parse(config) is config


def test_unknown_key_names_it_and_the_near_match():
    with pytest.raises(ConfigError, match=r"unknown configuration key 'expert_slot'; did you mean 'expert_slots'\?"):
        OffloadConfig.parse({"expert_slot": 4})
    with pytest.raises(ConfigError, match="'zzz'; known keys: .*cache_rate.*offload_path"):
        OffloadConfig.parse({"zzz": 4})


def test_errors_are_value_errors_too():
    assert issubclass(ConfigError, ValueError) and issubclass(ConfigError, MoEJaxError)


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("device_memory_ratio", 1.5, "from 0 to 1"),
        ("device_memory_ratio", float("nan"), "from 0 to 1"),
        ("device_memory_ratio", "0.5", "from 0 to 1"),
        ("kv_cache_ratio", -0.1, "from 0 to 1"),
        ("kv_cache_ratio", True, "from 0 to 1"),
        ("expert_slots", 0, ">= 1"),
        ("expert_slots", 2.0, ">= 1"),
        ("expert_slots", True, ">= 1"),
        ("expert_slots", [], "each MoE layer"),
        ("expert_slots", "12", ">= 1"),
        ("cache_rate", 0, "0 < cache_rate <= 1"),
        ("cache_rate", 1.01, "0 < cache_rate <= 1"),
        ("expert_cache_bytes", "12 parsecs", "12GB"),
        ("expert_cache_bytes", "-1GB", "12GB"),
        ("expert_cache_bytes", 0, "positive"),
        ("expert_cache_bytes", 1.5, "positive"),
        ("host_memory_bytes", "3 cups", "12GB"),
        ("host_memory_bytes", 0, "positive"),
        ("host_policy", "", "registered policy"),
        ("transport", "devise", "did you mean 'device'"),
        ("transport", None, "'auto', 'device', 'callback', 'resident'"),
        ("policy", "", "registered policy"),
        ("policy", 3, "registered policy"),
        ("scope", "layers", "did you mean 'layer'"),
        ("contract", "sequential", "'atomic-bypass', 'atomic-forced-admit'"),
        ("dtype", "fp32", "'float32'"),
        ("seed", -1, "0 to 4294967295"),
        ("seed", 2**32, "0 to 4294967295"),
        ("prefill_chunk", 0, ">= 1"),
        ("decode_chunk", 0, ">= 1"),
        ("pinned_memory", "register", "did you mean 'registered'"),
        ("page_size", 48, "a power of two from 8 to 256"),
        ("page_size", 512, "8 to 256"),
        ("max_sequence_length", 0, ">= 1"),
        ("max_batch", 0, ">= 1"),
        ("load_threads", -2, ">= 1"),
        ("progress", 1, "True or False"),
        ("trace", "yes", "True or False"),
        ("offload_path", 7, "a directory path or None"),
        ("offload_path", "", "a directory path or None"),
    ],
)
def test_bad_value_names_key_value_and_what_is_allowed(key, value, allowed):
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.parse({key: value})
    message = str(caught.value)
    assert message.startswith(f"{key}={value!r} is not allowed: it must be ")
    assert allowed in message


def test_bad_entry_of_a_quota_list_is_named():
    with pytest.raises(ConfigError, match=r"expert_slots\[1\]=0"):
        OffloadConfig(expert_slots=[4, 0])


def test_only_one_cache_size():
    with pytest.raises(ConfigError, match="expert_slots=8 and cache_rate=0.5 all set the size"):
        OffloadConfig(expert_slots=8, cache_rate=0.5)


def test_quotas_need_layer_scope():
    with pytest.raises(ConfigError, match="one pool"):
        OffloadConfig(expert_slots=[4, 4], scope="global")


@pytest.mark.parametrize(
    ("text", "count"),
    [("12GB", 12 * 10**9), ("512MiB", 512 * 2**20), ("1.5 kib", 1536), ("7", 7), ("3b", 3), (9, 9), ("1TB", 10**12)],
)
def test_bytes(text, count):
    assert parse_bytes("expert_cache_bytes", text) == count
    assert OffloadConfig(expert_cache_bytes=text).expert_cache_bytes == count


def test_numpy_numbers_are_accepted_and_stored_as_python_numbers():
    config = OffloadConfig(expert_slots=np.int32(5), device_memory_ratio=np.float32(0.5))
    assert json.loads(json.dumps(config.to_dict()))["expert_slots"] == 5
    assert type(config.device_memory_ratio) is float


def test_json_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"offload_path": str(tmp_path), "device_memory_ratio": 0.5, "expert_slots": [3, 4]}))
    config = OffloadConfig.parse(path)
    assert config == OffloadConfig.parse(str(path))
    assert config.expert_slots == (3, 4) and config.offload_path == str(tmp_path)


def test_json_file_errors_name_the_file(tmp_path):
    with pytest.raises(ConfigError, match="missing.json"):
        OffloadConfig.parse(tmp_path / "missing.json")
    path = tmp_path / "bad.json"
    path.write_text("{nope")
    with pytest.raises(ConfigError, match="bad.json is not valid JSON"):
        OffloadConfig.parse(path)
    path.write_text("[1]")
    with pytest.raises(ConfigError, match="one JSON object, not a list"):
        OffloadConfig.parse(path)
    path.write_text('{"page_size": 3}')
    with pytest.raises(ConfigError, match="bad.json: page_size=3 is not allowed"):
        OffloadConfig.parse(path)


def test_offload_path_must_not_be_a_file(tmp_path):
    path = tmp_path / "rows"
    path.write_text("")
    with pytest.raises(ConfigError, match="a file of that name exists"):
        OffloadConfig(offload_path=path)


def test_wrong_type_of_config():
    with pytest.raises(ConfigError, match="config of type int"):
        OffloadConfig.parse(3)


def test_replace_changes_the_cache_size_and_validates():
    config = OffloadConfig(cache_rate=0.5)
    assert config.replace(expert_slots=8) == OffloadConfig(expert_slots=8)
    assert config.replace(policy="lfu") == OffloadConfig(cache_rate=0.5, policy="lfu")
    with pytest.raises(ConfigError, match="did you mean 'policy'"):
        config.replace(polcy="lfu")


@settings(deadline=None, max_examples=40)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "device_memory_ratio": st.floats(0, 1),
            "kv_cache_ratio": st.floats(0, 1),
            "transport": st.sampled_from(TRANSPORTS),
            "scope": st.sampled_from(SCOPES),
            "contract": st.sampled_from(CONTRACTS),
            "dtype": st.sampled_from(DTYPES),
            "seed": st.integers(0, 2**32 - 1),
            "page_size": st.sampled_from([8, 16, 32, 64, 128, 256]),
            "prefill_chunk": st.none() | st.integers(1, 10**6),
            "trace": st.booleans(),
        },
    ),
    st.fixed_dictionaries({"expert_slots": st.integers(1, 10**6)})
    | st.fixed_dictionaries({"cache_rate": st.floats(0, 1, exclude_min=True)})
    | st.fixed_dictionaries({"expert_cache_bytes": st.sampled_from(["3GB", "1.5MiB", 12])}),
)
def test_round_trip_through_json(keys, size):
    config = OffloadConfig.parse(keys | size)
    assert OffloadConfig.parse(json.loads(json.dumps(config.to_dict()))) == config
