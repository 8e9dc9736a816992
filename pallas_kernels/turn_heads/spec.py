"""The norm of query and key heads."""

from dataclasses import dataclass

from pallas_kernels.row_norm import RowNorm


@dataclass(frozen=True)
class HeadNorm:
    """`row` over each head alone, or `over_all` queries together and all keys together; hashable, a static argument."""

    row: RowNorm
    over_all: bool = False
