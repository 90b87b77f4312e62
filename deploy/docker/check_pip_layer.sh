#!/usr/bin/env bash
# Whether an installed Python layer is whole: check_pip_layer.sh control|worker, with that layer's python first in PATH.
# The control plane must run without torch and ucxx; a worker must have both.
set -euo pipefail

layer=${1:?"usage: check_pip_layer.sh control|worker"}
if [[ $layer != control && $layer != worker ]]; then
    echo "unknown layer '$layer': control or worker" >&2
    exit 2
fi
python -m pip check
case "$layer" in
control)
    python - <<'PYTHON'
import importlib
import importlib.util

for package in ("torch", "ucxx"):
    if importlib.util.find_spec(package) is not None:
        raise SystemExit(f"{package} is installed: too much for the control plane")
for module in ("router.main", "router.controller.main", "cli.main", "baton_client", "baton.otlp", "kubernetes", "psycopg"):
    importlib.import_module(module)
PYTHON
    ;;
worker)
    # ucxx looks for a driver when it is imported, and a build has none; that it is found is all that can be asked here
    python - <<'PYTHON'
import importlib
import importlib.util

for package in ("torch", "ucxx", "ray"):
    if importlib.util.find_spec(package) is None:
        raise SystemExit(f"{package} is missing")
for module in ("worker.actor", "baton.otlp"):
    importlib.import_module(module)
PYTHON
    ;;
esac
echo "$layer layer: whole"
