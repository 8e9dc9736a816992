"""Which token comes next: parameters of a request, and the sampler that runs inside the jitted decode step.

The order of operations and every cut-off follow `generate` of Hugging Face transformers 5: repetition penalty,
temperature, top-k, top-p, min-p, draw. A draw is an argmax over logits plus Gumbel noise whose key depends only on
(seed, sequence, position), so a token does not depend on the batch it was drawn in nor on how decoding was chunked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.config import bad_value, integer, real, unknown_key
from moe_jax.errors import ConfigError, warn

# transformers' own defaults where neither the caller nor generation_config.json says anything
DEFAULT_NEW_TOKENS = 20
DEFAULT_TOP_K = 50

# Parameters that only a draw looks at, with the values that say nothing about it.
_DRAW_ONLY = {"temperature": (0, 1), "top_k": (0, DEFAULT_TOP_K), "top_p": (1,), "min_p": (0,)}

# Parameters that only an encoder-decoder has.
_TARGET_ONLY = ("decoder_start_token_id", "forced_bos_token_id")

# Settings of generation_config.json that would change the output and are not implemented, with their neutral values.
_NOT_IMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "typical_p": (None, 1.0),
    "top_h": (None,),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "no_repeat_ngram_size": (None, 0),
    "bad_words_ids": (None, []),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "exponential_decay_length_penalty": (None,),
    "sequence_bias": (None, []),
    "guidance_scale": (None, 1.0),
    "penalty_alpha": (None, 0.0),
}


@dataclass(frozen=True)
class SamplingParams:
    """What one request asks of the sampler. Immutable; validated on construction.

    Args:
        max_new_tokens: most tokens to generate, >= 1. None: `max_length` decides, or 20 without it.
        max_length: most tokens of prompt (padding included) and output together, >= 1; only without `max_new_tokens`.
        do_sample: draw from the distribution; False takes the most likely token.
        temperature: divides the logits, >= 0; 0 means greedy.
        top_k: only the k most likely tokens (and those that tie with the last of them); 0 is off.
        top_p: the most likely tokens whose probabilities reach this sum, 0 to 1; 1 is off.
        min_p: only tokens at least this share as likely as the most likely one, 0 to 1; 0 is off.
        repetition_penalty: > 0; positive logits of tokens already in prompt or output are divided by it and negative
            ones multiplied. 1 is off. Applies to greedy decoding too.
        eos_token_id: id or ids that end a sequence; None and an empty list never stop. Kept as a tuple.
        pad_token_id: fills the rows of a batch that ended early. None becomes the first EOS id if there is one.
        stop: text or texts that end a sequence. Kept as a tuple.
        seed: of the draws, 0 to 2^32 - 1; None leaves the choice to the caller's configuration.
        decoder_start_token_id: of an encoder-decoder: the target's first token, given to the decoder; None is the
            model's own.
        forced_bos_token_id: of an encoder-decoder: what the first generated token is, such as the target language; None
            forces nothing.

    Raises:
        ConfigError: names the field, the value and the range.
    """

    max_new_tokens: int | None = None
    max_length: int | None = None
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = DEFAULT_TOP_K
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    eos_token_id: int | Sequence[int] | None = None
    pad_token_id: int | None = None
    stop: str | Sequence[str] | None = None
    seed: int | None = None
    decoder_start_token_id: int | None = None
    forced_bos_token_id: int | None = None

    def __post_init__(self):
        normal = {
            "temperature": real("temperature", self.temperature, "a finite number >= 0", lambda v: v >= 0),
            "top_k": integer("top_k", self.top_k, 0),
            "top_p": real("top_p", self.top_p, "a number from 0 to 1", lambda v: 0 <= v <= 1),
            "min_p": real("min_p", self.min_p, "a number from 0 to 1", lambda v: 0 <= v <= 1),
            "repetition_penalty": real("repetition_penalty", self.repetition_penalty, "a number > 0", lambda v: v > 0),
            "eos_token_id": _id_set("eos_token_id", self.eos_token_id),
            "stop": _texts("stop", self.stop),
        }
        if not isinstance(self.do_sample, bool | np.bool_):
            raise bad_value("do_sample", self.do_sample, "True or False")
        normal["do_sample"] = bool(self.do_sample)
        for name, low, high in (
            ("max_new_tokens", 1, None),
            ("max_length", 1, None),
            ("pad_token_id", 0, None),
            ("decoder_start_token_id", 0, None),
            ("forced_bos_token_id", 0, None),
            ("seed", 0, 2**32 - 1),
        ):
            if getattr(self, name) is not None:
                normal[name] = integer(name, getattr(self, name), low, high)
        if self.max_new_tokens is None and self.max_length is None:
            normal["max_new_tokens"] = DEFAULT_NEW_TOKENS
        if self.pad_token_id is None and normal["eos_token_id"]:
            normal["pad_token_id"] = normal["eos_token_id"][0]
        for name, value in normal.items():
            object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        """True if every token is the most likely one: `do_sample=False` or `temperature=0`."""
        return not self.do_sample or self.temperature == 0

    @property
    def needs_sort(self) -> bool:
        """True if the sampler has to sort the logits (top-k or top-p in use)."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1)

    @property
    def needs_seen(self) -> bool:
        """True if the sampler has to know which tokens the sequence already holds."""
        return self.repetition_penalty != 1

    @property
    def fill_token_id(self) -> int:
        """What rows that ended early are filled with: `pad_token_id`, or 0 where a model has neither pad nor EOS."""
        return 0 if self.pad_token_id is None else self.pad_token_id

    def new_tokens(self, prompt_length: int) -> int:
        """Most tokens to generate after a prompt of `prompt_length` tokens, padding included.

        Raises:
            ConfigError: `max_length` decides and the prompt fills it already.
        """
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        if self.max_length <= prompt_length:
            raise ConfigError(
                f"max_length={self.max_length} counts the prompt, and the prompt has {prompt_length} tokens: "
                "pass max_new_tokens instead"
            )
        return self.max_length - prompt_length

    @classmethod
    def resolve(
        cls,
        generation_config: Mapping[str, Any] | None = None,
        model_config: Mapping[str, Any] | None = None,
        *,
        encoder_decoder: bool = False,
        **overrides: Any,
    ) -> SamplingParams:
        """Parameters of a request: arguments first, then generation_config.json, then the defaults of transformers.

        The special token ids fall back to config.json, too. `do_sample` must be set (by the caller or by
        generation_config.json) for temperature, top-k, top-p and min-p to have an effect, as in transformers; giving
        one of them as an argument without it warns.

        Args:
            generation_config: content of generation_config.json, or None.
            model_config: content of config.json, or None.
            encoder_decoder: whether the model is one; else its parameters are refused.
            **overrides: fields of SamplingParams; None means "not given".

        Raises:
            ConfigError: unknown field or bad value.
        """
        generation_config, model_config = generation_config or {}, model_config or {}
        names = tuple(field.name for field in fields(cls))
        for key in overrides:
            if key not in names:
                raise unknown_key(key, names, "generation")
            if key in _TARGET_ONLY and overrides[key] is not None and not encoder_decoder:
                raise ConfigError(
                    f"{key}={overrides[key]!r} is for encoder-decoder models, and this one continues its prompt: leave "
                    "it out"
                )
        if not encoder_decoder:
            names = tuple(name for name in names if name not in _TARGET_ONLY)
        given = {key: value for key, value in overrides.items() if value is not None}
        defaults = {key: generation_config[key] for key in names if generation_config.get(key) is not None}
        if generation_config.get("stop_strings") is not None:
            defaults["stop"] = generation_config["stop_strings"]
        for key in ("eos_token_id", "pad_token_id", *(_TARGET_ONLY if encoder_decoder else ())):
            if key not in defaults and model_config.get(key) is not None:
                defaults[key] = model_config[key]
        if "max_length" in given:  # an argument beats the file, whichever of the two it names
            defaults.pop("max_new_tokens", None)
        _warn_not_implemented(generation_config, _TARGET_ONLY if encoder_decoder else ())
        try:
            params = cls(**(defaults | given))
        except ConfigError as error:
            cls(**given)  # raises as well if the value is the caller's
            raise ConfigError(
                f"in generation_config.json or config.json, {error}: correct it or pass another"
            ) from error
        idle = [key for key, neutral in _DRAW_ONLY.items() if key in given and given[key] not in neutral]
        if idle and not params.do_sample:
            settings = ", ".join(f"{key}={given[key]!r}" for key in idle)
            warn(f"{settings} has no effect because do_sample is False; pass do_sample=True")
        return params


