"""`MoE` in clumsy hands: misspelt arguments, a closed model, threads, traces over several caches."""

import threading

import numpy as np
import pytest

from host_offload.policy import LRU
from moe_jax import MoE, OffloadConfig
from moe_jax.api import SEVERAL_CACHES
from moe_jax.errors import CheckpointError, ConfigError, InputError, MoEJaxError

PROMPT = np.random.default_rng(3).integers(3, 256, 12)
CONFIG = {
    "transport": "callback",
    "cache_rate": 0.25,
    "progress": False,
    "max_batch": 2,
    "max_sequence_length": 64,
    "page_size": 16,
    "decode_chunk": 4,
}


@pytest.fixture(scope="module")
def moe(tiny):
    with MoE(tiny("mixtral"), CONFIG) as moe:
        yield moe


def generate(moe, count=6, **options):
    return moe.generate(PROMPT, count, eos_token_id=[], **options)[12:].tolist()


# ------------------------------------------------------------------------------------------------- misspelt arguments


@pytest.mark.parametrize("checkpoint", (None, 3, ["a"]))
def test_what_is_no_checkpoint(checkpoint):
    with pytest.raises(CheckpointError, match="give a directory or a hub id"):
        MoE(checkpoint)


def test_a_configuration_key_given_as_an_argument(tiny):
    with pytest.raises(ConfigError, match=r"'cache_rate'.*MoE\(checkpoint, \{'cache_rate': 0.25\}\)"):
        MoE(tiny("mixtral"), cache_rate=0.25)


@pytest.mark.parametrize(
    "name, hint",
    (("expert_slots", "'slots'"), ("slots_per_layer", "'slots'"), ("scop", "'scope'"), ("dtype", "set when loading")),
)
def test_set_cache_names_the_setting_that_was_meant(name, hint, moe):
    before = moe.stats()["slots"], moe.config
    with pytest.raises(ConfigError, match=f"no setting '{name}'.*{hint}"):
        moe.set_cache(**{name: 6})
    assert (moe.stats()["slots"], moe.config) == before


class OnTheHost(LRU):
    name = "on-the-host"
    host_only = True


def test_a_policy_of_the_host_is_refused_by_the_compiled_step(moe):
    before = moe.config
    with pytest.raises(ConfigError, match="'on-the-host'.*use transport='callback', not 'device'"):
        moe.set_cache(OnTheHost(), transport="device")
    assert moe.config == before


def test_trace_is_true_or_false(moe):
    for call in (moe.generate, moe.stream_ids):
        with pytest.raises(ConfigError, match="trace='run.npz' is not allowed: it must be True, False or None"):
            call(PROMPT, 4, trace="run.npz")


@pytest.mark.parametrize("prompt, says", ((b"Once", "decode it to a text"), (7, "a text is a str")))
def test_a_prompt_that_is_no_prompt(prompt, says, moe):
    with pytest.raises(InputError, match=says):
        moe.generate(prompt, 4)


def test_a_warning_names_the_line_of_the_user(moe):
    with pytest.warns(UserWarning, match="do_sample is False") as caught:
        generate(moe, 2, temperature=2.0)
    assert [warning.filename for warning in caught] == [__file__]
    pad = int(PROMPT[0])
    with pytest.warns(UserWarning, match="padding is left out") as caught:
        generate(moe, 2, pad_token_id=pad)
    assert [warning.filename for warning in caught] == [__file__]


def test_sampling_params_are_those_of_generate(moe):
    params = moe.sampling_params(7, do_sample=True, top_k=3)
    assert (params.max_new_tokens, params.top_k, params.eos_token_id, params.seed) == (7, 3, (2,), moe.config.seed)
    assert moe.sampling_params(seed=5).seed == 5
    with pytest.raises(ConfigError, match="did you mean 'top_k'"):
        moe.sampling_params(topk=3)


def test_an_error_in_a_configuration_file_begins_with_its_name(tmp_path):
    path = tmp_path / "run.json"
    for content, says in (
        ('{"cache_rate": "0.2"}', "cache_rate='0.2' is not allowed"),
        ('{"cache_rat": 0.2}', "unknown configuration key 'cache_rat'; did you mean 'cache_rate'"),
    ):
        path.write_text(content)
        with pytest.raises(ConfigError) as caught:
            OffloadConfig.parse(path)
        assert str(caught.value).startswith(f"{path}: {says}")


def test_an_offload_path_that_cannot_be_made_is_named(tiny, tmp_path):
    (tmp_path / "file").touch()
    path = str(tmp_path / "file" / "rows")  # below a file: refused to root as well
    with pytest.raises(ConfigError, match=f"offload_path='{path}' cannot be used.*may write to"):
        MoE(tiny("mixtral"), CONFIG | {"offload_path": path})


