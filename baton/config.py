"""Every setting of a cluster: frozen dataclasses with their defaults, limits and the sources of both.

Loading (YAML <- environment <- flags, merged once, with origins) is `baton.config_load`; nothing here is changed after start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

LOOPBACK = "127.0.0.1"
# One slot, and the slots of one pair, as configured and as a peer may ask for; far above any measured gain (docs/kv_transfer.md).
MAX_FRAME_BYTES = 64 << 20
MAX_NUM_SLOTS = 64
KV_DTYPE_ALIASES = {"fp8": "float8_e4m3", "fp8_e4m3": "float8_e4m3"}  # what other engines call it


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, and where its files are."""

    path: str = "smollm2"  # a name that `baton model fetch` knows, a Hugging Face directory, or a .gguf file
    served_name: str = ""  # "" = the model's own name
    dtype: str = "float32"  # compute dtype; fp32 is the fastest exact arithmetic on CPUs without AMX (DESIGN section 7)
    # auto = weights as the files have them | int8 = those of the layers' matrices, rounded at loading (docs/quantization.md)
    quantization: str = "auto"
    max_model_len: int = 0  # tokens; 0 = the model's own
    weights_from: str = "auto"  # auto = a live worker that has them, else the files | files (docs/weights.md)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine on one worker."""

    block_size: int = 16  # tokens per block; DESIGN section 5
    num_blocks: int = 0  # 0 = from kv_memory_bytes
    kv_memory_bytes: int = 1 << 30  # 1 GiB = 23,301 tokens of the demo model at 46,080 B/token
    kv_cache_dtype: str = "auto"  # auto = the compute dtype; float8_e4m3 = 8 bits and a scale per head vector
    max_num_seqs: int = 64  # sequences that decode in one step
    max_num_batched_tokens: int = 2_048  # token budget of one step
    chunk_tokens: int = 512  # largest prefill chunk of one sequence in one step
    prefix_cache: bool = True
    deterministic: bool = False  # batch-invariant numerics; their price: docs/determinism.md
    tensor_parallel_size: int = 1  # ranks of one worker, that share every layer (docs/tensor_parallel.md)
    num_threads: int = 0  # torch intra-op threads, of all ranks together; 0 = cores / workers on this host, at least 1
    speculation: str = ""  # how tokens are guessed ahead; "" = not, all that the engine knows yet. Both ends must agree
    max_queued_seqs: int = 1_024  # submissions waiting in one worker; more are refused as Overloaded

    def kv_dtype(self, compute_dtype: str) -> str:
        """What the KV cache holds, by its one name (baton/kv_layout.py)."""
        wanted = compute_dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype
        return KV_DTYPE_ALIASES.get(wanted, wanted)

    def kv_bytes(self, block_bytes: int) -> int:
        """Of the KV cache of one worker, at most; `block_bytes` is KVLayout's."""
        return self.num_blocks * block_bytes if self.num_blocks else self.kv_memory_bytes


@dataclass(frozen=True, slots=True)
class KVTransferConfig:
    """The KV plane of one worker. Defaults: DESIGN section 5."""

    transport: str = "ucx"  # ucx | loopback (tests, one process)
    mode: str = "auto"  # auto | staged | direct: whether peers may read blocks in place, and whether they must
    ucx_tls: str = "all"  # UCX_TLS, e.g. "tcp" or "posix,sysv,self"
    ucx_net_devices: str = "lo"
    ucx: Mapping[str, str] = field(default_factory=dict)  # more options of UCX, by name without UCX_
    require_rdma: bool = False  # refuse to start, and refuse pairs, where KV would go another way
    frame_bytes: int = (4 << 20) + 64  # one slot: a header, and a payload that holds a whole number of usual blocks
    num_slots: int = 8  # per pair and direction
    lease_s: float = 5.0  # how long a sender holds blocks, and a receiver a silent ticket
    transfer_timeout_s: float = 10.0  # prefill end -> Ack
    hello_timeout_s: float = 3.0  # Hello and probe
    quiet_s: float = 0.25  # after Commit, silence that counts as loss; doubled each time: a paused sender is not blamed
    max_resends: int = 2  # of damaged or missing frames, per transfer


