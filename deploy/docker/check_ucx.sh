#!/usr/bin/env bash
# Whether a UCX is what a worker needs: check_ucx.sh PREFIX [MODULE...], e.g. check_ucx.sh /opt/ucx ib cuda
#   the version that ucxx was built against; each transport module there and its libraries found; threads; ucxx uses this UCX and
#   not the one in the wheel, which has no InfiniBand
# On a node `ucx_info -d` shows which devices there are; the router's `transport` metric shows what a pair really uses.
set -euo pipefail

prefix=${1:?"usage: check_ucx.sh PREFIX [MODULE...]"}
shift
readonly MAJOR_MINOR=1.21

fail() {
    echo "check_ucx: $1" >&2
    exit 1
}

info="$prefix/bin/ucx_info"
[[ -x $info ]] || fail "no $info"
version=$("$info" -v | sed -n 's/^# Library version: //p')
[[ $version == "$MAJOR_MINOR".* ]] || fail "UCX is $version, ucxx was built against $MAJOR_MINOR"
"$info" -b | grep -Eq '^#define ENABLE_MT +1' || fail "built without --enable-mt"

for module in "$@"; do
    library="$prefix/lib/ucx/libuct_$module.so"
    [[ -e $library ]] || fail "no $library: this UCX has no '$module'"
    # The driver's own libraries come from the node
    missing=$(ldd "$library" | awk '/not found/ && !/libcuda.so|libnvidia-ml.so/ {print $1}')
    [[ -z $missing ]] || fail "$library needs $missing"
done

LD_LIBRARY_PATH="$prefix/lib" RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true python - "$prefix" <<'PYTHON'
import sys

import libucx

libucx.load_library()
prefix = sys.argv[1]
with open("/proc/self/maps", encoding="utf-8") as maps:
    loaded = {line.split()[-1] for line in maps if "libuc" in line and ".so" in line}
strangers = [path for path in loaded if not path.startswith(prefix)]
if strangers or not any("libucp" in path for path in loaded):
    raise SystemExit(f"check_ucx: ucxx loads {sorted(loaded)}, not {prefix}")
PYTHON
echo "UCX $version in $prefix: ${*:-no module asked for}"
