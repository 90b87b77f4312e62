"""A worker process whose Hello differs in the fields that the environment names: ODD_HELLO='{"layout.head_dim": 8}'.

Scripted engine, real gRPC, real UCX.
"""

from __future__ import annotations

import json
import os
import sys
from unittest.mock import patch

from baton.model_spec import ModelSpec
from baton.v1 import kv_pb2
from tests.soak.soak_worker import load_scripted_model
from worker.main import main
from worker.server import WorkerServer

_plain_hello = WorkerServer._hello


def _odd_hello(self: WorkerServer, spec: ModelSpec, address: bytes, layout: kv_pb2.KvLayout) -> kv_pb2.Hello:
    hello = _plain_hello(self, spec, address, layout)
    for path, value in json.loads(os.environ.get("ODD_HELLO", "{}")).items():
        owner, _, name = path.rpartition(".")
        setattr(hello.layout if owner else hello, name, value)
    return hello


if __name__ == "__main__":
    with patch.object(WorkerServer, "_hello", _odd_hello):
        sys.exit(main(load_scripted_model))
