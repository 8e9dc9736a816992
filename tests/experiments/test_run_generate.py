"""experiments/run_generate.py as a user runs it: text, table, files, errors, Ctrl-C, a reader that goes away."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from byte_tokenizer import byte_tokenizer
from typer.testing import CliRunner

from host_offload.trace import Trace

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "experiments" / "run_generate.py"
LAYERS, EXPERTS, PER_TOKEN = 8, 32, 4  # of the demo model
# A process compiles for 20 s unless an earlier one ran the same program: the length (in pages, by powers of two) and
# the trace make another.
SHORT = "--cache-rate", 0.25, "--max-new-tokens", 24, "--ignore-eos"
ENDLESS = "--cache-rate", 0.25, "--max-new-tokens", 2000, "--ignore-eos"
PROMPT = "--prompt", "Once upon a time"


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "COLUMNS": "120"}


def command(*options) -> list[str]:
    return [sys.executable, str(SCRIPT), *map(str, options)]


def run(*options, stdin: bytes = b"") -> subprocess.CompletedProcess:
    return subprocess.run(command(*options), input=stdin, capture_output=True, env=environment(), timeout=200)


@pytest.fixture(scope="module")
def script():
    """The script as a module, for calls that end before anything is loaded."""
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        spec = importlib.util.spec_from_file_location("run_generate", SCRIPT)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(SCRIPT.parent))


@pytest.mark.slow
def test_demo_with_json_trace_and_verification(tmp_path):
    files = "--json", tmp_path / "out.json", "--trace", tmp_path / "out.npz", "--verify"
    done = run(*SHORT, *files)
    assert done.returncode == 0, done.stderr.decode()
    out = json.loads((tmp_path / "out.json").read_text())
    (sequence,) = out["sequences"]
    # Standard output is the new text and nothing else.
    assert done.stdout.decode() == sequence["text"] + "\n"
    assert len(sequence["new_ids"]) == 24 and sequence["prompt"].startswith("Once upon a time")
    # The demo draws as its card recommends.
    assert out["sampling"].items() >= {"temperature": 0.7, "top_k": 40, "repetition_penalty": 1.1}.items()
    assert out["sampling"]["do_sample"] is True
    # What was asked for, and what came of it with the model's generation_config.json and the defaults.
    resolved = out["sampling_resolved"]
    assert (resolved["top_k"], resolved["top_p"], resolved["seed"]) == (40, 1.0, 0)

    table = done.stderr.decode()
    for line in (
        "time to first token",
        "tok/s",
        "hit rate",
        "moved a token",
        "link floor",
        "time / floor",
        "compilation",
    ):
        assert line in table
    assert "64 of 256 experts" in table and "(no GPU)" in table
    assert out["verified_slots"] == 64 and "64 occupied slots equal host memory" in table

    figures, decode = out["figures"], out["stats"]["last"]["decode"]
    assert decode["steps"] == 23 and decode["accesses"] == 23 * LAYERS * PER_TOKEN
    assert figures["hit_rate"] == decode["hits"] / decode["accesses"] and 0 < figures["hit_rate"] < 1
    row_bytes = out["stats"]["experts"]["bytes_each"]
    assert figures["bytes_per_token"] == pytest.approx(decode["misses"] * row_bytes / 23)
    assert figures["link_floor_ms"] == pytest.approx(figures["bytes_per_token"] / figures["link_gbps"] / 1e6)
    least = figures["link_floor_ms"] + figures["hbm_floor_ms"]
    assert figures["time_over_floor"] == pytest.approx(figures["ms_per_token"] / least)
    assert figures["ms_per_token"] == pytest.approx(decode["seconds"] / 23 * 1e3)
    assert figures["compilations"] == 3 and figures["ttft_seconds"] > 0

    trace = Trace.load(tmp_path / "out.npz")
    assert trace.experts.shape == (sequence["prompt_tokens"] + 23, LAYERS, PER_TOKEN)
    assert np.count_nonzero(trace.phase) == 23
    assert trace.header["policy"] == "lru" and sum(trace.header["slots"]) == 64


@pytest.mark.slow
def test_batch_from_standard_input_through_the_callback_transport_and_a_disk_tier(tmp_path):
    options = "--transport", "callback", "--policy", "lfru", "--scope", "global", "--expert-slots", 40, "--greedy"
    files = "--host-memory-bytes", "12MB", "--host-policy", "lfu", "--json", tmp_path / "out.json"
    done = run(
        *options, *files, "--prompt-file", "-", "--batch", 3, "--max-new-tokens", 12, "--stop", ",",
        "--link-gbps", 50, "--hbm-gbps", 4000, stdin="Once upon a time\n\nThe king said\nÉtait-ce\nleft out\n".encode(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    out = json.loads((tmp_path / "out.json").read_text())
    assert [s["prompt"] for s in out["sequences"]] == ["Once upon a time", "The king said", "Était-ce"]
    assert [len(s["new_ids"]) for s in out["sequences"]] != [0, 0, 0]
    stdout = done.stdout.decode()
    # The first one live, then all of them.
    assert stdout == "\n".join([out["sequences"][0]["text"], *(s["text"] for s in out["sequences"])]) + "\n"
    assert all("," not in s["text"].rstrip(",") for s in out["sequences"])
    assert out["config"]["transport"] == "callback" and out["stats"]["policy"] == "lfru"
    assert out["stats"]["slots"] == {"total": 40, "per_layer": [], "source": "expert_slots=40"}
    assert (out["figures"]["link_gbps"], out["figures"]["link_source"]) == (50, "given")
    disk, decode = out["stats"]["disk"], out["stats"]["last"]["decode"]
    assert (disk["policy"], disk["rows"], disk["experts"]) == ("lfu", 12_000_000 // 98304, 256)
    assert out["figures"]["host_hit_rate"] == decode["disk"]["hit_rate"]
    assert out["figures"]["bytes_read_per_token"] == decode["disk"]["bytes_read"] / decode["tokens"]
    table = " ".join(done.stderr.decode().split())
    assert "host hit rate" in table and "read a token" in table and "from disk, buffered" in table
    assert out["sampling"]["do_sample"] is False and "temperature" not in out["sampling"]


@pytest.mark.slow
def test_interrupt_keeps_what_there_is(shallow_demo, tmp_path):
    files = "--json", tmp_path / "out.json", "--trace", tmp_path / "out.npz", "--verify"
    process = subprocess.Popen(
        command("--model", shallow_demo, *PROMPT, *ENDLESS, *files),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    try:
        first = process.stdout.read1()  # text has begun to come
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    errors = errors.decode()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors and "stopped by Ctrl-C after" in errors and "hit rate" in errors
    assert errors.index("stopping at the next chunk") < errors.index("stopped by Ctrl-C after")
    out = json.loads((tmp_path / "out.json").read_text())
    (sequence,) = out["sequences"]
    assert out["interrupted"] is True and 0 < len(sequence["new_ids"]) < 2000
    assert (first + rest).decode() == sequence["text"] + "\n"
    rows = sequence["prompt_tokens"] + len(sequence["new_ids"]) - 1
    assert len(Trace.load(tmp_path / "out.npz").experts) == rows


@pytest.mark.slow
def test_reader_that_goes_away_is_no_error(shallow_demo, tmp_path):
    process = subprocess.Popen(
        command("--model", shallow_demo, *PROMPT, *ENDLESS, "--trace", tmp_path / "out.npz"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    try:
        assert process.stdout.read(1)
        process.stdout.close()
        errors = process.stderr.read().decode()
        process.wait(timeout=60)
    finally:
        process.kill()
        process.stderr.close()
    assert process.returncode == 141
    assert "Traceback" not in errors and "BrokenPipe" not in errors and "Exception ignored" not in errors


@pytest.mark.slow
def test_text_that_cannot_be_written_is_one_line_and_the_figures_stay(shallow_demo, tmp_path):
    with open("/dev/full", "w") as full:
        line = command("--model", shallow_demo, *PROMPT, *SHORT, "--trace", tmp_path / "out.npz")
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, env=environment(), timeout=300)
    errors = done.stderr.decode()
    assert done.returncode == 1 and "Traceback" not in errors and "Exception ignored" not in errors
    assert "cannot be written to standard output: No space left on device" in errors and "hit rate" in errors


def test_fault_while_running_keeps_the_text_before_it(script, demo_model, capsys):
    from rich.console import Console

    from moe_jax.errors import TransportError
    from moe_jax.generation.text import load_tokenizer

    tokenizer = load_tokenizer(demo_model)
    ids = tokenizer("The king said: été")["input_ids"]

    def chunks():
        yield [ids[:1]]
        yield [ids[1:]]
        raise TransportError("moving experts failed while decoding: the link is down")

    run = script.Run.__new__(script.Run)
    run.moe = type("Model", (), {"tokenizer": tokenizer})
    run.console, run.prompts, run.chunks = Console(stderr=True), ["Once"], chunks()
    run.new_ids, run.interrupted = [[]], False
    assert run.generate() == 1
    out, errors = capsys.readouterr()
    assert out == "The king said: été\n" and run.new_ids == [ids]
    assert "the link is down" in run.fault and errors.endswith(f"run_generate: {run.fault}\n")


def test_wrong_option_ends_the_process_with_one_line():
    started = time.perf_counter()
    done = run("--cache-rate", 2)
    assert done.returncode == 2 and done.stdout == b""
    assert done.stderr.decode() == (
        "run_generate: cache_rate=2.0 is not allowed: it must be a number with 0 < cache_rate <= 1\n"
    )
    assert time.perf_counter() - started < 60


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "lruu"], "unknown name 'lruu'. Did you mean 'lru'"),
        (["--transport", "devise"], "transport='devise' is not allowed"),
        (["--scope", "layers"], "(did you mean 'layer'?)"),
        (["--contract", "atomic"], "contract='atomic' is not allowed"),
        (["--dtype", "int8"], "dtype='int8' is not allowed"),
        (["--expert-slots", "ten"], "--expert-slots='ten': give an integer"),
        (["--expert-slots", "8,0,8"], "expert_slots[1]=0 is not allowed"),
        (["--expert-slots", "20", "--cache-rate", "0.5"], "all set the size of the expert cache"),
        (["--expert-cache-bytes", "12XB"], "expert_cache_bytes='12XB' is not allowed"),
        (["--host-memory-bytes", "12 cows"], "host_memory_bytes='12 cows' is not allowed"),
        (["--host-memory-bytes", "9MB", "--transport", "device"], "What helps: transport='callback'"),
        (["--host-policy", "lruu"], "host_policy: unknown name 'lruu'"),
        (["--device-memory-ratio", "3"], "device_memory_ratio=3.0 is not allowed"),
        (["--seed", "-1"], "seed=-1 is not allowed"),
        (["--config", "{tmp}/none.json"], "cannot read configuration file"),
        (["--max-new-tokens", "0"], "max_new_tokens=0 is not allowed"),
        (["--temperature", "-1"], "temperature=-1.0 is not allowed"),
        (["--top-p", "1.5"], "top_p=1.5 is not allowed"),
        (["--greedy", "--top-k", "5"], "--top-k=5 has no effect"),
        (["--eos", "3", "--ignore-eos"], "contradict each other"),
        (["--link-gbps", "0"], "--link-gbps=0.0: give a positive rate"),
        (["--hbm-gbps", "nan"], "--hbm-gbps=nan: give a positive rate"),
        (["--batch", "0"], "--batch=0"),
        (["--verify", "--transport", "resident"], "choose --transport device or callback"),
        (["--prompt", "a", "--prompt-file", "b"], "both give a prompt"),
        (["--prompt-file", "{tmp}/none.txt"], "none.txt: No such file or directory"),
        (["--prompt-file", "{tmp}/empty.txt"], "the file is empty"),
        (["--prompt-file", "{tmp}/binary.txt"], "not UTF-8 text"),
        (["--prompt-file", "{tmp}/two.txt", "--batch", "3"], "has 2 lines that are not blank"),
        (["--json", "{tmp}/none/out.json"], "create it first"),
        (["--json", "{tmp}"], "is a directory"),
        (["--json", "/proc/out.json"], "the directory /proc cannot be written to"),
        (["--trace", "{tmp}/out.txt"], "must end in .npz"),
        (["--model", "{tmp}/none", "--prompt", "x"], "no such directory"),
        (["--model", "{tmp}"], "no prompt: give --prompt TEXT"),
        (["--chat"], "no prompt: give --prompt TEXT"),
        (["--prefetch", "gate-1", "--transport", "resident"], "use transport='device' or 'callback'"),
        (["--prefetch", "gate-2", "--transport", "device"], "prefetch='gate-2'"),
        (["--prefetch", "gate-one"], "prefetch='gate-one': predictor: unknown name"),
        (["--prefetch-budget", "1MB"], "prefetch_budget=1000000 has no effect without a predictor"),
        (["--no-prefetch-shutoff", "--warm-start", "x"], "prefetch_shutoff=False and warm_start='x' have no effect"),
        (["--system", "Be kind."], "--system is for conversations: add --chat"),
        (["--chat-template", "{tmp}/two.txt"], "--chat-template is for conversations"),
        (["--chat", "--chat-template", "{tmp}/none.jinja"], "none.jinja: No such file or directory"),
        (["--chat", "--chat-template", "{tmp}/binary.txt"], "not UTF-8 text"),
    ],
)  # fmt: skip
def test_wrong_options_are_explained_before_loading(script, tmp_path, options, message):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "two.txt").write_text("one\n\ntwo\n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe")
    result = CliRunner().invoke(script.app, [option.format(tmp=tmp_path) for option in options])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert result.stderr.startswith("run_generate: ") and result.stderr.count("\n") == 1


def test_a_checkpoint_without_a_tokenizer_is_one_line(script, tiny):
    result = CliRunner().invoke(script.app, ["--model", str(tiny("mixtral")), "--prompt", "hi"])
    assert result.exit_code == 2
    assert result.stderr.startswith("run_generate: mixtral has no tokenizer") and result.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def bytes_model(tiny, tmp_path_factory):
    """A tiny model whose tokenizer has no chat template."""
    directory = tmp_path_factory.mktemp("model") / "bytes"
    shutil.copytree(tiny("mixtral"), directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


def test_a_chat_is_what_the_model_answers(script, bytes_model, tmp_path):
    from moe_jax import MoE

    (tmp_path / "chat.jinja").write_text("{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}A:")
    (tmp_path / "questions.txt").write_text("Who?\nAnd what?\n")
    options = ["--model", bytes_model, "--chat", "--system", "Hi", "--chat-template", tmp_path / "chat.jinja"]
    options += ["--prompt-file", tmp_path / "questions.txt", "--batch", 2, "--max-new-tokens", 5, "--ignore-eos"]
    options += ["--json", tmp_path / "out.json", "--link-gbps", 50, "--hbm-gbps", 4000, "--cache-rate", 0.5]
    result = CliRunner().invoke(script.app, [*map(str, options), "--transport", "callback"])
    assert result.exit_code == 0, result.stderr
    out = json.loads((tmp_path / "out.json").read_text())
    rendered = ["system:Hi\nuser:Who?\nA:", "system:Hi\nuser:And what?\nA:"]
    assert [s["prompt"] for s in out["sequences"]] == ["Who?", "And what?"]
    assert [s["prompt_tokens"] for s in out["sequences"]] == [len(text) for text in rendered]
    assert "Who?\n" in result.stderr
    config = {"transport": "callback", "cache_rate": 0.5, "progress": False}
    with MoE(bytes_model, config) as moe:
        answers = moe.generate(rendered, 5, eos_token_id=[])
    assert [s["text"] for s in out["sequences"]] == answers
    assert all(answer in result.stdout for answer in answers)


def test_a_chat_without_a_template_is_one_line(script, bytes_model):
    result = CliRunner().invoke(script.app, ["--model", str(bytes_model), "--chat", "--prompt", "hi"])
    assert result.exit_code == 2
    assert result.stderr.startswith("run_generate: --chat: the tokenizer has no chat template")
    assert result.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def translator(tiny, tmp_path_factory):
    """A tiny encoder-decoder with a tokenizer."""
    directory = tmp_path_factory.mktemp("model") / "translator"
    shutil.copytree(tiny("nllb_moe"), directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


def test_an_encoder_decoder_begins_with_the_forced_token(script, translator, tmp_path):
    options = ["--model", translator, "--prompt", "Bonjour", "--forced-bos", "D", "--max-new-tokens", 3, "--ignore-eos"]
    options += ["--json", tmp_path / "out.json", "--link-gbps", 50, "--hbm-gbps", 4000, "--cache-rate", 0.5]
    result = CliRunner().invoke(script.app, [*map(str, options), "--transport", "callback"])
    assert result.exit_code == 0, result.stderr
    out = json.loads((tmp_path / "out.json").read_text())
    (sequence,) = out["sequences"]
    token = byte_tokenizer().get_vocab()["D"]
    assert sequence["new_ids"][0] == token == out["sampling"]["forced_bos_token_id"]
    assert len(sequence["new_ids"]) == 3 and sequence["prompt_tokens"] == len("Bonjour")
    moved = out["figures"]["encoder_bytes_moved"]
    assert moved == out["stats"]["last"]["encoder"]["bytes_moved"] > 0
    assert "encoder: " in result.stderr


@pytest.mark.parametrize(
    "forced, message",
    [
        ("deu_Latn", "--forced-bos='deu_Latn' is no token of this tokenizer"),
        ("256", "forced_bos_token_id=256 is outside the vocabulary: ids go from 0 to 255"),
    ],
)
def test_a_forced_token_that_is_none_is_one_line(script, translator, forced, message):
    result = CliRunner().invoke(script.app, ["--model", str(translator), "--prompt", "hi", "--forced-bos", forced])
    assert result.exit_code == 2
    assert message in result.stderr and result.stderr.count("\n") == 1


def test_a_decoder_has_no_forced_token(script, bytes_model):
    result = CliRunner().invoke(script.app, ["--model", str(bytes_model), "--prompt", "hi", "--forced-bos", "7"])
    assert result.exit_code == 2
    assert "forced_bos_token_id=7 is for encoder-decoder models" in result.stderr


def test_help_explains_every_option_without_starting_jax():
    # Its directory is in the path, as `python SCRIPT` puts it there.
    code = "import sys, runpy; sys.argv = ['run_generate', '--help']; sys.path.insert(0, {!r})\n"
    code += "try: runpy.run_path({!r}, run_name='__main__')\n"
    code = (
        code.format(str(SCRIPT.parent), str(SCRIPT)) + "except SystemExit as end: print('jax' in sys.modules, end.code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), timeout=60)
    assert done.stdout.rstrip().endswith("False 0")
    names = """
        model prompt prompt-file batch chat system chat-template
        max-new-tokens do-sample greedy temperature top-k top-p min-p repetition-penalty
        stop eos ignore-eos seed transport policy expert-slots cache-rate expert-cache-bytes scope contract
        host-memory-bytes host-policy device-memory-ratio offload-path dtype config json trace link-gbps hbm-gbps verify
    """
    for name in names.split():
        assert f"--{name}" in done.stdout


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (1436750, "1.44 MB"), (25_165_824, "25.2 MB"), (2.5e12, "2.5e+03 GB")],
)
def test_sizes_for_people(script, value, text):
    from _report import size

    assert size(value) == text
