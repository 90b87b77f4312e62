{{/* Where spans of calls go (baton/tracing.py). All of it is empty where tracing is off. */}}

{{/* TracingConfig. */}}
{{- define "baton.config.tracing" -}}
{{- with .Values.tracing -}}
{{- if .enabled -}}
{{- $attributes := list -}}
{{- range $name, $value := .resourceAttributes }}{{ $attributes = append $attributes (printf "%s=%s" $name $value) }}{{ end -}}
endpoint: {{ .endpoint | quote }}
callers: {{ .callers }}
sample_ratio: {{ .sampleRatio }}
service_name: {{ .serviceName | quote }}
resource_attributes: {{ join "," $attributes | quote }}
{{- if .headersSecret.name }}
headers_file: /etc/baton/tracing/headers
{{- end }}
{{- if .tls.caSecret }}
ca_file: /etc/baton/tracing/ca.crt
{{- end }}
{{- if .tls.clientSecret }}
certificate_file: /etc/baton/tracing/tls.crt
key_file: /etc/baton/tracing/tls.key
{{- end }}
{{- end -}}
{{- end -}}
{{- end }}

{{/* OpenTelemetry's SDK reads it; pods say who they are. After baton.env.pod. */}}
{{- define "baton.env.tracing" -}}
{{- if .Values.tracing.enabled -}}
- {name: OTEL_RESOURCE_ATTRIBUTES, value: "k8s.namespace.name={{ .Release.Namespace }},k8s.pod.name=$(POD_NAME),k8s.pod.uid=$(POD_UID)"}
{{- end -}}
{{- end }}

{{/* One folder of all secrets; what is asked for and missing keeps pods from starting. */}}
{{- define "baton.volume.tracing" -}}
{{- with .Values.tracing -}}
{{- if include "baton.tracingSecrets" $ -}}
- name: tracing
  projected:
    defaultMode: 0440
    sources:
      {{- if .headersSecret.name }}
      - secret: {name: {{ .headersSecret.name }}, items: [{key: {{ .headersSecret.key }}, path: headers}]}
      {{- end }}
      {{- if .tls.caSecret }}
      - secret: {name: {{ .tls.caSecret }}, items: [{key: ca.crt, path: ca.crt}]}
      {{- end }}
      {{- if .tls.clientSecret }}
      - secret: {name: {{ .tls.clientSecret }}, items: [{key: tls.crt, path: tls.crt}, {key: tls.key, path: tls.key}]}
      {{- end }}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "baton.mount.tracing" -}}
{{- if include "baton.tracingSecrets" . -}}
- {name: tracing, mountPath: /etc/baton/tracing, readOnly: true}
{{- end -}}
{{- end }}

{{- define "baton.tracingSecrets" -}}
{{- with .Values.tracing }}{{ if .enabled }}{{ print .headersSecret.name .tls.caSecret .tls.clientSecret }}{{ end }}{{ end -}}
{{- end }}
