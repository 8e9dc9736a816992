"""Cache policies of the literature, one idea a file; importing this package registers all of them by name.

Every policy is written from the definition in its paper for *events* that need several experts at once: members of
an event are processed by falling `layer * E + expert`, as ties of the plan are broken, and evictions wait for the
event's end. Policies that admit every missing expert, as textbook caches do, rank newcomers above all residents; under
the contract `atomic-bypass` only what exceeds the cache is then bypassed.
"""

from host_offload.policies.adaptive_replacement import ARC
from host_offload.policies.clock import CLOCK
from host_offload.policies.decayed import LRFU, DecayedLFU
from host_offload.policies.dynamic_aging import LFUDA
from host_offload.policies.fifo import FIFO
from host_offload.policies.finemoe import FineMoE
from host_offload.policies.frequency import LFUInCache, LFUInCachePersistent, LFUPersistent
from host_offload.policies.hobbit import HOBBIT
from host_offload.policies.layer_order import LayerAwareLRU, LeastStale
from host_offload.policies.moe_infinity_code import MoEInfinityCode, MoEInfinityPriority
from host_offload.policies.moe_infinity_paper import MoEInfinityPaper
from host_offload.policies.mrs import MRS
from host_offload.policies.random_choice import RandomChoice
from host_offload.policies.s3_fifo import S3FIFO
from host_offload.policies.segmented import SLRU
from host_offload.policies.sieve import SIEVE
from host_offload.policies.two_queue import TwoQueue

__all__ = [
    "ARC",
    "CLOCK",
    "FIFO",
    "HOBBIT",
    "LFUDA",
    "LRFU",
    "MRS",
    "S3FIFO",
    "SIEVE",
    "SLRU",
    "DecayedLFU",
    "FineMoE",
    "LFUInCache",
    "LFUInCachePersistent",
    "LFUPersistent",
    "LayerAwareLRU",
    "LeastStale",
    "MoEInfinityCode",
    "MoEInfinityPaper",
    "MoEInfinityPriority",
    "RandomChoice",
    "TwoQueue",
]
