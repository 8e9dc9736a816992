"""Cache policies: which experts are worth a slot.

A policy is a few pure functions on small arrays, written against an array namespace `xp` (`numpy` or `jax.numpy`) that
the caller passes in, so that one policy object serves the jitted decode step, the host callback, the simulator and
plain tests. Shape letters: L MoE layers, E experts a layer, n queried (layer, expert) pairs. `t = step * L + layer` is
the event clock.

Arrays of a policy's state are owned by that state: under NumPy `observe` and `reset` update them *in place* and return
them; under jax.numpy they are immutable and new ones are returned. Use the returned state in both cases.
"""

import abc
import difflib
import os

import numpy as np

from host_offload.registry import find
from host_offload.rounding import quotient
from host_offload.trace import Trace


class Policy(abc.ABC):
    """The interface of a cache policy; subclass it, set `name`, and `register` the class.

    `name` is the registry name. Policies that keep the very same statistics (equal `init`, `observe` and `reset`) may
    set `shares` to a common word: a `PolicySet` then keeps and updates one copy for all of them. A policy that sets
    `uses_scores = False` gets zeros for `scores` in the callback transport, which then need not read them back.

    A policy that must know what the cache holds (since when an expert is in it, who left) sets `in_cache = True`:
    `bound` is then called once after `init`, and `commit` at the end of every event. For others nothing is computed.
    A policy whose state is more than arrays sets `host_only = True`: it runs under NumPy alone, in the callback
    transport and the simulator's NumPy back end.
    """

    name: str = ""
    shares: str | None = None
    uses_scores: bool = True
    in_cache: bool = False
    host_only: bool = False

    @abc.abstractmethod
    def init(self, xp, L, E, seed):
        """Returns the state before the first event: a dict of arrays (a pytree); `seed` is a Python int."""

    @abc.abstractmethod
    def observe(self, xp, state, layer, need, scores, t):
        """Records an event before it is planned and returns the new state.

        `layer` int32 scalar; `need` [E] bool, the distinct experts of the event; `scores` [E] float32, the router's
        scores summed over the event's rows, rounded through float16; `t` int32 scalar, the event clock.
        """

    @abc.abstractmethod
    def priority(self, xp, state, layer, expert, t):
        """Returns float32 [n], higher = keep, for the pairs `layer`, `expert` [n] int32 at clock `t`; NaN is lowest."""

    def bound(self, xp, state, capacity, global_scope):
        """Returns the state of an empty cache that `init` made, once the cache's size is known (`in_cache` only).

        `capacity` [L] int32: slots of each layer, or L times the total when `global_scope`. Both may be traced, so that
        one program serves caches of many sizes. A Python bool, instead of a bool scalar array, promises that the scope
        never changes: the state may then have another form for each.
        """
        return state

    def commit(self, xp, state, layer, resident, t):
        """Returns the state at the end of an event, after its evictions and insertions (`in_cache` only).

        `resident` [L, E] bool: the experts that now have a slot; `layer`, `t` as `observe` got them for this event. A
        policy learns who came and who left by comparing with what it kept.
        """
        return state

    def reset(self, xp, state):
        """Returns the state at the start of a request; by default nothing is forgotten."""
        return state


def fresh_state(policy, xp, L, E, seed, capacity, global_scope):
    """Returns the state of `policy` over an empty cache: `init`, then `bound` if the policy follows the cache.

    `capacity` [L] int32 and `global_scope`, a Python bool or a bool array, as `Policy.bound` takes them. Raises
    ValueError for a `host_only` policy unless `xp` is NumPy, and TypeError for the state of any other policy if that is
    not a dict of arrays (dicts in it are fine).
    """
    if policy.host_only and xp is not np:
        raise ValueError(
            f"policy {policy.name!r} keeps more than arrays and runs on the host only: use transport 'callback', or "
            "back end 'numpy' in the simulator"
        )
    state = policy.init(xp, L, E, seed)
    if policy.in_cache:
        state = policy.bound(xp, state, xp.asarray(capacity, xp.int32), global_scope)
    if not policy.host_only:
        _check_arrays(policy.name or type(policy).__name__, "", state)
    return state


