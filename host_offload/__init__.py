"""Experts in host memory behind a cache of device slots: storage, slots, transports, policies, plans and traces.

The policy lab is importable from here and needs NumPy only (jax once the simulator's compiled back end is used); the
engine's parts are taken from their modules (`host_offload.store`, `.pool`, `.slots`, `.transport`, ...).
"""

from host_offload.bounds import belady, belady_curve, best_static_split, gap, oracle_prefetch
from host_offload.policy import Policy, get_policy, list_policies, register, set_row
from host_offload.simulate import Result, simulate, simulate_many
from host_offload.trace import Trace, TraceError, bundled_trace, load_trace
from host_offload.trace_formats import export_trace, import_trace

__all__ = [
    "Policy",
    "Result",
    "Trace",
    "TraceError",
    "belady",
    "belady_curve",
    "best_static_split",
    "bundled_trace",
    "export_trace",
    "gap",
    "get_policy",
    "import_trace",
    "list_policies",
    "load_trace",
    "oracle_prefetch",
    "register",
    "set_row",
    "simulate",
    "simulate_many",
]
