"""How a worker gets its model: the seam between the server and what computes. The weights come from a live worker that has them,
where there is one, else from the files."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

from baton import clock
from baton.config import WorkerConfig
from baton.log import get_log
from baton.memory import available_memory_bytes
from baton.model_files import ModelFiles, describe_model, load_model_files
from baton.model_spec import ModelSpec
from engine.loading.weight_manifest import WeightManifest, weight_manifest
from engine.ports import Runner
from kv_transfer.pages import PageSource, page_layout

log = get_log("worker.loading")

FROM_FILES, FROM_PEER = "files", "peer"


def on_time() -> float:
    """The lateness of a real GPU, which takes the time it takes."""
    return 0.0


@dataclass(frozen=True, slots=True)
class LendableWeights:
    """A loaded model's weights for others that start."""

    manifest: WeightManifest
    pages: PageSource


class OtherProcesses(Protocol):
    """Those that compute a model beside the worker's own (engine/tensor_parallel/ranks.py)."""

    def watch(self, on_lost: Callable[[BaseException], None]) -> None:
        """Call `on_lost`, from any thread, if one ends by itself."""
        ...

    def close(self) -> None:
        """End them; none is left when this returns."""
        ...


class NoOthers:
    """Of a model in one process."""

    def watch(self, on_lost: Callable[[BaseException], None]) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and what is known of it."""

    spec: ModelSpec
    runner: Runner
    lateness: Callable[[], float] = (
        on_time  # of an emulated step, p99 of the last ones as a share of it; from any thread
    )
    lendable: LendableWeights | None = None
    weights_from: str = ""  # FROM_PEER | FROM_FILES; "" = it has none
    weights_s: float = 0.0  # that they took to come and to be laid out
    others: OtherProcesses = field(default_factory=NoOthers)  # whoever takes the model closes them


Allocate: TypeAlias = Callable[
    [int], memoryview
]  # bytes wanted -> zeroed memory that peers may map, if the transport can
LoadModel: TypeAlias = Callable[[WorkerConfig, Allocate], LoadedModel]
# Fills memory of whole pages with a model's weights; False: nobody lends them, and it is not to be used
Borrow: TypeAlias = Callable[[ModelSpec, WeightManifest, mmap.mmap], bool]


def load_torch_model(config: WorkerConfig, allocate: Allocate, borrow: Borrow | None = None) -> LoadedModel:
    """Get weights, `borrow`ed if possible; the KV cache lies in memory of `allocate`.

    Raises:
        ConfigError: missing or damaged files, too little memory.
    """
    from engine.loading.weight_image import WeightImage, tensors_of  # loads torch: only in processes that compute
    from engine.models.architecture import ARCHITECTURES
    from engine.torch_runner import load_torch_runner

    started_s = clock.now_s()
    path, dtype = config.model.path, config.model.dtype

    def manifest_of(spec: ModelSpec) -> WeightManifest:
        return weight_manifest(ARCHITECTURES[spec.architecture].tensor_shapes(spec), dtype, spec.is_int8)

    def quantized(files: ModelFiles) -> ModelFiles:
        return replace(files, spec=files.spec.quantized(config.model.quantization))

    files, weights = None, None
    is_whole = config.engine.tensor_parallel_size == 1  # else each rank reads its share, and nobody has all to lend
    if is_whole and borrow is not None and config.model.weights_from == "auto":
        described = quantized(describe_model(path))
        manifest = manifest_of(described.spec)
        buffer = _borrowed(config, borrow, described, manifest) if described.spec.weights_hash else None
        if buffer is not None:
            files, weights = described, tensors_of(manifest, buffer)
    if files is None:
        files = quantized(load_model_files(path))
    weights_from = FROM_FILES if weights is None else FROM_PEER
    runner = load_torch_runner(files, config.engine, dtype, allocate=allocate, weights=weights)
    weights_s = clock.now_s() - started_s
    lendable = None
    if is_whole:
        manifest = manifest_of(files.spec)
        pages = PageSource(
            page_layout(config.kv.frame_bytes), manifest.nbytes, WeightImage(runner.model, manifest).read
        )
        lendable = LendableWeights(manifest, pages)
    spec = replace(files.spec, numerics=runner.numerics)
    return LoadedModel(
        spec,
        runner,
        lendable=lendable,
        weights_from=weights_from,
        weights_s=weights_s,
        others=runner.ranks or NoOthers(),
    )


def _borrowed(config: WorkerConfig, borrow: Borrow, files: ModelFiles, manifest: WeightManifest) -> mmap.mmap | None:
    from engine.loading.weight_image import weight_buffer
    from engine.torch_runner import loading_bytes

    layout, engine, dtype = page_layout(config.kv.frame_bytes), config.engine, config.model.dtype
    nbytes = PageSource(layout, manifest.nbytes, lambda *_: None).num_blocks * layout.block_bytes
    kv_bytes = engine.kv_bytes(files.spec.kv_layout(engine.kv_dtype(dtype), engine.block_size).block_bytes)
    needed_bytes = nbytes + loading_bytes(files.spec, dtype) + kv_bytes  # the image, and what is made beside it
    if needed_bytes > available_memory_bytes():
        log.warning("weights_not_borrowed", reason=f"{needed_bytes >> 20} MiB must be free for it")
        return None
    buffer = weight_buffer(nbytes)
    return buffer if borrow(files.spec, manifest, buffer) else None
