"""experiments/random_model.py: rows of every shape have the spread of trained weights, packed ones too."""

import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))
import random_model


@pytest.mark.parametrize("shape", random_model.SHAPES)
def test_rows_of_a_shape(shape):
    parts = random_model.random_parts(shape, **random_model.small(shape) | {"hidden_size": 128})
    experts, F = parts.experts, parts.cfg.expert_width
    rows = [{name: np.empty(s, dtype) for name, (s, dtype) in parts.spec.tensors.items()} for _ in range(2)]
    for expert, row in enumerate(rows):
        for name, out in row.items():
            parts.store.read(0, expert, name, out)
    for tensor, width, outs in (("gate_up", 128, (F, F)), ("down", F, (128,))):
        form = getattr(experts, tensor)
        assert (form.name == "mxfp4") == (shape in random_model.PACKED)
        one, other = (
            np.asarray(form.decode({s: jnp.asarray(row[tensor + s]) for s in form.suffixes}, outs, width, jnp.float32))
            for row in rows
        )
        assert np.isfinite(one).all() and (one != other).mean() > 0.5
        # The scales of packed rows are for the released widths: 2880 columns, to a factor of 8.
        wanted = (1 if tensor == "gate_up" else random_model.QUIET) * width**-0.5
        assert wanted / 8 < one.std() < wanted * 2, (tensor, one.std(), wanted)
