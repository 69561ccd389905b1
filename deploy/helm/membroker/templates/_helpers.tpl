{{- define "membroker.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "membroker.labels" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- /* The part of both pods that says where they run. */ -}}
{{- define "membroker.node" -}}
automountServiceAccountToken: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{- /* A map of TOML keys. JSON strings, numbers, booleans and lists are valid TOML, too. Helm stores 8589934592 as a float. */ -}}
{{- define "membroker.toml" -}}
{{- $path := .path -}}
[{{ $path }}]
{{- range $key, $value := .table }}{{ if not (kindIs "map" $value) }}
{{ $key }} = {{ if and (kindIs "float64" $value) (eq (floor $value) $value) }}{{ int64 $value }}{{ else }}{{ toJson $value }}{{ end }}
{{- end }}{{ end }}
{{ range $key, $value := .table }}{{ if kindIs "map" $value }}
{{ include "membroker.toml" (dict "path" (printf "%s.%s" $path (ternary $key ($key | quote) (regexMatch "^[A-Za-z0-9_-]+$" $key))) "table" $value) }}
{{- end }}{{ end }}
{{- end }}
