"""experiments/plan.py: a plan from a name or a config.json alone, its estimates, and refusals."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))
import plan

HARDWARE = ("--device-memory", "80GiB", "--host-memory", "128GiB")
RATES = ("--link-gbps", "50", "--memory-gbps", "1000", "--link-efficiency", "0.8", "--memory-efficiency", "0.5")


def run(tmp_path, *arguments):
    """(the JSON file's content, what was printed)."""
    path = tmp_path / "plan.json"
    result = CliRunner(env={"COLUMNS": "160"}).invoke(plan.app, [*map(str, arguments), "--json", str(path)])
    assert result.exit_code == 0, result.output
    return json.loads(path.read_text()), result.output


def refusal(*arguments):
    result = CliRunner().invoke(plan.app, [*map(str, arguments)])
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1, result.output
    return result.stderr


def test_a_release_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    found, text = run(tmp_path, "qwen3-30b-a3b", *HARDWARE, *RATES, "--cache-rate", "0.25", "--disk-gbps", "2")
    memory, row = found["memory"], 3 * 2048 * 768 * 2
    assert memory["device_bytes"] == 40 << 30
    assert (found["slots"]["total"], memory["slot_bytes"]) == (1536, 1536 * row)
    assert (memory["pool_bytes"], found["spare_rows"]) == (6144 * row, 64)
    assert memory["transfer_bytes"] == 1 << 30, "above the embedding, 151936 x 2048 in bfloat16"
    [line] = [line for line in text.splitlines() if "transfers" in line]
    assert "1,073,741,824" in line and "kept by XLA" in line
    parts = ("dense", "kv", "state", "workspace", "staging", "prefetch", "slot", "spare")
    device = [memory[f"{part}_bytes"] for part in parts]
    assert sum(device) == found["total_device_bytes"] <= found["allowed_device_bytes"] == (30 << 30)
    assert found["disk"]["load_seconds"] == pytest.approx((memory["dense_bytes"] + 6144 * row) / 2e9)
    # 48 layers use 8 experts each; 1023 tokens before the one whose step is estimated, and itself.
    rows = {line["hit_rate"]: line for line in found["estimate"]["rows"]}
    assert list(rows) == [0.25, 0.5, 0.75, 0.9, 0.95, 1.0]
    half = rows[0.5]
    assert half["bytes_moved"] == 192 * row and half["link_floor_ms"] == pytest.approx(192 * row / 50e6)
    read = memory["dense_bytes"] - 151936 * 2048 * 2 + 384 * row + 1024 * 98304
    assert half["memory_floor_ms"] == pytest.approx(read / 1e9)
    assert half["ms_per_token"] == pytest.approx(half["link_floor_ms"] / 0.8 + half["memory_floor_ms"] / 0.5)
    assert half["tokens_per_second"] == pytest.approx(1e3 / half["ms_per_token"])
    assert rows[1.0]["bytes_moved"] == 0
    assert (
        "ESTIMATE, not a measurement" in text
        and "25.0% = slots" in text
        and "Transport device: " in text
        and "1536 of 6144 experts" in text
    )


def test_a_config_alone_gives_the_plan_of_its_files(tmp_path, tiny):
    whole, alone = tiny("qwen3_moe_gptq"), tmp_path / "alone"
    alone.mkdir()
    shutil.copy(whole / "config.json", alone)
    options = ("--max-batch", 2, "--expert-slots", 6)
    here = run(tmp_path, alone, *options)[0]["memory"]
    assert (here["device_bytes"], here["transfer_bytes"]) == (None, 0)
    plans = [run(tmp_path, directory, *options, "--device-memory", "8GiB")[0] for directory in (whole, alone)]
    assert plans[0]["memory"]["transfer_bytes"] > 0
    assert plans[0]["memory"] == plans[1]["memory"] and plans[0]["experts"] == plans[1]["experts"]
    assert plans[0]["experts"]["format"]["down"] == "int4"
    assert [p["disk"]["counted"] for p in plans] == [True, False]
    assert plans[0]["disk"]["weights_bytes"] == sum(f.stat().st_size for f in whole.glob("*.safetensors"))


def test_what_config_json_leaves_out_is_said(tmp_path):
    found, text = run(tmp_path, "gpt-oss-20b", *HARDWARE, "--hit-rate", "0.3")
    assert found["dtype"] == "bfloat16" and "names no dtype: bfloat16 assumed" in text
    assert found["transport"]["name"] == "resident" and found["memory"]["pool_bytes"] == 0
    assert [row["hit_rate"] for row in found["estimate"]["rows"]] == [1.0], "a resident model misses nothing"
    found, _ = run(tmp_path, "gpt-oss-20b", *HARDWARE, "--hit-rate", "0.3", "--cache-rate", "0.5")
    assert [row["hit_rate"] for row in found["estimate"]["rows"]] == [0.3, 0.5]


def test_experts_that_stay_on_disk(tmp_path):
    options = (*RATES, "--cache-rate", "0.25", "--host-memory-bytes", "32GB")
    found, text = run(tmp_path, "qwen3-30b-a3b", *HARDWARE, *options, "--disk-gbps", "4")
    row = 3 * 2048 * 768 * 2
    rows = found["host_rows"]
    assert found["transport"]["name"] == "callback" and rows == 32 * 10**9 // row
    assert rows * row < found["memory"]["pool_bytes"] <= 32 * 10**9
    assert found["disk"]["why"] == f"{rows} of 6144 experts fit into host_memory_bytes=32000000000"
    assert found["disk"]["load_seconds"] == pytest.approx(found["memory"]["dense_bytes"] / 4e9)
    share = 1 - (rows - 1536) / (6144 - 1536)
    assert found["estimate"]["disk_share"] == pytest.approx(share)
    half = next(line for line in found["estimate"]["rows"] if line["hit_rate"] == 0.5)
    assert half["bytes_read"] == pytest.approx(192 * row * share, rel=1e-6)
    assert half["disk_ms"] == pytest.approx(half["bytes_read"] / 4e6)
    without = half["link_floor_ms"] / 0.8 + half["memory_floor_ms"] / 0.5
    assert half["ms_per_token"] == pytest.approx(without + half["disk_ms"])
    assert "the others are read from disk when they are needed" in " ".join(text.replace("│", " ").split())
    found, text = run(tmp_path, "qwen3-30b-a3b", *HARDWARE, *options)
    assert found["estimate"]["rows"][0]["disk_ms"] is None and "--disk-gbps" in text
    found, text = run(tmp_path, "qwen3-30b-a3b", *HARDWARE, *RATES, "--cache-rate", "0.25")
    assert (found["host_rows"], found["disk"]["why"], found["estimate"]["disk_share"]) == (6144, None, 0)
    assert {line["disk_ms"] for line in found["estimate"]["rows"]} == {0.0} and "read a token" not in text


def test_what_does_not_fit_or_is_not_known_is_one_line():
    # Beside the experts, 2 GiB for transfers of its embedding, 129280 x 7168 in bfloat16.
    assert "host memory is 532520842036 bytes too small" in refusal("deepseek-v3", *HARDWARE, "--transport", "device")
    assert "set host_memory_bytes to at least" in refusal("deepseek-v3", *HARDWARE, "--host-memory-bytes", "1GB")
    small = refusal("qwen3-235b-a22b", "--device-memory", "24GiB", "--host-memory", "1TiB")
    assert "device memory is" in small and "bytes too small" in small and "What helps: " in small
    assert "did you mean mixtral-8x7b?" in refusal("mixtral8x7b", *HARDWARE)
    assert "cache_rate=1.5 is not allowed" in refusal("olmoe-1b-7b", *HARDWARE, "--cache-rate", "1.5")
    assert "--link-gbps=0.0 is not allowed" in refusal("olmoe-1b-7b", *HARDWARE, "--link-gbps", "0")
    assert "--hit-rate=2.0 is not allowed" in refusal("olmoe-1b-7b", *HARDWARE, "--hit-rate", "2")
    assert "--device-memory='80Gi'" in refusal("olmoe-1b-7b", "--device-memory", "80Gi")


def test_a_file_in_the_place_of_a_directory_or_of_the_output_is_named(tmp_path, tiny):
    config = tiny("qwen3_moe") / "config.json"
    assert f"is a file: give {config.parent}, the directory of" in refusal(config)
    assert "--json=/proc/plan.json: the directory /proc cannot be written to" in refusal(
        "olmoe-1b-7b", *HARDWARE, "--json", "/proc/plan.json"
    )
    assert "there is no directory" in refusal("olmoe-1b-7b", *HARDWARE, "--json", tmp_path / "none" / "plan.json")
