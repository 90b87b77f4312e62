"""`helm test`: a controller leads, its admin endpoint lets nobody in without a token, and routers do not serve it at all.
`check_admin.py ADMIN_URL ROUTER_URL`.
"""

from __future__ import annotations

import sys
import urllib.error
import urllib.request


def main() -> int:
    admin, router = sys.argv[1:]
    wanted = {f"{admin}/leaderz": 200, f"{admin}/admin/v1/slo": 401, f"{router}/admin/v1/slo": 404}
    wrong = {url: status for url, want in wanted.items() if (status := _status(url)) != want}
    for url, status in wrong.items():
        print(f"{url} answered {status}, not {wanted[url]}", file=sys.stderr)
    return 1 if wrong else 0


def _status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


if __name__ == "__main__":
    sys.exit(main())
