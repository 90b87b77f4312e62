"""`baton up --emulate`: what it makes of the flags, and what it refuses."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest

from baton.config import ClusterConfig, EmulationConfig, EngineConfig, KVTransferConfig, ModelConfig
from baton.errors import ConfigError
from cli.checks import check_context, check_memory
from cli.emulation import as_emulated, describe
from cli.main import main
from cli.options import add_config_flags, load_config
from engine.timing.hardware import gpu_names
from engine.timing.shapes import model_names
from tests.worker.scripted_worker import SPEC

LLAMA_70B = ("--emulate", "h100", "--emulate-model", "llama-3.1-70b", "--tp", "4")


def parsed(*flags: str) -> ClusterConfig:
    parser = argparse.ArgumentParser()
    add_config_flags(parser)
    return load_config(parser.parse_args(flags)).config


def emulated(*flags: str) -> ClusterConfig:
    return as_emulated(parsed(*flags), now_s=70.0)


def test_without_the_flag_nothing_changes() -> None:
    assert emulated() == parsed()
    assert describe(parsed()) == ""


def test_the_cluster_serves_the_emulated_model_s_name_with_the_blocks_that_fit_beside_its_weights() -> None:
    config = emulated(*LLAMA_70B)
    assert config.model.served_name == config.router.model.served_name == "llama-3.1-70b"
    # 4 x 80 GB x 0.9 - 70.55 GB of fp8 weights, over blocks of 16 tokens at 327,680 bytes
    assert config.engine.num_blocks == pytest.approx((4 * 80e9 * 0.9 - 70.55e9) / (16 * 327_680), rel=1e-3)


def test_a_slow_clock_changes_no_configured_time_and_every_process_is_told_of_it() -> None:
    plain, slow = emulated(*LLAMA_70B), emulated(*LLAMA_70B, "--time-scale", "10", "--flip-s", "3")
    assert (slow.kv, slow.controller) == (plain.kv, plain.controller)
    assert replace(slow.router, time_scale=1.0) == plain.router
    assert (slow.router.time_scale, slow.emulation.time_scale, slow.emulation.flip_s) == (10.0, 10.0, 3.0)
    assert slow.emulation.origin == plain.emulation.origin / 10


def test_routers_know_what_the_emulated_gpus_cost_unless_a_price_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = emulated(*LLAMA_70B, "--time-scale", "10").router.cost
    assert cost.usd_per_gpu_hour == pytest.approx(31.92 / 8)
    assert cost.gpus_per_worker == 4
    monkeypatch.setenv("BATON__ROUTER__COST__USD_PER_GPU_HOUR", "2.5")
    assert emulated(*LLAMA_70B).router.cost.usd_per_gpu_hour == 2.5
    assert parsed().router.cost.usd_per_gpu_hour == 2.5


def test_frames_are_as_small_as_the_payload_so_that_senders_take_turns() -> None:
    config = emulated(*LLAMA_70B)
    assert config.kv.mode == "staged"
    assert config.kv.frame_bytes == 64 << 10


def test_a_served_name_of_one_s_own_stays() -> None:
    config = replace(
        parsed(), model=ModelConfig(served_name="mine"), emulation=EmulationConfig(gpu="h100", model="llama-3.1-8b")
    )
    assert as_emulated(config, 0.0).model.served_name == "mine"


def test_an_unknown_gpu_or_model_is_answered_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--emulate", "h1000"]) != 0
    said = "".join(capsys.readouterr()).replace("\n", " ")
    assert "h1000" in said
    assert all(name in said for name in gpu_names())
    with pytest.raises(ConfigError, match="gpt-5") as refused:
        emulated("--emulate", "h100", "--emulate-model", "gpt-5")
    assert all(name in refused.value.message for name in model_names())


def test_a_model_that_does_not_fit_is_answered_with_the_bytes() -> None:
    with pytest.raises(ConfigError) as refused:
        emulated("--emulate", "h100", "--emulate-model", "llama-3.1-70b", "--emulate-dtype", "bf16")
    assert "141,104,775,168 bytes of bf16 weights" in refused.value.message
    assert "1 x h100 at a memory_ratio of 0.9 hold 72,000,000,000 bytes" in refused.value.message
    assert refused.value.field == "emulation.tp"


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (("--time-scale", "0.5"), "emulation.time_scale"),
        (("--kv-scale", "0"), "emulation.kv_scale"),
        (("--tp", "0"), "emulation.tp"),
        (("--failure-mean-s", "-1"), "emulation.failure_mean_s"),
        (("--time-scale", "nan"), "emulation.time_scale"),
        (("--emulate-dtype", "fp3"), "emulation.weight_dtype"),
        (("--num-blocks", "1000000"), "engine.num_blocks"),
        (("--quantization", "int8"), "model.quantization"),
        (("--kv-cache-dtype", "fp8"), "engine.kv_cache_dtype"),
        (("--decode-kv-cache-dtype", "fp8"), "engine.kv_cache_dtype"),
    ],
)
def test_a_setting_that_cannot_be_emulated_is_refused_by_name(flags: tuple[str, ...], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        emulated(*LLAMA_70B, *flags)
    assert refused.value.field == field


@pytest.mark.parametrize("kv", [KVTransferConfig(require_rdma=True), KVTransferConfig(mode="direct")])
def test_a_network_that_cannot_be_emulated_is_refused(kv: KVTransferConfig) -> None:
    with pytest.raises(ConfigError, match="emulated"):
        as_emulated(replace(parsed(*LLAMA_70B), kv=kv), 0.0)


def test_memory_is_asked_for_what_is_really_kept_and_context_is_the_emulated_model_s() -> None:
    config = emulated(*LLAMA_70B)
    check_context(replace(config, model=replace(config.model, max_model_len=100_000)), SPEC)
    check_memory(config, SPEC, available=4 << 30)
    whole = replace(config, emulation=replace(config.emulation, kv_scale=1), engine=EngineConfig())
    with pytest.raises(ConfigError, match="--kv-scale"):
        check_memory(whole, SPEC, available=4 << 30)


def test_what_is_emulated_is_said_in_one_line() -> None:
    said = describe(emulated(*LLAMA_70B, "--time-scale", "10"))
    assert "llama-3.1-70b in fp8 on 4 x h100 per worker, 10 times slower than real" in said
