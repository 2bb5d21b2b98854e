#!/usr/bin/env bash
# What no API of Kubernetes does, on a cluster whose programs are processes of one machine, and whose further nodes are
# network namespaces `kube-NODE` that end at a bridge of the namespace `kube` as `to-NODE`: README.md has the words. RUN is
# the folder with a file NAME.pid for each program, NODE/containerd.sock among them, and UP the command that starts again
# what does not run.
set -eu
: "${RUN:?is the folder with the ids of the programs}" "${UP:?is the command that starts what does not run}"
stop() {
  local id; id=$(cat "$RUN/$1.pid")
  kill -9 "$id"
  while kill -0 "$id" 2>/dev/null; do sleep 0.1; done
  rm "$RUN/$1.pid"
}
link() { nsenter --net=/run/netns/kube ip link set "to-$1" "$2"; }
end() { # a node, at once: its kubelet, its proxy, and all containers
  link "$1" down
  stop "$1-kubelet"; stop "$1-proxy"
  local socket=$RUN/$1/containerd.sock task
  for task in $(ctr --address "$socket" --namespace k8s.io tasks list -q); do
    ctr --address "$socket" --namespace k8s.io tasks kill --signal KILL "$task" >/dev/null 2>&1 || true
  done
}
case "$*" in
  "can cut "* | "can mend "* | "can end "* | "can begin "*) [ -e "/run/netns/kube-$3" ] ;;
  "can stop api-server" | "can start api-server" | "can stop dns" | "can start dns") ;;
  "cut "*) link "$2" down ;;
  "mend "*) link "$2" up ;;
  "end "*) end "$2" ;;
  "begin "*) link "$2" up; $UP >/dev/null ;;
  "stop api-server") stop apiserver ;;
  "stop dns") stop coredns ;;
  "start api-server" | "start dns") $UP >/dev/null ;;
  *) echo "unknown: $*" >&2; exit 2 ;;
esac
