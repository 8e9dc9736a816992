"""MoE-Infinity as its paper describes it: the activation patterns of earlier requests predict the reuse of experts."""

import os

import numpy as np

from host_offload.policies.common import check_count
from host_offload.policy import Policy, register
from host_offload.trace import Trace


@register
class MoEInfinityPaper(Policy):
    """Evicts the lowest predicted reuse: priority = pEAM[layer, expert] * (1 - distance / L).

    MoE-Infinity, arXiv 2401.14361 v3. An *expert activation matrix* [L, E] counts the events that needed an expert:
    over the running pass (iEAM) or the running request (rEAM). The collection (EAMC) holds up to `capacity` rEAMs of
    earlier requests. At each event the iEAM is compared with all of them by cosine over the rows of layers that ran
    already; pEAM is the mean of the `matches` most similar, each row scaled to sum 1. `distance` is how many layers run
    before that layer does: 0 for the next one, L - 1 for the running one. A finished request's rEAM joins the
    collection, and when that is full replaces its most similar by cosine. Without any, the request's own rEAM stands
    in.

    The paper keeps prefill and decode apart; a policy does not see the phase, so here they are one.

    Args:
        capacity: rEAMs to keep; 120 suffice in the paper.
        matches: how many nearest are averaged; the paper leaves the number open.
        collection: what to start with: an array [n, L, E], a `Trace` (one rEAM a request), the path of a file that
            `save` wrote, or None. Only the last `capacity` are used.

    State: `collection` [capacity, L, E] float32 and its `size`; `pass`, `request` [L, E] float32 (iEAM, rEAM); `now`,
    `dot`, `norm` [capacity] float64. Host only: it searches.
    """

    name = "moeinf_paper"
    uses_scores = False
    host_only = True

    def __init__(self, capacity=120, matches=8, collection=None):
        self.capacity = check_count(self.name, "capacity", capacity)
        self.matches = check_count(self.name, "matches", matches)
        if isinstance(collection, str | os.PathLike):
            with np.load(collection, allow_pickle=False) as file:
                if "collection" not in file:
                    raise ValueError(f"moeinf_paper policy: {collection} holds no array 'collection'; use save()")
                collection = file["collection"]
        elif isinstance(collection, Trace):
            collection = activation_matrices(collection)
        if collection is not None:
            collection = np.asarray(collection, np.float32)
            if collection.ndim != 3 or not np.all(np.isfinite(collection)) or not np.all(collection >= 0):
                raise ValueError(
                    "moeinf_paper policy: collection must be finite, non-negative counts [n, L, E], got shape "
                    f"{collection.shape}"
                )
            collection = collection[-self.capacity :]
        self.collection = collection

    def init(self, xp, L, E, seed):
        if xp is not np:
            raise ValueError(
                "policy 'moeinf_paper' searches a collection on the host only: use transport 'callback', or back end "
                "'numpy' in the simulator"
            )
        given = np.zeros((0, L, E), np.float32) if self.collection is None else self.collection
        if given.shape[1:] != (L, E):
            raise ValueError(
                f"moeinf_paper policy: collection has [L, E] = {given.shape[1:]}, the model needs {(L, E)}"
            )
        collection = np.zeros((self.capacity, L, E), np.float32)
        collection[: len(given)] = given
        return {
            "collection": collection,
            "size": len(given),
            "pass": np.zeros((L, E), np.float32),
            "request": np.zeros((L, E), np.float32),
            "dot": np.zeros(self.capacity),
            "norm": np.zeros(self.capacity),
            "now": L,
        }

    def observe(self, xp, state, layer, need, scores, t):
        if layer <= state["now"]:  # a pass begins
            for name in ("pass", "dot", "norm"):
                state[name].fill(0)
        state["now"] = int(layer)
        state["pass"][layer] += need
        state["request"][layer] += need
        rows = state["collection"][:, layer].astype(np.float64)
        state["dot"] += rows @ state["pass"][layer].astype(np.float64)
        state["norm"] += (rows * rows).sum(axis=1)
        return state

    def predicted(self, state):
        """pEAM [L, E] float32 at this event: where activations are expected, rows of sum 1 or 0."""
        size = state["size"]
        if size == 0:
            return _rows_to_one(state["request"])
        similar = _cosine(state["dot"][:size], state["norm"][:size])
        nearest = np.argsort(-similar, kind="stable")[: self.matches]
        return _rows_to_one(state["collection"][nearest]).mean(axis=0)

    def priority(self, xp, state, layer, expert, t):
        L = len(state["request"])
        distance = (layer - state["now"] - 1) % L
        return (self.predicted(state)[layer, expert] * (1 - distance / L)).astype(np.float32)

    def reset(self, xp, state):
        request, size = state["request"], state["size"]
        if request.any():
            if size < self.capacity:
                at, state["size"] = size, size + 1
            else:
                flat = state["collection"].reshape(size, -1).astype(np.float64)
                at = int(np.argmax(_cosine(flat @ request.reshape(-1), (flat * flat).sum(axis=1))))
            state["collection"][at] = request
        for name in ("pass", "request", "dot", "norm"):
            state[name].fill(0)
        state["now"] = len(request)
        return state

    def save(self, state, path):
        """Writes the collection of a state to `path` (.npz), for the argument `collection` of a later run."""
        with open(path, "wb") as file:
            np.savez_compressed(file, collection=state["collection"][: state["size"]])


def activation_matrices(trace):
    """[n, L, E] float32: for each request of a `Trace`, as they appear, how many of its steps needed an expert."""
    L, E = len(trace.header["moe_layers"]), trace.header["E"]
    requests, first_row = np.unique(trace.request, return_index=True)
    matrices = np.zeros((len(requests), L, E), np.float32)
    for place, request in enumerate(requests[np.argsort(first_row)]):
        rows = np.flatnonzero(trace.request == request)
        steps, of_step = np.unique(trace.step[rows], return_inverse=True)
        need = np.zeros((len(steps), L, E), bool)
        need[of_step[:, None, None], np.arange(L)[:, None], trace.experts[rows]] = True
        matrices[place] = need.sum(axis=0)
    return matrices


def _rows_to_one(matrix):
    total = matrix.sum(axis=-1, keepdims=True)
    return matrix / np.where(total > 0, total, 1)


def _cosine(dot, norm):
    """[n] dot / sqrt(norm), 0 where the norm is 0; the other vector's norm is common to all."""
    return dot / np.sqrt(np.where(norm > 0, norm, np.inf))
