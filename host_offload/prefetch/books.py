"""What became of every prefetch, by layer: the columns that `stats()["prefetch"]` adds up."""

import numpy as np

# issued: the copy began. on_time, late: used, and had arrived or not when the event began. wasted: never used. harmful:
# took the place of a prefetched row that was demanded before it was used itself. cancelled: dropped before its copy
# began, which moves nothing.
COLUMNS = ("issued", "on_time", "late", "wasted", "harmful", "cancelled")
ISSUED, ON_TIME, LATE, WASTED, HARMFUL, CANCELLED = range(len(COLUMNS))


class Books:
    """Counts of rows by the layer that they were fetched for, [L, 6] int64 in the order of `COLUMNS`.

    At any time issued = on_time + late + wasted + rows that wait in the reserve with their copy begun.
    """

    def __init__(self, L, row_bytes):
        self.counts = np.zeros((L, len(COLUMNS)), np.int64)
        self._row_bytes = row_bytes

    def add(self, layer, column):
        """Counts one row."""
        self.counts[layer, column] += 1

    def to_dict(self, waiting) -> dict:
        """Plain numbers: rows of all layers by column, with `useful` = on time + late and `waiting`, rows in the
        reserve that may yet be used; the same in bytes; and by layer."""
        sums = dict(zip(COLUMNS, self.counts.sum(axis=0).tolist(), strict=True))
        sums |= {"useful": sums["on_time"] + sums["late"], "waiting": waiting}
        issued = sums["issued"]
        return {
            "rows": sums,
            "bytes": {name: rows * self._row_bytes for name, rows in sums.items()},
            "precision": sums["useful"] / issued if issued else None,
            "per_layer": {name: self.counts[:, column].tolist() for column, name in enumerate(COLUMNS)},
        }
