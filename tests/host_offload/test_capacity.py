"""Slot budgets: the three requests, what memory leaves, the ceiling, and the division between layers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_offload.capacity import resolve_slots

MODEL = {"L": 4, "E": 10, "row_bytes": 100}


def test_total_and_division():
    budget = resolve_slots(**MODEL, expert_slots=10)
    assert (budget.total, budget.per_layer, budget.nbytes) == (10, (3, 3, 2, 2), 1000)
    assert budget.capacities.tolist() == [3, 3, 2, 2] and budget.capacities.dtype == np.int32
    assert "expert_slots=10" in budget.source


def test_global_scope_has_one_pool():
    budget = resolve_slots(**MODEL, expert_slots=3, scope="global")
    assert budget.per_layer == () and budget.capacities.tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize("quotas", [[1, 2, 3, 10], (1, 2, 3, 10), np.array([1, 2, 3, 10])])
def test_quotas_per_layer(quotas):
    budget = resolve_slots(**MODEL, expert_slots=quotas)
    assert budget.total == 16 and budget.per_layer == (1, 2, 3, 10)


def test_rate_is_the_decimal_that_was_written():
    assert 0.29 * 100 < 29  # binary floating point would lose a slot
    assert resolve_slots(L=10, E=10, row_bytes=1, cache_rate=0.29).total == 29
    assert resolve_slots(**MODEL, cache_rate=0.333).total == 13
    assert resolve_slots(**MODEL, cache_rate=1).total == 40


def test_bytes_are_whole_slots():
    assert resolve_slots(**MODEL, expert_cache_bytes=1299).total == 12


def test_memory_left_decides_when_nothing_is_asked():
    budget = resolve_slots(**MODEL, device_bytes=4000, device_memory_ratio=0.5, reserved_bytes=550)
    assert budget.total == 14
    assert budget.source == "device_memory_ratio 0.5 of 4000 device bytes, less 550 reserved"


def test_all_experts_when_memory_is_unknown_or_ample():
    assert resolve_slots(**MODEL).total == 40
    budget = resolve_slots(**MODEL, device_bytes=10**9)
    assert budget.total == 40 and "capped at all 40 experts" in budget.source
    assert resolve_slots(**MODEL, expert_slots=41).per_layer == (10, 10, 10, 10)


def test_ratio_is_a_ceiling_of_a_request():
    memory = {"device_bytes": 2000, "device_memory_ratio": 0.9, "reserved_bytes": 300}  # 1500 bytes: 15 slots
    assert resolve_slots(**MODEL, **memory, expert_slots=15).total == 15
    with pytest.raises(ValueError, match="16 expert slots take 1600 bytes, 100 more than .* 15 slots would fit"):
        resolve_slots(**MODEL, **memory, expert_slots=16)
    with pytest.raises(ValueError, match="expert_cache_bytes=2000 .* 500 more than .* 15 slots would fit"):
        resolve_slots(**MODEL, **memory, expert_cache_bytes=2000)
    with pytest.raises(ValueError, match="not even 4 slots fit"):
        resolve_slots(**MODEL, device_bytes=400, expert_slots=4)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (
            {"expert_slots": 3},
            "expert_slots=3: gives 3 expert slots, but scope 'layer' needs at least 4 .*or use scope",
        ),
        ({"cache_rate": 0.05}, "cache_rate=0.05 of 40 experts: gives 2 expert slots"),
        ({"expert_cache_bytes": 99, "scope": "global"}, "gives 0 expert slots, but scope 'global' needs at least 1"),
        ({"device_bytes": 1000, "reserved_bytes": 2000}, "gives 0 expert slots.*lower reserved_bytes"),
        ({"expert_slots": 8, "cache_rate": 0.5}, "give only one of .*got expert_slots=8, cache_rate=0.5"),
        ({"expert_slots": [1, 2, 3]}, "expert_slots: 3 quotas for 4 MoE layers"),
        ({"expert_slots": [1, 2, 3, 0]}, r"expert_slots\[3\]: 0 is not an integer of at least 1"),
        ({"expert_slots": [1, 2, 3, 11]}, r"expert_slots\[3\]: 11 slots for 10 experts"),
        ({"expert_slots": [1, 2, 3, 4], "scope": "global"}, "a list of quotas needs scope 'layer'"),
        ({"expert_slots": "8"}, "expert_slots: '8' is not an integer"),
        ({"expert_slots": 8.0}, "expert_slots: 8.0 is not an integer"),
        ({"expert_slots": True}, "expert_slots: True is not an integer"),
        ({"cache_rate": 0}, "cache_rate: 0 is not a share"),
        ({"cache_rate": 25}, "cache_rate: 25 is not a share above 0 and up to 1"),
        ({"cache_rate": float("nan")}, "cache_rate: nan is not a share"),
        ({"device_memory_ratio": 1.2}, "device_memory_ratio: 1.2 is not a share"),
        ({"expert_cache_bytes": -1}, "expert_cache_bytes: -1 is not an integer of at least 1"),
        ({"device_bytes": 0}, "device_bytes: 0 is not an integer"),
        ({"reserved_bytes": -1}, "reserved_bytes: -1 is not"),
        ({"row_bytes": 0}, "row_bytes: 0 is not"),
        ({"scope": "layers"}, "scope: 'layers' is neither"),
    ],
)
def test_bad_requests_name_the_field_and_value(request_, message):
    with pytest.raises(ValueError, match=message):
        resolve_slots(**(MODEL | request_))


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 9), st.data())
def test_division_is_even_and_complete(L, E, data):
    total = data.draw(st.integers(L, L * E))
    quotas = resolve_slots(L=L, E=E, row_bytes=7, expert_slots=total).per_layer
    assert sum(quotas) == total and max(quotas) - min(quotas) <= 1
    assert list(quotas) == sorted(quotas, reverse=True) and 1 <= quotas[-1] and quotas[0] <= E
