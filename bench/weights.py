"""`python -m bench.weights [--model NAME] [--rounds N]`: how long a model takes to load from a live worker, and from warm files.

One worker of the product serves the model; this process loads it again and again, in turn from there and from the files, through
the product's own code, to the point where a runner could compute. The files were read before, so they come from the page cache.
Nothing runs beside but what the machine has to do anyway.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import mmap
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import grpc

from baton.config import LOOPBACK, EngineConfig, ModelConfig, WorkerConfig
from baton.config_load import to_json
from baton.model_spec import ModelSpec
from baton.peer_trust import PLAIN
from baton.v1 import control_pb2, control_pb2_grpc, worker_pb2
from engine.loading.weight_manifest import WeightManifest
from worker.loading import FROM_FILES, FROM_PEER, load_torch_model
from worker.weight_borrower import borrow_weights


class Names(control_pb2_grpc.ControlServicer):
    """A controller that knows one worker."""

    def __init__(self) -> None:
        self.worker: worker_pb2.Peer | None = None

    def Announce(
        self, request: control_pb2.AnnounceRequest, context: grpc.ServicerContext
    ) -> control_pb2.AnnounceResponse:
        said = request.worker
        self.worker = worker_pb2.Peer(worker_id=said.worker_id, epoch=said.epoch, address=said.address)
        return control_pb2.AnnounceResponse(role=said.role)

    def Lenders(
        self, request: control_pb2.LendersRequest, context: grpc.ServicerContext
    ) -> control_pb2.LendersResponse:
        return control_pb2.LendersResponse(workers=[self.worker] if self.worker else [])

    def Watch(self, request: object, context: object) -> Iterator[control_pb2.ControlState]:
        raise AssertionError("a worker does not watch")

    def Report(self, request: object, context: object) -> control_pb2.ReportResponse:
        raise AssertionError("a worker does not report")

    def Leave(self, request: object, context: object) -> control_pb2.LeaveResponse:
        raise AssertionError("nobody asks")


@contextmanager
def lender(model: str) -> Iterator[str]:
    """A worker that serves `model`; yields the address of a controller that names it."""
    from concurrent.futures import ThreadPoolExecutor

    names, server = Names(), grpc.server(ThreadPoolExecutor(2))
    control_pb2_grpc.add_ControlServicer_to_server(names, server)
    address = f"{LOOPBACK}:{server.add_insecure_port(f'{LOOPBACK}:0')}"
    server.start()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "lender.json")
        file.write_text(to_json(_config("lender", model, address)))
        command = [sys.executable, "-m", "worker.main", "--config", str(file)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            assert process.stdout is not None
            process.stdout.readline()
            while names.worker is None:
                time.sleep(0.05)
            yield address
        finally:
            process.terminate()
            process.communicate()
            server.stop(None)


class Loader:
    """Loads on the calling thread, borrows through a loop of its own, as a worker does."""

    def __init__(self, model: str, control_address: str) -> None:
        self._config = _config("bench", model, control_address)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.nbytes = 0
        self.borrow_s = 0.0

    def _borrow(self, spec: ModelSpec, manifest: WeightManifest, buffer: mmap.mmap) -> bool:
        started_s = time.perf_counter()
        borrowing = borrow_weights(self._config, spec, manifest, buffer, PLAIN)
        lent = asyncio.run_coroutine_threadsafe(borrowing, self._loop).result()
        self.nbytes, self.borrow_s = manifest.nbytes, time.perf_counter() - started_s
        return lent

    def load(self, source: str) -> float:
        """Returns seconds."""
        gc.collect()
        started_s = time.perf_counter()
        borrow = self._borrow if source == FROM_PEER else None
        model = load_torch_model(self._config, lambda nbytes: memoryview(bytearray(nbytes)), borrow)
        assert model.weights_from == source, f"the weights came from {model.weights_from}"
        return time.perf_counter() - started_s


def _config(worker_id: str, model: str, control_address: str) -> WorkerConfig:
    engine = EngineConfig(num_blocks=16, num_threads=1)
    return WorkerConfig(worker_id, control_address=control_address, model=ModelConfig(path=model), engine=engine)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=ModelConfig().path)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with lender(args.model) as control_address:
        loader = Loader(args.model, control_address)
        for source in (FROM_FILES, FROM_PEER):  # torch, page cache, the lender's rings
            loader.load(source)
        took_s: dict[str, list[float]] = {FROM_PEER: [], FROM_FILES: []}
        borrow_s: list[float] = []
        for _ in range(args.rounds):
            for source, values in took_s.items():
                values.append(loader.load(source))
            borrow_s.append(loader.borrow_s)
    gb = loader.nbytes / 1e9
    for name, values in (*took_s.items(), ("peer, bytes alone", borrow_s)):
        shown = {
            "from": name, "n": len(values), "median_s": round(median(values), 3), "min_s": round(min(values), 3),
            "max_s": round(max(values), 3), "gb": round(gb, 3), "gb_per_s": round(gb / median(values), 2),
        }  # fmt: skip
        print(json.dumps(shown))


if __name__ == "__main__":
    main()
