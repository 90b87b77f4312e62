{{/* Names and labels, made here and nowhere else: a selector and its pods cannot disagree. */}}

{{- define "baton.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{/* 40 characters: a StatefulSet's name and its pods' revision hash must fit into a label's 63. */}}
{{- define "baton.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "baton.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "baton.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{/* (list root component home?) -> what selects the pods of one part. Immutable: no version, no live role, nothing of the user's. */}}
{{- define "baton.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "baton.name" $root }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- if gt (len .) 2 }}
baton.dev/home: {{ index . 2 }}
{{- end }}
{{- end }}

{{/* The same arguments -> the labels of an object of that part; ours win over the user's. */}}
{{- define "baton.labels" -}}
{{- $root := index . 0 -}}
{{- $ours := include "baton.selector" . | fromYaml -}}
{{- $about := dict "app.kubernetes.io/version" $root.Chart.AppVersion "app.kubernetes.io/managed-by" $root.Release.Service "app.kubernetes.io/part-of" "baton" "helm.sh/chart" (printf "%s-%s" $root.Chart.Name $root.Chart.Version) -}}
{{- toYaml (merge $ours $about $root.Values.commonLabels) -}}
{{- end }}

{{/* The same arguments -> the labels of a pod: without versions, so that a new chart alone replaces no pod. */}}
{{- define "baton.podLabels" -}}
{{- $ours := include "baton.selector" . | fromYaml -}}
{{- toYaml (merge $ours (dict "app.kubernetes.io/part-of" "baton") (index . 0).Values.commonLabels) -}}
{{- end }}

{{/* (list root name component home?) -> metadata of an object. */}}
{{- define "baton.metadata" -}}
{{- $root := index . 0 -}}
name: {{ index . 1 }}
namespace: {{ $root.Release.Namespace }}
labels:
  {{- include "baton.labels" (concat (list $root) (slice . 2)) | nindent 2 }}
{{- with $root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "baton.serviceAccount" -}}
{{- default (include "baton.fullname" .) .Values.serviceAccount.name -}}
{{- end }}

{{- define "baton.rayTokenSecret" -}}
{{- if eq .Values.ray.mode "external" -}}
{{- .Values.ray.external.tokenSecret -}}
{{- else -}}
{{- default (printf "%s-ray" (include "baton.fullname" .)) .Values.ray.tokenSecret -}}
{{- end -}}
{{- end }}

{{- define "baton.rayAddress" -}}
{{- if eq .Values.ray.mode "external" -}}
{{- .Values.ray.external.address -}}
{{- else if eq .Values.ray.mode "kuberay" -}}
{{- printf "%s-head-svc:6379" (include "baton.fullname" .) -}}
{{- else -}}
{{- printf "%s-head:6379" (include "baton.fullname" .) -}}
{{- end -}}
{{- end }}

{{- define "baton.adminSecret" -}}
{{- default (printf "%s-admin" (include "baton.fullname" .)) .Values.admin.tokensSecret -}}
{{- end }}

{{/* (list root part) -> an image; a digest is exact, so it wins. */}}
{{- define "baton.image" -}}
{{- $root := index . 0 -}}
{{- $image := get $root.Values.image (index . 1) -}}
{{- with $root.Values.image.registry }}{{ . }}/{{ end -}}
{{- $image.repository -}}
{{- if $image.digest }}@{{ $image.digest }}{{ else }}:{{ default $root.Chart.AppVersion $image.tag }}{{ end -}}
{{- end }}

{{/* The pools that are on, as a comma-separated list in a fixed order. */}}
{{- define "baton.pools" -}}
{{- $names := list -}}
{{- range $name := list "prefill" "decode" "both" -}}
{{- if (get $.Values.pools $name).enabled }}{{ $names = append $names $name }}{{ end -}}
{{- end -}}
{{- join "," $names -}}
{{- end }}

{{/* Where workers and routers find the model. Another revision is another folder: pods that run keep theirs. */}}
{{- define "baton.modelPath" -}}
{{- with .Values.model -}}
{{- if .path -}}
{{- printf "%s/%s" $.Values.modelCache.mountPath .path -}}
{{- else if eq .source "url" -}}
{{- printf "%s/%s-%s.gguf" $.Values.modelCache.mountPath (replace "/" "--" .id) (trunc 12 .sha256) -}}
{{- else -}}
{{- printf "%s/%s-%s" $.Values.modelCache.mountPath (replace "/" "--" .id) (default "main" .revision | replace "/" "--") -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Where a router finds the model. It reads no weights, so of a hub's model that no claim holds it fetches the small files alone,
     beside the whole ones that workers of its node may have. */}}
{{- define "baton.routerModelPath" -}}
{{- $whole := include "baton.modelPath" . -}}
{{- ternary (printf "%s/small/%s" .Values.modelCache.mountPath (base $whole)) $whole (eq (include "baton.routerFetch" .) "small") -}}
{{- end }}

{{/* What a router's pod does for its model: small | fetch | wait, or nothing. */}}
{{- define "baton.routerFetch" -}}
{{- if ne .Values.model.source "pvc" -}}
{{- $verb := include "baton.fetchVerb" . -}}
{{- ternary "small" $verb (and (eq $verb "fetch") (eq .Values.model.source "hf")) -}}
{{- end -}}
{{- end }}

{{/* "true" where mTLS inside is on. */}}
{{- define "baton.internalTls" -}}
{{- if .Values.auth.internalTls.workerSecret -}}true{{- end -}}
{{- end }}
