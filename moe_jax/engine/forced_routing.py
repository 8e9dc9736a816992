"""Routing that is given instead of chosen: positions of a batch have their experts before the model runs.

The override sits between the model and the transport's `experts`, so layers, cache, policy, transport and record work
as they always do; without one the programs are what they were. Shape letters: B rows, S positions, T new tokens.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


@partial(jax.tree_util.register_dataclass, data_fields=["given", "ids", "weights", "scores"], meta_fields=[])
@dataclass(frozen=True)
class ForcedRouting:
    """The routing of a batch by position.

    given [B, S] bool: where the routing is given; elsewhere the router chooses. ids [B, S, L, K] int16: distinct
    experts of a token by falling weight. weights [B, S, L, K] float16: what their outputs are multiplied with. scores
    [B, S, L, E] float16 or None: what a policy that reads scores sees; None: the weights of the chosen experts and 0
    elsewhere, as in `host_offload.simulate`. A position that a live token has must be below S.
    """

    given: Any
    ids: Any
    weights: Any
    scores: Any = None


def force(experts, forced: ForcedRouting | None, positions: jax.Array):
    """`experts` (docs/architecture.md, "Model and experts") under the routing of `positions` [B, T]; None: as it is.

    The router still runs, and whether its choice is used is a value: a step costs what it costs without, but for the
    lookup.
    """
    if forced is None:
        return experts
    rows = jnp.arange(positions.shape[0])[:, None]
    # One lookup a step for all layers.
    chosen = jax.tree.map(lambda array: array[rows, positions].reshape(-1, *array.shape[2:]), forced)

    def call(layer, x, ids, weights, scores, live, token_ids, state, **onward):
        told, told_weights = chosen.ids[:, layer].astype(ids.dtype), chosen.weights[:, layer]
        if chosen.scores is None:
            at = jnp.arange(len(ids))[:, None], told
            told_scores = jnp.zeros_like(scores).at[at].set(told_weights.astype(scores.dtype))
        else:
            told_scores = chosen.scores[:, layer].astype(scores.dtype)
        given = chosen.given[:, None]
        ids = jnp.where(given, told, ids)
        weights = jnp.where(given, told_weights.astype(weights.dtype), weights)
        scores = jnp.where(given, told_scores, scores)
        return experts(layer, x, ids, weights, scores, live, token_ids, state, **onward)

    return call
