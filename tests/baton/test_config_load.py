from pathlib import Path

import pytest

from baton.config import ClusterConfig, KVTransferConfig, RouterConfig
from baton.config_load import from_json, load, to_json
from baton.errors import ConfigError


def test_later_sources_win_and_every_value_knows_its_origin(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("prefill: 2\nrouter: {http_port: 7000, grpc_port: 7001}\nkv:\n  lease_s: 3\n")
    environ = {"BATON__ROUTER__HTTP_PORT": "7100", "BATON__ENGINE__PREFIX_CACHE": "false", "PATH": "ignored"}
    loaded = load(file, environ, {"router.grpc_port": ("--grpc-port", 7200)})
    config = loaded.config
    assert (config.prefill, config.router.http_port, config.router.grpc_port) == (2, 7100, 7200)
    assert config.kv.lease_s == 3.0
    assert not config.engine.prefix_cache
    assert loaded.origins["prefill"] == "file cluster.yaml"
    assert loaded.origins["router.http_port"] == "env BATON__ROUTER__HTTP_PORT"
    assert loaded.origins["router.grpc_port"] == "flag --grpc-port"
    assert loaded.origins["decode"] == "default"
    assert any(line.startswith("prefill = 2 ") and line.endswith("# file cluster.yaml") for line in loaded.describe())


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "float8_e4m3"])
def test_the_decode_pool_may_keep_kv_in_8_bits_under_any_of_its_names(name: str) -> None:
    cluster = load(None, {}, {"decode_kv_cache_dtype": ("--decode-kv-cache-dtype", name)}).config
    dtypes = {role: cluster.engine_of(role).kv_dtype(cluster.model.dtype) for role in ("prefill", "decode", "both")}
    assert dtypes == {"prefill": "float32", "decode": "float8_e4m3", "both": "float32"}
    assert cluster.engine_of("prefill") == cluster.engine
    assert (
        load(None, {}, {"engine.kv_cache_dtype": ("--kv-cache-dtype", name)}).config.engine.kv_dtype("bfloat16")
        == "float8_e4m3"
    )