@dataclass(frozen=True, slots=True)
class EmulationConfig:
    """GPUs that are not there: all is real but the tensors, and takes the time that it would on them (docs/emulator.md)."""

    gpu: str = ""  # a name that engine/timing/hardware.py knows; "" = none: a real model, at its own pace
    model: str = "llama-3.1-8b"  # of engine/timing/shapes.py: what is timed; `model.path` only lends its tokenizer
    tp: int = 1  # GPUs of one worker
    weight_dtype: str = "fp8"  # names of engine/timing/hardware.py; DESIGN section 1 serves the 70B like this
    kv_dtype: str = "bf16"
    time_scale: float = 1.0  # seconds that a second of the cluster takes here: 10 = everything at a tenth of its speed
    kv_scale: int = 1_024  # bytes of KV that are timed for each one moved; DESIGN section 7
    memory_ratio: float = 0.9  # of the GPUs' memory that weights and KV may fill; vLLM's gpu_memory_utilization
    max_model_len: int = 131_072  # tokens; of Llama 3.1, and no emulated model is trained for less
    start_s: float = 0.0  # that loading the weights takes, on top of the process's own start
    flip_s: float = 0.0  # that an idle worker takes to change its role
    failure_mean_s: float = 0.0  # between two deaths of one worker, exponentially distributed; 0 = it never dies
    failure_seed: int = 0
    origin: float = 0.0  # of the deaths, on the cluster's clock (baton/clock.py); `baton up` notes its start here


@dataclass(frozen=True, slots=True)
class TracingConfig:
    """Traces of calls, sent to an OpenTelemetry collector (docs/tracing.md)."""

    endpoint: str = ""  # of OTLP over gRPC: http://host:port, or https:// with TLS; "" = nothing is traced
    callers: str = (
        "join"  # join: calls go on with their callers' traces | link: they only name those, and begin their own
    )
    sample_ratio: float = 1.0  # of calls that begin a trace; those that join one are sampled as their callers said
    service_name: str = "baton"  # service.name is this and -router or -worker
    resource_attributes: str = ""  # more of them: name=value,... as OTEL_RESOURCE_ATTRIBUTES has them
    headers_file: str = ""  # of each export, a secret: name=value, one a line
    ca_file: str = ""  # PEM, of who signed the collector's certificate; "" = the system's
    certificate_file: str = ""  # PEM, where the collector asks for one; with key_file
    key_file: str = ""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One worker process."""

    worker_id: str
    role: str = "both"  # prefill | decode | both
    host: str = LOOPBACK
    port: int = 0  # 0 = the system picks one; the worker announces what it bound
    control_address: str = ""  # the controller's control port; "" = nobody to announce to
    tls_dir: str = (
        ""  # its ca.crt, tls.crt and tls.key; "" = plain text between parts of the cluster (baton/peer_trust.py)
    )
    prefill_role: str = "prefill_worker.prefill_role:build"  # dotted names: a worker imports nothing above itself
    decode_role: str = "decode_worker.decode_role:build"
    heartbeat_s: float = 0.5
    missed_heartbeats: int = 3  # then a router counts as gone
    outbox_bytes: int = 4 << 20  # per router and per link; beyond it, or 5 s behind, that Session or link is dropped
    outbox_s: float = 5.0
    fabric: str = ""  # a label of its network: routers prefer or require pairs within one; "" = all alike
    # For all of its start; controller.worker_start_timeout_s where a controller starts it
    start_timeout_s: float = 120.0
    drain_s: float = 600.0  # after SIGTERM, for what runs to end; DESIGN section 5
    parked_bytes: int = 64 << 20  # what clients may resume: 4,000 calls of 2k-token prompts (worker/parked.py)
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    kv: KVTransferConfig = field(default_factory=KVTransferConfig)
    emulation: EmulationConfig = field(default_factory=EmulationConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)
    log_level: str = "info"


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """Files and batches over HTTP (docs/batch.md)."""

    enabled: bool = True  # where there is a folder
    folder: str = ""  # of files and results, shared by all routers; "" = no batches. `baton up` names one
    database: str = ""  # of their rows; "" = an SQLite file in the folder. `baton up` names controller.database
    max_file_bytes: int = 200 << 20  # of one input file; this and the next as OpenAI has them
    max_lines: int = 50_000
    max_files: int = 1_000  # inputs of one tenant; each is a row of a listing that is made at once
    max_tenant_bytes: int = 4 << 30  # of one tenant's files: twenty of the largest inputs
    max_bytes: int = 32 << 30  # of everybody's: half of a small node's disk
    max_batches: int = 100  # of one tenant, that are not over
    max_running_batches: int = 4  # of one router, so that a large one does not hold up a small one
    max_running_lines: int = 256  # of one router: half of max_inflight
    keep_s: float = 2_592_000.0  # 30 days, as OpenAI keeps what a batch made
    lease_s: float = 5.0  # of a router that works on a batch; DESIGN section 5


@dataclass(frozen=True, slots=True)
class CostConfig:
    """What a worker's time is worth (docs/cost.md)."""

    usd_per_gpu_hour: float = 0.0  # 0 = not known: GPU seconds alone are counted. Emulated GPUs bring theirs
    gpus_per_worker: int = 1  # `baton up --emulate` fills it in


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """One front end process."""

    host: str = LOOPBACK
    http_port: int = 8_000
    grpc_port: int = 50_051
    control_address: str = ""
    processes: int = 1  # that serve the two ports together; docs/router_cost.md shows what one is good for
    shared_ports: bool = (
        False  # listen with SO_REUSEPORT; `baton up` sets it, since it holds the ports while a router is away
    )
    process_port: int = 0  # HTTP of this process alone, for its metrics and health; 0 = none. `baton up` picks one each
    max_inflight: int = 512  # sequences inside, an n=4 call is 4; more get Overloaded
    max_queued: int = 1_024  # calls that wait for their turn: 2 s of TTFT where 500 start each second
    max_queued_tokens: int = 8_000_000  # of their prompts: 64 MB of token ids
    # Of work that a prefill worker has before it gets more; -1 = as much as lasts until the next prompt can begin, 10 to 100 ms
    # (router/lane_window.py, docs/overload.md)
    queue_window_s: float = -1.0
    shed_by_forecast: bool = True  # false: only full bounds and passed deadlines turn calls away, not TTFT targets
    grpc_certificate_file: str = ""  # PEM, of the gRPC port; "" = no TLS
    grpc_key_file: str = ""
    grpc_client_ca_file: str = ""  # PEM; clients must show a certificate signed by one of these; "" = none is asked for
    tls_dir: str = ""  # of what it shows to workers and the controller; baton/peer_trust.py
    api_keys_file: str = ""  # or a folder of them, as a secret is mounted; "" = no keys. router/tenants.py
    request_timeout_s: float = 600.0  # where the caller gives no deadline
    max_retries: int = (
        4  # of one sequence elsewhere, in a row without a new token; 0 = a worker's death ends its streams
    )
    unavailable_wait_s: float = 60.0  # how long a call waits for a worker to come back, within its deadline
    heartbeat_s: float = 0.5
    missed_heartbeats: int = 3
    max_body_bytes: int = 4 << 20  # HTTP body and gRPC message; 300 KB prompts pass, 10 MB bodies do not
    max_stop_strings: int = 16
    max_n: int = 16
    # A prompt of which a decode worker lacks at most so many tokens may be prefilled there, where that is forecast to be sooner
    # and its running streams keep their TPOT; 0 = never, -1 = one chunk (docs/placement.md)
    local_prefill_tokens: int = 0
    one_fabric: bool = False  # KV stays within one fabric: workers of others are no pair; false = it is preferred
    prefix_index_blocks: int = (
        4_000_000  # that workers cache; at most 120 MB (docs/placement.md). 100 workers of 40,000 blocks
    )
    max_connection_age_s: float = 600.0
    max_concurrent_streams: int = (
        1_000  # of one gRPC connection, HTTP/2's SETTINGS; more wait in the client. docs/grpc.md
    )
    max_session_calls: int = 1_024  # running calls of one bulk Session; at 4 KB of task and sinks each, 4 MB
    client_backlog_bytes: int = (
        4 << 20
    )  # of an answer that its client has not taken; as a worker's outbox, DESIGN section 7
    drain_s: float = 600.0  # how long running calls may go on after SIGTERM; DESIGN section 5
    time_scale: float = 1.0  # emulation.time_scale; `baton up --emulate` fills it in
    batch: BatchConfig = field(default_factory=BatchConfig)
    cost: CostConfig = field(default_factory=CostConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)
    log_level: str = "info"


