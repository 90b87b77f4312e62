{{/* (list root poolName) -> the pod template of one pool, the same under a StatefulSet and in a RayCluster. */}}
{{- define "baton.workerPod" -}}
{{- $root := index . 0 -}}
{{- $name := index . 1 -}}
{{- $full := include "baton.fullname" $root -}}
{{- with get $root.Values.pools $name -}}
metadata:
  labels:
    {{- include "baton.podLabels" (list $root "worker" $name) | nindent 4 }}
    baton.dev/fleet: {{ $full }}
    baton.dev/role: {{ $name }}
    {{- if $root.Values.llmdLabels }}
    llm-d.ai/inferenceServing: "true"
    llm-d.ai/role: {{ $name }}
    {{- end }}
  annotations:
    baton.dev/config: {{ include "baton.config.worker" $root | sha256sum | trunc 16 }}
    {{- with merge (dict) .podAnnotations $root.Values.commonAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "baton.serviceAccount" $root }}
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: {{ add .drainSeconds 30 }}
  {{- with include "baton.pod.images" $root }}{{ . | nindent 2 }}{{ end }}
  {{- with .runtimeClass }}
  runtimeClassName: {{ . }}
  {{- end }}
  securityContext:
    runAsNonRoot: {{ ne (int .runAsUser) 0 }}
    runAsUser: {{ .runAsUser }}
    runAsGroup: {{ .runAsUser }}
    fsGroup: {{ .runAsUser }}
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile: {type: RuntimeDefault}
  {{- $affinity := include "baton.workerAffinity" (list $root .affinity) | fromYaml }}
  {{- with include "baton.pod.placement" (mergeOverwrite (deepCopy .) (dict "affinity" $affinity "topologySpread" (include "baton.spread" (list $root "worker" $name .topologySpread) | fromYamlArray))) }}{{ . | nindent 2 }}{{ end }}
  {{- if .gpu.claimTemplate }}
  resourceClaims:
    - {name: gpu, resourceClaimTemplateName: {{ .gpu.claimTemplate }}}
  {{- end }}
  {{- if ne $root.Values.model.source "pvc" }}
  initContainers:
    {{- include "baton.container.fetch" (list $root (include "baton.fetchVerb" $root)) | nindent 4 }}
  {{- end }}
  containers:
    - name: worker
      image: {{ include "baton.image" (list $root "worker") }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      {{- if ne $root.Values.ray.mode "kuberay" }}
      args:
        - ray
        - start
        - --address={{ include "baton.rayAddress" $root }}
        - --node-ip-address=$(POD_IP)
        {{- range $flag, $value := include "baton.rayStart" (list $root $name) | fromYaml }}
        - {{ printf "--%s=%s" $flag $value | quote }}
        {{- end }}
        - --block
      {{- end }}
      env:
        {{- include "baton.env.pod" $root | nindent 8 }}
        {{- include "baton.env.ray" $root | nindent 8 }}
        {{- with include "baton.env.tracing" $root }}{{ . | nindent 8 }}{{ end }}
        # Else the worker's log is in a file of Ray's, and `kubectl logs` shows none of it; Ray's own would be pages a minute
        - {name: RAY_LOG_TO_STDERR, value: "1"}
        - {name: RAY_BACKEND_LOG_LEVEL, value: warning}
        {{- range $key, $value := .env }}
        - {name: {{ $key }}, value: {{ $value | quote }}}
        {{- end }}
      ports:
        - {name: worker, containerPort: 7100}
      # Ready = the weights are loaded and the worker serves. Ray restarts the process, and the pod ends with its Ray node: where
      # KubeRay asks for a liveness probe, that of the node answers.
      readinessProbe:
        tcpSocket: {port: worker}
        {{- toYaml .probe | nindent 8 }}
      {{- if eq $root.Values.ray.mode "kuberay" }}
      livenessProbe:
        tcpSocket: {port: 6380}
        initialDelaySeconds: 30
        periodSeconds: 10
        failureThreshold: 6
      {{- end }}
      lifecycle:
        preStop:
          exec:
            command:
              - sh
              - -c
              - exec python -m router.controller.kube.prestop --control {{ include "baton.controlAddress" $root }} --worker "$POD_NAME" --limit-s {{ .drainSeconds }}{{ if include "baton.internalTls" $root }} --tls-dir /etc/baton/tls/worker{{ end }}
      resources:
        {{- include "baton.workerResources" . | nindent 8 }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities:
          drop: [ALL]
          {{- if .rdma.resource }}
          add: [IPC_LOCK]
          {{- end }}
      volumeMounts:
        - {name: model, mountPath: {{ $root.Values.modelCache.mountPath }}, readOnly: {{ ne $root.Values.model.source "pvc" }}}
        - {name: ray-token, mountPath: /etc/baton/ray, readOnly: true}
        - {name: shm, mountPath: /dev/shm}
        - {name: tmp, mountPath: /tmp}
        {{- with include "baton.mount.tracing" $root }}{{ . | nindent 8 }}{{ end }}
        {{- if .hugepages.size }}
        - {name: hugepages, mountPath: /hugepages}
        {{- end }}
        {{- if include "baton.internalTls" $root }}
        - {name: tls, mountPath: /etc/baton/tls/worker, readOnly: true}
        {{- end }}
  volumes:
    {{- include "baton.volume.model" $root | nindent 4 }}
    {{- include "baton.volume.rayToken" $root | nindent 4 }}
    - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ .shmSize }}}}
    - {name: tmp, emptyDir: {}}
    {{- with include "baton.volume.tracing" $root }}{{ . | nindent 4 }}{{ end }}
    {{- if .hugepages.size }}
    - {name: hugepages, emptyDir: {medium: HugePages-{{ .hugepages.size }}}}
    {{- end }}
    {{- if include "baton.internalTls" $root }}
    - {name: tls, secret: {secretName: {{ $root.Values.auth.internalTls.workerSecret }}, defaultMode: 0440}}
    {{- end }}
{{- end -}}
{{- end }}

