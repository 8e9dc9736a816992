"""`MoE`: a model from a directory or hub id, ready to generate, with its expert cache open to inspection and change."""

import dataclasses
import logging
import os
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from host_offload.disk_tier import DiskTier
from host_offload.policy import Policy
from host_offload.trace import Trace
from moe_jax.checkpoint import open_checkpoint, resolve
from moe_jax.config import CACHE_SIZE_KEYS, OffloadConfig, unknown_setting
from moe_jax.engine.engine import BUSY
from moe_jax.engine.loading import (
    CacheBuilder,
    build_engine,
    check_policy,
    check_prefetch,
    make_host_policy,
    make_policy,
    plan_parts,
    read_parts,
)
from moe_jax.engine.stats import RunStats
from moe_jax.errors import CheckpointError, ConfigError, InputError, MoEJaxError, TokenizerError, warn
from moe_jax.generation.chat import encode_chat
from moe_jax.generation.request import make_request, prepare_forward, spread
from moe_jax.generation.sampling import SamplingParams
from moe_jax.generation.text import load_tokenizer, require_tokenizer
from moe_jax.models.config import text_settings
from moe_jax.replay import replay
from moe_jax.session import Session, complete, recorded, stream_text

logger = logging.getLogger(__name__)

# `policy` in the header of a trace that was recorded under more than one cache.
SEVERAL_CACHES = "several, see caches"