def _check_arrays(name, key, state):
    if isinstance(state, dict):
        for inner, value in state.items():
            _check_arrays(name, f"{key}[{inner!r}]", value)
    elif not (hasattr(state, "dtype") and hasattr(state, "shape")):
        remedy = "make a number an array, xp.asarray(0, xp.int32), or set host_only = True" if key else "return a dict"
        found = f"state{key} is of type {type(state).__name__}"
        raise TypeError(f"policy {name!r}: its state must be a dict of arrays, and {found}: {remedy}")


def set_row(xp, array, layer, row):
    """Returns `array` [L, ...] with `array[layer] = row`: in place under NumPy, a new array under jax.numpy."""
    if xp is np:
        array[layer] = row
        return array
    # Promised in bounds, or XLA adds a bounds check (two kernels) to each update.
    return array.at[layer].set(row, mode="promise_in_bounds")


class ElementwisePolicy(Policy):
    """Base of policies that judge an expert by numbers of its own and the clock: give `seen` and `worth` instead of
    `observe` and `priority`.

    The kernel of the slot plan (`pallas_kernels/slot_plan`) then evaluates them in place, on whole arrays in registers;
    other policies are kernels of their own before it. State: [L, E] arrays, at least one, and scalars, which only
    `reset` may change. Beside arithmetic, `xp.where` and comparisons the kernel knows no gathers, sorts or sums.
    """

    uses_scores = False

    def seen(self, xp, own, need, t):
        """Returns an expert's numbers after an event of its layer.

        `own`: the state, with an expert's entry in the place of each [L, E] array: arrays of one shape, whatever it
        is; `need`: bool of that shape, whether the event needs the expert; `t` int32 scalar. Entries that stay as they
        are must be returned as the very same objects.
        """
        raise NotImplementedError(f"policy {self.name!r}: neither `seen` nor `observe`")

    def worth(self, xp, own, t, L):
        """Returns float32 of the shape of the entries of `own`, the priority at clock `t`; `L` layers, a Python int."""
        raise NotImplementedError(f"policy {self.name!r}: neither `worth` nor `priority`")

    def observe(self, xp, state, layer, need, scores, t):
        own = {name: value[layer] if value.ndim else value for name, value in state.items()}
        new = self.seen(xp, own, need, t)
        changed = [name for name in state if new[name] is not own[name]]
        for name in changed:
            if not state[name].ndim:
                raise TypeError(
                    f"policy {self.name!r}: `seen` changes the scalar {name!r}; only [L, E] arrays may change"
                )
        return {**state, **{name: set_row(xp, state[name], layer, new[name]) for name in changed}}

    def priority(self, xp, state, layer, expert, t):
        own = {name: value[layer, expert] if value.ndim else value for name, value in state.items()}
        return self.worth(xp, own, t, next(len(value) for value in state.values() if value.ndim))


def is_elementwise(policy):
    """Whether `seen` and `worth` are all there is to `policy`: a kernel may evaluate them."""
    if type(policy) is PolicySet:
        return all(map(is_elementwise, policy.policies))
    plain = all(
        getattr(type(policy), name) is getattr(ElementwisePolicy, name, None) for name in ("observe", "priority")
    )
    return plain and not policy.in_cache and not policy.host_only


# ------------------------------------------------------------------------------------------------------------- registry

_REGISTRY: dict[str, type[Policy] | Policy] = {}


