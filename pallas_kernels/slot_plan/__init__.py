"""Slot plan of a decode event in one kernel launch."""

from pallas_kernels.slot_plan.kernel import slot_plan

__all__ = ["slot_plan"]
