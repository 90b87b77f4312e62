{{/* The classes as PUT /admin/v1/slo takes them. */}}
{{- define "baton.sloClasses" -}}
{{- $classes := list -}}
{{- range .Values.slo.classes -}}
{{- $class := dict -}}
{{- range $name, $value := . }}{{ $_ := set $class (snakecase $name | replace "e_2e" "e2e") $value }}{{ end -}}
{{- $classes = append $classes $class -}}
{{- end -}}
{{- toPrettyJson $classes -}}
{{- end }}
