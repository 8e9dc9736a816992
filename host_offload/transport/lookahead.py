"""Rows of the next layer that a long prompt moves before that layer's router has run.

A prompt with many more token-expert pairs than a layer has experts needs nearly all of them, so what the next layer
lacks can be told without its router. While the link would rest, between the last row of one layer and the first of the
next, some of these rows are moved into staging memory on the device; the layer that needs them takes them from there,
at the speed of device memory. What was moved ahead and not needed is counted.
"""

# Long enough to fill the pause between two layers of the shapes that were measured (docs/measurements.md), and small
# beside the slots.
STAGING_BYTES = 128 << 20
# Token-expert pairs for each expert from which a prefill step is taken to need all of them. At least half of a padded
# chunk is live, and 8 pairs an expert leave out one in 3000 where all are equally likely.
PAIRS_FOR_ALL = 16


def lookahead_rows(spec) -> int:
    """Rows that `STAGING_BYTES` hold, at most those of a layer."""
    return min(spec.E, STAGING_BYTES // spec.row_bytes)


class Lookahead:
    """Which row lies at which place of the mover's staging memory. Owner: XLA's execution thread.

    A place keeps its row until another is put there: rows in the pool never change, so it stays right across events,
    requests and faults.

    Args:
      mover: with staging memory of `rows` rows, see `CudaMover.stage`.
      rows: places.
    """

    def __init__(self, mover, rows: int):
        self._mover, self.rows = mover, rows
        self._place_of: dict[tuple[int, int], int] = {}
        self._unused: set[tuple[int, int]] = set()
        self.moved = self.used = 0

    def stage(self, layer: int, missing) -> None:
        """Starts moving the last of `missing`, experts that a layer lacks in ascending order.

        The last, as rounds go through the experts in about that order: the first rounds' own moves start at once.
        """
        chosen = missing[-self.rows :]
        self._place_of, self._unused = {}, set()  # should a copy fail to start
        self._mover.stage(layer, list(enumerate(chosen)))
        self._place_of = {(layer, expert): place for place, expert in enumerate(chosen)}
        self._unused = set(self._place_of)
        self.moved += len(chosen)

    def split(self, layer: int, moves):
        """((expert, row) to move from the pool, (place, row) to take from staging) of one round's moves."""
        if not self._place_of:
            return moves, []
        keys = [(layer, expert) for expert, _ in moves]
        held = [(self._place_of[key], row) for key, (_, row) in zip(keys, moves, strict=True) if key in self._place_of]
        for key in self._unused.intersection(keys):
            self.used += 1
            self._unused.discard(key)
        return [move for key, move in zip(keys, moves, strict=True) if key not in self._place_of], held

    def stats(self, row_bytes: int) -> dict:
        """Rows staged, those that their layer then needed, and the bytes that were moved for nothing."""
        return {
            "staging_rows": self.rows,
            "rows_moved": self.moved,
            "rows_used": self.used,
            "bytes_wasted": (self.moved - self.used - len(self._unused)) * row_bytes,
        }


def looks_ahead(lookahead: Lookahead | None, pairs: int, spec, layer: int, starts) -> bool:
    """Whether a prefill event of `pairs` token-expert pairs (padding included) moves rows for the layer after it."""
    follows = layer + 1 < spec.L and layer + 1 not in starts
    return lookahead is not None and follows and pairs >= PAIRS_FOR_ALL * spec.E