def register(policy, replace=False):
    """Makes a `Policy` subclass (built without arguments on demand) or instance available by its `name`; returns it.

    Usable as a class decorator. Raises TypeError for anything else and ValueError for an empty name, or for a name that
    is taken by a different policy unless `replace`; defining the same class again (a notebook cell run twice) is fine.
    """
    cls = policy if isinstance(policy, type) else type(policy)
    if not issubclass(cls, Policy):
        raise TypeError(f"policy: expected a subclass or an instance of host_offload.policy.Policy, got {policy!r}")
    name = policy.name
    if not isinstance(name, str) or not name:
        raise ValueError(f"policy {cls.__qualname__}: `name` must be a non-empty string, got {name!r}")
    known = _REGISTRY.get(name)
    if known is not None and not replace:
        known_cls = known if isinstance(known, type) else type(known)
        if (known_cls.__module__, known_cls.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(
                f"policy name {name!r} is taken by {known_cls.__module__}.{known_cls.__qualname__}; "
                "choose another name or pass replace=True"
            )
    _REGISTRY[name] = policy
    return policy


def get_policy(policy, **parameters):
    """Returns the policy instance for a registered name (built with `parameters`), a `Policy` class or an instance.

    Raises ValueError for an unknown name (with the nearest known ones) and TypeError for other objects, or for
    `parameters` given beside a finished instance.
    """
    return find("policy", "policies", Policy, _REGISTRY, policy, parameters)


def list_policies():
    """Returns the registered names in alphabetical order."""
    return sorted(_REGISTRY)


# ------------------------------------------------------------------------------------------------------------ built-ins


class AccessPolicy(ElementwisePolicy):
    """Base of policies that rank by how often and how lately an expert was needed.

    State: `count` [L, E] int32, events that needed the expert since the last `reset`; `last` [L, E] int32, the clock of
    the latest of all events that did (-1: never). Integers, because float32 counts stop growing at 2^24.
    """

    shares = "access"

    def init(self, xp, L, E, seed):
        return {"count": xp.zeros((L, E), xp.int32), "last": xp.full((L, E), -1, xp.int32)}

    def seen(self, xp, own, need, t):
        return {**own, "count": own["count"] + need, "last": xp.where(need, t, own["last"])}

    def reset(self, xp, state):
        if xp is np:
            state["count"].fill(0)
            return state
        return {**state, "count": xp.zeros_like(state["count"])}


@register
class LRU(AccessPolicy):
    """Least recently used leaves first: priority = -(t - last).

    The age, not the clock, is cast to float32, so the order is exact for ages below 2^24 however long the run is.
    """

    name = "lru"

    def worth(self, xp, own, t, L):
        return -(t - own["last"]).astype(xp.float32)


@register
class LFU(AccessPolicy):
    """Least frequently used leaves first: priority = accesses since the last reset, resident or not."""

    name = "lfu"

    def worth(self, xp, own, t, L):
        return own["count"].astype(xp.float32)


@register
class LFRU(AccessPolicy):
    """Frequency over recency: priority = count / ((t - last) / L + 1), ages in steps.

    As in moe-cache-eval (arXiv 2608.07911). Evaluated as count * L / (t - last + L), integers and one division.
    """

    name = "lfru"

    def worth(self, xp, own, t, L):
        age = (t - own["last"] + L).astype(xp.float32)
        return quotient(xp, own["count"].astype(xp.float32) * L, age)


@register
class StaticPin(ElementwisePolicy):
    """Pins the experts that a calibration run used most, and never learns: priority = frequency.

    `frequency`: a non-negative [L, E] array, a `Trace`, or the path of a trace or of an `.npz` with an array
    `frequency`; None pins the lowest expert ids of every layer.
    """

    name = "static"

    def __init__(self, frequency=None):
        if isinstance(frequency, str | os.PathLike):
            frequency = _load_frequency(frequency)
        if isinstance(frequency, Trace):
            frequency = frequency.frequency()
        if frequency is not None:
            frequency = np.asarray(frequency, np.float32)
            if frequency.ndim != 2 or not np.all(frequency >= 0) or not np.all(np.isfinite(frequency)):
                raise ValueError(
                    "static policy: frequency must be a finite, non-negative [L, E] table, got shape "
                    f"{frequency.shape}, values {frequency.min(initial=np.inf)} to {frequency.max(initial=-np.inf)}"
                )
        self.frequency = frequency

    def init(self, xp, L, E, seed):
        rank = np.broadcast_to(-np.arange(E, dtype=np.float32), (L, E)) if self.frequency is None else self.frequency
        if rank.shape != (L, E):
            raise ValueError(f"static policy: frequency has shape {rank.shape}, the model needs [L, E] = {(L, E)}")
        return {"rank": xp.array(rank, xp.float32)}

    def seen(self, xp, own, need, t):
        return own

    def worth(self, xp, own, t, L):
        return own["rank"]


def _load_frequency(path):
    with np.load(path, allow_pickle=False) as arrays:
        if "frequency" in arrays:
            return arrays["frequency"]
    return Trace.load(path)


# ------------------------------------------------------------------------------------------------------- several in one


class PolicySet(Policy):
    """Several policies as one, chosen by a value: one compiled program serves a sweep over policies.

    State: `select`, an int32 scalar (traced under jax, the first member at the start), and the members' states by name
    (one copy for members with the same `shares`). All members observe every event, so a change of `select` finds its
    member with a full history.
    """

    name = "set"

    def __init__(self, policies):
        self.policies = tuple(get_policy(policy) for policy in policies)
        self.names = tuple(policy.name for policy in self.policies)
        if not self.policies:
            raise ValueError("policies: a PolicySet needs at least one policy")
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"policies: names in a PolicySet must differ, got {list(self.names)}")
        for flag in ("uses_scores", "in_cache", "host_only"):
            setattr(self, flag, any(getattr(policy, flag) for policy in self.policies))
        self._keys = tuple(policy.shares or policy.name for policy in self.policies)
        self._groups = dict(zip(reversed(self._keys), reversed(self.policies), strict=True))
        if "select" in self._groups:
            raise ValueError("policies: 'select' is reserved in a PolicySet; rename that policy")

    def init(self, xp, L, E, seed):
        state = {key: policy.init(xp, L, E, seed) for key, policy in self._groups.items()}
        return {"select": xp.zeros((), xp.int32), **state}

    def with_selected(self, state, name):
        """Returns `state` with the member `name` in charge; shapes, dtypes and devices stay, so nothing recompiles."""
        if name not in self.names:
            near = difflib.get_close_matches(str(name).lower(), self.names, n=1, cutoff=0.5)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"policy: {name!r} is not in this set.{hint} Members: {', '.join(self.names)}")
        # Arithmetic on the old scalar keeps its device and commitment, which a fresh array would not.
        return {**state, "select": state["select"] * 0 + np.int32(self.names.index(name))}

    def observe(self, xp, state, layer, need, scores, t):
        seen = {key: policy.observe(xp, state[key], layer, need, scores, t) for key, policy in self._groups.items()}
        return {"select": state["select"], **seen}

    def priority(self, xp, state, layer, expert, t):
        if xp is np:  # the choice is known here: the other members need not be evaluated
            index = int(state["select"])
            return self.policies[index].priority(xp, state[self._keys[index]], layer, expert, t)
        return self._chosen(xp, state, lambda policy, own: policy.priority(xp, own, layer, expert, t))

    def seen(self, xp, own, need, t):
        """As of `ElementwisePolicy`, if all members are such."""
        return {**own, **{key: policy.seen(xp, own[key], need, t) for key, policy in self._groups.items()}}

    def worth(self, xp, own, t, L):
        """As of `ElementwisePolicy`, if all members are such."""
        return self._chosen(xp, own, lambda policy, mine: policy.worth(xp, mine, t, L))

    def _chosen(self, xp, state, value_of):
        """`value_of(policy, its state)` of the member in charge, which the program learns only when it runs."""
        chosen = None
        for index, (policy, key) in enumerate(zip(self.policies, self._keys, strict=True)):
            value = value_of(policy, state[key])
            chosen = value if chosen is None else xp.where(state["select"] == index, value, chosen)
        return chosen

    def bound(self, xp, state, capacity, global_scope):
        return self._follow(state, lambda policy, own: policy.bound(xp, own, capacity, global_scope))

    def commit(self, xp, state, layer, resident, t):
        return self._follow(state, lambda policy, own: policy.commit(xp, own, layer, resident, t))

    def _follow(self, state, update):
        seen = {key: update(policy, state[key]) for key, policy in self._groups.items() if policy.in_cache}
        return {**state, **seen}

    def reset(self, xp, state):
        fresh = {key: policy.reset(xp, state[key]) for key, policy in self._groups.items()}
        return {"select": state["select"], **fresh}


# Registers the policies of the literature. At the end, because they are built on what this module defines.
import host_offload.policies  # noqa: E402, F401
