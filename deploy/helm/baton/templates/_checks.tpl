{{/* What no single value can show. All that is wrong is said at once. */}}
{{- define "baton.checks" -}}
{{- $wrong := concat (include "baton.checks.model" . | fromYamlArray) (include "baton.checks.pools" . | fromYamlArray) (include "baton.checks.parts" . | fromYamlArray) (include "baton.checks.labels" . | fromYamlArray) -}}
{{- if $wrong -}}
{{- fail (printf "\n- %s" (join "\n- " $wrong)) -}}
{{- end -}}
{{- end }}

{{- define "baton.checks.model" -}}
{{- $wrong := list -}}
{{- $model := .Values.model -}}
{{- $cache := .Values.modelCache -}}
{{- if eq $model.source "pvc" -}}
  {{- if not $model.path -}}{{- $wrong = append $wrong "model.path is empty: with model.source pvc it says where in the claim the model is" -}}{{- end -}}
  {{- if not (and (eq $cache.type "pvc") $cache.pvc.existingClaim) -}}{{- $wrong = append $wrong "model.source is pvc: set modelCache.type to pvc and modelCache.pvc.existingClaim to the claim that holds the model" -}}{{- end -}}
{{- else -}}
  {{- if not $model.id -}}{{- $wrong = append $wrong "model.id is empty: name a model, such as meta-llama/Llama-3.1-8B-Instruct" -}}{{- end -}}
  {{- if $model.path -}}{{- $wrong = append $wrong (printf "model.path is %q, but model.source is %s, which makes the path from model.id: leave it out, or set model.source to pvc" $model.path $model.source) -}}{{- end -}}
{{- end -}}
{{- if eq $model.source "url" -}}
  {{- if not (and $model.url $model.sha256) -}}{{- $wrong = append $wrong "model.source is url: set model.url and model.sha256, the hash of that file" -}}{{- end -}}
  {{- if $model.revision -}}{{- $wrong = append $wrong "model.revision is set, but model.source is url: model.sha256 says which file is meant" -}}{{- end -}}
{{- else if or $model.url $model.sha256 -}}
  {{- $wrong = append $wrong (printf "model.url or model.sha256 is set, but model.source is %s: set model.source to url" $model.source) -}}
{{- end -}}
{{- if and (eq $cache.type "pvc") (not $cache.prefetch.enabled) (not $cache.pvc.existingClaim) (ne $model.source "pvc") -}}
  {{- $wrong = append $wrong "modelCache.prefetch.enabled is false, so nobody fills the claim that this chart makes: name one that is filled in modelCache.pvc.existingClaim" -}}
{{- end -}}
{{- if and .Values.emulation.gpu (ne $model.quantization "auto") -}}
  {{- $wrong = append $wrong (printf "model.quantization is %s, but emulation.gpu is set: emulated weights are never loaded, leave it at auto" $model.quantization) -}}
{{- end -}}
{{- if and (gt (int .Values.engine.chunkTokens) (int .Values.engine.maxNumBatchedTokens)) -}}
  {{- $wrong = append $wrong (printf "engine.chunkTokens = %d is above engine.maxNumBatchedTokens = %d: a chunk has to fit in a step" (int .Values.engine.chunkTokens) (int .Values.engine.maxNumBatchedTokens)) -}}
{{- end -}}
{{- toYaml $wrong -}}
{{- end }}

