"""`python -m tests.faults.fault_worker --config FILE [--direct]`: worker.main with a scripted engine and gates.

Each line of standard input is a JSON list [command, *arguments]; each is answered by one line ["answer", value]:

    hold KIND SEQ        keep link messages of this kind that name SEQ     copy NAME N    let N copies pass, stop the next
    pace SECONDS         of every step that decodes                        trouble RATES  of link messages
    release              all of it ends                                    held           counts by gate
    found                what the scripted engine found wrong              resources      fds, threads, resident bytes
"""

from __future__ import annotations

import json
import os
import sys
import threading

import psutil

from baton.config import WorkerConfig
from engine.scripted_runner import ScriptedRunner
from tests.faults.fault_gates import GATES, held_runner
from tests.worker.scripted_worker import LAYOUT, SPEC
from worker.main import main
from worker.server import LoadedModel

RUNNERS: list[ScriptedRunner] = []
DIRECT = "--direct" in sys.argv


def load_scripted_model(config: WorkerConfig) -> LoadedModel:
    runner = held_runner(LAYOUT, config.engine.num_blocks, direct=DIRECT)
    RUNNERS.append(runner)
    return LoadedModel(SPEC, runner)


def obey(command: str, *arguments: object) -> object:
    match [command, *arguments]:
        case ["hold", str(kind), int(seq)]:
            GATES.arm_message(kind, seq)
        case ["copy", str(name), int(num_skipped)]:
            GATES.arm_copy(name, num_skipped)
        case ["pace", float(pace_s)]:
            GATES.pace_s = pace_s
        case ["trouble", dict(rates)]:
            GATES.trouble = rates
        case ["release"]:
            GATES.release()
        case ["held"]:
            return dict(GATES.held)
        case ["found"]:
            return RUNNERS[0].faults
        case ["resources"]:
            process = psutil.Process()
            threads = [thread.name for thread in threading.enumerate()]
            return [len(os.listdir("/proc/self/fd")), sorted(threads), process.memory_info().rss]
        case _:
            raise ValueError(f"no such command: {command} {arguments}")
    return None


def listen() -> None:
    for line in sys.stdin:
        print(json.dumps(["answer", obey(*json.loads(line))]), flush=True)


if __name__ == "__main__":
    if DIRECT:
        sys.argv.remove("--direct")
    threading.Thread(target=listen, name="commands", daemon=True).start()
    sys.exit(main(load_scripted_model))