def _warn_not_implemented(generation_config: Mapping[str, Any], served: Sequence[str]) -> None:
    for key, neutral in _NOT_IMPLEMENTED.items():
        if key in served:
            continue
        value = generation_config.get(key)
        if not any(value == other for other in neutral):
            warn(f"generation_config.json sets {key}={value!r}, which moe_jax does not apply")


def _id_set(key: str, value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, list | tuple | set | frozenset) or np.ndim(value) == 1:
        return tuple(dict.fromkeys(integer(key, token, 0) for token in value))
    return (integer(key, value, 0),)


def _texts(key: str, value: Any) -> tuple[str, ...]:
    texts = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
        raise bad_value(key, value, "a text or a list of texts, none of them empty")
    return tuple(dict.fromkeys(texts))


class SamplerArrays(NamedTuple):
    """Sampling parameters as traced values: changing one never recompiles. Each is a scalar or [B].

    Attributes:
        temperature: f32; a row with 0 is greedy.
        top_k: i32; 0 is off.
        tail: f32, 1 - top_p, the mass that top-p may cut; negative is off.
        min_p: f32; 0 is off.
        repetition_penalty: f32; 1 is off.
    """

    temperature: jax.Array | np.ndarray
    top_k: jax.Array | np.ndarray
    tail: jax.Array | np.ndarray
    min_p: jax.Array | np.ndarray
    repetition_penalty: jax.Array | np.ndarray


