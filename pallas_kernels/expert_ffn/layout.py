"""Grouping of token-expert pairs into blocks of one expert each (plain XLA; runs inside the jitted step)."""

import jax.numpy as jnp


def group_pairs(ids, live, position_of_expert, positions: int, block_rows: int):
    """Sorts live (token, k) pairs by their expert's processing position and pads each expert to whole blocks.

    Args:
      ids: [T, K] i32 expert of each pair; live: [T] bool.
      position_of_expert: [E] i32 processing position of each needed expert.
      positions: static number of positions.
      block_rows: BM, rows a block.

    Returns a dict:
      token, pair: [blocks*BM] i32, the token and the pair t*K+k in each padded row (token 0 and pair -1 on padding);
      block_position: [blocks] i32, whose expert each block is (`positions` on unused blocks);
      block_end: [positions] i32, first block after each position.
    """
    tokens, k = ids.shape
    pairs = tokens * k
    experts = position_of_expert.shape[0]
    blocks = -(-pairs // block_rows) + min(experts, pairs)
    position = jnp.where(jnp.repeat(live, k), position_of_expert[ids.reshape(-1)], positions)
    order = jnp.argsort(position, stable=True).astype(jnp.int32)
    position = position[order]
    # Comparing all is one fused reduction; a binary search is a loop of small kernels.
    bounds = _search(position, jnp.arange(positions + 1, dtype=jnp.int32), "left")
    count = bounds[1:] - bounds[:-1]
    block_count = -(-count // block_rows)
    block_end = jnp.cumsum(block_count).astype(jnp.int32)
    block_start = block_end - block_count
    real = jnp.minimum(position, positions - 1)
    row = block_start[real] * block_rows + jnp.arange(pairs, dtype=jnp.int32) - bounds[real]
    # Dead pairs go past the end, each to a place of its own: the scatter may then assume unique indices.
    row = jnp.where(position < positions, row, blocks * block_rows + jnp.arange(pairs, dtype=jnp.int32))
    pair = jnp.full(blocks * block_rows, -1, jnp.int32).at[row].set(order, mode="drop", unique_indices=True)
    block_position = _search(block_end, jnp.arange(blocks, dtype=jnp.int32), "right")
    return {"token": jnp.maximum(pair, 0) // k, "pair": pair, "block_position": block_position, "block_end": block_end}


def _search(ascending, values, side):
    return jnp.searchsorted(ascending, values, side=side, method="compare_all").astype(jnp.int32)