{{- define "baton.checks.pools" -}}
{{- $wrong := list -}}
{{- $pools := .Values.pools -}}
{{- $names := include "baton.pools" . | splitList "," -}}
{{- if not (or $pools.both.enabled (and $pools.prefill.enabled $pools.decode.enabled)) -}}
  {{- $wrong = append $wrong "pools: an answer needs a prefill and a decode pool, or pools.both" -}}
{{- end -}}
{{- if and $pools.both.enabled (or $pools.prefill.enabled $pools.decode.enabled) -}}
  {{- $wrong = append $wrong "pools.both goes alone: set pools.prefill.enabled and pools.decode.enabled to false, or pools.both.enabled" -}}
{{- end -}}
{{- $floor := 0 -}}
{{- $first := get $pools (first $names) -}}
{{- range $name := $names -}}
  {{- $pool := get $pools $name -}}
  {{- $size := $pool.replicas -}}
  {{- $floor = add $floor (mul $size.min $pool.gpu.count) -}}
  {{- if gt (int $size.min) (int $size.max) -}}{{- $wrong = append $wrong (printf "pools.%s.replicas.min = %d is above pools.%s.replicas.max = %d" $name (int $size.min) $name (int $size.max)) -}}{{- end -}}
  {{- if or (lt (int $size.initial) (int $size.min)) (gt (int $size.initial) (int $size.max)) -}}{{- $wrong = append $wrong (printf "pools.%s.replicas.initial = %d is not between min = %d and max = %d" $name (int $size.initial) (int $size.min) (int $size.max)) -}}{{- end -}}
  {{- if ne (int $pool.gpu.count) (int $first.gpu.count) -}}{{- $wrong = append $wrong (printf "pools.%s.gpu.count = %d differs from pools.%s.gpu.count = %d: the GPU budget counts workers of one size" $name (int $pool.gpu.count) (first $names) (int $first.gpu.count)) -}}{{- end -}}
  {{- $tensor := int $pool.parallelism.tensor -}}
  {{- if ne $tensor (int $first.parallelism.tensor) -}}{{- $wrong = append $wrong (printf "pools.%s.parallelism.tensor = %d differs from pools.%s.parallelism.tensor = %d: workers that may take each other's role are cut alike" $name $tensor (first $names) (int $first.parallelism.tensor)) -}}{{- end -}}
  {{- if gt $tensor 1 -}}
    {{- if $.Values.emulation.gpu -}}{{- $wrong = append $wrong (printf "pools.%s.parallelism.tensor = %d: the emulated GPUs of a worker are emulation.tp" $name $tensor) -}}
    {{- else if and $pool.gpu.count (ne $tensor (int $pool.gpu.count)) -}}{{- $wrong = append $wrong (printf "pools.%s.parallelism.tensor = %d, but gpu.count = %d: each rank has one GPU" $name $tensor (int $pool.gpu.count)) -}}{{- end -}}
    {{- if eq $.Values.kv.mode "direct" -}}{{- $wrong = append $wrong (printf "pools.%s.parallelism.tensor = %d: ranks share their KV among themselves, not with peers, so kv.mode cannot be direct" $name $tensor) -}}{{- end -}}
  {{- end -}}
  {{- if ne (pick $pool.rdma "hcas" "addrType" "require" | toJson) (pick $first.rdma "hcas" "addrType" "require" | toJson) -}}{{- $wrong = append $wrong (printf "pools.%s.rdma differs from pools.%s.rdma in hcas, addrType or require: all workers have one KV plane" $name (first $names)) -}}{{- end -}}
  {{- if and $pool.gpu.claimTemplate (eq (int $pool.gpu.count) 0) -}}{{- $wrong = append $wrong (printf "pools.%s.gpu.claimTemplate is set, but gpu.count is 0: say how many GPUs the claim holds" $name) -}}{{- end -}}
  {{- if and $pool.gpu.claimTemplate (not (semverCompare ">=1.32-0" $.Capabilities.KubeVersion.Version)) -}}{{- $wrong = append $wrong (printf "pools.%s.gpu.claimTemplate: Kubernetes %s has no claims of devices as this chart writes them, 1.32 has" $name $.Capabilities.KubeVersion.Version) -}}{{- end -}}
  {{- if and $pool.hugepages.size (not $pool.hugepages.count) -}}{{- $wrong = append $wrong (printf "pools.%s.hugepages.count is empty: say how much, such as 4Gi" $name) -}}{{- end -}}
  {{- if and $pool.hugepages.count (not $pool.hugepages.size) -}}{{- $wrong = append $wrong (printf "pools.%s.hugepages.size is empty: 2Mi or 1Gi" $name) -}}{{- end -}}
  {{- if and $pool.rdma.require (not $pool.rdma.resource) -}}{{- $wrong = append $wrong (printf "pools.%s.rdma.require is set, but no rdma.resource: a pod without a device has no RDMA" $name) -}}{{- end -}}
  {{- if and $pool.rdma.hcas (not $pool.rdma.resource) -}}{{- $wrong = append $wrong (printf "pools.%s.rdma.hcas is set, but no rdma.resource: a pod without a device has no RDMA" $name) -}}{{- end -}}
  {{- range $key, $value := $pool.env -}}
    {{- if and $.Values.tracing.enabled (eq $key "OTEL_RESOURCE_ATTRIBUTES") -}}{{- $wrong = append $wrong (printf "pools.%s.env.%s: the chart sets it where tracing.enabled is true; set tracing.resourceAttributes" $name $key) -}}{{- end -}}
    {{- if or (hasPrefix "RAY_" $key) (hasPrefix "POD_" $key) (hasPrefix "BATON_" $key) -}}{{- $wrong = append $wrong (printf "pools.%s.env.%s: names that begin with RAY_, POD_ and BATON_ are the chart's" $name $key) -}}{{- end -}}
  {{- end -}}
{{- end -}}
{{- $budget := int .Values.scaler.gpuBudget -}}
{{- if and $budget (lt $budget (int $floor)) -}}
  {{- $wrong = append $wrong (printf "scaler.gpuBudget = %d is below the %d GPUs of the smallest pools (replicas.min x gpu.count)" $budget (int $floor)) -}}
{{- end -}}
{{- toYaml $wrong -}}
{{- end }}