class MoE:
    """A Mixture-of-Experts language model with offloaded experts.

    Args:
        checkpoint: directory in Hugging Face layout, or hub id.
        config: None, a mapping, an `OffloadConfig`, or the path of a JSON file; see `OffloadConfig` for the keys.
        policy: a `Policy` object (or another name) instead of the name in the configuration.

    One call at a time: the engine is not thread-safe. Use as a context manager, or call `close()`, to give device and
    pinned memory back.

    Raises:
        ConfigError, CheckpointError: before anything large is allocated. Also for a keyword other than `policy`.
    """

    def __init__(
        self,
        checkpoint: str | os.PathLike,
        config: None | Mapping[str, Any] | OffloadConfig | str | os.PathLike = None,
        *,
        policy: str | Policy | None = None,
        **misplaced: Any,
    ):
        if misplaced:
            key, value = next(iter(misplaced.items()))
            raise ConfigError(
                f"MoE() has no argument {key!r}: configuration keys go into the second one, "
                f"as in MoE(checkpoint, {{{key!r}: {value!r}}})"
            )
        if not isinstance(checkpoint, str | os.PathLike):
            raise CheckpointError(
                f"checkpoint={checkpoint!r} is not understood: give a directory or a hub id; "
                "demo_model_path() is the bundled model"
            )
        config = OffloadConfig.parse(config)
        make_policy(config.policy if policy is None else policy, config.transport)  # a wrong one costs no loading
        make_host_policy(config.host_policy)
        check_prefetch(config)
        started = time.perf_counter()
        directory = resolve(checkpoint)
        progress = None if config.progress else False
        with open_checkpoint(directory) as files:
            parts = read_parts(files, config, progress)
            self.generation_config = files.generation_config
            self._hf_config = text_settings(files.config)
            self.fingerprint = files.fingerprint()
            self._setup(parts, config, policy, progress)
        # Rows are read once, into the pool or the slots: the files are closed now, unless host memory holds some only.
        self._builder.release_store()
        self.name = os.path.basename(os.path.normpath(directory))
        try:
            self.tokenizer = load_tokenizer(directory)
        except TokenizerError as error:  # ids need none; what needs one will say so
            self.tokenizer = None
            warn(str(error))
        self.load_seconds = time.perf_counter() - started

    @classmethod
    def from_parts(cls, parts, config=None, *, policy=None, name="model", pool=None) -> "MoE":
        """A model from `engine.loading.Parts` that did not come from files (random weights, say); no tokenizer.

        `pool`: a filled `ExpertPool` to use, else one is filled from `parts.store`.
        """
        self = cls.__new__(cls)
        config = OffloadConfig.parse(config)
        self.generation_config, self._hf_config, self.fingerprint = {}, {}, ""
        started = time.perf_counter()
        self._setup(parts, config, policy, None if config.progress else False, pool)
        self.name, self.tokenizer = name, None
        self.load_seconds = time.perf_counter() - started
        return self

    def _setup(self, parts, config, policy, progress, pool=None):
        if isinstance(policy, str):
            config, policy = config.replace(policy=policy), None
        self.model_config, self.dtype = parts.cfg, parts.dtype
        plan = self._plan = plan_parts(parts.cfg, parts.dtype, config, parts.spec, parts.params)
        self.max_sequence_length, kind = plan.max_sequence_length, plan.transport
        logger.info("transport %s: %s", kind, plan.transport_why)
        self.config = config.replace(transport=kind)
        check_prefetch(config, parts.cfg)
        self._builder = CacheBuilder(parts, self.config, plan, self.fingerprint)
        self._builder.pool = pool
        chosen = make_policy(policy if policy is not None else self.config.policy, kind)
        check_policy(chosen.policy, kind, parts.spec)
        transport = None
        try:
            if kind != "resident" and self._builder.pool is None:
                self._builder.open_pool(progress)
            transport = self._builder.transport(self.config, chosen)
            self._engine = build_engine(
                parts, self.config, transport, self._builder.state(transport, self.config), plan.kv_pages
            )
        except BaseException:
            if transport is not None:
                transport.close()
            if self._builder.pool is not None and pool is None:
                self._builder.pool.close()
            raise
        self._builder.warm_host()
        self._chosen = chosen
        self._last = self._total = None
        self._routing: list[tuple[dict, list[dict]]] = []  # a call each: its cache, its rows
        self.reset_stats()
        self._finalizer = weakref.finalize(self, _release, self._engine, self._builder)

    # ------------------------------------------------------------------------------------------------------- generation

    def generate(
        self,
        inputs: Any = None,
        max_new_tokens: int | None = None,
        *,
        input_ids: Any = None,
        attention_mask: Any = None,
        streamer: Any = None,
        seed: int | None = None,
        trace: bool | None = None,
        **sampling: Any,
    ):
        """Generates with Hugging Face semantics.

        Args:
            inputs (or input_ids): token ids [T] or [B, T] (list, NumPy, JAX or torch), a text or a list of texts.
            max_new_tokens: most new tokens; with none, generation_config.json decides, or 20.
            attention_mask: [B, T], 0 marks padding on the left or right.
            streamer: object with `put(value)` and `end()`, such as transformers' TextStreamer.
            seed: of the draws; default the configuration's.
            trace: record routing for `trace()`; default the configuration's `trace`.
            sampling: `do_sample, temperature, top_k, top_p, min_p, repetition_penalty, eos_token_id, pad_token_id`,
                `stop`; see `SamplingParams`. generation_config.json gives the defaults. An encoder-decoder also takes
                `forced_bos_token_id` (the target language of a translation) and `decoder_start_token_id`.

        Returns:
            For ids: int32 [B, T + new], prompt and new ids ([T + new] for one sequence). For text: the new text(s).
            Of an encoder-decoder the prompt is the source, and the ids are those of the target: start token and new.

        Raises:
            InputError, ConfigError: before any work. TransportError: experts could not be moved; `error.partial` holds
            what this call would have returned for the tokens made so far.
        """
        request = self._request(inputs, input_ids, attention_mask, max_new_tokens, sampling | {"seed": seed})
        return complete(self, request, trace, streamer)

    __call__ = generate

    def stream(
        self,
        inputs: Any,
        max_new_tokens: int | None = None,
        *,
        seed: int | None = None,
        trace: bool | None = None,
        **sampling,
    ) -> Iterator[str]:
        """Yields the new text of one prompt in pieces that are always valid UTF-8; arguments as `generate`.

        The pieces add up to what `generate` returns for the same text. Closing the generator stops the generation.

        Raises:
            InputError, ConfigError: at the call. TransportError: after the text before the fault (`error.partial`).
        """
        tokenizer = require_tokenizer(self.tokenizer, "streaming text", "give ids to stream_ids()")
        request = self._request(inputs, None, None, max_new_tokens, sampling | {"seed": seed})
        if len(request.batch.prompts) != 1:
            count = len(request.batch.prompts)
            raise InputError(f"stream() takes one prompt, not {count}: call generate() for a batch")
        return stream_text(Session(self, request, trace), tokenizer)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_new_tokens: int | None = None,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        streamer: Any = None,
        seed: int | None = None,
        trace: bool | None = None,
        **sampling: Any,
    ) -> str:
        """The assistant's answer to a conversation: all the model writes until it ends, its reasoning too.

        Args:
            messages: [{"role": "user", "content": "Hello"}, ...], see `encode_chat` (also for the next two).
            chat_template: Jinja text or a name; default the tokenizer's (chat_template.jinja, tokenizer_config.json).
            chat_template_kwargs: further variables of the template, such as {"enable_thinking": False}.
            max_new_tokens, streamer, seed, trace, sampling: as in `generate`, with the same defaults.

        Raises:
            InputError, ConfigError: before any work. TransportError: `error.partial` holds the text made so far.
        """
        request = self._chat_request(messages, chat_template, chat_template_kwargs, max_new_tokens, seed, sampling)
        return complete(self, request, trace, streamer)

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_new_tokens: int | None = None,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        seed: int | None = None,
        trace: bool | None = None,
        **sampling: Any,
    ) -> Iterator[str]:
        """Yields what `chat` returns in pieces, as `stream` does; arguments as `chat`, errors as `stream`."""
        request = self._chat_request(messages, chat_template, chat_template_kwargs, max_new_tokens, seed, sampling)
        return stream_text(Session(self, request, trace), self.tokenizer)

    def stream_ids(
        self,
        inputs: Any = None,
        max_new_tokens: int | None = None,
        *,
        input_ids: Any = None,
        attention_mask: Any = None,
        seed: int | None = None,
        trace: bool | None = None,
        **sampling: Any,
    ) -> Iterator[list[list[int]]]:
        """Yields the new ids of a batch as they come, B lists a chunk; arguments as `generate`.

        The first chunk has one id a sequence, later ones up to `decode_chunk`; a sequence that ended gives empty lists.
        EOS is among the ids. Closing the generator early stops the generation.
        """
        request = self._request(inputs, input_ids, attention_mask, max_new_tokens, sampling | {"seed": seed})
        return Session(self, request, trace).advance()

    def sampling_params(self, max_new_tokens: int | None = None, **sampling: Any) -> SamplingParams:
        """What `generate` draws with under these arguments: they, then generation_config.json, then the defaults.

        `seed` is the configuration's unless given. Raises ConfigError as `generate` does.
        """
        params = SamplingParams.resolve(
            self.generation_config,
            self._hf_config,
            encoder_decoder=self.model_config.encoder_decoder,
            max_new_tokens=max_new_tokens,
            **sampling,
        )
        return params if params.seed is not None else dataclasses.replace(params, seed=self.config.seed)

    def forward(self, input_ids: Any, attention_mask: Any = None, decoder_input_ids: Any = None) -> np.ndarray:
        """Logits of every position: float32 [B, T, V] ([T, V] for one sequence); zeros where the mask is 0.

        Of an encoder-decoder: the logits of `decoder_input_ids` [B, T] or [T], all of them text, after the sources
        `input_ids` with their mask. Raises InputError for bad ids.
        """
        batch, source = prepare_forward(
            input_ids,
            cfg=self.model_config,
            max_length=self.max_sequence_length,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            tokenizer=self.tokenizer,
        )
        rows, stats = self._idle_engine().forward(list(batch.prompts), source)
        self._book(stats)
        return spread(rows, batch, attention_mask if source is None else None)

    def replay(
        self,
        trace: Trace,
        requests: Iterable[int] | None = None,
        *,
        prompts: Sequence[Any] | None = None,
        record: bool | None = None,
    ) -> list[np.ndarray]:
        """Runs requests of `trace` with its routing in the router's place; see `moe_jax.replay.replay`.

        `stats()["last"]` covers them all. Returns the new ids of each request.
        """
        return replay(self, trace, requests, prompts=prompts, record=record)

    # ------------------------------------------------------------------------------------------------------------ cache

    def set_cache(
        self,
        policy: str | Policy | None = None,
        *,
        slots: int | Sequence[int] | None = None,
        cache_rate: float | None = None,
        expert_cache_bytes: int | str | None = None,
        scope: str | None = None,
        transport: str | None = None,
        contract: str | None = None,
        prefetch: str | None = None,
        prefetch_budget: int | str | None = None,
        **unknown: Any,
    ) -> "MoE":
        """Changes the expert cache and empties it; weights and the pinned pool stay where they are.

        Anything left out keeps its setting, except that `transport="resident"` forgets the size: name it again when
        leaving that transport, or all experts that fit get a slot. `slots` is the configuration's `expert_slots`.
        Quotas, scope, contract, the built-in policies and the members of a `PolicySet`, by name, are values of the
        compiled step: changing them does not recompile, unless more slots are asked for than the banks hold. Returns
        self.

        `prefetch` names another predictor, or "none"; what predictors have learned stays. From none to one, and to or
        from one that asks the model's routers, compiles again.

        Raises ConfigError, also for a keyword that is not listed, and leaves the cache as it was.
        """
        engine = self._idle_engine()
        if unknown:
            raise unknown_setting(next(iter(unknown)))
        changes = {
            "expert_slots": slots,
            "cache_rate": cache_rate,
            "expert_cache_bytes": expert_cache_bytes,
            "scope": scope,
            "transport": transport,
            "contract": contract,
            "prefetch": prefetch,
            "prefetch_budget": prefetch_budget,
            "policy": policy if isinstance(policy, str) else None,
        }
        if transport == "auto":
            raise ConfigError("transport='auto' is for loading; name 'device', 'callback' or 'resident'")
        changes = {key: value for key, value in changes.items() if value is not None}
        if changes.get("transport") == "resident":  # the sizes set before are for the other transports
            changes = dict.fromkeys(CACHE_SIZE_KEYS) | changes
        if prefetch == "none":  # what was set beside it goes with it
            changes = {"prefetch_budget": "auto", "prefetch_shutoff": True, "warm_start": None} | changes
        config = self.config.replace(**changes)
        check_prefetch(config, self.model_config)
        settings, budget = self._builder.prefetch(config), self._builder.budget(config)
        wanted = policy if policy is not None else (self._chosen.select or self._chosen.given or config.policy)
        chosen = make_policy(wanted, config.transport, self._chosen.given)
        current = engine.transport
        check_policy(chosen.policy, config.transport, current.spec)
        fits = budget.total + current.spare <= current.rows
        same = config.transport == current.name and current.prefetches(settings)
        if same and current.serves(chosen.policy) and fits:
            current.configure(budget, config.contract == "atomic-forced-admit", chosen.policy, chosen.select)
            if settings is not None:
                current.use(settings)
            engine.cache = current.empty(engine.cache)
            engine.refresh_operands()
        else:
            self._replace_transport(config, chosen)
        self.config, self._chosen = config, chosen
        return self

    def _replace_transport(self, config, chosen):
        engine, builder = self._engine, self._builder
        if config.transport != "resident" and builder.pool is None:
            raise ConfigError(
                "the model was loaded with transport='resident', so its experts are not in host memory: "
                "load it with transport='device' or 'callback' to switch between all three"
            )
        old = engine.transport
        rows = old.rows if config.transport != "resident" and old.name != "resident" else 0
        transport = builder.transport(config, chosen, bank_rows=rows)
        old.quiesce()
        for leaf in jax.tree.leaves((engine.cache.banks, engine.cache.ahead)):
            leaf.delete()  # before the new banks: there may be no room for both
        try:
            state = builder.state(transport, config)
        except BaseException:
            transport.close()
            engine.recover()
            raise
        engine.use_transport(transport, state)
        old.close()

    # ------------------------------------------------------------------------------------------------------ observation

    def stats(self) -> dict:
        """What happened: `last` call and `total` since `reset_stats()`, cache settings, resident set and memory plan.

        Each of `last` and `total` has `prefill` and `decode` apart (hits, misses, bypasses, evictions, bytes moved, per
        layer too), `ttft_seconds` (without compilation) and `seconds_per_token`. `kernel`, `decode_attention` and
        `decode_rows` (by sequences: the linear layers) name the code of decode, `policy_path` where the policy runs:
        "plan kernel", "xla", "host" or "none". `experts` names the formats in which experts rest and are computed,
        `dense_weights` what was done to packed dense ones when they were loaded.
        `lookahead`: rows that long prompts moved to the next layer ahead of its router, since the transport was chosen.
        `load_seconds` includes `pool_seconds`: getting `pinned_memory` and filling it (None without a pool). `disk`:
        see `DiskTier.stats`, since the model was loaded; None if no expert is read from disk. `prefetch`: predictor,
        budget, what became of the rows that were fetched ahead, in rows and bytes, and for each layer whether prefetch
        is on and why, since it was chosen; None without one. `last` and `total` count misses, not wasted rows.
        """
        engine, parts, pool = self._open_engine(), self._builder.parts, self._builder.pool
        transport, budget, spec = engine.transport, engine.transport.budget, engine.transport.spec
        return {
            "last": None if self._last is None else self._last.to_dict(),
            "total": self._total.to_dict(),
            "kernel": [transport.kernel] * spec.L,
            "decode_attention": {rows: engine.attention(rows, 1) for rows in (1, self.config.max_batch)},
            "transport": {"name": transport.name, "why": self._plan.transport_why},
            "decode_rows": {rows: engine.row_kernels(rows) for rows in (1, self.config.max_batch)},
            "policy": self._chosen.name,
            "policy_path": transport.policy_path,
            "scope": budget.scope,
            "contract": self.config.contract,
            "slots": {"total": budget.total, "per_layer": list(budget.per_layer), "source": budget.source},
            **transport.occupancy(engine.cache),
            "experts": {
                "layers": spec.L,
                "per_layer": spec.E,
                "bytes_each": spec.row_bytes,
                "format": {"gate_up": parts.experts.gate_up.name, "down": parts.experts.down.name},
            },
            "dense_weights": ", ".join(parts.conversions) or str(parts.dtype),
            "memory": {
                **self._plan.fixed(),
                "slot_bytes": budget.total * spec.row_bytes,
                "spare_bytes": (transport.rows - budget.total) * spec.row_bytes,
                "staging_bytes": transport.staging_rows * spec.row_bytes,
                "prefetch_bytes": transport.prefetch_bytes,
                "pool_bytes": pool.nbytes if pool else 0,
            },
            "lookahead": transport.lookahead.stats(spec.row_bytes) if transport.lookahead else None,
            "prefetch": transport.prefetch_stats(),
            "disk": pool.stats() if isinstance(pool, DiskTier) else None,
            "load_seconds": self.load_seconds,
            "pinned_memory": pool.pinned if pool else None,
            "pool_seconds": {"allocate": pool.allocate_seconds, "fill": pool.fill_seconds} if pool else None,
        }

    def reset_stats(self) -> None:
        """Forgets `last` and `total`; the cache keeps its content, and what counts since loading goes on."""
        spec = self._engine.transport.spec
        self._last, self._total = None, RunStats(spec.L, spec.row_bytes, self.model_config.encoder_decoder)

    def trace(self, *, clear: bool = True) -> Trace:
        """The routing recorded so far (calls with `trace=True`) as a `Trace`; `clear` starts a new one.

        The header names the cache that the calls ran under. If `set_cache` changed it between them, the header's
        `policy` says so and its `caches` lists scope, slots, contract and policy of each, with its first request.
        Of an encoder-decoder it holds the target's tokens and the decoder's layers; `stats()` has the encoder's hits.

        Raises MoEJaxError if nothing was recorded.
        """
        if not self._routing:
            raise MoEJaxError(
                "no routing was recorded since loading or the last trace(), which takes it (clear=False leaves it): "
                "pass trace=True to generate(), or set trace in the configuration"
            )
        caches, parts = recorded(self._routing)
        cfg = self.model_config
        header = {
            "moe_layers": list(cfg.moe_layers[cfg.encoder_moe_layers :]),
            "E": cfg.num_experts,
            "K": cfg.num_experts_per_tok,
            "chunk": self._engine.prefill_chunk,
            **caches[-1],
            "model": self.name,
            "dtype": str(self.dtype),
            "fingerprint": self.fingerprint,
        }
        del header["from_request"]
        if len(caches) > 1:  # one name would be wrong for a part of the rows, and a replay under it would mislead
            header |= {"policy": SEVERAL_CACHES, "caches": caches}
        trace = Trace.from_rows(header=header, **parts)
        if clear:
            self._routing = []
        return trace

    def verify_slots(self) -> None:
        """Compares every occupied slot with its expert's bytes in the pool, or on disk if the pool holds some only.

        Raises RuntimeError on a difference, ValueError if the cache's tables contradict each other, MoEJaxError if the
        model was loaded with transport='resident' and has no pool.
        """
        engine = self._open_engine()
        if self._builder.pool is None:
            raise MoEJaxError("transport='resident' keeps no pool to compare with")
        engine.transport.verify(engine.cache, self._builder.pool)

    # -------------------------------------------------------------------------------------------------------- lifetime

    def close(self) -> None:
        """Gives device and pinned memory back. Safe to call twice."""
        self._finalizer()

    def __enter__(self) -> "MoE":
        self._open_engine()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if not self._engine.alive:
            return f"<MoE {self.name}: closed>"
        budget, spec = self._engine.transport.budget, self._engine.transport.spec
        cache = f"{self.config.transport}, {self._chosen.name}, scope {budget.scope}, {self.config.contract}"
        return f"<MoE {self.name}: {budget.total} of {spec.L * spec.E} experts have a slot; {cache}>"

    # -------------------------------------------------------------------------------------------------------- internals

    def _cache_now(self) -> dict:
        """The header fields of a trace that say which cache the routing was recorded under."""
        budget = self._engine.transport.budget
        return {
            "scope": budget.scope,
            "slots": list(budget.per_layer[self.model_config.encoder_moe_layers :]) or budget.total,
            "contract": self.config.contract,
            "policy": self._chosen.name,
        }

    def _open_engine(self):
        if not self._engine.alive:
            raise MoEJaxError("this model is closed: load it again with MoE(...)")
        return self._engine

    def _idle_engine(self):
        engine = self._open_engine()
        if engine.running is not None:
            raise MoEJaxError(BUSY)
        return engine

    def _request(self, inputs, input_ids, attention_mask, max_new_tokens, sampling):
        if self._idle_engine().transport.scripted:
            raise ConfigError(
                f"prefetch={self.config.prefetch!r} reads what a recorded run did: use it with replay(), or choose a "
                "predictor that learns while the model runs, such as 'cross-layer+temporal'"
            )
        if (inputs is None) == (input_ids is None):
            raise InputError("give the prompt as the first argument or as input_ids, one of them")
        return make_request(
            input_ids if inputs is None else inputs,
            self.sampling_params(max_new_tokens, **sampling),
            cfg=self.model_config,
            max_length=self.max_sequence_length,
            max_batch=self.config.max_batch,
            attention_mask=attention_mask,
            tokenizer=self.tokenizer,
        )

    def _chat_request(self, messages, chat_template, chat_template_kwargs, max_new_tokens, seed, sampling):
        tokenizer = require_tokenizer(self.tokenizer, "a chat", "give the ids of the whole conversation to generate()")
        ids = encode_chat(tokenizer, messages, chat_template, chat_template_kwargs)
        # The mask says that all of them count, a padding token that a template writes too.
        request = self._request(ids, None, np.ones(len(ids), bool), max_new_tokens, sampling | {"seed": seed})
        return dataclasses.replace(request, batch=dataclasses.replace(request.batch, from_text=True))

    def _book(self, stats: RunStats):
        self._last = stats
        self._total.merge(stats)


def _release(engine, builder):
    """Frees everything a model holds, and keeps what a warm start needs; also run when it is garbage-collected."""
    was_open = engine.alive
    if was_open:
        transport = engine.transport
        engine.close()
        transport.close()
    if builder.pool is not None:
        builder.pool.close()
    if was_open:
        builder.keep_experience()