{{/* A pool -> the container's resources. Memory is a limit too: what exceeds it is ours, and must not take the node along. */}}
{{- define "baton.workerResources" -}}
{{- $devices := dict -}}
{{- if and .gpu.count (not .gpu.claimTemplate) }}{{ $_ := set $devices .gpu.resource (toString .gpu.count) }}{{ end -}}
{{- if .rdma.resource }}{{ $_ := set $devices .rdma.resource (toString .rdma.count) }}{{ end -}}
{{- if .hugepages.size }}{{ $_ := set $devices (printf "hugepages-%s" .hugepages.size) .hugepages.count }}{{ end -}}
requests:
  {{- toYaml (merge (dict "cpu" .cpu "memory" .memory) $devices) | nindent 2 }}
limits:
  {{- toYaml (merge (dict "memory" .memory) $devices) | nindent 2 }}
{{- if .gpu.claimTemplate }}
claims: [{name: gpu}]
{{- end }}
{{- end }}

{{/* (list root poolName) -> flags of `ray start`: one worker a pod, told by a resource that bears its name. */}}
{{- define "baton.rayStart" -}}
{{- $pool := get (index . 0).Values.pools (index . 1) -}}
num-cpus: "1"
num-gpus: {{ $pool.gpu.count | toString | quote }}
{{- if eq (index . 0).Values.ray.mode "kuberay" }}
resources: {{ `"{\"pod:$POD_NAME\": 1}"` | squote }}  # a shell reads it
{{- else }}
resources: '{"pod:$(POD_NAME)": 1}'
{{- end }}
node-manager-port: "6380"
object-store-memory: "80000000"
include-log-monitor: "false"
{{- end }}

{{/* (list root affinity) -> what the user asks of a pool's pods, and the fabric's term beside it. */}}
{{- define "baton.workerAffinity" -}}
{{- $affinity := deepCopy (index . 1) -}}
{{- range $kind, $rules := include "baton.fabricAffinity" (index . 0) | fromYaml -}}
{{- $theirs := get $affinity $kind | default dict -}}
{{- range $rule, $terms := $rules }}{{ $_ := set $theirs $rule (concat (get $theirs $rule | default list) $terms) }}{{ end -}}
{{- $_ := set $affinity $kind $theirs -}}
{{- end -}}
{{- toYaml $affinity -}}
{{- end }}

{{/* Both pools alike: KV moves within one island of the fabric. */}}
{{- define "baton.fabricAffinity" -}}
{{- with .Values.fabric -}}
{{- if .topologyKey -}}
{{- $term := dict "topologyKey" .topologyKey "labelSelector" (dict "matchLabels" (include "baton.selector" (list $ "worker") | fromYaml)) -}}
{{- if eq .policy "required" -}}
{{- toYaml (dict "podAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (list $term))) -}}
{{- else -}}
{{- toYaml (dict "podAffinity" (dict "preferredDuringSchedulingIgnoredDuringExecution" (list (dict "weight" 100 "podAffinityTerm" $term)))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* (list root component pool? constraints) -> topologySpread, each of the part's own pods where it names none. */}}
{{- define "baton.spread" -}}
{{- $root := index . 0 -}}
{{- $selector := include "baton.selector" (initial .) | fromYaml -}}
{{- $constraints := list -}}
{{- range last . -}}
{{- $constraints = append $constraints (mergeOverwrite (dict "labelSelector" (dict "matchLabels" $selector)) .) -}}
{{- end -}}
{{- toYaml $constraints -}}
{{- end }}
