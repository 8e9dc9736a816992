"""experiments/bench_kernels.py and tune_kernels.py: every kernel runs, a wrong result fails, tiles are found."""

import concurrent.futures
import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))
import _case
import _gemm_cases
import _kernel_cases
import bench_kernels
import tune_kernels

from moe_jax.floors import Ceilings
from pallas_kernels import tile_table
from pallas_kernels.dequant_gemm.arg_specs import ARG_SPECS
from pallas_kernels.formats import FP8, INT4, MXFP4, Dense

RATES = bench_kernels.Rates(Ceilings(50.0, 4000.0, "given", "given"), 700.0)


@pytest.fixture(autouse=True)
def few_repeats(monkeypatch):
    """The interpreter takes seconds for some calls."""
    monkeypatch.setattr(bench_kernels, "REPEATS", 2)


def bench(tmp_path, *arguments):
    """(exit code, rows of the JSON file, what was printed) of a dry run."""
    path = tmp_path / "kernels.json"
    result = CliRunner().invoke(bench_kernels.app, ["--dry", "--out", str(path), *arguments])
    assert result.exit_code in (0, 1), result.output
    return result.exit_code, json.loads(path.read_text())["rows"], result.output


@pytest.mark.slow
def test_every_kernel_runs_and_is_right(tmp_path, monkeypatch):
    def first_of_each(batches, small):
        found = {}
        for entry in _kernel_cases.entries(batches, small):
            found.setdefault(entry.op, entry)
        return list(found.values())

    monkeypatch.setattr(bench_kernels, "entries", first_of_each)
    code, rows, text = bench(tmp_path, "--verbose")
    assert code == 0, text
    assert {row["op"] for row in rows} == {entry.op for entry in _kernel_cases.entries((1,), True)} and len(rows) == 13
    for row in rows:
        assert row["status"] == "ok" and 0 <= row["error"] <= row["tolerance"] and row["op"] in text
        assert 0 < row["us_least"] <= row["us"] <= row["us_most"] and row["xla_us"] > 0
        assert row["run_seconds"] > 0 and row["compile_seconds"] > 0
        assert (row["gbps"] is None) == (row["moved_bytes"] == 0) and (row["tflops"] is None) == (row["flops"] == 0)
        assert "aim_us" not in row  # a machine without the card has no ceilings


def test_wrong_results_and_failures_exit_1_and_cost_nothing_else(tmp_path, monkeypatch):
    right = _kernel_cases.router_topk

    def wrong(scores, k, **options):
        values, ids = right(scores, k, **options)
        return values, ids.at[0, 0].add(1) if len(scores) == 1 else ids

    def broken(*arguments, **options):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(_kernel_cases, "router_topk", wrong)
    monkeypatch.setattr(_kernel_cases, "sinkhorn_kernel", broken)
    code, rows, text = bench(tmp_path, "--op", "router_topk,sinkhorn", "--no-xla")
    assert code == 1
    status = {(row["op"], row["size"]): row["status"] for row in rows}
    assert status == {
        ("router_topk", "T1"): "wrong",
        ("router_topk", "T4096"): "ok",
        ("sinkhorn", "T1"): "failed",
        ("sinkhorn", "T4096"): "failed",
    }
    assert "WRONG: router_topk qwen3-30b-a3b f32 T1: error 1.00e+00" in text and "no such kernel" in text


@pytest.mark.parametrize("planted", ["shifted", "nan"])
def test_a_wrong_expert_is_seen(tmp_path, monkeypatch, planted):
    right = _kernel_cases.decode.expert_ffn_decode

    def wrong(x, rows, *operands, **options):
        y, banks = right(x, rows + 1 if planted == "shifted" else rows, *operands, **options)
        return (y if planted == "shifted" else y.at[-1, 0, -1].set(jnp.nan)), banks

    monkeypatch.setattr(_kernel_cases.decode, "expert_ffn_decode", wrong)
    select = ("--op", "expert_ffn", "--shape", "olmoe-1b-7b", "--batch", "1", "--no-xla")
    code, rows, _ = bench(tmp_path, *select)
    assert code == 1 and [row["status"] for row in rows] == ["wrong"]


