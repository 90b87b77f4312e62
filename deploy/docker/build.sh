#!/usr/bin/env bash
# Build both images: deploy/docker/build.sh REGISTRY/REPOSITORY TAG [--push]
# With an SBOM and provenance attached to each; needs Docker's buildx, some 20 GB of disk and, for UCX, a few minutes of all cores.
set -euo pipefail
cd "$(dirname "$0")/../.."

if (($# < 2)); then
    sed -n 's/^# Build both images: /usage: /p' "$0" >&2
    exit 2
fi
repository=$1
tag=$2
shift 2
for target in control worker; do
    docker buildx build --file deploy/docker/Dockerfile --target "$target" --tag "$repository/baton-$target:$tag" \
        --sbom=true --provenance=mode=max "$@" .
done
