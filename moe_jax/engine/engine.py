"""The engine: a batch of sequences over KV pages, prefilled in chunks and decoded N steps a jit call.

`Engine` owns the device state (parameters, KV pools, slot cache) and runs one batch at a time; `Run` is such a batch.
It knows ids only: text, stop strings and streaming belong to `moe_jax.api`.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from host_offload.slots import MISSES
from host_offload.transport.base import DecodeCall, StateLost
from moe_jax.engine.kv_cache import OutOfPages, PageAllocator, PagedKV, create_states
from moe_jax.engine.programs import NO_TOKEN, LoopState, Programs
from moe_jax.engine.stats import RunStats
from moe_jax.errors import MoEJaxError, TransportError
from moe_jax.generation.sampling import initial_seen, sampler_arrays, switches
from moe_jax.generation.stopping import eos_array
from moe_jax.layers.attention import choose_implementation
from moe_jax.layers.linear import row_implementation

logger = logging.getLogger(__name__)

# Shortest padded prompt: below it, more shapes would only mean more compilations.
MIN_CHUNK = 16
DEFAULT_CHUNK = {"gpu": 8192, "cpu": 512}
# Decode steps a call, by whether calls run ahead: else the device waits between them (4 ms with 24 layers).
CALL_STEPS = {True: 8, False: 16}
BUSY = (
    "a generation is open on this model: finish its stream, or close() the generator, or wait for the call in the "
    "other thread (a model runs one call at a time)"
)
CLOSED_MEANWHILE = "the model was closed while it was generating"


def power_of_two(n: int) -> int:
    """Smallest power of two >= n."""
    return 1 << max(0, int(n) - 1).bit_length()


class Engine:
    """Runs one model. Not thread-safe: one call at a time.

    Args:
      graphdef, params: the model's structure and its dense parameters (nested dict on the device).
      cfg: the family's config; dtype: compute dtype.
      transport: a `Transport`; state: its cache state.
      kv_pages: pages of the KV pool, trash page included; page_size: tokens a page.
      prefill_chunk: tokens a prefill step over all rows (None: by platform).
      decode_chunk: decode steps a jit call (None: by transport).
    """

    def __init__(
        self, graphdef, params, cfg, dtype, transport, state, *, kv_pages, page_size, prefill_chunk, decode_chunk
    ):  # fmt: skip
        self.cfg, self.dtype = cfg, dtype
        self._graphdef, self.params = graphdef, params
        self.platform = jax.devices()[0].platform
        self.prefill_chunk = prefill_chunk or DEFAULT_CHUNK.get(self.platform, 512)
        self.decode_chunk = decode_chunk
        self.page_size, self.kv_pages = page_size, kv_pages
        self._kv = self._create_pages()
        self.kv_bytes = sum(pool.nbytes for pool in jax.tree.leaves(self._kv))
        self._pages = PageAllocator(kv_pages)
        self.requests = self.steps = 0
        self.running: Run | None = None
        self.turn = threading.Lock()
        self.use_transport(transport, state)

    def attention(self, rows: int, tokens: int, from_zero: bool = False):
        """Attention code for `tokens` new tokens of each of `rows` sequences, see `choose_implementation`."""
        cfg = self.cfg
        return choose_implementation(
            platform=self.platform,
            dtype=self.dtype,
            batch=rows,
            tokens=tokens,
            from_zero=from_zero,
            page_size=self.page_size,
            head_dim=cfg.head_dim,
            sinks=cfg.attention_sinks,
            kernel=cfg.attention_kernel,
        )

    def row_kernels(self, rows: int) -> str:
        """Code of the linear layers of a decode step of `rows` sequences, see `Linear`."""
        return row_implementation(rows)

    def _create_pages(self):
        """Empty pages of all layers, shared by the sequences of every batch; states belong to a batch (`Run._open`)."""
        layout = self.cfg.cache_layout()
        return PagedKV.create(layout, self.kv_pages, self.page_size, 1, 1, self.dtype).pages

    def use_transport(self, transport, state):
        """Switches to another cache; programs are compiled anew for it."""
        self.transport, self.cache = transport, state
        self.programs = Programs(self._graphdef, transport)
        self.refresh_operands()

    def refresh_operands(self):
        """Takes over changed quotas, scope or contract of the transport (values, not programs)."""
        self.operands = self.transport.operands()

    def follow_transport(self):
        """Takes over what the transport changed by itself since it was asked last."""
        if self.transport.changed:
            self.refresh_operands()

    @property
    def call_steps(self) -> int:
        """Decode steps a jit call."""
        return self.decode_chunk or CALL_STEPS[self.transport.runs_ahead]

    @property
    def alive(self) -> bool:
        """False after `close`."""
        return self.params is not None

    def close(self):
        """Drops parameters, KV pools, banks and programs."""
        self.transport.quiesce()
        own = [values for name, values in self.operands.items() if name != "pool"]
        for leaf in jax.tree.leaves((self.params, self._kv, self.cache, own)):
            if isinstance(leaf, jax.Array) and not leaf.is_deleted():
                leaf.delete()
        self.params = self._kv = self.cache = self.operands = self.programs = None

    def start(
        self, prompts, params, *, seed, routing=False, forced=None, source=None, script=None, stops=False
    ) -> "Run":
        """A batch: prompts [T_b] int32 arrays without padding, one `SamplingParams` a row.

        routing: record it. forced: `ForcedRouting` of the rows, which then takes the router's place.
        source: `PreparedBatch` of an encoder-decoder's sources; the prompts are then what the decoder is given.
        script: the decode steps ahead of time, for a transport that is `scripted`.
        stops: the caller may want to `stop` rows.
        """
        return Run(
            self, prompts, params, seed=seed, routing=routing, forced=forced, source=source, script=script, stops=stops
        )

    def forward(self, prompts, source=None):
        """Logits of every prompt token: list of [T_b, V] f32 arrays. Counts as prefill in the returned `RunStats`."""
        run = Run(self, prompts, None, seed=0, routing=False, source=source)
        return run.score(), run.stats

    def recover(self):
        """After a fault: free slots, and new banks or KV pools where a failed call consumed them.

        Raises MoEJaxError, and closes the engine, if the experts on the device were the only copy and are gone.
        """
        cache, kv = _usable(self.cache), _usable(self._kv)  # waits, so no callback runs after this
        self.transport.take_error()
        if not kv:
            self._kv = self._create_pages()
        if not cache:
            try:
                self.cache = self.transport.rebuild()
            except StateLost as error:
                self.close()
                raise MoEJaxError(str(error)) from error
        self.cache = self.transport.empty(self.cache)


class Run:
    """One batch from prompt to last token. Iterate `tokens()`; `stop` rows to end them early.

    Rows are padded to a power of two (dead rows), so a new batch size rarely compiles.
    """

    def __init__(self, engine, prompts, params, *, seed, routing, forced=None, source=None, script=None, stops=False):
        self.engine = engine
        self.stats = RunStats(engine.transport.spec.L, engine.transport.spec.row_bytes, source is not None)
        self.stats.calls = 1
        self.prompts = prompts
        self.params = params
        self.routing: list[dict] = []
        self._record = routing
        self._forced = None if forced is None else jax.device_put(forced)
        self._source = source
        self._script = script
        self._stops = stops
        self._requests = np.arange(engine.requests, engine.requests + len(prompts))
        engine.requests += len(prompts)
        self._seed = seed
        self.rows = power_of_two(len(prompts))
        self.live = np.zeros(self.rows, bool)
        self.live[: len(prompts)] = True
        self._pages: list[int] = []
        self._compiled = engine.programs.compilations, engine.programs.compile_seconds
        self._loop = None
        self._begun: deque = deque()  # (program, results) of each call of decode that is under way, oldest first
        self._clock: float | None = None  # when the last one was finished, or one was started with none under way
        self._disturbed = False  # the time since then holds more than the steps of a call
        self._step = engine.steps

    # ------------------------------------------------------------ public calls

    def score(self):
        """Logits of every prompt token: a list of [T_b, V] f32."""
        with self._guard():
            kv = self._encode(self._open([len(p) for p in self.prompts]))
            kv, chunks = self._prefill(kv, everything=True)
            self.engine._kv = kv.pages
        logits = np.concatenate(chunks, axis=1)
        return [logits[row, : len(p)] for row, p in enumerate(self.prompts)]

    def tokens(self):
        """Yields new ids: int32 [B, n] with NO_TOKEN where a row gave none.

        First comes the token after the prompt (n = 1), then a chunk a time.

        Raises:
          TransportError: moving experts failed; what came before was yielded. The engine is usable again.
        """
        started = time.perf_counter()
        with self._guard():
            yield from self._generate(started)

    def stop(self, row: int):
        """No more tokens of this row. Raises ValueError if the run was started without `stops`."""
        if not self._stops:
            raise ValueError(f"stop({row}): later tokens of this run may be under way: start it with stops=True")
        self.live[row] = False

    # ------------------------------------------------------------ the work

    def _generate(self, started):
        engine, B = self.engine, len(self.prompts)
        new = [p.max_new_tokens for p in self.params]
        kv = self._open([len(p) + n for p, n in zip(self.prompts, new, strict=True)])
        if self._script is not None:
            engine.transport.expect(self._script)
        engine.cache = engine.transport.reset_policy(engine.cache)
        engine.follow_transport()
        kv, logits = self._prefill(self._encode(kv))

        choice = switches(self.params)
        params = [*self.params, *[self.params[0]] * (self.rows - B)]
        seen = None
        if choice.pop("seen"):
            rows = [*self.prompts, *[np.zeros(0, np.int32)] * (self.rows - B)]
            seen = jnp.asarray(initial_seen(rows, engine.cfg.vocab_size))
        lengths = np.array([len(p) for p in self.prompts] + [0] * (self.rows - B), np.int32)
        draws = jax.device_put(
            {
                "arrays": sampler_arrays(params),
                "eos": eos_array([p.eos_token_id for p in params]),
                "seed": np.full(self.rows, self._seed, np.uint32),
                "sequence": np.arange(self.rows, dtype=np.int32),
                "length": lengths,
                "first": np.array([forced_first(p) for p in params], np.int32),
            }
        )
        left = jnp.asarray([*new, *[0] * (self.rows - B)], jnp.int32)
        first = engine.programs.run("first", (1,), choice, logits, seen, jnp.asarray(self.live), left, draws)
        tokens, live, left, seen = first
        host_tokens, self.live = np.asarray(tokens)[:B], np.array(live)
        self._count_compilation()
        self.stats.ttft = time.perf_counter() - started - self.stats.compile_seconds
        self.stats.first_tokens = 1
        self._keep(LoopState(kv, engine.cache, tokens, live, left, seen))
        left = max(new) - 1
        yield host_tokens[:, None].astype(np.int32)

        try:
            while self.live.any():
                if not engine.alive:
                    raise MoEJaxError(CLOSED_MEANWHILE)
                while left > 0 and len(self._begun) < (2 if self._ahead else 1):
                    self._begin(draws, choice)
                    left -= engine.call_steps
                tokens, error = self._finish()
                if tokens.size:
                    yield tokens
                if error is not None:  # only now: the steps of this chunk before the faulty one are good
                    raise transport_error("decoding", error)
        except GeneratorExit:  # the caller wants no more
            while self._begun and engine.alive:
                self._finish(unwanted=True)
            raise

    @property
    def _ahead(self):
        """Whether a chunk may start before the host has seen the one before it: between two of them the device would
        wait for the host to read results and to hand over all arrays again (4 ms with 24 layers)."""
        return self.engine.transport.runs_ahead and not self._stops

    def _begin(self, draws, choice):
        """Starts a jit call of the decode loop, which `_finish` ends."""
        engine, transport = self.engine, self.engine.transport
        loop = self._loop if self._ahead else replace(self._loop, live=jnp.asarray(self.live))
        K, program = engine.cfg.num_experts_per_tok, transport.choose_program()
        static = {
            "steps": engine.call_steps,
            "attention": engine.attention(self.rows, 1),
            "routing": (self._decoder_layers, K) if self._record or transport.reads_routing(program) else None,
            "program": program,
            **choice,
        }
        first = self._clock is None
        if not self._begun:
            self._clock = time.perf_counter()
        compiled = engine.programs.compile_seconds
        loop, results = engine.programs.run(
            "decode", (2,), static, engine.params, engine.operands, loop, draws, self._forced
        )
        self._keep(loop)
        compiling = engine.programs.compile_seconds - compiled
        self._clock += compiling
        self._disturbed |= first or compiling > 0
        self._begun.append((program, results))

    def _finish(self, unwanted=False):
        """Waits for the oldest call under way: new ids [B, n] of its good steps, and what ended it early or None.

        unwanted: nobody takes its tokens any more, they are only counted.
        """
        engine, transport = self.engine, self.engine.transport
        program, results = self._begun.popleft()
        results = jax.device_get(results)
        out, done, routed = (results[name] for name in ("tokens", "steps", "routing"))
        self.live = np.array(results["live"])
        out = out[: len(self.prompts), :done]
        counters = transport.read_counters(results["counters"])
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        error = transport.take_error()
        good = out != NO_TOKEN
        fed = int(good.sum())
        steps = int(good.any(axis=0).sum())
        self.stats.decode.add(counters, fed, steps, seconds, fed * self._pairs_per_token)
        if unwanted:
            self.stats.overshoot += fed
        elif self._record:
            self._note_routing(routed[0][:steps], routed[1][:steps], good.T[:steps], phase=1)
        if transport.watches:
            timed = steps == engine.call_steps and not self._disturbed
            call = DecodeCall(program, seconds, steps, int(counters[:, MISSES].sum()), timed)
            ids = routed[0][:steps] if transport.reads_routing(program) else None
            transport.decoded(call, results["report"], ids, good.T[:steps])
            engine.follow_transport()
        self._step += done
        self._disturbed = False
        self._count_compilation()
        return out[:, :steps], error

    def _encode(self, kv):
        """kv with what the decoder keeps of the sources; as it is without an encoder.

        All sources go through the encoder whole and together: attention looks both ways, and an expert's capacity is a
        share of all tokens, of padding too.
        """
        if self._source is None:
            return kv
        engine, source = self.engine, self._source
        began, compiled = time.perf_counter(), engine.programs.compile_seconds
        width = source.input_ids.shape[1]
        S = max(MIN_CHUNK, power_of_two(width))
        lengths = np.zeros(self.rows, np.int32)
        tokens = np.zeros((self.rows, S), np.int32)
        for row, prompt in enumerate(source.prompts):
            lengths[row] = len(prompt)
            tokens[row, : len(prompt)] = prompt
        live = np.arange(S) < lengths[:, None]
        counted = np.int32(len(source.prompts) * width)
        K = engine.cfg.num_experts_per_tok
        static = {"block_rows": block_rows(engine.platform, self.rows * S * K, engine.cfg)}
        batch = jax.device_put((tokens, live, counted))
        args = engine.params, engine.operands, engine.cache, batch
        kept, engine.cache = engine.programs.run("encode", (2,), static, *args)
        jax.block_until_ready(kept)
        error = engine.transport.take_error()
        fed = int(lengths.sum())
        lookups = fed * engine.cfg.encoder_moe_layers * K
        self._book(self.stats.encoder, fed, lookups, began, compiled)
        if error is not None:
            raise transport_error("encoding", error)
        return kv.with_source(kept, jnp.asarray(lengths))

    def _book(self, phase, fed, lookups, began, compiled):
        """Counts a step of `fed` tokens that began at `began`, when `compiled` seconds had been spent compiling."""
        programs = self.engine.programs
        transport = self.engine.transport
        counters = transport.read_counters(transport.counters(self.engine.cache))
        seconds = time.perf_counter() - began - (programs.compile_seconds - compiled)
        phase.add(counters, fed, 1, seconds, lookups)
        self._step += 1
        self._count_compilation()

    def _prefill(self, kv, everything=False):
        """Feeds all prompts in chunks: (kv, logits [B, V] of the last tokens; with `everything` [B, T, V]s)."""
        engine, transport = self.engine, self.engine.transport
        lengths = np.array([len(p) for p in self.prompts] + [0] * (self.rows - len(self.prompts)))
        longest = int(lengths.max())
        most = max(MIN_CHUNK, power_of_two(engine.prefill_chunk // self.rows + 1) // 2)
        if self._source is not None:  # whole: an expert's capacity is a share of all tokens
            most = max(most, power_of_two(longest))
        logits = None if everything else jnp.zeros((self.rows, engine.cfg.vocab_size), jnp.float32)
        chunks = []
        for start in range(0, longest, most):
            began = time.perf_counter()
            compiled = engine.programs.compile_seconds
            T = min(most, max(MIN_CHUNK, power_of_two(longest - start)))
            tokens = np.zeros((self.rows, T), np.int32)
            for row, prompt in enumerate(self.prompts):
                part = prompt[start : start + T]
                tokens[row, : len(part)] = part
            positions = np.broadcast_to(np.arange(start, start + T, dtype=np.int32), tokens.shape)
            live = positions < lengths[:, None]
            ends = (lengths > start) & (lengths <= start + T)
            static = {
                "block_rows": block_rows(engine.platform, self.rows * T * engine.cfg.num_experts_per_tok, engine.cfg),
                "attention": engine.attention(self.rows, T, from_zero=start == 0),
                "routing": self._record,
                "everything": everything,
            }
            batch = jax.device_put((tokens, positions, live, ends))
            args = engine.params, engine.operands, kv, engine.cache, batch, logits, self._forced
            kv, engine.cache, out, routed = engine.programs.run("prefill", (2, 3, 5), static, *args)
            engine._kv = kv.pages
            if everything:
                chunks.append(np.asarray(out)[: len(self.prompts)])
            else:
                logits = jax.block_until_ready(out)
            error = transport.take_error()
            if routed is not None:
                ids, weights = (np.asarray(a).reshape(1, a.shape[0], self.rows * T, -1) for a in routed)
                self._note_routing(ids, weights, live.reshape(1, -1), phase=0, per_row=T)
            fed = int(live.sum())
            self._book(self.stats.prefill, fed, fed * self._pairs_per_token, began, compiled)
            if error is not None:
                raise transport_error("prefilling", error)
        return kv, (chunks if everything else logits)

    @property
    def _decoder_layers(self):
        """MoE layers that a token of the prompt and each new one goes through."""
        return self.engine.transport.spec.L - self.engine.cfg.encoder_moe_layers

    @property
    def _pairs_per_token(self):
        return self._decoder_layers * self.engine.cfg.num_experts_per_tok

    def _note_routing(self, ids, weights, live, *, phase, per_row=1):
        """Keeps the routing of live rows: ids, weights [steps, L, rows, K], live [steps, <= rows].

        per_row: tokens of a sequence that follow one another in a step.
        """
        for step in range(ids.shape[0]):
            rows = np.flatnonzero(live[step])
            self.routing.append(
                {
                    "experts": ids[step][:, rows].swapaxes(0, 1),
                    "weights": weights[step][:, rows].swapaxes(0, 1),
                    "request": self._requests[rows // per_row],
                    "phase": np.full(len(rows), phase),
                    "step": np.full(len(rows), self._step + step),
                }
            )

    def _open(self, tokens_per_row):
        """Pages for every row and the cache that names them."""
        engine = self.engine
        self._step = engine.steps
        needed = [-(-n // engine.page_size) for n in tokens_per_row]
        self._pages = engine._pages.alloc(sum(needed))
        table = np.zeros((self.rows, power_of_two(max(needed))), np.int32)
        at = 0
        for row, count in enumerate(needed):
            table[row, :count] = self._pages[at : at + count]
            at += count
        states = create_states(engine.cfg.cache_layout(), self.rows, engine.dtype)
        tables = jax.device_put((table, np.zeros(self.rows, np.int32)))
        return PagedKV(engine._kv, states, *tables, engine.page_size)

    def _keep(self, loop):
        """Books the state of a call before anything is waited for: an interrupt must not lose donated buffers."""
        self._loop = loop
        self.engine.cache = loop.cache
        self.engine._kv = loop.kv.pages

    def _count_compilation(self):
        programs = self.engine.programs
        self.stats.compilations = programs.compilations - self._compiled[0]
        self.stats.compile_seconds = programs.compile_seconds - self._compiled[1]

    @contextlib.contextmanager
    def _guard(self):
        """Gives pages back however the run ends, and makes the engine usable after a fault."""
        if not self.engine.turn.acquire(blocking=False):
            raise MoEJaxError(BUSY)
        self.engine.running = self
        try:
            yield
        except (GeneratorExit, OutOfPages):  # nothing was lost
            raise
        except BaseException as error:
            if self.engine.alive:
                self.engine.recover()
            elif isinstance(error, Exception) and not isinstance(error, MoEJaxError):
                # Another thread closed the model: arrays and programs went away under the call.
                raise MoEJaxError(CLOSED_MEANWHILE) from error
            raise
        finally:
            self.engine.running = None
            self.engine.steps = self._step
            if self._pages:
                self.engine._pages.free(self._pages)
                self._pages = []
            self.engine.turn.release()


def _usable(tree) -> bool:
    """Waits for the arrays of `tree`; false if one was donated to a call that failed, or is the result of one."""
    usable = True
    for leaf in jax.tree.leaves(tree):
        if leaf.is_deleted():
            usable = False
            continue
        try:
            leaf.block_until_ready()
        except jax.errors.JaxRuntimeError:  # the fault itself is being raised already
            usable = False
    return usable


def forced_first(params) -> int:
    """The first new token that a request wants, NO_TOKEN where it is drawn."""
    return NO_TOKEN if params.forced_bos_token_id is None else params.forced_bos_token_id


def transport_error(doing: str, cause: BaseException) -> BaseException:
    """What to raise for an exception that a callback kept: TransportError, or an interrupt as it came."""
    if not isinstance(cause, Exception):  # KeyboardInterrupt, SystemExit: the callback ran on the interrupted thread
        return cause
    error = TransportError(f"moving experts failed while {doing}: {cause!r}")
    error.__cause__ = cause
    return error


def block_rows(platform: str, pairs: int, cfg) -> int:
    """BM of the grouped prefill kernel: large tiles for long chunks, small ones when experts get few rows."""
    mean = pairs // cfg.num_experts
    if platform == "gpu":
        return 128 if mean >= 96 else 64 if mean >= 48 else 16
    return 32 if mean >= 32 else 16