def sampler_arrays(params: SamplingParams | Sequence[SamplingParams]) -> SamplerArrays:
    """The traced values of one request (scalars) or of one request a row (each [B]), as NumPy arrays.

    A greedy request among others becomes a row with temperature 0.
    """
    if isinstance(params, SamplingParams):
        return jax.tree.map(lambda column: column[0], sampler_arrays([params]))
    return SamplerArrays(
        temperature=np.array([0.0 if p.greedy else p.temperature for p in params], np.float32),
        # capped because any k >= V is off, and V fits int32
        top_k=np.array([min(p.top_k, 2**31 - 1) for p in params], np.int32),
        tail=np.array([1 - p.top_p if p.top_p < 1 else -1.0 for p in params], np.float32),
        min_p=np.array([p.min_p for p in params], np.float32),
        repetition_penalty=np.array([p.repetition_penalty for p in params], np.float32),
    )


def initial_seen(prompts: Sequence[np.ndarray], vocab_size: int) -> np.ndarray:
    """Which tokens each prompt holds, bool [B, V]; prompts are int arrays without padding (which does not count)."""
    seen = np.zeros((len(prompts), vocab_size), bool)
    for row, prompt in zip(seen, prompts, strict=True):
        row[prompt] = True
    return seen


def mark_seen(seen: jax.Array, tokens: jax.Array, live: jax.Array) -> jax.Array:
    """`seen` [B, V] bool with `tokens` [B] i32 added on the rows where `live` [B] bool holds; in place if donated."""
    rows = jnp.arange(seen.shape[0])
    return seen.at[rows, tokens].max(live)


def penalise(logits: jax.Array, penalty: jax.Array, seen: jax.Array) -> jax.Array:
    """Repetition penalty of CTRL (Keskar et al. 2019, section 4.1) in the form that transformers gave it.

    Args:
        logits: f32 [B, V].
        penalty: f32, scalar or [B].
        seen: bool [B, V], tokens already in prompt or output.

    Returns:
        f32 [B, V]: seen tokens divided by the penalty if positive, multiplied if negative.
    """
    penalty = _column(penalty)
    return jnp.where(seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)


def process_logits(
    logits: jax.Array, arrays: SamplerArrays, *, seen: jax.Array | None = None, sort: bool = True
) -> jax.Array:
    """Logits of the distribution that is drawn from: penalty, temperature, top-k, top-p, min-p, in this order.

    Differs from transformers' processors only where logits tie exactly at the edge of top-p: there the lower token ids
    are kept (transformers leaves it to an unstable sort).

    Args:
        logits: [B, V], any float dtype.
        arrays: parameters; a temperature of 0 counts as 1 here.
        seen: bool [B, V], or None to leave the repetition penalty out.
        sort: static; False leaves top-k and top-p out.

    Returns:
        f32 [B, V], -inf for tokens that are cut.
    """
    logits = logits.astype(jnp.float32)
    if seen is not None:
        logits = penalise(logits, arrays.repetition_penalty, seen)
    temperature = _column(arrays.temperature)
    logits = logits / jnp.where(temperature > 0, temperature, 1.0)
    if sort:
        logits = _cut_by_rank(logits, _column(arrays.top_k), _column(arrays.tail))
    probs = jax.nn.softmax(logits, axis=-1)
    floor = _column(arrays.min_p) * jnp.max(probs, axis=-1, keepdims=True)
    return jnp.where(probs < floor, -jnp.inf, logits)


