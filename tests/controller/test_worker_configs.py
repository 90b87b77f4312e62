"""What the controller tells each worker of one host to be."""

from __future__ import annotations

from baton.config import ClusterConfig, EngineConfig
from router.controller.main import worker_configs


def test_a_pool_s_workers_have_its_kv_dtype_and_all_else_in_common() -> None:
    cluster = ClusterConfig(prefill=1, decode=2, both=1, decode_kv_cache_dtype="fp8", engine=EngineConfig(num_blocks=7))
    workers = worker_configs(cluster, "127.0.0.1:1", num_cores=8)
    dtypes = {worker.worker_id: worker.engine.kv_dtype(worker.model.dtype) for worker in workers}
    assert dtypes == {
        "prefill-0": "float32",
        "decode-0": "float8_e4m3",
        "decode-1": "float8_e4m3",
        "both-0": "float32",
    }
    assert {(worker.engine.num_blocks, worker.engine.num_threads) for worker in workers} == {(7, 2)}