{{- define "baton.checks.parts" -}}
{{- $wrong := list -}}
{{- with .Values.ray -}}
  {{- if eq .mode "external" -}}
    {{- if not (and .external.address .external.tokenSecret) -}}{{- $wrong = append $wrong "ray.mode is external: set ray.external.address and ray.external.tokenSecret" -}}{{- end -}}
    {{- if ne $.Values.scaler.type "none" -}}{{- $wrong = append $wrong (printf "ray.mode is external, so the pods are somebody else's: scaler.type must be none, it is %s" $.Values.scaler.type) -}}{{- end -}}
  {{- else if or .external.address .external.tokenSecret -}}{{- $wrong = append $wrong (printf "ray.external is set, but ray.mode is %s" .mode) -}}
  {{- end -}}
  {{- with $.Values.networkPolicy }}
    {{- if and (eq $.Values.ray.mode "external") .enabled (not .rayFrom) -}}{{- $wrong = append $wrong "ray.mode is external: name the pods of its head in networkPolicy.rayFrom, or they cannot reach the controller" -}}{{- end -}}
    {{- if and (ne $.Values.ray.mode "external") .rayFrom -}}{{- $wrong = append $wrong (printf "networkPolicy.rayFrom is set, but ray.mode is %s: the head is the chart's own" $.Values.ray.mode) -}}{{- end -}}
  {{- end -}}
  {{- if and (eq .mode "kuberay") (ne $.Values.scaler.type "slo") -}}{{- $wrong = append $wrong (printf "ray.mode is kuberay: only the controller can size worker groups, scaler.type must be slo, it is %s" $.Values.scaler.type) -}}{{- end -}}
  {{- if and (eq .gcs.storage "redis") (not .gcs.redis.address) -}}{{- $wrong = append $wrong "ray.gcs.storage is redis: set ray.gcs.redis.address" -}}{{- end -}}
  {{- if and (ne .gcs.storage "redis") (or .gcs.redis.address .gcs.redis.passwordSecret) -}}{{- $wrong = append $wrong (printf "ray.gcs.redis is set, but ray.gcs.storage is %s" .gcs.storage) -}}{{- end -}}
{{- end -}}
{{- with .Values.auth.internalTls -}}
  {{- $given := compact (list .routerSecret .workerSecret .controllerSecret) | len -}}
  {{- if and (gt $given 0) (lt $given 3) -}}{{- $wrong = append $wrong "auth.internalTls: name the secrets of router, worker and controller, or none of them" -}}{{- end -}}
{{- end -}}
{{- with .Values.router -}}
  {{- if eq (int .httpPort) (int .grpcPort) -}}{{- $wrong = append $wrong (printf "router.httpPort and router.grpcPort are both %d" (int .httpPort)) -}}{{- end -}}
  {{- if eq (int .service.httpPort) (int .service.grpcPort) -}}{{- $wrong = append $wrong (printf "router.service.httpPort and router.service.grpcPort are both %d" (int .service.httpPort)) -}}{{- end -}}
  {{- range $port := list .httpPort .grpcPort -}}
    {{- if and (ge (int $port) 9100) (lt (int $port) (add 9100 $.Values.router.processes | int)) -}}{{- $wrong = append $wrong (printf "router port %d is one of the processes' own (9100 and up, one each)" (int $port)) -}}{{- end -}}
  {{- end -}}
  {{- if gt (int .hpa.minReplicas) (int .hpa.maxReplicas) -}}{{- $wrong = append $wrong (printf "router.hpa.minReplicas = %d is above router.hpa.maxReplicas = %d" (int .hpa.minReplicas) (int .hpa.maxReplicas)) -}}{{- end -}}
  {{- if and .ingress.enabled (not .ingress.host) -}}{{- $wrong = append $wrong "router.ingress.enabled: set router.ingress.host" -}}{{- end -}}
  {{- if and (or .gateway.http.enabled .gateway.grpc.enabled) (not .gateway.parentRefs) -}}{{- $wrong = append $wrong "router.gateway: name a Gateway in router.gateway.parentRefs" -}}{{- end -}}
  {{- if and .tls.clientCa (not .tls.secret) -}}{{- $wrong = append $wrong "router.tls.clientCa is set, but no router.tls.secret" -}}{{- end -}}
  {{- if and $.Values.batch.enabled (not $.Values.database.existingSecret) (or (gt (int .replicas) 1) .hpa.enabled) -}}{{- $wrong = append $wrong "batch.enabled: its rows are in a file of the claim, which one router pod may write; set database.existingSecret, or router.replicas to 1 and router.hpa.enabled to false" -}}{{- end -}}
{{- end -}}
{{- if and .Values.batch.enabled (not .Values.batch.existingClaim) -}}{{- $wrong = append $wrong "batch.enabled: set batch.existingClaim" -}}{{- end -}}
{{- if and .Values.metrics.serviceMonitor.enabled .Values.networkPolicy.enabled (not .Values.networkPolicy.metricsFrom) -}}
  {{- $wrong = append $wrong "metrics.serviceMonitor.enabled: name Prometheus's pods in networkPolicy.metricsFrom, or nobody can scrape" -}}
{{- end -}}
{{- with .Values.tracing -}}
  {{- if and .enabled (not .endpoint) -}}{{- $wrong = append $wrong "tracing.enabled: set tracing.endpoint to a collector's OTLP over gRPC, such as http://otel-collector.observability:4317" -}}{{- end -}}
  {{- if and (or .tls.caSecret .tls.clientSecret) (not (hasPrefix "https://" .endpoint)) -}}{{- $wrong = append $wrong (printf "tracing.tls is set, but tracing.endpoint is %q: without https:// there is no TLS" .endpoint) -}}{{- end -}}
{{- end -}}
{{- if and (eq .Values.scaler.type "hpa") (not .Values.metrics.prometheusRule.enabled) -}}
  {{- $wrong = append $wrong "scaler.type is hpa: it scales by metrics that the rules of metrics.prometheusRule.enabled record" -}}
{{- end -}}
{{- if and (eq .Values.fabric.policy "required") (not .Values.fabric.topologyKey) (not .Values.fabric.podLabel) -}}{{- $wrong = append $wrong "fabric.policy is required: set fabric.topologyKey, or fabric.podLabel where you place the pods yourself" -}}{{- end -}}
{{- if and .Values.fabric.topologyKey (eq .Values.ray.mode "external") -}}{{- $wrong = append $wrong "fabric.topologyKey is set, but ray.mode is external: place those pods where they are made" -}}{{- end -}}
{{- $seen := dict -}}
{{- range .Values.slo.classes -}}
  {{- if hasKey $seen .name -}}{{- $wrong = append $wrong (printf "slo.classes: %s is there twice" .name) -}}{{- end -}}
  {{- $_ := set $seen .name true -}}
  {{- if and .e2eMs (lt (float64 .e2eMs) (float64 .ttftMs)) -}}{{- $wrong = append $wrong (printf "slo.classes: %s: e2eMs = %v is below ttftMs = %v" .name .e2eMs .ttftMs) -}}{{- end -}}
{{- end -}}
{{- if not (hasKey $seen "interactive") -}}{{- $wrong = append $wrong "slo.classes: interactive must be among them; calls that name no class are of it" -}}{{- end -}}
{{- toYaml $wrong -}}
{{- end }}

{{- define "baton.checks.labels" -}}
{{- $wrong := list -}}
{{- $ours := list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component" "baton.dev/home" "baton.dev/fleet" "baton.dev/role" "baton.dev/controller" "baton.dev/leads" "llm-d.ai/role" -}}
{{- range $key, $_ := .Values.commonLabels -}}
  {{- if has $key $ours -}}{{- $wrong = append $wrong (printf "commonLabels.%s: selectors use it; choose another key" $key) -}}{{- end -}}
{{- end -}}
{{- toYaml $wrong -}}
{{- end }}
