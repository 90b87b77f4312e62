#!/usr/bin/env bash
# Write constraints.txt anew: one version for every package of both images' Python layers. Run it after a change of dependencies.
# Versions are those of Python 3.12 on x86-64 Linux. torch's own CUDA packages are left out: each torch names theirs exactly.
set -euo pipefail
cd "$(dirname "$0")/../.."

report=$(mktemp)
trap 'rm -f "$report"' EXIT
mapfile -t wanted < <(python3 - <<'PYTHON'
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
extras = project["optional-dependencies"]
for name in (*project["dependencies"], *extras["postgres"], *extras["kubernetes"], *extras["tracing"], *extras["worker-cuda13"]):
    if not name.startswith("torch"):
        print(name)
PYTHON
)
python3 -m pip install --quiet --dry-run --ignore-installed --only-binary :all: --python-version 3.12 \
    --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --target "$report.none" --report "$report" "${wanted[@]}"
python3 - "$report" <<'PYTHON' > deploy/docker/constraints.txt
import json
import sys
import tomllib

with open("pyproject.toml", "rb") as file:
    extras = tomllib.load(file)["project"]["optional-dependencies"]
with open(sys.argv[1], encoding="utf-8") as file:
    installed = json.load(file)["install"]
print("# Made by deploy/docker/lock.sh.")
print("\n".join(sorted((f"{one['metadata']['name']}=={one['metadata']['version']}" for one in installed), key=str.lower)))
print(next(name for name in extras["worker-cuda13"] if name.startswith("torch")))
PYTHON