# ------------------------------------------------------------------------------------------------ what a cell displays


def test_a_model_shows_its_cache(moe):
    moe.set_cache("lfu", slots=6)
    assert repr(moe) == "<MoE mixtral: 6 of 24 experts have a slot; callback, lfu, scope layer, atomic-bypass>"
    assert repr(moe.set_cache("lru", slots=9, scope="global")).endswith("9 of 24 experts have a slot; callback, lru, "
    "scope global, atomic-bypass>")  # fmt: skip
    moe.set_cache(scope="layer", slots=6)


# ---------------------------------------------------------------------------------------------------- threads, closing


def test_a_call_from_a_second_thread_is_refused_and_the_first_goes_on(moe):
    wanted, met = generate(moe, 20), []

    class Streamer:
        """Calls the model from another thread while the first call is between two chunks."""

        def put(self, value):
            if not met:
                thread = threading.Thread(target=self.intrude)
                thread.start()
                thread.join()

        def intrude(self):
            for call in (lambda: generate(moe), lambda: moe.set_cache("lfu"), lambda: moe.forward(PROMPT)):
                try:
                    met.append(call())
                except MoEJaxError as error:
                    met.append(str(error))

        def end(self):
            pass

    stream = moe.stream_ids(PROMPT, 20, eos_token_id=[])
    first = next(stream)[0]
    Streamer().put(None)
    assert first + [token for pieces in stream for token in pieces[0]] == wanted
    assert len(met) == 3 and all("in the other thread" in text for text in met)
    assert generate(moe, 20) == wanted


def test_one_generation_at_a_time(moe):
    wanted = generate(moe, 12)
    stream = moe.stream_ids(PROMPT, 12, eos_token_id=[])
    got = next(stream)[0]
    for call in (
        lambda: moe.generate(PROMPT, 2),
        lambda: moe.forward(PROMPT),
        lambda: moe.stream_ids(PROMPT, 2),
        lambda: moe.set_cache(policy="lfu"),
    ):
        with pytest.raises(MoEJaxError, match="a generation is open on this model: finish its stream, or close"):
            call()
    assert moe.stats()["occupied_slots"]
    moe.verify_slots()  # looking is allowed
    got += [token for chunk in stream for token in chunk[0]]
    assert got == wanted
    first, second = (moe.stream_ids(PROMPT, 12, eos_token_id=[]) for _ in range(2))
    next(first)
    with pytest.raises(MoEJaxError, match="one call at a time"):
        next(second)
    assert sum((chunk[0] for chunk in first), []) == wanted[1:]
    assert moe._engine.running is None and generate(moe, 12) == wanted


def test_closing_under_a_running_call_says_so(tiny):
    moe = MoE(tiny("mixtral"), CONFIG)
    stream = moe.stream_ids(PROMPT, 20, eos_token_id=[])
    next(stream)
    run = moe._engine.programs.run

    def close_then_run(*arguments):  # as when another thread closes while this one is about to enter the program
        moe.close()
        return run(*arguments)

    moe._engine.programs.run = close_then_run
    with pytest.raises(MoEJaxError, match="closed while it was generating"):
        list(stream)
    assert repr(moe) == "<MoE mixtral: closed>"
    with pytest.raises(MoEJaxError, match="load it again"):
        moe.generate(PROMPT, 2)
    with pytest.raises(MoEJaxError, match="is closed"), moe:
        pass


# ------------------------------------------------------------------------------------------- traces over several caches


def test_a_trace_over_several_caches_names_them_all(moe):
    moe.set_cache("lru", slots=6)
    generate(moe, trace=True)
    generate(moe, trace=True)
    one = moe.trace(clear=False)
    assert (one.header["policy"], one.header["slots"]) == ("lru", [2, 2, 2]) and "caches" not in one.header
    moe.set_cache("lfu", slots=12)
    generate(moe, trace=True)
    both = moe.trace()
    assert both.header["policy"] == SEVERAL_CACHES
    requests = sorted(set(both.request.tolist()))
    first, second = both.header["caches"]
    assert first == {"from_request": requests[0], "scope": "layer", "slots": [2, 2, 2], "contract": "atomic-bypass",
                     "policy": "lru"}  # fmt: skip
    assert second == first | {"from_request": requests[2], "slots": [4, 4, 4], "policy": "lfu"}
    generate(moe, trace=True)
    assert moe.trace().header["policy"] == "lfu"  # cleared: one cache again


def test_a_trace_says_what_it_was_recorded_under_though_the_cache_changed_since(moe):
    moe.set_cache("lru", slots=6)
    generate(moe, trace=True)
    moe.set_cache("lfu", slots=12)
    assert moe.trace().header["policy"] == "lru"
