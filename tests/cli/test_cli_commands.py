from __future__ import annotations

import re
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.config import ClusterConfig, EngineConfig, ModelConfig
from baton.errors import ConfigError, InvalidRequest, NotFound, Unavailable
from baton.model_spec import ModelSpec
from baton.v1 import serving_pb2
from cli.chat import stream_chat
from cli.checks import (
    check_all,
    check_context,
    check_memory,
    check_port,
    check_shared_memory,
    weight_bytes,
)
from cli.cluster import Cluster
from cli.main import main
from cli.processes import spawn
from cli.run_folder import ClusterRecord, RunFolder
from cli.shared_memory import SharedMemory
from cli.signals import Signals
from cli.supervisor import ClusterFailed
from tests.tiny_models import make_tiny_model

SMOLLM2 = ModelSpec(
    name="smollm2",
    architecture="llama",
    num_layers=30,
    hidden_size=576,
    ffn_size=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=49_152,
    rope_theta=100_000.0,
    norm_eps=1e-5,
    max_model_len=8_192,
    tie_embeddings=True,
)


def test_a_taken_port_is_named_with_its_holder_and_the_flag_that_moves_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"HTTP port {port} .*taken by pid \d+.*--http-port"):
            check_port(port, "HTTP", "--http-port")
    check_port(port, "HTTP", "--http-port")


