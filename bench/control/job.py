"""`python -m bench.control.job FD`: carries out what a Jobs tells it, one Job after the other; ends at once when its pipe does.

A second thread reads the pipe, so that who is busy hears of its end, too.
"""

from __future__ import annotations

import os
import pickle
import sys
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread

from bench.control.jobs import Answer, Job


def main() -> None:
    pipe, messages = Connection(int(sys.argv[1])), SimpleQueue[bytes]()
    Thread(target=_read, args=(pipe, messages), daemon=True).start()
    while True:
        pipe.send(_answer(messages.get()))


def _read(pipe: Connection, messages: SimpleQueue[bytes]) -> None:
    try:
        while True:
            messages.put(pipe.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)


def _answer(message: bytes) -> Answer:
    try:
        job: Job = pickle.loads(message)
        return Answer(job.function(*job.args))
    except Exception as error:  # noqa: BLE001  the boundary of a process: it is raised where the job was given
        return Answer(error=error)


if __name__ == "__main__":
    main()