def _cut_by_rank(logits: jax.Array, top_k: jax.Array, tail: jax.Array) -> jax.Array:
    """Top-k, then top-p, from one sort: masking below the k-th value leaves a sorted row sorted."""
    V = logits.shape[-1]
    ascending = jnp.sort(logits, axis=-1)  # [B V]
    k = jnp.where(top_k > 0, jnp.minimum(top_k, V), V)
    k = jnp.broadcast_to(k, (logits.shape[0], 1))
    kth = jnp.take_along_axis(ascending, V - k, axis=-1)  # [B 1]
    ascending = jnp.where(ascending < kth, -jnp.inf, ascending)
    logits = jnp.where(logits < kth, -jnp.inf, logits)
    # The sum runs from the unlikely end as in transformers, so that rounding falls on the same side of the edge.
    below = jnp.cumsum(jax.nn.softmax(ascending, axis=-1), axis=-1)
    cut = jnp.sum(below[:, : V - 1] <= tail, axis=-1, keepdims=True)  # [B 1]; the most likely token always stays
    edge = jnp.take_along_axis(ascending, cut, axis=-1)  # [B 1], the least likely value that is kept
    ties = logits == edge
    # Of equal logits at the edge as many stay as the sorted row kept; the lower ids do, as in a greedy argmax.
    stay = jnp.sum(jnp.where(jnp.arange(V) >= cut, ascending == edge, False), axis=-1, keepdims=True)
    keep = (logits > edge) | (ties & (jnp.cumsum(ties, axis=-1) <= stay))
    return jnp.where(keep, logits, -jnp.inf)


def sample(
    logits: jax.Array,
    arrays: SamplerArrays,
    *,
    seed: jax.Array,
    sequence: jax.Array,
    position: jax.Array,
    seen: jax.Array | None = None,
    greedy: bool = False,
    sort: bool = True,
) -> jax.Array:
    """One token a row; made to run inside a jitted step.

    The draw is argmax(logits + Gumbel noise), which has the softmax distribution (Gumbel 1954; Maddison et al. 2014).
    The noise key is fold_in(fold_in(key(seed), sequence), position). Greedy takes the first index of the largest
    logit and sorts nothing.

    A row with a NaN or +inf logit does not crash and is not drawn from: it gives its largest *finite* logit (id 0 if
    there is none). -inf is an ordinary logit of a token that cannot come.

    Args:
        logits: [B, V], any float dtype.
        arrays: parameters, see `sampler_arrays`.
        seed: u32 [B].
        sequence: i32 [B], number of the sequence within its request.
        position: i32 [B], index in its sequence of the token that is drawn (prompt included, padding not).
        seen: bool [B, V] if a row has a repetition penalty, else None.
        greedy: static; True if all rows are greedy.
        sort: static; False if no row uses top-k or top-p.

    Returns:
        i32 [B].
    """
    logits = logits.astype(jnp.float32)
    broken = jnp.any(jnp.isnan(logits) | jnp.isposinf(logits), axis=-1)  # [B]
    logits = jnp.where(jnp.isfinite(logits), logits, -jnp.inf)
    if greedy:
        if seen is not None:
            logits = penalise(logits, arrays.repetition_penalty, seen)
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    likeliest = logits if seen is None else penalise(logits, arrays.repetition_penalty, seen)
    first = jnp.argmax(likeliest, axis=-1)
    noisy = process_logits(logits, arrays, seen=seen, sort=sort) + _gumbel(seed, sequence, position, logits.shape[-1])
    drawn = jnp.argmax(noisy, axis=-1)
    return jnp.where((arrays.temperature > 0) & ~broken, drawn, first).astype(jnp.int32)


def _gumbel(seed: jax.Array, sequence: jax.Array, position: jax.Array, V: int) -> jax.Array:
    """Noise f32 [B, V]; the generator is named so that a jax default cannot change what a seed gives."""

    def row(seed, sequence, position):
        key = jax.random.key(seed, impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, sequence), position)
        return jax.random.gumbel(key, (V,), jnp.float32)

    return jax.vmap(row)(seed, sequence, position)


def _column(value: jax.Array | np.ndarray) -> jax.Array:
    """A scalar or [B] parameter in a shape that broadcasts against [B, V]."""
    return jnp.asarray(value).reshape(-1, 1)


def switches(params: Sequence[SamplingParams]) -> dict[str, bool]:
    """The static switches of a batch: `greedy`, `sort` (arguments of `sample`) and `seen` (it must be given)."""
    return {
        "greedy": all(p.greedy for p in params),
        "sort": any(p.needs_sort for p in params),
        "seen": any(p.needs_seen for p in params),
    }