@dataclass(frozen=True, slots=True)
class ControllerConfig:
    host: str = LOOPBACK
    admin_port: int = 8_001
    control_port: int = 0
    shared_ports: bool = False  # as a router's
    # Of SLO classes, settings and decisions: sqlite:///file, postgresql://..., or file:///path of a file that holds such a URL;
    # "" = an SQLite file in the run folder
    database: str = ""
    admin_tokens_file: str = ""  # or a folder of them; "" = the run folder's two alone. docs/slo.md
    require_reason: bool = False  # true: each change of SLO classes must say why; mode, budget and imports always must
    worker_start_timeout_s: float = 120.0  # Ray's own placement waits for ever
    # How far the autoscaler may go: auto | advisory | frozen. Put in force once, when a fleet begins; what operators change later
    # stays. "" = as the database has it, in a new one advisory: nobody's machine gets workers that nobody asked for
    mode: str = ""
    max_gpus: int = 0  # of all pools together, put in force likewise; 0 = as the database has it, in a new one no bound
    standby: int = 0  # workers of a new fleet that are up, weights loaded, and wait to be needed
    tick_s: float = 10.0  # between two looks of the autoscaler; this and the next two: DESIGN section 9
    dwell_s: float = 60.0  # between flips, at least
    shrink_after_s: float = 300.0  # that a smaller pool must have been enough
    heartbeat_s: float = 0.5
    missed_heartbeats: int = 3
    ray_address: str = ""  # host:port of the Ray head; `baton up` fills it in
    ray_node_dir: str = ""  # temporary folder of the Ray node to connect through; "" = any on this host
    run_dir: str = ""  # tokens, logs and the SQLite file; `baton up` fills it in
    worker_num_cpus: float = 0.25  # of Ray's accounting, not a limit: 2 cores hold 8 workers, more are refused
    # What answers "what if" (dry runs, whether disaggregation pays): a module that is run in a process of its own, where it is
    # installed; "" = nobody. router/controller/planner.py
    planner: str = "bench.what_if"
    planner_seconds: float = (
        5.0  # that it may simulate for one answer, by the wall clock however slow an emulated one is
    )
    # Between two looks at whether disaggregation pays; a fall-back takes two of them, and twice as long since the last one. Each
    # is of the calls of the last 300 s, so shorter ones see some of them again
    pd_period_s: float = 300.0
    worker_server: str = "worker.server:WorkerServer"  # module:class that the actor shell runs; tests name a stand-in
    log_level: str = "info"


