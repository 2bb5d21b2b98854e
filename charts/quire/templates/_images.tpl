{{/* Which images run. */}}

{{/* The image of the router, as a reference. Takes the root. */}}
{{- define "quire.routerImage" -}}
{{- $image := .Values.router.image -}}
{{- include "quire.reference" (dict "registry" .Values.image.registry "repository" $image.repository "digest" $image.digest "tag" (default .Chart.AppVersion $image.tag) "path" "router.image.tag") -}}
{{- end -}}

{{/* The image of an engine, for GPUs or not. Takes root and model. */}}
{{- define "quire.engineImage" -}}
{{- $image := .root.Values.engine.image -}}
{{- $kind := ternary "cuda" "cpu" (gt (int .model.gpus) 0) -}}
{{- $tag := printf "%s-%s" (default .root.Chart.AppVersion $image.tag) $kind -}}
{{- include "quire.reference" (dict "registry" .root.Values.image.registry "repository" $image.repository "digest" (get $image (printf "%sDigest" $kind)) "tag" $tag "path" "engine.image.tag") -}}
{{- end -}}

{{/* A reference to an image. Takes registry, repository, tag, digest and path (of the value with the tag). */}}
{{- define "quire.reference" -}}
{{- $name := .repository -}}
{{- with .registry -}}{{- $name = printf "%s/%s" (trimSuffix "/" .) $name -}}{{- end -}}
{{- include "quire.fixed" (dict "path" .path "image" (ternary (printf "%s@%s" $name .digest) (printf "%s:%s" $name .tag) (ne (default "" .digest) ""))) -}}
{{- end -}}

{{/* A reference to an image, unless its tag is one that moves. Takes image and path (of the value). */}}
{{- define "quire.fixed" -}}
{{- if regexMatch ":(latest|main|master|nightly|edge|stable|dev|head|canary|alpine|bookworm|v?[0-9]{1,3})(-(cpu|cuda|alpine|bookworm))?$" .image -}}
{{- fail (printf "%s: the image %s can be another one tomorrow, and pods of one release would differ: give it a tag that is a version, or a digest." .path .image) -}}
{{- end -}}
{{- .image -}}
{{- end -}}
