{{/* What the processes read: ClusterConfig and RouterConfig (baton/config.py), written as the values say. */}}

{{/* A map of camelCase settings as snake_case YAML. */}}
{{- define "baton.snake" -}}
{{- range $name, $value := . }}
{{ snakecase $name }}: {{ toJson $value }}
{{- end }}
{{- end }}

{{- define "baton.config.model" -}}
path: {{ include "baton.modelPath" . | quote }}
{{- include "baton.config.modelSettings" . }}
{{- end }}

{{- define "baton.config.modelSettings" }}
served_name: {{ default .Values.model.id .Values.model.servedName | quote }}
dtype: {{ .Values.model.dtype }}
quantization: {{ .Values.model.quantization }}
max_model_len: {{ .Values.model.maxModelLen }}
weights_from: {{ .Values.model.weightsFrom }}
{{- end }}

{{- define "baton.config.router" -}}
host: 0.0.0.0
http_port: {{ .Values.router.httpPort }}
grpc_port: {{ .Values.router.grpcPort }}
control_address: {{ include "baton.controlAddress" . | quote }}
processes: {{ .Values.router.processes }}
shared_ports: {{ gt (int .Values.router.processes) 1 }}
drain_s: {{ .Values.router.drainSeconds }}
log_level: {{ .Values.router.logLevel }}
{{- include "baton.snake" .Values.router.settings }}
{{- if .Values.router.tls.secret }}
grpc_certificate_file: /etc/baton/grpc-tls/tls.crt
grpc_key_file: /etc/baton/grpc-tls/tls.key
{{- if .Values.router.tls.clientCa }}
grpc_client_ca_file: /etc/baton/grpc-tls/ca.crt
{{- end }}
{{- end }}
{{- if .Values.auth.apiKeysSecret }}
api_keys_file: /etc/baton/api-keys
{{- end }}
{{- if .Values.emulation.gpu }}
time_scale: {{ .Values.emulation.timeScale }}
{{- end }}
cost:
  usd_per_gpu_hour: {{ .Values.cost.usdPerGpuHour }}
  gpus_per_worker: {{ max 1 (include "baton.gpusPerWorker" . | int) }}
one_fabric: {{ eq .Values.fabric.policy "required" }}
{{- end }}

{{- define "baton.config.batch" -}}
enabled: {{ .Values.batch.enabled }}
{{- if .Values.batch.enabled }}
folder: /var/lib/baton/batch
{{- end }}
{{- end }}

{{/* RouterConfig of one process of a pod: (list root index). */}}
{{- define "baton.config.routerProcess" -}}
{{- $root := index . 0 -}}
{{- include "baton.config.router" $root }}
process_port: {{ add 9100 (index . 1) }}
batch:
  {{- include "baton.config.batch" $root | nindent 2 }}
  database: {{ include "baton.databaseUrl" $root | quote }}
tls_dir: {{ ternary "/etc/baton/tls/router" "" (eq (include "baton.internalTls" $root) "true") | quote }}
model:
  path: {{ include "baton.routerModelPath" $root | quote }}
  {{- include "baton.config.modelSettings" $root | indent 2 }}
{{- with include "baton.config.tracing" $root }}
tracing:
  {{- . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "baton.config.cluster" -}}
{{- range $name, $pool := .Values.pools }}
{{ $name }}: {{ ternary $pool.replicas.initial 0 $pool.enabled }}
{{- end }}
tls_dir: {{ ternary "/etc/baton/tls" "" (eq (include "baton.internalTls" .) "true") | quote }}
decode_kv_cache_dtype: {{ .Values.engine.decodeKvCacheDtype }}
model:
  {{- include "baton.config.model" . | nindent 2 }}
engine:
  {{- include "baton.snake" (omit .Values.engine "decodeKvCacheDtype") | indent 2 }}
  tensor_parallel_size: {{ include "baton.ranksPerWorker" . }}
kv:
  {{- include "baton.config.kv" . | nindent 2 }}
router:
  {{- include "baton.config.router" . | nindent 2 }}
  batch:
    {{- include "baton.config.batch" . | nindent 4 }}
