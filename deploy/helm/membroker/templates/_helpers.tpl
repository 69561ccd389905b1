{{- define "membroker.image" -}}
{{ with .Values.image.registry }}{{ . }}/{{ end }}{{ .Values.image.repository }}
{{- if .Values.image.digest }}@{{ .Values.image.digest }}{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{- define "membroker.daemon" -}}
{{ .Values.fullnameOverride | default (eq .Release.Name "membroker" | ternary "membrokerd" (printf "%s-membrokerd" .Release.Name)) | trunc 52 | trimSuffix "-" }}
{{- end }}

{{- define "membroker.keeper" -}}
{{ if or .Values.fullnameOverride (ne .Release.Name "membroker") }}{{ include "membroker.daemon" . }}-keeper{{ else }}membroker-keeper{{ end }}
{{- end }}

{{- define "membroker.account" -}}
{{ .Values.serviceAccount.name | default (.Values.serviceAccount.create | ternary (include "membroker.daemon" .) "default") }}
{{- end }}

{{- define "membroker.labels" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- /* The labels of a pod, of which a selector has the first two. The argument is (list $ name). */ -}}
{{- define "membroker.selector" -}}
app.kubernetes.io/name: {{ index . 1 }}
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
{{- end }}

{{- define "membroker.podLabels" -}}
app.kubernetes.io/name: {{ index . 1 }}
{{ with index . 0 }}{{ include "membroker.labels" . }}
{{- with .Values.podLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}
{{- end }}

{{- /* The part of each pod that says where it runs, and as what. */ -}}
{{- define "membroker.node" -}}
automountServiceAccountToken: false
serviceAccountName: {{ include "membroker.account" . }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.seLinuxOptions }}
securityContext:
  seLinuxOptions: {{- toYaml . | nindent 4 }}
{{- end }}
{{- end }}

{{- /* What a container of ours may do, unless it says more. */ -}}
{{- define "membroker.security" -}}
runAsUser: 0
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- /* The pod sees all GPUs of the node, but reserves no GPU: the workers need the same GPUs. */ -}}
{{- define "membroker.env" -}}
- name: NODE_NAME
  valueFrom:
    fieldRef:
      fieldPath: spec.nodeName
- name: NVIDIA_VISIBLE_DEVICES
  value: {{ get (dict "variable" "all" "mount" "/var/run/nvidia-container-devices" "cdi" "void") .Values.gpuDevices }}
- name: NVIDIA_DRIVER_CAPABILITIES
  value: compute,utility
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* The other ways to ask for the GPUs: a volume mount, whose name is all that matters, and an annotation. */ -}}
{{- define "membroker.gpuMount" -}}
{{ if eq .Values.gpuDevices "mount" -}}
- name: gpus
  mountPath: /var/run/nvidia-container-devices/all
  readOnly: true
{{- end }}
{{- end }}

{{- define "membroker.gpuVolume" -}}
{{ if eq .Values.gpuDevices "mount" -}}
- name: gpus
  hostPath:
    path: /dev/null
    type: CharDevice
{{- end }}
{{- end }}

{{- define "membroker.gpuAnnotation" -}}
{{ if eq .Values.gpuDevices "cdi" -}}
cdi.k8s.io/membroker: nvidia.com/gpu=all
{{- end }}
{{- end }}

{{- /* A TOML value. JSON strings, numbers, booleans and lists are valid TOML, too. Helm stores 8589934592 as a float. */ -}}
{{- define "membroker.value" -}}
{{ if and (kindIs "float64" .) (eq (floor .) .) }}{{ int64 . }}{{ else }}{{ toJson . }}{{ end }}
{{- end }}

{{- /* A table of TOML, with the tables in it. */ -}}
{{- define "membroker.toml" -}}
{{- $path := .path -}}
[{{ $path }}]
{{- range $key, $value := .table }}{{ if not (kindIs "map" $value) }}
{{ $key }} = {{ include "membroker.value" $value }}
{{- end }}{{ end }}
{{ range $key, $value := .table }}{{ if kindIs "map" $value }}
{{ include "membroker.toml" (dict "path" (printf "%s.%s" $path (ternary $key ($key | quote) (regexMatch "^[A-Za-z0-9_-]+$" $key))) "table" $value) }}
{{- end }}{{ end }}
{{- end }}

{{- define "membroker.configuration" -}}
driver = {{ .Values.driver | quote }}
runtime_directory = "/run/membroker"
{{- if .Values.keeper.enabled }}

# Each GPU has a keeper of its own in the keepers' pod. {index} is the GPU's number.
descriptor_store = "keeper"
keeper_socket = "/run/membroker-keeper/{index}/fdstore.sock"
{{- end }}
{{- range $key, $value := .Values.config }}
{{ $key }} = {{ include "membroker.value" $value }}
{{- end }}

[metrics]
# All addresses of the pod, of IPv4 and IPv6: the kubelet and Prometheus connect from outside. Do not expose the port
# outside the cluster.
address = "*"
port = {{ .Values.metrics.port }}
{{- if not .Values.metrics.modelReasons }}
model_reasons = false
{{- end }}

[log]
format = {{ .Values.log.format | quote }}
level = {{ .Values.log.level | quote }}
{{- range $name, $table := .Values.tenants }}

{{ include "membroker.toml" (dict "path" (printf "tenants.%s" $name) "table" $table) | trim }}
{{- end }}
{{- end }}

{{- /* The directories of the node. */ -}}
{{- define "membroker.volumes" -}}
- name: runtime
  hostPath:
    path: {{ .Values.runtimeDirectory }}
    type: DirectoryOrCreate
- name: state
  hostPath:
    path: /var/lib/membroker
    type: DirectoryOrCreate
{{- if .Values.keeper.enabled }}
- name: keeper
  hostPath:
    path: /run/membroker-keeper
    type: DirectoryOrCreate
{{- end }}
{{- end }}
