"""Routing in plain jax.numpy: the kernel's reference, and the path of platforms without it."""

import jax
import jax.numpy as jnp


def all_scores(logits, score: str):
    """Scores [T, E] f32 of logits [T, E] f32."""
    if score == "softmax":
        return jax.nn.softmax(logits, axis=-1)
    return jax.nn.sigmoid(logits) if score == "sigmoid" else jnp.sqrt(jax.nn.softplus(logits))


def route(logits, bias, how):
    """As `pallas_kernels.router_topk.route`."""
    logits = logits.astype(jnp.float32)
    scores = all_scores(logits, how.score)
    if how.over_chosen:
        chosen, ids = jax.lax.top_k(logits if bias is None else logits + bias, how.k)
        weights = jax.nn.softmax(chosen if bias is None else jnp.take_along_axis(logits, ids, axis=-1), axis=-1)
    else:
        ranked = scores if how.rounded is None else scores.astype(how.rounded).astype(jnp.float32)
        if bias is not None:
            _, picked = jax.lax.top_k(ranked + bias, how.k)
            is_picked = jnp.any(picked[:, :, None] == jnp.arange(scores.shape[1]), axis=1)  # [T, E]
            ranked = jnp.where(is_picked, ranked, -jnp.inf)  # the same experts, now by weight
        weights, ids = jax.lax.top_k(ranked, how.k)
        if how.norm is not None:
            total = jnp.sum(weights if how.norm == 1 else weights**how.norm, axis=-1, keepdims=True)
            weights = weights / ((total if how.norm == 1 else total ** (1 / how.norm)) + how.epsilon)
    return ids.astype(jnp.int32), (weights * how.scale).astype(how.weights), scores
