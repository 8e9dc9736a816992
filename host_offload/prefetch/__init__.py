"""Fetching ahead of need: what, how much, when to stop, and in the `callback` transport how the bytes travel."""

from host_offload.prefetch.experience import Experience, ExperienceError
from host_offload.prefetch.prefetcher import Prefetcher, PrefetchSettings, reserve_rows
from host_offload.prefetch.staging import StagingSettings

__all__ = ["Experience", "ExperienceError", "PrefetchSettings", "Prefetcher", "StagingSettings", "reserve_rows"]
