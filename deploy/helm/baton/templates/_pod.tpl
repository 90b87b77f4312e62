{{/* Pieces of pods that several parts share. */}}

{{- define "baton.pod.security" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "baton.container.security" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "baton.pod.images" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{/* (dict nodeSelector tolerations affinity topologySpread priorityClass) of the values -> where a pod may run. */}}
{{- define "baton.pod.placement" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .topologySpread }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClass }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{/* What every process needs that talks to Ray; each was checked against ray 2.60 (router/controller/ray_head.py). */}}
{{- define "baton.env.ray" -}}
- {name: RAY_AUTH_MODE, value: token}
- {name: RAY_AUTH_TOKEN_PATH, value: /etc/baton/ray/token}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- {name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, value: "0"}
- {name: RAY_gcs_rpc_server_reconnect_timeout_s, value: "600"}
- {name: RAY_worker_niceness, value: "0"}
{{- end }}

{{- define "baton.env.pod" -}}
- {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
- {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
- {name: POD_UID, valueFrom: {fieldRef: {fieldPath: metadata.uid}}}
- {name: HOME, value: /tmp}
- {name: BATON_HOME, value: /tmp/baton}
{{- end }}

{{- define "baton.volume.rayToken" -}}
- name: ray-token
  secret: {secretName: {{ include "baton.rayTokenSecret" . }}, items: [{key: token, path: token}], defaultMode: 0440}
{{- end }}

{{- define "baton.volume.database" -}}
{{- with .Values.database }}
{{- if .existingSecret }}
- name: database
  secret: {secretName: {{ .existingSecret }}, items: [{key: {{ .key }}, path: url}], defaultMode: 0440}
{{- end }}
{{- end }}
{{- end }}

{{- define "baton.mount.database" -}}
{{- if .Values.database.existingSecret }}
- {name: database, mountPath: /etc/baton/database, readOnly: true}
{{- end }}
{{- end }}

{{/* -- the model -- */}}

{{- define "baton.volume.model" -}}
{{- $cache := .Values.modelCache -}}
- name: model
  {{- if eq $cache.type "pvc" }}
  persistentVolumeClaim: {claimName: {{ default (printf "%s-models" (include "baton.fullname" .)) $cache.pvc.existingClaim }}}
  {{- else if eq $cache.type "hostPath" }}
  hostPath: {path: {{ $cache.hostPath.path }}, type: DirectoryOrCreate}
  {{- else }}
  emptyDir: {sizeLimit: {{ $cache.emptyDir.sizeLimit }}}
  {{- end }}
{{- if ne .Values.model.source "pvc" }}
- name: fetch
  configMap: {name: {{ include "baton.fullname" . }}-fetch}
{{- end }}
{{- end }}

{{/* (list root verb) -> a container that brings the model into the cache, small: without weights, or waits until it is there. */}}
{{- define "baton.container.fetch" -}}
{{- $root := index . 0 -}}
{{- $isSmall := eq (index . 1) "small" -}}
{{- with $root.Values.model -}}
- name: model
  image: {{ include "baton.image" (list $root "control") }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  args:
    - python
    - /etc/baton/fetch/fetch_model.py
    - {{ ternary "fetch" (index $ 1) $isSmall }}
    - {{ include (ternary "baton.routerModelPath" "baton.modelPath" $isSmall) $root }}
    {{- if $isSmall }}
    - --small
    {{- end }}
    {{- if eq .source "url" }}
    - --url={{ .url }}
    - --sha256={{ .sha256 }}
    {{- else }}
    - --repo={{ .id }}
    - --revision={{ default "main" .revision }}
    {{- end }}
  env:
    - {name: HOME, value: /tmp}
    {{- with $root.Values.hfToken }}
    {{- if .existingSecret }}
    - {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: {{ .existingSecret }}, key: {{ .key }}}}}
    {{- end }}
    {{- end }}
  resources:
    requests: {cpu: "1", memory: 1Gi}
    limits: {memory: 4Gi}
  {{- include "baton.container.security" $root | nindent 2 }}
  volumeMounts:
    - {name: model, mountPath: {{ $root.Values.modelCache.mountPath }}}
    - {name: fetch, mountPath: /etc/baton/fetch, readOnly: true}
    - {name: tmp, mountPath: /tmp}
{{- end -}}
{{- end }}

{{/* Into a claim that is shared a Job fetches and pods wait; otherwise each pod fetches for itself, one at a time on a node. */}}
{{- define "baton.fetchVerb" -}}
{{- ternary "wait" "fetch" (eq .Values.modelCache.type "pvc") -}}
{{- end }}
