"""The compute of a prefill event, round by round (`schedule.py`): traced into the step, the same for all transports."""

import jax
import jax.numpy as jnp

from host_offload.schedule import max_rounds
from host_offload.transport.base import combine_prefill
from pallas_kernels.expert_ffn import expert_ffn_round, group_pairs


def serve_rounds(transport, layer, x, ids, weights, live, order, state, moves, calls, block_rows):
    """Runs the experts of one prefill event.

    Args:
      transport: its spec and implementation; x [T, D], ids and weights [T, K], live [T] as in `experts`.
      order: `Schedule` of device arrays (position, row, bounds, rounds).
      moves, calls: `RoundMoves` and `HostCalls` that bring the rows in, or None when every expert is resident.
      block_rows: BM of the grouped kernel.

    Returns:
      y [T, D] f32 and the state.
    """
    E = transport.spec.E
    with jax.named_scope("group"):
        layout = group_pairs(ids, live, order.position, E, block_rows)
        layout["block_row"] = order.row[jnp.minimum(layout["block_position"], E - 1)]
        ends = jnp.concatenate([jnp.zeros((1,), jnp.int32), layout["block_end"]])

    def compute(r, carry):
        y, state = carry
        if moves is not None:
            _, state = calls.call(moves.on_round, layer, {}, {}, state)
        span = jnp.stack([ends[order.bounds[r]], ends[order.bounds[r + 1]]])
        y = expert_ffn_round(
            x,
            y,
            layout,
            span,
            state.banks,
            block_rows=block_rows,
            spec=transport.experts,
            implementation=transport.ffn_implementation,
        )
        return y, state

    with jax.named_scope("expert_ffn"):
        # Pairs of dead tokens are never written; `combine_prefill` leaves them out.
        y = jax.lax.empty((ids.size, x.shape[1]), x.dtype)
        if moves is None:
            y, state = compute(0, (y, state))
        else:
            # Bounded here too: a host call that failed may have left anything in its tables, and the program must end.
            rounds = jnp.minimum(order.rounds.reshape(()), max_rounds(E, transport.group))
            y, state = jax.lax.fori_loop(0, rounds, compute, (y, state))
        return combine_prefill(y, weights, live), state
