{{/* Sizes that somebody else owns: an upgrade leaves them as they are. `lookup` finds nothing where nobody installs. */}}

{{/*
(list root kind name) -> spec.replicas of what runs, while Helm owns that field, which `scaler.type: none` or fixed routers gave it:
a field that Helm owns and renders no more is removed, and the API server makes 1 of it. "" where another one owns it.
*/}}
{{- define "baton.keptReplicas" -}}
{{- $live := lookup "apps/v1" (index . 1) (index . 0).Release.Namespace (index . 2) -}}
{{- $kept := dict -}}
{{- if $live -}}
{{- range $owner := $live.metadata.managedFields -}}
{{- $fields := dig "f:spec" dict ($owner.fieldsV1 | default dict) -}}
{{- if and (eq $owner.manager "helm") (hasKey $fields "f:replicas") }}{{ $_ := set $kept "is" true }}{{ end -}}
{{- end -}}
{{- if $kept.is }}{{ $live.spec.replicas }}{{ end -}}
{{- end -}}
{{- end }}

{{/*
(list root pool) -> what the controller wrote into the pool's group of the live RayCluster. To the API server the groups are one
value, so whoever writes one of them writes the sizes of all.
*/}}
{{- define "baton.groupSizes" -}}
{{- $root := index . 0 -}}
{{- $live := lookup "ray.io/v1" "RayCluster" $root.Release.Namespace (include "baton.fullname" $root) -}}
{{- range $group := dig "spec" "workerGroupSpecs" list ($live | default dict) -}}
{{- if eq $group.groupName (index $ 1) }}{{ with pick $group "replicas" "scaleStrategy" }}{{ toYaml . }}{{ end }}{{ end -}}
{{- end -}}
{{- end }}