@dataclass(frozen=True, slots=True)
class KubernetesConfig:
    """Where pods are the machines (docs/kubernetes.md); a chart fills it in."""

    fullname: str = ""  # of the release: what objects are named after; "" = not on Kubernetes
    namespace: str = ""  # "" = the pod's own
    api_server: str = ""  # URL; "" = the cluster that this pod runs in
    token_file: str = ""  # with `api_server`: a bearer token
    ca_file: str = ""  # with `api_server`: PEM; "" = the system's
    mode: str = "statefulset"  # what sizes pools: statefulset | kuberay | external (nobody here)
    scaler: str = "slo"  # who decides on sizes: slo (the controller) | hpa | none (values)
    control_address: str = ""  # host:port at which worker pods reach the controller
    worker_port: int = 7_100  # on each worker pod's own address
    gpus_per_worker: int = 1
    prefill_shape: str = "gpu"  # hardware of each pool's pods, by any name; equal ones may flip
    decode_shape: str = "gpu"
    both_shape: str = "gpu"
    prefill_cores: int = 1  # that a worker of the pool computes with where engine.num_threads leaves it open
    decode_cores: int = 1
    both_cores: int = 1
    # What running calls get of a worker of that role that is ended or replaced; DESIGN section 5
    prefill_drain_s: float = 600.0
    decode_drain_s: float = 600.0
    both_drain_s: float = 600.0
    prefill_min: int = 1  # bounds of a new store's budget
    prefill_max: int = 0  # 0 = the GPU budget alone
    decode_min: int = 1
    decode_max: int = 0
    both_min: int = 0
    both_max: int = 0
    # A pod that was asked for and does not run after so long is given up: a node of a cloud's pool boots in 2-6 minutes, and an
    # image of 10 GB takes as long
    pending_s: float = 900.0
    # A worker that is away for so long, on a pod that runs, is evicted: twice a start from a page cache
    sick_s: float = 300.0
    slo_seed: str = ""  # file: SLO classes that the chart's values name
    slo_source: str = "live"  # live: seeds are a new store's defaults; values: they are put in force at each start
    fabric_label: str = ""  # of worker pods, whose value is the worker's fabric; "" = all are of one
    llmd_labels: bool = False  # label roles as llm-d does, too


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """All of `baton up`."""

    prefill: int = 1
    decode: int = 1
    both: int = 0  # --colocated: prefill 0, decode 0, both 1
    decode_kv_cache_dtype: str = "auto"  # of the decode pool alone; auto = engine.kv_cache_dtype
    tls_dir: str = ""  # holds router/, worker/ and controller/, each with its certificate; "" = plain text inside
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    kv: KVTransferConfig = field(default_factory=KVTransferConfig)
    emulation: EmulationConfig = field(default_factory=EmulationConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    controller: ControllerConfig = field(default_factory=ControllerConfig)
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)

    def tls_dir_of(self, part: str) -> str:
        """Where router, worker or controller finds its certificate; "" = there is none."""
        return f"{self.tls_dir}/{part}" if self.tls_dir else ""

    def engine_of(self, role: str) -> EngineConfig:
        """The engine settings of one pool's workers."""
        if role != "decode" or self.decode_kv_cache_dtype == "auto":
            return self.engine
        return replace(self.engine, kv_cache_dtype=self.decode_kv_cache_dtype)

    def drain_s_of(self, role: str) -> float:
        """How long running calls may go on at a worker of that role that is to be ended or replaced."""
        pods = self.kubernetes
        if not pods.fullname:
            return self.router.drain_s
        return {"prefill": pods.prefill_drain_s, "decode": pods.decode_drain_s, "both": pods.both_drain_s}[role]
