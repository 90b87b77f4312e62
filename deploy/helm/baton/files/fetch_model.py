"""Bring a model into the cache, or wait until another pod has.

    fetch_model.py fetch|wait PATH [--small] --repo ID --revision NAME, or --url URL --sha256 HEX

    1 what is there already, whole, is left alone: PATH.fetched says so, written last
    2 one at a time: a lock beside PATH, so that pods of one node do not fetch into one folder together
    3 fetch beside PATH, rename, let Baton read it (headers, hashes, which it keeps for all starts), write PATH.fetched
With --small the weights stay where they are: for routers, which only want to know what the model is.
A fetch that breaks off is begun again by the kubelet, and goes on where the hub's client can. Only files that Baton reads are
fetched: never pickles. HF_TOKEN is the hub client's own.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import shutil
import sys
import time
import urllib.request
from pathlib import Path

from baton.errors import ConfigError
from baton.model_files import describe_model, load_model_files

SMALL = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
WANTED = ("*.safetensors", "*.json", "*.jinja")
LOOK_S = 5.0  # of who waits; a fetch takes minutes
CHUNK_BYTES = 8 << 20


def main() -> int:
    options = _parser().parse_args()
    done = options.path.with_name(options.path.name + ".fetched")
    if options.verb == "wait":
        return _wait(done, options.limit_s)
    options.path.parent.mkdir(parents=True, exist_ok=True)
    with options.path.with_name(options.path.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            _fetch(options)
            (describe_model if options.small else load_model_files)(str(options.path))
            done.touch()
    print(f"{options.path} is there", flush=True)
    return 0


def _wait(done: Path, limit_s: float) -> int:
    until_s = time.monotonic() + limit_s
    while not done.exists():
        if time.monotonic() > until_s:
            print(f"{done} did not come within {limit_s:g} s; look at the Job that fetches", file=sys.stderr)
            return 1
        time.sleep(LOOK_S)
    return 0


def _fetch(options: argparse.Namespace) -> None:
    part = options.path.with_name(options.path.name + ".part")
    if options.url:
        _download(options.url, options.sha256, part)
    else:
        from huggingface_hub import snapshot_download  # a second to import: not for who waits

        wanted = list(SMALL if options.small else WANTED)
        snapshot_download(options.repo, revision=options.revision, local_dir=part, allow_patterns=wanted)
        shutil.rmtree(part / ".cache", ignore_errors=True)  # the client's own notes
    if options.path.is_dir():  # of a try that ended before it was done
        shutil.rmtree(options.path)
    part.rename(options.path)


def _download(url: str, sha256: str, to: Path) -> None:
    """Raises: ConfigError: it is another file."""
    digest = hashlib.sha256()
    with urllib.request.urlopen(url, timeout=60) as answer, to.open("wb") as file:
        while chunk := answer.read(CHUNK_BYTES):
            digest.update(chunk)
            file.write(chunk)
    if digest.hexdigest() != sha256:
        raise ConfigError(f"{url} has the sha256 {digest.hexdigest()}, not {sha256}", field="model.sha256")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Bring a model into the cache.")
    parser.add_argument("verb", choices=("fetch", "wait"))
    parser.add_argument("path", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--repo", default="")
    parser.add_argument("--revision", default="main")
    parser.add_argument("--url", default="")
    parser.add_argument("--sha256", default="")
    parser.add_argument("--limit-s", type=float, default=7_200.0)
    return parser


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ConfigError, OSError) as error:
        print(f"fetch_model: {error}", file=sys.stderr)
        sys.exit(1)
