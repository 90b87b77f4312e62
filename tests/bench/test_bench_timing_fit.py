"""The commands that show how good step times are: what they print, and what they say where the data is not."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from bench import timing_fit, timing_kernels, timing_measured, timing_residuals
from bench.timing_data import load_serving_runs

LAYOUT = ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size", "num_workers", "batch_size")
COLUMNS = [
    *(
        "silicon_data_source",
        "backend",
        "backend_version",
        "model_path",
        "system",
        "mode",
        "isl",
        "osl",
        "moe_quant_mode",
    ),
    *(prefix + column for prefix in ("", "prefill_", "decode_") for column in LAYOUT),
    *("silicon_ttft_ms", "silicon_tpot_ms"),
]
DENSE = {
    "silicon_data_source": "source_file=x.csv; silicon_concurrency=8; measured=2025",
    "backend": "vllm",
    "backend_version": "1",
    "model_path": "meta-llama/Llama-3.1-70B",
    "system": "h100_sxm",
    "mode": "agg",
    "isl": "1024",
    "osl": "512",
    "moe_quant_mode": "fp8",
    "batch_size": "8.0",
    "tp_size": "4.0",
    "silicon_ttft_ms": "100",
    "silicon_tpot_ms": "12",
}
MIXTURE = DENSE | {
    "model_path": "deepseek-ai/DeepSeek-R1",
    "system": "h200_sxm",
    "tp_size": "1.0",
    "silicon_ttft_ms": "300",
}


def write(folder: Path, *rows: dict[str, str]) -> Path:
    path = folder / "aiconfigurator" / "silicon_sample.csv"
    path.parent.mkdir(parents=True)
    with path.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.DictWriter(lines, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_a_run_is_read_with_its_layout(tmp_path: Path) -> None:
    (run,) = load_serving_runs(write(tmp_path, DENSE))
    assert run.group == "llama-3.1-70b x4"
    assert (run.loop.num_clients, run.loop.input_tokens, run.loop.output_tokens) == (8, 1024, 512)
    assert (run.ttft_s, run.tpot_s) == (0.1, 0.012)
    assert run.loop.prefill is run.loop.decode


@pytest.mark.parametrize(
    ("columns", "gpus", "replicas", "clients"),
    [
        ({"tp_size": "8", "moe_ep_size": "8"}, 8, 1, 8),
        ({"attention_dp_size": "8", "moe_ep_size": "8"}, 8, 8, 64),  # the batch is that of one replica
        ({"tp_size": "64", "moe_tp_size": "8", "moe_ep_size": "8"}, 8, 1, 8),  # n x n stands for n
        ({"attention_dp_size": "64", "moe_tp_size": "8", "moe_ep_size": "8", "batch_size": "1"}, 8, 8, 64),
        ({"tp_size": "4", "attention_dp_size": "4", "moe_ep_size": "16", "batch_size": "2"}, 4, 4, 8),
        ({"tp_size": "2", "moe_tp_size": "4", "silicon_data_source": "a; silicon_concurrency=8"}, 4, 2, 8),
    ],
)
def test_data_and_expert_parallel_layouts_are_told_apart(
    tmp_path: Path, columns: dict[str, str], gpus: int, replicas: int, clients: int
) -> None:
    (run,) = load_serving_runs(write(tmp_path, MIXTURE | columns))
    assert (run.loop.decode.tp, run.loop.decode.attention_replicas, run.loop.num_clients) == (gpus, replicas, clients)


def test_a_disaggregated_run_has_two_kinds_of_workers(tmp_path: Path) -> None:
    row = MIXTURE | {
        "mode": "disagg",
        "batch_size": "",
        "prefill_num_workers": "1",
        "prefill_attention_dp_size": "16",
        "decode_batch_size": "10",
        "decode_num_workers": "2",
        "decode_tp_size": "16",
    }
    (run,) = load_serving_runs(write(tmp_path, row))
    assert run.loop.disaggregated
    assert run.loop.num_clients == 4  # the source names 8 for both decode workers
    assert run.loop.decode_per_prefill == 2
    assert (run.loop.prefill.attention_replicas, run.loop.decode.attention_replicas) == (16, 1)


def test_a_run_counts_once_and_only_if_its_clients_are_known(tmp_path: Path) -> None:
    planned = DENSE | {"silicon_data_source": "source_file=y.csv", "silicon_ttft_ms": "101"}
    renamed = MIXTURE | {"model_path": "deepseek-ai/DeepSeek-V3"}
    assert len(load_serving_runs(write(tmp_path, DENSE, DENSE, planned, MIXTURE, renamed))) == 2


def test_the_table_and_its_json_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    others = [DENSE | {"tp_size": str(tp), "silicon_tpot_ms": str(30 - tp)} for tp in (2, 8)]
    write(tmp_path, DENSE, *others, MIXTURE, MIXTURE | {"tp_size": "8", "silicon_tpot_ms": "13"})
    assert timing_fit.main(["--calibration", str(tmp_path), "--json", str(tmp_path / "out.json")]) == 0
    dense, mixture = json.loads((tmp_path / "out.json").read_text())
    assert [group["name"] for group in dense["held_out"]] == [
        "llama-3.1-70b x2",
        "llama-3.1-70b x4",
        "llama-3.1-70b x8",
    ]
    assert mixture["name"] == "mixture"
    printed = capsys.readouterr().out
    for group in (*dense["held_out"], *mixture["held_out"]):
        assert f"| {group['name']} | {group['num_runs']} | {group['tpot_median']:.1%} |" in printed
    assert f"memory={dense['coefficients']['memory']:.4g}" in printed


def test_without_the_data_every_command_says_where_to_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BATON_TRACES", str(tmp_path / "nowhere"))
    for code in (timing_fit.main([]), timing_measured.main(), timing_kernels.main(), timing_residuals.main(["x"])):
        assert code == 2
    assert capsys.readouterr().err.count("the calibration data is not here") == 4


def test_residuals_need_a_group_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "calibration", DENSE, DENSE | {"tp_size": "2", "silicon_tpot_ms": "20"})
    monkeypatch.setenv("BATON_TRACES", str(tmp_path))
    assert timing_residuals.main(["llama-3.1-70b x3"]) == 2
    assert '"llama-3.1-70b x4"' in capsys.readouterr().err
    assert timing_residuals.main(["llama-3.1-70b x4"]) == 0
    assert "| llama-3.1-70b x4 | vllm 1 | 1024 | 8 | 1 |" in capsys.readouterr().out
