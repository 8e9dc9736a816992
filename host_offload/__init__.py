"""Experts in host memory behind a cache of device slots: storage, slots, transports, policies, plans and traces.

The policy lab is importable from here and needs NumPy only (jax once the simulator's compiled back end is used); the
engine's parts are taken from their modules (`host_offload.store`, `.pool`, `.slots`, `.transport`, ...).
"""

from host_offload.bounds import belady, belady_curve, best_static_split, gap, oracle_prefetch
from host_offload.cost_model import CostModel, CostModelError, LinkCurve, predict_ms_per_token
from host_offload.policy import Policy, get_policy, list_policies, register, set_row
from host_offload.predictor import Predictor, get_predictor, list_predictors, register_predictor
from host_offload.predictors import Accuracy, evaluate
from host_offload.prefetch_sim import PrefetchResult, simulate_prefetch
from host_offload.simulate import Result, simulate, simulate_many
from host_offload.trace import Trace, TraceError, bundled_trace, load_trace
from host_offload.trace_formats import export_trace, import_trace

__all__ = [
    "Accuracy",
    "CostModel",
    "CostModelError",
    "LinkCurve",
    "Policy",
    "Predictor",
    "PrefetchResult",
    "Result",
    "Trace",
    "TraceError",
    "belady",
    "belady_curve",
    "best_static_split",
    "bundled_trace",
    "evaluate",
    "export_trace",
    "gap",
    "get_policy",
    "get_predictor",
    "import_trace",
    "list_policies",
    "list_predictors",
    "load_trace",
    "oracle_prefetch",
    "predict_ms_per_token",
    "register",
    "register_predictor",
    "set_row",
    "simulate",
    "simulate_many",
    "simulate_prefetch",
]
