"""What the controller tells each worker of one host to be."""

from __future__ import annotations

from baton.config import ClusterConfig, EmulationConfig, EngineConfig
from baton.request import Role
from router.controller.ray_fleet import WorkerConfigs, shared_out


def test_a_pool_s_workers_have_its_kv_dtype_and_all_else_in_common() -> None:
    cluster = ClusterConfig(prefill=1, decode=2, both=1, decode_kv_cache_dtype="fp8", engine=EngineConfig(num_blocks=7))
    make_config = WorkerConfigs(cluster, "127.0.0.1:1", shared_out(cluster, num_cores=8))
    workers = [make_config(f"{role.name.lower()}-0", role) for role in Role]
    dtypes = {worker.worker_id: worker.engine.kv_dtype(worker.model.dtype) for worker in workers}
    assert dtypes == {"prefill-0": "float32", "decode-0": "float8_e4m3", "both-0": "float32"}
    assert {(worker.engine.num_blocks, worker.engine.num_threads) for worker in workers} == {(7, 2)}


def test_workers_flip_only_among_those_that_keep_kv_alike() -> None:
    alike = WorkerConfigs(ClusterConfig(emulation=EmulationConfig(gpu="h100", tp=4)), "127.0.0.1:1", lambda role: 2)
    assert {alike.shape_of(role) for role in Role} == {"4xh100"}
    ranks = WorkerConfigs(
        ClusterConfig(engine=EngineConfig(tensor_parallel_size=2)), "127.0.0.1:1", lambda role: 2
    )  # whose steps last otherwise, so that what was learned of them is not taken for those of one rank
    assert {ranks.shape_of(role) for role in Role} == {"2xcpu"}
    apart = WorkerConfigs(ClusterConfig(decode_kv_cache_dtype="fp8"), "127.0.0.1:1", lambda role: 2)
    assert [apart.shape_of(role) for role in Role] == ["cpu-float32", "cpu-float8_e4m3", "cpu-float32"]
