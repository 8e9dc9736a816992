"""experiments/record_traces.py: documents of text files, the trace of them, and going on after a stop."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import lzma
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from host_offload.trace import load_trace

SCRIPT = Path(__file__).resolve().parents[2] / "experiments" / "record_traces.py"
STORY = "Once upon a time there was a poor woodcutter who lived with his wife at the edge of a great forest. "


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("record_traces", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["record_traces"] = module  # typer looks up the annotations there
    spec.loader.exec_module(module)
    yield module
    del sys.modules["record_traces"]


def run(script, *options):
    return CliRunner().invoke(script.app, list(map(str, options)))


def test_documents_of_a_file(script, tmp_path):
    (tmp_path / "tales.txt").write_text("one<|endoftext|>\n two \n<|endoftext|> ")
    assert list(script.read_texts(tmp_path / "tales.txt")) == [("tales", "one"), ("tales", "two")]
    lines = [{"text": "a", "domain": "math"}, {"text": "b"}]
    path = tmp_path / "mixed.jsonl.xz"
    path.write_bytes(lzma.compress("\n\n".join(map(json.dumps, lines)).encode()))
    assert list(script.read_texts(path)) == [("math", "a"), ("mixed", "b")]


def test_choice_takes_the_first_long_enough_of_each_domain(script):
    def tokenizer(text):
        return {"input_ids": list(text.encode())}

    texts = [("a", "x" * 5), ("a", "abcdef"), ("b", "ghijkl"), ("a", "mnopqr"), ("a", "stuvwx")]
    chosen, short = script.choose(texts, tokenizer, 4, 2, 2)
    assert [(document.domain, bytes(document.ids)) for document in chosen] == [
        ("a", b"abcd"),
        ("b", b"ghij"),
        ("a", b"mnop"),
    ]
    assert short == 1
    assert len(script.choose(texts, tokenizer, 4, 2, None)[0]) == 4


def test_wrong_options_end_before_anything_is_loaded(script, tmp_path):
    story = tmp_path / "story.txt"
    story.write_text(STORY)
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"txt": "b"}\n')
    (tmp_path / "bad.txt").write_bytes(b"abc\xff")
    for options, message in (
        (("--text", story, "--out", tmp_path / "run.json"), "must end in .npz or .parquet"),
        (("--text", story, "--out", tmp_path / "no" / "run.npz"), "there is no directory"),
        (("--text", tmp_path / "bad.jsonl", "--out", tmp_path / "run.npz"), "line 2: expected an object with text"),
        (
            ("--text", tmp_path / "bad.txt", "--out", tmp_path / "run.npz"),
            "not UTF-8 text (invalid start byte at byte 3)",
        ),
        (("--text", tmp_path / "a.pdf", "--out", tmp_path / "run.npz"), "expected .txt or .jsonl"),
        (("--text", tmp_path / "absent.txt", "--out", tmp_path / "run.npz"), "cannot be read"),
    ):
        done = run(script, *options)
        assert done.exit_code == 2 and message in done.stderr.replace("\n", " "), (options, done.stderr)


@pytest.mark.slow
def test_recording_goes_on_where_it_stopped(script, tmp_path, monkeypatch):
    import moe_jax

    moe = moe_jax.MoE(moe_jax.demo_model_path())  # loaded and compiled once for the three runs
    monkeypatch.setattr(moe_jax, "MoE", lambda model, config: contextlib.nullcontext(moe))
    (tmp_path / "tales.txt").write_text("<|endoftext|>".join([STORY * 2, STORY[40:] * 3]))
    (tmp_path / "verse.txt").write_text("The cat sat on the mat, and the dog sat on the log. " * 4)
    options = ["--prompt-tokens", 12, "--new-tokens", 6, "--seed", 3]
    options += ["--text", tmp_path / "tales.txt", "--text", tmp_path / "verse.txt"]
    generate, calls = moe.generate, []

    def stop_at_the_third(*args, **kwargs):
        calls.append(kwargs["seed"])
        if len(calls) == 3:
            raise KeyboardInterrupt
        return generate(*args, **kwargs)

    monkeypatch.setattr(moe, "generate", stop_at_the_third)
    done = run(script, *options, "--out", tmp_path / "run.npz")
    assert done.exit_code == 130 and "the same command goes on" in done.stderr.replace("\n", " "), done.stderr
    assert len(list((tmp_path / "run.npz.parts").iterdir())) == 2 and not (tmp_path / "run.npz").exists()
    done = run(script, *options, "--out", tmp_path / "run.npz")
    assert done.exit_code == 0, done.stderr
    assert calls == [3, 4, 5, 5]  # the first two documents were not run again
    assert not (tmp_path / "run.npz.parts").exists()

    trace = load_trace(tmp_path / "run.npz")
    assert trace.header["domains"] == ["tales", "tales", "verse"] and trace.header["seed"] == 3
    prompts = np.bincount(trace.request, trace.phase == 0)
    assert prompts.tolist() == [12] * 3 and np.bincount(trace.request).max() <= 12 + 6 - 1
    # One uninterrupted run tells the same.
    done = run(script, *options, "--out", tmp_path / "whole.parquet")
    assert done.exit_code == 0 and calls[4:] == [3, 4, 5], done.stderr
    whole = load_trace(tmp_path / "whole.parquet")
    assert whole.header == trace.header
    for name, array in trace.arrays().items():
        np.testing.assert_array_equal(whole.arrays()[name], array, err_msg=name)
    moe.close()
