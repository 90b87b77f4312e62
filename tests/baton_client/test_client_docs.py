"""The example of the documentation runs as it stands there."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

from tests.baton_client.router_processes import running_routers
from tests.router.stub_worker import StubWorker

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "grpc.md"


async def test_the_ten_lines_of_the_docs_print_an_answer_and_its_length(model_dir: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert len(example.splitlines()) <= 10
    assert example in (ROOT / "README.md").read_text()
    worker = await StubWorker("b0").start()
    try:
        async with running_routers(model_dir, [worker.address], number=1) as routers:
            code = example.replace("127.0.0.1:50051", f"127.0.0.1:{routers.ports[0]}")
            done = await asyncio.to_thread(
                subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
            )
    finally:
        await worker.kill()
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n64 tokens\n")
