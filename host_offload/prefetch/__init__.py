"""Fetching ahead of need in the `callback` transport: what, how much, when to stop, and how the bytes travel."""

from host_offload.prefetch.experience import Experience, ExperienceError
from host_offload.prefetch.prefetcher import Prefetcher, PrefetchSettings, reserve_rows

__all__ = ["Experience", "ExperienceError", "PrefetchSettings", "Prefetcher", "reserve_rows"]
