"""`python -m tests.faults.fault_worker --config FILE`: worker.main with a scripted engine and gates.

Each line of standard input is a JSON list [command, *arguments]; each is answered by one line ["answer", value]:

    hold KIND SEQ        keep link messages of this kind that name SEQ     copy NAME N    let N copies pass, stop the next
    pace SECONDS         of every step that decodes                        trouble RATES  of link messages
    commit CHANGES       say the last Commit again, changed                fail BOOL      Ready, but every step raises
    release              all of it ends                                    held           counts by gate
    found                what the scripted engine found wrong              resources      fds, threads, shared mappings, rss
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import psutil

from baton.config import WorkerConfig
from engine.scripted_runner import ScriptedRunner
from kv_transfer.liveness import ProcessIdentity
from kv_transfer.ucx import transport
from tests.faults.fault_gates import GATES, held_runner, hold_direct_copies
from tests.worker.scripted_worker import LAYOUT, SPEC
from worker.loading import Allocate, LoadedModel
from worker.main import main

RUNNERS: list[ScriptedRunner] = []


def load_scripted_model(config: WorkerConfig, allocate: Allocate) -> LoadedModel:
    runner = held_runner(LAYOUT, config.engine.num_blocks, allocate)
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
        case ["fail", bool(fails)]:
            GATES.fails = fails
        case ["trouble", dict(rates)]:
            GATES.trouble = rates
        case ["commit", dict(changes)]:
            GATES.say_commit_again(changes)
        case ["release"]:
            GATES.release()
        case ["held"]:
            return dict(GATES.held)
        case ["found"]:
            return RUNNERS[0].faults
        case ["resources"]:
            process = psutil.Process()
            maps = Path("/proc/self/maps").read_text().splitlines()
            shared = sum("/SYSV" in line or "/dev/shm/" in line for line in maps)
            return {
                "fds": len(os.listdir("/proc/self/fd")),
                "threads": threading.active_count(),
                "shared": shared,
                "rss": process.memory_info().rss,
            }
        case _:
            raise ValueError(f"no such command: {command} {arguments}")
    return None


def advertise(port: int) -> None:
    """Tell peers another TCP port for KV than the one that we listen on, as behind a wrong device or a firewall."""
    pack = vars(transport)["pack_address"]

    def pack_elsewhere(told: bytes, process: ProcessIdentity) -> bytes:
        listening = [c.laddr.port for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        (ours,) = (packed for packed in map(packed_port, listening) if packed in told)
        return bytes(pack(told.replace(ours, packed_port(port)), process))

    vars(transport)["pack_address"] = pack_elsewhere


def packed_port(port: int) -> bytes:
    return port.to_bytes(2, "big")


def listen() -> None:
    for line in sys.stdin:
        print(json.dumps(["answer", obey(*json.loads(line))]), flush=True)


if __name__ == "__main__":
    hold_direct_copies()
    if "FAULT_DATA_PORT" in os.environ:
        advertise(int(os.environ["FAULT_DATA_PORT"]))
    threading.Thread(target=listen, name="commands", daemon=True).start()
    sys.exit(main(load_scripted_model))
