"""experiments/record_gates.py: the recorded routing is the engine's, the guesses are the later routers'."""

import sys
from pathlib import Path

import numpy as np
import pytest

from host_offload.predictors import evaluate
from moe_jax import MoE, OffloadConfig, demo_model_path
from moe_jax.checkpoint.reader import Checkpoint
from moe_jax.engine.loading import read_parts

pytestmark = pytest.mark.slow  # compiles the demo model twice


def test_gates_of_the_demo_model(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "experiments")
    monkeypatch.delitem(sys.modules, "record_gates", raising=False)
    from record_gates import record

    settings = OffloadConfig(progress=False, cache_rate=0.5)
    prompt = np.arange(5, 13, dtype=np.int32)
    with MoE(demo_model_path(), settings) as moe:
        ids = moe.generate(prompt, 9, eos_token_id=[], trace=True)
        own = moe.trace()
    with Checkpoint.open(demo_model_path()) as files:
        trace = record(read_parts(files, settings, False), [ids[:-1]], [8], "demo")
    assert trace.phase.tolist() == own.phase.tolist() == [0] * 8 + [1] * 8
    assert trace.step.tolist() == [0] * 8 + list(range(1, 9))
    # One pass or many round differently, which a near-tie of two experts may show.
    assert (np.sort(trace.experts) == np.sort(own.experts)).mean() > 0.97
    recall = []
    for ahead in (1, 2, 3):
        guess = trace.pred[f"gate-{ahead}"]
        assert (guess[:, :ahead] == -1).all() and (guess[:, ahead:] >= 0).all()
        recall.append(evaluate(f"gate-{ahead}", trace, lead=ahead, ks=(4,)).recall[0])
    assert recall[0] > 0.5 and recall[0] > recall[2] > 4 / 32