def test_the_router_serves_the_cluster_s_model() -> None:
    assert load(None, {"BATON__MODEL__PATH": "somewhere"}, {}).config.router.model.path == "somewhere"


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"BATON__ROUTER__HTTP_PRT": "1"}, ["router.http_prt", "BATON__ROUTER__HTTP_PRT", "router.http_port"]),
        ({"BATON__ROUTER__HTTP_PORT": "x"}, ["router.http_port", "'x'", "whole number"]),
        ({"BATON__ROUTER__HTTP_PORT": "70000"}, ["70000", "65535", "TCP port"]),
        ({"BATON__KV__LEASE_S": "nan"}, ["kv.lease_s", "nan", "0.01"]),
        ({"BATON__KV__TRANSPORT": "carrier-pigeon"}, ["carrier-pigeon", "ucx, loopback"]),
        ({"BATON__ROUTER__MODEL__PATH": "x"}, ["router.model.path", "model.path"]),
        ({"BATON__ROUTER": "x"}, ["router", "section"]),
        ({"BATON__PREFILL": "0"}, ["prefill = 0", "--colocated"]),
        ({"BATON__ENGINE__KV_MEMORY_BYTES": "5"}, ["engine.kv_memory_bytes", "at least 1048576"]),
        ({"BATON__MODEL__QUANTIZATION": "awq"}, ["model.quantization", "'awq'", "auto, int8", "GGUF"]),
        ({"BATON__ENGINE__KV_CACHE_DTYPE": "float8_e5m2"}, ["float8_e5m2", "float16, float8_e4m3, fp8"]),
        ({"BATON__ENGINE__TENSOR_PARALLEL_SIZE": "0"}, ["engine.tensor_parallel_size", "1"]),
        (
            {"BATON__ENGINE__TENSOR_PARALLEL_SIZE": "2", "BATON__EMULATION__GPU": "h100"},
            ["engine.tensor_parallel_size = 2", "--tp"],
        ),
        (
            {"BATON__ENGINE__TENSOR_PARALLEL_SIZE": "2", "BATON__KV__MODE": "direct"},
            ["engine.tensor_parallel_size = 2", "kv.mode cannot be direct"],
        ),
        (
            {"BATON__DECODE_KV_CACHE_DTYPE": "bfloat16"},
            ["decode_kv_cache_dtype", "prefill workers keep float32", "float8_e4m3 (fp8) only"],
        ),
        (
            {"BATON__DECODE_KV_CACHE_DTYPE": "float32", "BATON__ENGINE__KV_CACHE_DTYPE": "fp8"},
            ["decode_kv_cache_dtype", "prefill workers keep float8_e4m3"],
        ),
        (
            {"BATON__DECODE_KV_CACHE_DTYPE": "fp8", "BATON__PREFILL": "0", "BATON__DECODE": "0", "BATON__BOTH": "1"},
            ["decode_kv_cache_dtype", "no decode pool", "engine.kv_cache_dtype"],
        ),
        ({"BATON__ROUTER__HTTP_PORT": "50051"}, ["router.http_port", "router.grpc_port", "both 50051"]),
        ({"BATON__ENGINE__CHUNK_TOKENS": "4096"}, ["engine.chunk_tokens", "4096", "2048"]),
        ({"BATON__KV__NUM_SLOTS": "65"}, ["kv.num_slots", "65", "between 2 and 64"]),  # more is refused by every peer
        ({"BATON__KV__FRAME_BYTES": "67108865"}, ["kv.frame_bytes", "67108865", "67108864"]),
        ({"BATON__PREFILL": "1001"}, ["prefill", "1001", "between 0 and 1000"]),  # the largest fleet that was measured
        ({"BATON__ROUTER__BATCH__DATABASE": "x"}, ["router.batch.database", "follows controller.database"]),
        ({"BATON__KV__MODE": "fast"}, ["kv.mode = 'fast'", "auto, staged, direct"]),
        ({"BATON__KV__UCX": "x"}, ["kv.ucx", "section"]),
        ({"BATON__KV__UCX__UCX_RNDV_THRESH": "1"}, ["kv.ucx.UCX_RNDV_THRESH", "leave out the prefix UCX_"]),
        ({"BATON__KV__UCX__TLS": "tcp"}, ["kv.ucx.TLS", "set kv.ucx_tls instead"]),
        ({"BATON__KV__UCX__A-B": "1"}, ["kv.ucx.A-B", "letters, digits and _"]),
        ({"BATON__KV__UCX__RNDV_THRESH": ""}, ["kv.ucx.RNDV_THRESH", "text or a number"]),
        (
            {"BATON__KV__REQUIRE_RDMA": "true", "BATON__KV__TRANSPORT": "loopback"},
            ["kv.require_rdma", "kv.transport = loopback has no RDMA"],
        ),
        ({"BATON__EMULATION__TIME_SCALE": "10"}, ["emulation.time_scale = 10", "real GPUs", "--emulate"]),
        ({"BATON__ROUTER__TIME_SCALE": "10"}, ["router.time_scale = 10", "one clock", "emulation.time_scale"]),
        ({"BATON__EMULATION__FLIP_S": "3"}, ["emulation.flip_s = 3", "real GPUs", "--emulate"]),
    ],
)
def test_a_wrong_setting_is_refused_with_value_limit_and_reason(environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        load(None, environ, {})
    assert "\n" not in str(refused.value)
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_options_of_ucx_pass_through_from_every_source_and_know_their_origin(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("kv:\n  ucx: {RNDV_THRESH: 65536, MAX_EAGER_LANES: 2, ADDRESS_DEBUG_INFO: false}\n")
    environ = {"BATON__KV__UCX__MAX_EAGER_LANES": "3", "BATON__KV__UCX__TCP_TX_SEG_SIZE": "64k"}
    loaded = load(file, environ, {"kv.ucx.tcp_tx_seg_size": ("--ucx tcp_tx_seg_size=", "128k")})
    assert loaded.config.kv.ucx == {
        "RNDV_THRESH": "65536",
        "MAX_EAGER_LANES": "3",
        "ADDRESS_DEBUG_INFO": "n",
        "TCP_TX_SEG_SIZE": "128k",
    }
    assert loaded.origins["kv.ucx.MAX_EAGER_LANES"] == "env BATON__KV__UCX__MAX_EAGER_LANES"
    (line,) = [line for line in loaded.describe() if line.startswith("kv.ucx.TCP")]
    assert line.split(" = ")[1].split()[0] == '"128k"'
    assert line.endswith("# flag --ucx tcp_tx_seg_size=")
    assert from_json(ClusterConfig, to_json(loaded.config)) == loaded.config


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("router: {http_port: '8000'}", ["router.http_port", "whole number"]),
        ("router: {http_port: true}", ["router.http_port", "whole number"]),
        ("router:\n  htpp_port: 1", ["router.htpp_port", "router.http_port"]),
        ("- a", ["mapping"]),
        ("a: [", ["not YAML"]),
        ("router:", ["router", "section"]),
        ("kv: {ucx: }", ["kv.ucx", "section"]),
        ("kv: {ucx: {RNDV_THRESH: [1]}}", ["kv.ucx.RNDV_THRESH", "text or a number"]),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load(file, {}, {})
    assert "\n" not in str(refused.value)
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.yaml"):
        load(tmp_path / "none.yaml", {}, {})


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("")
    assert load(tmp_path / "empty.yaml", {}, {}).config == load(None, {}, {}).config


def test_a_config_survives_the_way_to_a_child_process() -> None:
    config = load(None, {"BATON__KV__LEASE_S": "2", "BATON__MODEL__PATH": "m"}, {}).config
    assert from_json(ClusterConfig, to_json(config)) == config
    assert from_json(RouterConfig, to_json(config.router)) == config.router


def test_options_of_ucx_that_are_no_map_are_refused_by_the_child() -> None:
    with pytest.raises(ConfigError, match="must be a map of names to text"):
        from_json(KVTransferConfig, '{"ucx": 3}')


@pytest.mark.parametrize("text", ["{", "[]", '{"http_prt": 1}', '{"http_port": "1"}', '{"model": 3}'])
def test_a_damaged_config_is_refused_by_the_child(text: str) -> None:
    with pytest.raises(ConfigError):
        from_json(RouterConfig, text)
