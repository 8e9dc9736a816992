"""The disk tier behind the movers: no row is overwritten while a copy out of it may be under way."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from host_offload.disk_tier import DiskTier
from host_offload.plan import apply
from host_offload.policy import get_policy
from tests.host_offload.test_disk_tier import Source
from tests.host_offload.test_host_calls import SPEC, Device, E, L, cuda_module, decide, histories, holds

__all__ = ["cuda_module"]  # the fixture


class TieredDevice(Device):
    """A played GPU whose experts come through a tier of H rows, and a source that watches what is written."""

    def __init__(self, module, rows, held, policy="lru"):
        self.source = Source()
        super().__init__(module, rows, tier=DiskTier(SPEC, self.source, held, get_policy(policy), threads=2))
        self.source.watch = self.check_free

    def check_free(self, out):
        """No copy that is not known on the host to have ended reads the memory of `out`."""
        start = out.ctypes.data
        for copy in list(self.cuda.copies):
            touched = copy.source < start + out.nbytes and start < copy.source + copy.nbytes
            assert not touched or copy.bit & self.cuda.host.ended, "a host row is overwritten while it is copied"

    def decode(self, layer, rows, missing):
        """As the transport serves it: the mover's `fetch`, then the tier, then the moves."""
        wait, self.mover.move = self.mover.move, self._move_through_tier(layer)
        try:
            super().decode(layer, rows, missing)
        finally:
            self.mover.move = wait
        if not missing:
            self.pool.event(layer, [])

    def _move_through_tier(self, layer):
        move = self.mover.move

        def through(ctx, banks, at, moves):
            experts = [expert for expert, _ in moves]
            self.pool.event(layer, experts)
            self.pool.ensure(layer, experts)
            move(ctx, banks, at, moves)

        return through


# Every round takes the rows of the one but last, whose copies must have ended.
AS_FEW_ROWS_AS_CAN_BE = {
    "group": 1,
    "capacity": 1,
    "global_scope": False,
    "resident": [],
    "events": [(False, 0, [True] * E, [0] * L * E, False), (False, 1, [True] * E, [0] * L * E, True)],
}


@settings(max_examples=60)
@given(histories(), st.integers(0, L * E), st.sampled_from(("lru", "lfu")))
@example(AS_FEW_ROWS_AS_CAN_BE, 0, "lru")
def test_no_host_row_is_overwritten_before_its_copy_has_ended(cuda_module, history, more, policy):
    """Events over tiers of all sizes that are allowed: what is computed is right, and what is overwritten free."""
    group, capacity = history["group"], history["capacity"]
    spare = max(2 * group, E if any(decode for decode, *_ in history["events"]) else 0)
    rows = capacity * (1 if history["global_scope"] else L) + spare
    slot_of, owner = np.full((L, E), -1, np.int32), np.full(rows, -1, np.int32)
    device = TieredDevice(cuda_module, rows, min(spare + more, L * E), policy)
    try:
        for decode, layer, need, table, forced in history["events"]:
            need, table = np.array(need), np.array(table, np.float32).reshape(L, E)
            options = {"layer": layer, "capacity": capacity, "global_scope": history["global_scope"]}
            plan, order = decide(
                need, table, slot_of, owner, group=group, forced_admit=forced, decode=decode, **options
            )
            if decode:
                row = np.where(plan.miss, plan.dest, slot_of[layer])
                wanted = np.flatnonzero(need).tolist()
                device.decode(layer, {e: int(row[e]) for e in wanted}, [e for e in wanted if plan.miss[e]])
            else:
                device.prefill(layer, order)
                plan = plan._replace(dest=order.dest)
            assert device.cuda.none_under_way(device.stream)
            device.mover.fetch(device.ctx, layer, {}, lambda: None)  # as the next event begins
            apply(np, plan, slot_of, owner)
            for row in np.flatnonzero(owner >= 0):
                assert holds(device.arrays, row, *divmod(int(owner[row]), E))
    finally:
        device.pool.close()


def test_the_check_sees_a_tier_that_does_not_wait(cuda_module, monkeypatch):
    """What the test above would say of a mover whose `finish` does nothing."""
    device = TieredDevice(cuda_module, 3, 2)
    monkeypatch.setattr(device.mover, "finish", lambda turn: None)
    slot_of, owner = np.full((L, E), -1, np.int32), np.full(3, -1, np.int32)
    table = np.zeros((L, E), np.float32)
    _, order = decide(np.ones(E, bool), table, slot_of, owner, layer=0, capacity=1, group=1)
    try:
        with pytest.raises(AssertionError, match="overwritten while it is copied"):
            device.prefill(0, order)
    finally:
        device.pool.close()


def test_rounds_read_beside_the_copies_of_the_round_before(cuda_module):
    """With rows for two rounds, the third waits for the copies of the first alone."""
    device = TieredDevice(cuda_module, 5, 4)
    finished, finish = [], device.mover.finish
    device.mover.finish = lambda turn: (finished.append(turn), finish(turn))
    slot_of, owner = np.full((L, E), -1, np.int32), np.full(5, -1, np.int32)
    table = np.zeros((L, E), np.float32)
    _, order = decide(np.ones(E, bool), table, slot_of, owner, layer=0, capacity=1, group=2)
    try:
        device.prefill(0, order)
        assert finished == [1] and order.rounds == 4
    finally:
        device.pool.close()