controller:
  database: {{ include "baton.databaseUrl" . | quote }}
  host: 0.0.0.0
  admin_port: 8001
  control_port: 7001
  admin_tokens_file: /etc/baton/admin
  require_reason: {{ .Values.admin.requireReason }}
  worker_start_timeout_s: {{ .Values.controller.workerStartTimeoutSeconds }}
  mode: {{ ternary .Values.scaler.mode "frozen" (eq .Values.scaler.type "slo") }}
  max_gpus: {{ .Values.scaler.gpuBudget }}
  standby: {{ .Values.scaler.standby }}
  tick_s: {{ .Values.scaler.windows.tickSeconds }}
  dwell_s: {{ .Values.scaler.windows.dwellSeconds }}
  shrink_after_s: {{ .Values.scaler.windows.shrinkAfterSeconds }}
  ray_address: {{ include "baton.rayAddress" . | quote }}
  ray_node_dir: /ray
  run_dir: /run/baton
  planner: {{ ternary "bench.what_if" "" .Values.controller.planner | quote }}
  log_level: {{ .Values.controller.logLevel }}
{{- with .Values.emulation }}
{{- if .gpu }}
emulation:
  {{- include "baton.snake" . | indent 2 }}
{{- end }}
{{- end }}
{{- with include "baton.config.tracing" . }}
tracing:
  {{- . | nindent 2 }}
{{- end }}
kubernetes:
  fullname: {{ include "baton.fullname" . }}
  namespace: {{ .Release.Namespace }}
  mode: {{ .Values.ray.mode }}
  scaler: {{ .Values.scaler.type }}
  control_address: {{ include "baton.controlAddress" . | quote }}
  worker_port: 7100
  gpus_per_worker: {{ include "baton.gpusPerWorker" . }}
  {{- $pods := get .Values.pools (ternary "both" "decode" .Values.pools.both.enabled) }}
  {{- range $name := list "prefill" "decode" "both" }}
  {{- $pool := get $.Values.pools $name }}
  {{- $kind := ternary $pool $pods $pool.enabled }}{{/* of whom plays a role that has no pool */}}
  {{ $name }}_shape: {{ include "baton.shape" $kind }}
  {{ $name }}_cores: {{ include "baton.cores" $kind.cpu }}
  {{ $name }}_drain_s: {{ $kind.drainSeconds }}
  {{ $name }}_min: {{ ternary $pool.replicas.min 0 $pool.enabled }}
  {{ $name }}_max: {{ $pool.replicas.max }}
  {{- end }}
  pending_s: {{ .Values.scaler.pendingSeconds }}
  sick_s: {{ .Values.scaler.sickSeconds }}
  slo_seed: /etc/baton/seed/slo.json
  slo_source: {{ .Values.slo.source }}
  llmd_labels: {{ .Values.llmdLabels }}
  fabric_label: {{ default .Values.fabric.topologyKey .Values.fabric.podLabel | quote }}
{{- end }}

{{/* Where the URL is, which is a secret: a ConfigMap holds the path alone. */}}
{{- define "baton.databaseUrl" -}}
{{- if .Values.database.existingSecret }}file:///etc/baton/database/url{{ end -}}
{{- end }}

{{/* A name of a pool's hardware: pools whose pods are alike may flip. */}}
{{- define "baton.shape" -}}
{{- pick . "gpu" "cpu" "memory" "shmSize" "hugepages" "rdma" "env" "nodeSelector" "runtimeClass" | toJson | sha256sum | trunc 8 | printf "gpu-%s" -}}
{{- end }}

{{/* A quantity of CPU -> whole cores, at least one. */}}
{{- define "baton.cores" -}}
{{- $cpu := toString . -}}
{{- if hasSuffix "m" $cpu }}{{ div (trimSuffix "m" $cpu | int64) 1000 | max 1 }}{{ else }}{{ floor (float64 $cpu) | int64 | max 1 }}{{ end -}}
{{- end }}

{{- define "baton.controlAddress" -}}
{{- printf "%s-controller:7001" (include "baton.fullname" .) -}}
{{- end }}

{{/* What a worker is made of: pods whose workers would be others are others. */}}
{{- define "baton.config.worker" -}}
{{- include "baton.config.model" . }}{{ include "baton.config.kv" . }}{{ toJson .Values.engine }}{{ include "baton.ranksPerWorker" . }}{{ toJson .Values.emulation }}{{ include "baton.config.tracing" . -}}
{{- end }}

{{- define "baton.config.kv" -}}
{{- $rdma := dict -}}
{{- range $name := splitList "," (include "baton.pools" .) }}{{ $rdma = (get $.Values.pools $name).rdma }}{{ end -}}
mode: {{ .Values.kv.mode }}
ucx_tls: {{ .Values.kv.tls | quote }}
ucx_net_devices: {{ default "all" (join "," $rdma.hcas) | quote }}
require_rdma: {{ $rdma.require }}
frame_bytes: {{ int .Values.kv.frameBytes }}
num_slots: {{ .Values.kv.numSlots }}
lease_s: {{ .Values.kv.leaseSeconds }}
transfer_timeout_s: {{ .Values.kv.transferTimeoutSeconds }}
{{- $ucx := dict }}
{{- range $option, $value := .Values.kv.ucx }}{{ $_ := set $ucx $option (toString $value) }}{{ end }}
{{- if ne $rdma.addrType "auto" }}{{ $_ := set $ucx "IB_ADDR_TYPE" $rdma.addrType }}{{ end }}
ucx: {{ toJson $ucx }}
{{- end }}

{{/* Processes that compute one worker's model; all enabled pools agree (_checks.tpl). */}}
{{- define "baton.ranksPerWorker" -}}
{{- $size := 1 -}}
{{- range $name := splitList "," (include "baton.pools" .) }}{{ $size = (get $.Values.pools $name).parallelism.tensor }}{{ end -}}
{{- $size -}}
{{- end }}

{{/* GPUs that one worker takes; all enabled pools agree (_checks.tpl). */}}
{{- define "baton.gpusPerWorker" -}}
{{- $count := 0 -}}
{{- range $name := splitList "," (include "baton.pools" .) }}{{ $count = (get $.Values.pools $name).gpu.count }}{{ end -}}
{{- $count -}}
{{- end }}
