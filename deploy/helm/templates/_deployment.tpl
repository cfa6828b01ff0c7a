{{- /* Changes the deployment `made`; writes nothing. */ -}}
{{- define "kestrel.deployment" -}}
{{- $values := .root.Values -}}
{{- $pod := .made.spec.template.spec -}}
{{- $container := first $pod.containers -}}
{{- if not (or $values.tokensSecret (get $values.options "insecure-public")) -}}
{{- fail "tokensSecret: without tokens anybody who reaches the pods could call; say so by options.insecure-public=true" -}}
{{- end -}}
{{- $_ := merge .made.spec.selector.matchLabels .release -}}
{{- $_ := merge .made.spec.template.metadata.labels .release -}}
{{- $_ := set .made.spec "replicas" (int $values.replicas) -}}
{{- with $values.strategy }}{{ $_ := set $.made.spec "strategy" . }}{{ end -}}
{{- $_ := set $container "image" $values.image -}}
{{- $gpus := int $values.gpus -}}
{{- $options := deepCopy $values.options -}}
{{- if gt $gpus 1 -}}
{{- $options = merge $options (dict "devices" "all" "frontends" "auto") -}}
{{- else if eq $gpus 0 -}}
{{- $_ := set $options "device" "cpu" -}}
{{- $_ := unset $pod "tolerations" -}}
{{- end -}}
{{- $chosen := dict -}}
{{- range $name, $value := $options -}}
{{- $text := toString $value -}}
{{- if kindIs "bool" $value }}{{ $text = ternary "on" "off" $value }}{{ end -}}
{{- if and (kindIs "float64" $value) (eq (floor $value) $value) }}{{ $text = toString (int64 $value) }}{{ end -}}
{{- $_ := set $chosen (printf "kestrel-grpc-%s" $name | upper | replace "-" "_") $text -}}
{{- end -}}
{{- $env := list -}}
{{- range $container.env -}}
{{- if and (eq .name "KESTREL_GRPC_TOKENS") (not $values.tokensSecret) -}}
{{- else if and (eq .name "KESTREL_GRPC_DEVICE") (gt $gpus 1) -}}
{{- else if hasKey $chosen .name -}}
{{- $env = append $env (dict "name" .name "value" (get $chosen .name)) -}}
{{- $_ := unset $chosen .name -}}
{{- else -}}
{{- with .valueFrom }}{{ $_ := set .secretKeyRef "name" $values.hubSecret }}{{ end -}}
{{- $env = append $env . -}}
{{- end -}}
{{- end -}}
{{- range $name, $value := $chosen }}{{ $env = append $env (dict "name" $name "value" $value) }}{{ end -}}
{{- $_ := set $container "env" $env -}}
{{- if $gpus }}{{ $_ := set $container.resources.limits "nvidia.com/gpu" $gpus }}{{ else }}{{ $_ := unset $container.resources.limits "nvidia.com/gpu" }}{{ end -}}
{{- $_ := set $container "resources" (mergeOverwrite $container.resources (deepCopy $values.resources)) -}}
{{- $volumes := list -}}
{{- range $pod.volumes -}}
{{- with .persistentVolumeClaim }}{{ $_ := set . "claimName" $.root.Release.Name }}{{ end -}}
{{- with .secret }}{{ $_ := set . "secretName" $values.tokensSecret }}{{ end -}}
{{- if or $values.tokensSecret (ne .name "tokens") }}{{ $volumes = append $volumes . }}{{ end -}}
{{- end -}}
{{- $_ := set $pod "volumes" $volumes -}}
{{- $mounts := list -}}
{{- range $container.volumeMounts -}}
{{- if or $values.tokensSecret (ne .name "tokens") }}{{ $mounts = append $mounts . }}{{ end -}}
{{- end -}}
{{- $_ := set $container "volumeMounts" $mounts -}}
{{- end -}}
