#!/usr/bin/env bash
# What no API of Kubernetes does, on a cluster of kind: README.md has the words. KIND_CLUSTER_NAME as kind has it.
set -eu
control=${KIND_CLUSTER_NAME:-kind}-control-plane
manifest=/etc/kubernetes/manifests/kube-apiserver.yaml
drop() { # -I to begin, -D to end; of a node's own traffic, and of that of its pods
  for chain in "INPUT -i" "OUTPUT -o" "FORWARD -i" "FORWARD -o"; do
    # shellcheck disable=SC2086
    docker exec "$2" iptables "$1" $chain eth0 -j DROP
  done
}
case "$*" in
  "can cut "* | "can mend "* | "can end "* | "can begin "*) docker inspect "$3" >/dev/null ;;
  "can stop api-server" | "can start api-server" | "can stop dns" | "can start dns") ;;
  "cut "*) drop -I "$2" ;;
  "mend "*) drop -D "$2" ;;
  "end "*) docker kill "$2" ;;
  "begin "*) docker start "$2" ;;
  "stop api-server") docker exec "$control" mv "$manifest" /etc/kubernetes/ ;;
  "start api-server") docker exec "$control" mv "/etc/kubernetes/${manifest##*/}" "$manifest" ;;
  "stop dns") kubectl -n kube-system scale deployment coredns --replicas=0 ;;
  "start dns") kubectl -n kube-system scale deployment coredns --replicas=2 ;;
  *) echo "unknown: $*" >&2; exit 2 ;;
esac
