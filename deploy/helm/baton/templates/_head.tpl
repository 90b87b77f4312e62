{{/* The head's pod: the GCS, which knows the actors, and no room for actors. */}}
{{- define "baton.headPod" -}}
metadata:
  labels:
    {{- include "baton.podLabels" (list . "head") | nindent 4 }}
spec:
  serviceAccountName: {{ include "baton.serviceAccount" . }}
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: 30
  {{- with include "baton.pod.images" . }}{{ . | nindent 2 }}{{ end }}
  {{- include "baton.pod.security" . | nindent 2 }}
  {{- with include "baton.pod.placement" .Values.ray.head }}{{ . | nindent 2 }}{{ end }}
  containers:
    - name: head
      image: {{ include "baton.image" (list . "control") }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      {{- if ne .Values.ray.mode "kuberay" }}
      args:
        - ray
        - start
        - --head
        - --port=6379
        - --node-ip-address=$(POD_IP)
        {{- range $flag, $value := include "baton.headStart" . | fromYaml }}
        - {{ printf "--%s=%s" $flag $value | quote }}
        {{- end }}
        {{- if and (eq .Values.ray.gcs.storage "redis") .Values.ray.gcs.redis.passwordSecret }}
        - --redis-password=$(REDIS_PASSWORD)
        {{- end }}
        - --no-monitor
        - --block
      {{- end }}
      env:
        {{- include "baton.env.pod" . | nindent 8 }}
        {{- include "baton.env.ray" . | nindent 8 }}
        - {name: RAY_START_HOOK, value: router.controller.ray_head.adapt_start}
        {{- if eq .Values.ray.gcs.storage "rocksdb" }}
        - {name: RAY_gcs_storage, value: rocksdb}
        - {name: RAY_gcs_storage_path, value: /var/lib/gcs/rocksdb}
        {{- else if and (eq .Values.ray.gcs.storage "redis") (ne .Values.ray.mode "kuberay") }}
        - {name: RAY_REDIS_ADDRESS, value: {{ .Values.ray.gcs.redis.address | quote }}}
        {{- with .Values.ray.gcs.redis }}
        {{- if .passwordSecret }}
        - {name: REDIS_PASSWORD, valueFrom: {secretKeyRef: {name: {{ .passwordSecret }}, key: {{ .passwordKey }}}}}
        {{- end }}
        {{- end }}
        {{- end }}
      ports:
        - {name: gcs, containerPort: 6379}
      readinessProbe:
        tcpSocket: {port: gcs}
        periodSeconds: 5
      livenessProbe:
        tcpSocket: {port: gcs}
        initialDelaySeconds: 30
        periodSeconds: 10
        failureThreshold: 6
      resources:
        requests: {cpu: {{ .Values.ray.head.cpu | quote }}, memory: {{ .Values.ray.head.memory }}}
        limits: {memory: {{ .Values.ray.head.memory }}}
      {{- include "baton.container.security" . | nindent 6 }}
      volumeMounts:
        - {name: ray-token, mountPath: /etc/baton/ray, readOnly: true}
        - {name: tmp, mountPath: /tmp}
        - {name: shm, mountPath: /dev/shm}
        {{- if eq .Values.ray.gcs.storage "rocksdb" }}
        - {name: gcs, mountPath: /var/lib/gcs}
        {{- end }}
  volumes:
    {{- include "baton.volume.rayToken" . | nindent 4 }}
    - {name: tmp, emptyDir: {}}
    - {name: shm, emptyDir: {medium: Memory, sizeLimit: 256Mi}}
    {{- if and (eq .Values.ray.gcs.storage "rocksdb") (eq .Values.ray.mode "kuberay") }}
    - {name: gcs, persistentVolumeClaim: {claimName: {{ include "baton.fullname" . }}-gcs}}
    {{- end }}
{{- end }}

{{- define "baton.headStart" -}}
num-cpus: "0"
num-gpus: "0"
include-dashboard: "false"
object-store-memory: "80000000"
include-log-monitor: "false"
{{- if eq .Values.ray.mode "kuberay" }}
no-monitor: "true"
{{- end }}
{{- end }}

{{- define "baton.gcsClaim" -}}
accessModes: [ReadWriteOnce]
{{- with .Values.ray.gcs.storageClass }}
storageClassName: {{ . }}
{{- end }}
resources: {requests: {storage: {{ .Values.ray.gcs.size }}}}
{{- end }}