def test_baton_up_on_a_taken_port_is_one_line_and_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        assert main(["up", "--grpc-port", str(port), "--http-port", "0", "--admin-port", "0"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert f"gRPC port {port}" in line
    assert "--grpc-port" in line


def test_the_demo_keeps_to_a_port_that_the_environment_names(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        monkeypatch.setenv("BATON__ROUTER__HTTP_PORT", str(port))
        assert main(["demo"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert f"HTTP port {port} cannot be used" in line


def test_a_missing_model_is_one_line_that_says_how_to_get_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    assert main(["up", "--grpc-port", "0", "--http-port", "0", "--admin-port", "0"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "baton model fetch smollm2" in line


def test_the_demo_model_has_the_parameters_of_its_name() -> None:
    assert weight_bytes(SMOLLM2, "float32") == pytest.approx(4 * 134.5e6, rel=0.01)


def test_int8_weights_need_less_memory_to_start() -> None:
    spec = SMOLLM2.quantized("int8")
    embeddings = spec.vocab_size * spec.hidden_size
    projections = weight_bytes(SMOLLM2, "float32") // 4 - embeddings
    assert weight_bytes(spec, "float32") == 4 * embeddings + projections
    saved = 2 * 3 * projections  # of two workers
    least = next(size for size in range(1 << 30, 16 << 30, 1 << 20) if fits(ClusterConfig(), size))
    config = ClusterConfig(model=ModelConfig(quantization="int8"))
    assert fits(config, least - saved + (1 << 20))
    assert not fits(config, least - saved - (1 << 20))


def fits(config: ClusterConfig, available: int) -> bool:
    try:
        check_memory(config, SMOLLM2, available)
    except ConfigError:
        return False
    return True


def test_more_context_than_the_model_has_is_refused_not_cut() -> None:
    check_context(ClusterConfig(model=ModelConfig(max_model_len=8_192)), SMOLLM2)
    with pytest.raises(
        ConfigError, match=r"max_model_len = 8,193: smollm2 was made for 8,192 tokens; lower --max-model-len"
    ):
        check_context(ClusterConfig(model=ModelConfig(max_model_len=8_193)), SMOLLM2)


def test_too_little_memory_says_how_much_and_what_to_lower() -> None:
    check_memory(ClusterConfig(), SMOLLM2, 16 << 30)
    with pytest.raises(ConfigError, match=r"2 workers need about .* GiB.*3\.0 GiB is available.*--kv-memory-bytes"):
        check_memory(ClusterConfig(), SMOLLM2, 3 << 30)


def test_a_block_count_replaces_the_memory_figure() -> None:
    check_memory(ClusterConfig(engine=EngineConfig(num_blocks=64)), SMOLLM2, 7 << 29)


def test_ranks_need_memory_of_their_own() -> None:
    engine = EngineConfig(num_blocks=64)
    check_memory(ClusterConfig(engine=engine), SMOLLM2, 7 << 29)
    with pytest.raises(ConfigError, match="2 workers need about"):
        check_memory(ClusterConfig(engine=replace(engine, tensor_parallel_size=3)), SMOLLM2, 7 << 29)


def test_a_degree_that_the_model_has_not_is_refused_before_anything_starts(tmp_path: Path) -> None:
    model = ModelConfig(path=str(make_tiny_model(tmp_path / "tiny")))
    config = ClusterConfig(model=model, engine=EngineConfig(num_blocks=64, tensor_parallel_size=3))
    free = replace(config, router=replace(config.router, http_port=0, grpc_port=0))
    with pytest.raises(ConfigError, match=r"tensor_parallel_size = 3 does not divide KV heads = 2 of .*: use 1, 2$"):
        check_all(replace(free, controller=replace(free.controller, admin_port=0)))


def test_too_little_shared_memory_says_how_to_enlarge_it() -> None:
    with pytest.raises(ConfigError, match=r"/dev/shm has 64 MiB free.*--shm-size="):
        check_shared_memory(ClusterConfig(), 64 << 20)


def test_print_config_names_the_origin_of_each_value(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON__KV__LEASE_S", "3")
    assert main(["up", "--prefill", "2", "--no-prefix-cache", "--print-config"]) == 0
    lines = {line.split(" = ")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["prefill"].endswith("# flag --prefill")
    assert lines["kv.lease_s"].endswith("# env BATON__KV__LEASE_S")
    assert lines["engine.prefix_cache"].split()[2] == "false"
    assert lines["decode"].endswith("# default")


def test_colocated_is_one_worker_that_does_both(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--colocated", "--print-config"]) == 0
    lines = capsys.readouterr().out
    assert "prefill = 0 " in lines
    assert "both = 1 " in lines


def test_colocated_beside_a_pool_size_is_refused_not_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--colocated", "--decode", "2", "--print-config"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "leave out --decode, or --colocated" in line


def test_the_command_loads_neither_ray_nor_torch() -> None:
    code = (
        "import sys, cli.main as m, cli.cluster;"
        "m.main(['up', '--print-config']);"
        "print([name for name in ('ray', 'torch', 'ucxx') if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr.strip() == "[]"


def test_commands_without_a_cluster_say_how_to_start_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    for command in (["status"], ["chat", "hello"], ["drain", "decode-0"]):
        assert main(command) == 1
        [line] = capsys.readouterr().err.splitlines()
        assert "no cluster with admin port 8001 runs here; start one with 'baton up'" in line


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RunFolder:
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    return RunFolder(8001)


def test_the_run_folder_and_its_secrets_are_the_user_s_alone(folder: RunFolder) -> None:
    folder.take()
    folder.write_secrets()
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    for file in (folder.tokens_file, folder.ray_token_file):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert folder.admin_secret("viewer") != folder.admin_secret("operator")
    folder.release(remove=False)
    assert not folder.tokens_file.exists()
    assert folder.logs.exists()


def test_two_clusters_cannot_own_one_run_folder(folder: RunFolder) -> None:
    folder.take()
    folder.write_secrets()
    late = RunFolder(8001)
    with pytest.raises(ConfigError, match=r"admin port 8001 is already running.*--admin-port"):
        late.take()
    late.release(remove=True)
    assert folder.admin_secret("viewer"), "the late one has removed what is not its own"
    folder.release(remove=True)
    assert not folder.path.exists()


def test_a_run_folder_that_cannot_be_made_is_one_line_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("BATON_HOME", str(tmp_path / "file"))
    with Signals() as signals:
        cluster = Cluster(ClusterConfig(), signals)
        with pytest.raises(ConfigError, match=r"cannot use .*set BATON_HOME"):
            cluster.start()
        assert cluster.stop() == []


def test_the_record_of_a_dead_cluster_is_not_believed(folder: RunFolder) -> None:
    folder.take()
    with subprocess.Popen(["true"]) as dead:
        dead.wait()
    folder.write_record(ClusterRecord(dead.pid, "127.0.0.1", 1, 2, 3, {}))
    with pytest.raises(NotFound):
        folder.read_record()
    folder.release(remove=True)


def test_shared_memory_that_nobody_maps_is_removed_and_mapped_one_is_not() -> None:
    before = SharedMemory()
    orphan, used = Path("/dev/shm/baton-test-orphan"), Path("/dev/shm/baton-test-used")
    orphan.write_bytes(b"x")
    with used.open("wb") as held:
        held.write(b"x")
        assert before.clean() == []
        assert (orphan.exists(), used.exists()) == (False, True)
    assert before.clean() == []
    assert not used.exists()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo log; echo 'router: port 80 cannot be bound; choose another'; exit 1", "router: port 80 cannot be bound"),
        ("kill -9 $$", r"router was killed \(SIGKILL\).*run the command again"),
        ("echo boom; exit 3", "router ended with exit code 3"),
    ],
)
def test_a_process_that_ended_is_explained_by_its_own_last_word_or_its_signal(
    tmp_path: Path, script: str, message: str
) -> None:
    error = ClusterFailed.ended(spawn("router", ["sh", "-c", script], {}, tmp_path / "router.log"))
    assert re.match(message, str(error))
    assert error.log == ("boom" if "boom" in script else "")


class ScriptedRouter:
    """Answers Generate, and nothing else, with the events it was given, or aborts."""

    def __init__(self) -> None:
        self.events: list[serving_pb2.GenerateResponse] = []
        self.abort: grpc.StatusCode | None = None
        self.request = serving_pb2.GenerateRequest()

    def Generate(self, request: serving_pb2.GenerateRequest, context: Any) -> Iterator[serving_pb2.GenerateResponse]:
        self.request = request
        yield from self.events
        if self.abort is not None:
            context.abort(self.abort, "decode-0 died")


@pytest.fixture
def router() -> Iterator[tuple[ScriptedRouter, grpc.Channel]]:
    scripted = ScriptedRouter()
    server = grpc.server(ThreadPoolExecutor(max_workers=2))
    handler = grpc.unary_stream_rpc_method_handler(
        scripted.Generate,
        request_deserializer=serving_pb2.GenerateRequest.FromString,
        response_serializer=serving_pb2.GenerateResponse.SerializeToString,
    )
    service = grpc.method_handlers_generic_handler("baton.v1.Serving", {"Generate": handler})
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield scripted, channel
    server.stop(grace=None).wait()


def ask(channel: grpc.Channel, written: list[str]) -> serving_pb2.Done:
    messages = [serving_pb2.ChatMessage(role="user", content="hello")]
    return stream_chat(channel, messages, serving_pb2.Sampling(max_tokens=5), written.append).done


def chunk(text: str) -> serving_pb2.GenerateResponse:
    return serving_pb2.GenerateResponse(chunk=serving_pb2.Chunk(text=text))


def test_chat_writes_pieces_as_they_come_and_returns_the_end(router: tuple[ScriptedRouter, grpc.Channel]) -> None:
    scripted, channel = router
    done = serving_pb2.Done(usage=serving_pb2.Usage(completion_tokens=2))
    scripted.events = [chunk("a"), chunk("b"), serving_pb2.GenerateResponse(done=done)]
    written: list[str] = []
    assert ask(channel, written).usage.completion_tokens == 2
    assert written == ["a", "b"]
    assert scripted.request.sampling.max_tokens == 5


def test_chat_says_the_router_s_own_error(router: tuple[ScriptedRouter, grpc.Channel]) -> None:
    scripted, channel = router
    detail = serving_pb2.ErrorDetail(code="invalid_request", message="max_tokens: at least 1", field="max_tokens")
    scripted.events = [serving_pb2.GenerateResponse(error=detail)]
    with pytest.raises(InvalidRequest, match="max_tokens: at least 1"):
        ask(channel, [])


def test_chat_names_a_broken_call_s_reason_and_status(router: tuple[ScriptedRouter, grpc.Channel]) -> None:
    scripted, channel = router
    scripted.events, scripted.abort = [chunk("half")], grpc.StatusCode.UNAVAILABLE
    with pytest.raises(Unavailable, match=r"decode-0 died \(UNAVAILABLE\)"):
        ask(channel, [])