def test_cases_of_real_size_rotate_over_512_mb():
    entries = _kernel_cases.entries((1, 8, 64), False)
    assert len({entry.name for entry in entries}) == len(entries)
    at_one_row = {entry.name: entry.build().sets for entry in entries if entry.name.endswith(" M1")}
    assert len(at_one_row) == len(ARG_SPECS)
    for entry in entries:
        case = entry.build()
        assert 1 <= case.sets <= _case.MOST_SETS, entry.name
        if case.moved:
            assert case.sets >= 2 and case.sets * case.moved >= 512_000_000, entry.name
        if case.flops and entry.op == "dequant_gemm":
            assert case.sets == at_one_row[entry.name.replace("M4096", "M1")] and case.aim is None
        elif case.flops:
            experts = _kernel_cases.experts_of(entry.shape, entry.format, False)
            assert case.sets * experts.E * experts.row_bytes >= 512_000_000, entry.name
    qwen = {entry.size: entry.build() for entry in entries if entry.name.startswith("expert_ffn qwen3-30b-a3b bf16")}
    gemm = next(entry.build() for entry in entries if entry.name == "dequant_gemm mixtral-8x7b int4z qkv M1")
    assert gemm.moved == 6144 * (4096 // 2 + 4096 // 128 * 2 + 4096 // 128 // 2) and gemm.aim == 0.65
    assert [(size, case.moved // (3 * 2048 * 768 * 2), case.aim) for size, case in qwen.items()] == [
        ("B1", 8, 0.85),
        ("B8", 52, None),  # of 128 experts, 64 choices leave out (1 - 1/16)^8 of them
        ("B64", 126, None),
    ]


@pytest.mark.slow
def test_every_format_of_dense_matrices_is_right_and_a_wrong_one_seen(tmp_path, monkeypatch):
    code, rows, text = bench(tmp_path, "--op", "dequant_gemm", "--batch", "8", "--no-xla")
    assert code == 0, text
    # One line a format, with 8 rows and with many.
    assert {row["format"] for row in rows} == {line[1] for line in _gemm_cases.gemm_lines(1, False)}
    assert {row["size"].split(" ")[1] for row in rows} == {"M8", "M4096"}
    right = _gemm_cases.kernel.dequant_gemm
    monkeypatch.setattr(_gemm_cases.kernel, "dequant_gemm", lambda x, *rest, **options: right(-x, *rest, **options))
    code, rows, _ = bench(tmp_path, "--op", "dequant_gemm", "--format", "int4", "--batch", "1", "--no-xla")
    assert code == 1 and [row["status"] for row in rows] == ["wrong"] * 2


def test_names_of_the_formats_of_dense_matrices():
    forms = Dense(), FP8(), MXFP4(), INT4(128), INT4(32, zeros=True), INT4(128, order=True)
    assert [_gemm_cases.label(form) for form in forms] == ["bf16", "fp8", "mxfp4", "int4", "int4zg32", "int4o"]


def test_aims():
    case = dict(flops=0, moved=40_000_000, memory="hbm", aim=0.8, starts=2)
    found = bench_kernels.against(SimpleNamespace(**case), 20.0, RATES)
    assert found == pytest.approx({"floor_us": 10.0, "share": 0.5, "aim_us": 17.5})
    case |= dict(flops=7_000_000_000, moved=0, aim=None)
    assert bench_kernels.against(SimpleNamespace(**case), 40.0, RATES) == pytest.approx(
        {"floor_us": 10.0, "share": 0.25}
    )
    assert bench_kernels.against(SimpleNamespace(flops=0, memory=None), 1.0, RATES) == {}


def test_the_end_of_the_table_names_what_was_missed(capsys):
    line = dict(op="expert_ffn", shape="m", format="bf16", size="B1", aim_us=10.0)
    bench_kernels.closing([line | dict(status="ok"), line | dict(status="aim missed", us=12.0)])
    text = capsys.readouterr().out
    assert "aim missed: expert_ffn m bf16 B1: 12.0 us, asked for 10.0" in text and "1 of 2 aims met" in text


def test_the_time_limit_leaves_lines_out(tmp_path, monkeypatch):
    begun, over = threading.Event(), threading.Event()
    wait = concurrent.futures.wait

    def late(futures, timeout):
        """The limit begins when the first job has, however busy the machine is; the job ends after the last one."""
        assert begun.wait(60)
        futures[-1].add_done_callback(lambda _: over.set())
        return wait(futures, timeout)

    def slow():
        begun.set()
        over.wait(60)

    with monkeypatch.context() as patch:
        patch.setattr(concurrent.futures, "wait", late)
        futures = bench_kernels.prepare_all([slow, slow, slow], 1, 0.05)
    assert [future.cancelled() for future in futures] == [False, True, True]
    monkeypatch.setattr(bench_kernels, "prepare_all", lambda jobs, workers, limit: futures[1:])
    code, rows, text = bench(tmp_path, "--op", "slot_plan")
    assert (
        code == 1
        and [row["status"] for row in rows] == ["not run"] * 2
        and "not run: slot_plan qwen3-30b-a3b i32 miss0: the time limit was reached" in text
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dry", "--op", "gemm"], "--op gemm: choose from"),
        (["--dry", "--batch", "1,x"], "--batch 1,x: give numbers"),
        (["--dry", "--op", "sinkhorn", "--shape", "dbrx"], "together"),
        (["--op", "sinkhorn"], "need an NVIDIA GPU"),
    ],
)
def test_bad_arguments(arguments, message):
    result = CliRunner(env={"COLUMNS": "160"}).invoke(bench_kernels.app, arguments)
    assert result.exit_code == 2 and message in " ".join(result.stderr.split())


def tune(*arguments):
    return CliRunner(env={"COLUMNS": "160"}).invoke(tune_kernels.app, ["--dry", *map(str, arguments)])


def test_tuning_writes_the_fastest_tiles(tmp_path, monkeypatch):
    out = tmp_path / "tiles.json"
    out.write_text('{"kept": 1}')
    tried = [{}, {"gate_up": {"block_out": 8}}, {"down": {"num_warps": 2}}, {"down": {"block_out": 3}}]
    monkeypatch.setattr(tune_kernels, "variants", lambda *arguments: tried)
    right, times = tune_kernels.measure, iter([9.0, 5.0, 7.0, 3.0])
    monkeypatch.setattr(tune_kernels, "measure", lambda *given: right(*given) | {"us": next(times)})
    result = tune("--op", "expert_ffn", "--shape", "olmoe-1b-7b", "--out", out)
    assert result.exit_code == 0, result.output
    # 3 divides nothing; the two best are run together, and were the fastest.
    assert "must be a power of two" in result.output
    found = json.loads(out.read_text())
    tiles = tune_kernels.decode_tiles(128, 256, 1)
    tiles["gate_up"]["block_out"], tiles["down"]["num_warps"] = 8, 2
    key = "expert_ffn Dense() [D256 F128 silu 2-byte B1] cpu"
    assert found == {"kept": 1, key: {"tiles": tiles, "us": 3.0, "before_us": 9.0}}
    # The kernels take them from the table.
    assert tune_kernels.decode_tiles(128, 256, 1) != tiles
    monkeypatch.setattr(tile_table, "FILE", out)
    assert tune_kernels.decode_tiles(128, 256, 1) == tiles
    assert tune_kernels.decode_tiles(128, 256, 2) != tiles


def test_tuning_what_is_read_from_pinned_memory_keeps_the_other_tiles(tmp_path, monkeypatch):
    out = tmp_path / "tiles.json"
    monkeypatch.setattr(tile_table, "FILE", out)
    key = "expert_ffn MXFP4() [D256 F128 clamped_swiglu 2-byte B1] cpu"
    tiles = {"gate_up": {"block_out": 4}, "down": {"num_warps": 2}}
    out.write_text(json.dumps({key: {"tiles": tiles, "us": 2.0}}))
    other = tmp_path / "more.json"
    other.write_text(out.read_text())
    times = iter([9.0, 5.0, 7.0])
    right = tune_kernels.measure
    monkeypatch.setattr(tune_kernels, "measure", lambda *given: right(*given) | {"us": next(times, 4.0)})
    result = tune("--op", "expert_ffn_deposit", "--shape", "gpt-oss-120b", "--most", 3, "--out", other)
    assert result.exit_code == 0, result.output
    entry = json.loads(other.read_text())[key]
    assert (entry["us"], entry["deposit_us"], entry["deposit_before_us"]) == (2.0, 5.0, 9.0)
    assert entry["tiles"]["gate_up"]["unroll_missing"] > 1 and entry["tiles"]["gate_up"]["block_out"] == 4
    assert entry["tiles"]["down"] | {"unroll_missing": 1} == entry["tiles"]["down"]
    # A table with tiles that the kernels do not run with would get figures of others.
    other.write_text(json.dumps({key: {"tiles": {"gate_up": {"block_out": 8}}, "us": 2.0}}))
    result = tune("--op", "expert_ffn_deposit", "--shape", "gpt-oss-120b", "--most", 1, "--out", other)
    assert result.exit_code == 2 and "than the kernels use" in " ".join(result.stderr.split())


def test_tuning_attention(tmp_path, monkeypatch):
    monkeypatch.setattr(tune_kernels, "variants", lambda *arguments: [{}, {"tokens": 16, "splits": 4}])
    out = tmp_path / "tiles.json"
    size = ("--size", "B1 S4096")
    result = tune("--op", "paged_attention", "--shape", "gpt-oss-120b,deepseek-v3", *size, "--out", out)
    assert result.exit_code == 0, result.output
    assert list(json.loads(out.read_text())) == [
        "paged_attention bfloat16 [N16 G2 H16 V16 P64 B1 S128] cpu",
        "paged_attention bfloat16 [N128 G1 H128+16 V128 P64 B1 S128] cpu",
    ]


@pytest.mark.parametrize("name", ["gpt-oss-120b", "deepseek-v3"])
def test_tiles_of_attention_fit_and_the_nearest_come_first(name):
    chosen = bench_kernels.select("1", "paged_attention", name, None, False)
    (entry,) = [entry for entry in chosen if entry.size == "B1 S32768"]
    base = tune_kernels.class_of(entry, 1, False)[1]
    tried = tune_kernels.variants(entry, base, 1, False)[1:]
    changed = [sum(base[name] != tiles[name] for name in base if name != "splits") for tiles in tried]
    assert max(changed[:4]) == 1 and changed[-1] > 2
    wide = name == "deepseek-v3"
    for tiles in tried:
        row = tiles["tokens"] * tiles["unroll"] * 2 * (576 if wide else 128)
        assert (tiles["num_stages"] - 1) * row + tiles["heads"] * 2 * (576 if wide else 64) < 227 * 1024
        assert tiles["heads"] < 64 or (tiles["num_warps"] == 8 and tiles["unroll"] == 1)
    heads, splits = ({16, 32, 64}, {8, 16, 32, 64, 128, 256}) if wide else ({16}, {8, 16, 32, 64})
    assert {tiles["heads"] for tiles in tried} == heads and {tiles["splits"] for tiles in tried} == splits


def test_tuning_a_dense_matrix(tmp_path, monkeypatch):
    monkeypatch.setattr(tune_kernels, "variants", lambda *arguments: [{}, {"splits": 2}, {"block_in": 100}])
    out = tmp_path / "tiles.json"
    arguments = ("--shape", "deepseek-v3", "--format", "fp8", "--size", "kv_a M1")
    result = tune("--op", "dequant_gemm", *arguments, "--out", out)
    assert result.exit_code == 0 and "must be a power of two from 16 to 128" in result.output
    ((key, entry),) = json.loads(out.read_text()).items()
    assert key == "dequant_gemm FP8(block=128) [N96 D256 2-byte M16] cpu"
    assert entry["tiles"] in (tune_kernels.gemm_tiles(96, 256, 1, FP8()) | {"splits": n} for n in (1, 2))


def test_variants_differ_and_fit():
    for entry in _kernel_cases.entries((1,), False):
        if entry.op not in tune_kernels.TUNABLE:
            continue
        base = tune_kernels.class_of(entry, 1, False)[1]
        found = tune_kernels.variants(entry, base, 1, False)
        least = 2 if entry.op == "expert_ffn_deposit" else 11
        assert found[0] == {} and least <= len(found) < 160, (entry.name, len(found))
        assert len({json.dumps(tiles, sort_keys=True) for tiles in found}) == len(found)


def test_tuning_refuses(tmp_path):
    bad = tmp_path / "bad.json"
    bad.write_text("[1]")
    for arguments, message in (
        (("--op", "fetch_rows"), "kernels with tiles are dequant_gemm"),
        (("--op", "paged_attention", "--size", "B3"), "no line has it"),
        (("--op", "expert_ffn_deposit", "--batch", "4"), "is measured with 1 token"),
        (("--op", "paged_attention", "--out", bad), "must hold a JSON object"),
        (("--op", "paged_attention", "--out", tile_table.FILE), "a dry run measures nothing"),
    ):
        result = tune(*arguments)
        assert result.exit_code == 2 and message in " ".join(result.stderr.split()), result.output
