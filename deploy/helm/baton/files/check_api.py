"""`helm test`: the OpenAI API answers a short call. `check_api.py URL`, with BATON_API_KEY where keys are asked for."""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from typing import Any


def main() -> int:
    base, key = sys.argv[1], os.environ.get("BATON_API_KEY", "")
    try:
        models = _ask(f"{base}/v1/models", key)
        name = models["data"][0]["id"]
        body = {"model": name, "prompt": "1, 2, 3,", "max_tokens": 4, "temperature": 0}
        answer = _ask(f"{base}/v1/completions", key, body)
    except urllib.error.HTTPError as error:
        if error.code == 401 and not key:
            print("keys are asked for, as they should be; set tests.apiKeySecret to go further")
            return 0
        print(f"{error.code}: {error.read(1_000)!r}", file=sys.stderr)
        return 1
    num_tokens = answer["usage"]["completion_tokens"]
    print(f"{name} answered with {num_tokens} tokens")
    return 0 if num_tokens else 1


def _ask(url: str, key: str, body: dict[str, object] | None = None) -> Any:
    headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
    request = urllib.request.Request(url, json.dumps(body).encode() if body else None, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


if __name__ == "__main__":
    sys.exit(main())
