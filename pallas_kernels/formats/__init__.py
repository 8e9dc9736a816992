"""Formats of weight matrices: which arrays a matrix is stored as, and how its values are read from them.

One module a format. The experts' rows (`ExpertSpec`), dense parameters of quantised checkpoints and the conversion of
checkpoints all go by these objects.
"""

from pallas_kernels.formats.base import Format
from pallas_kernels.formats.dense import Dense
from pallas_kernels.formats.fp8 import FP8
from pallas_kernels.formats.int4 import INT4
from pallas_kernels.formats.mxfp4 import MXFP4

__all__ = ["FP8", "INT4", "MXFP4", "Dense", "Format"]
