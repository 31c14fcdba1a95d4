#!/bin/bash
# Two network namespaces with a cable between them stand for two hosts. Usage, under `unshare -r -n -m`:
#   two_hosts.sh FOLDER STEPS COMMAND...      COMMAND gets --node-rank; once STEPS steps are recorded, the cable is cut.
# Leaves host-0.err, host-1.err and, in codes.txt, both exit codes and the seconds from the cut to the end of both.
set -eu
folder=$1 steps=$2; shift 2
cd "$folder"
ip link set lo up
unshare -n sleep 600 & second=$!
sleep 0.5
ip link add one type veth peer name two
ip link set two netns "$second"
ip addr add 10.77.0.1/24 dev one; ip link set one up
nsenter -t "$second" -n sh -c "ip link set lo up; ip addr add 10.77.0.2/24 dev two; ip link set two up"
trap 'kill $second $first_host $second_host 2>/dev/null || true' EXIT
GLOO_SOCKET_IFNAME=one "$@" --node-rank 0 2> host-0.err & first_host=$!
GLOO_SOCKET_IFNAME=two nsenter -t "$second" -n "$@" --node-rank 1 2> host-1.err & second_host=$!
for _ in $(seq 1200); do
  [ "$(cat grpo_masked/metrics.jsonl 2>/dev/null | wc -l)" -ge "$steps" ] && break
  kill -0 $first_host 2>/dev/null || break
  sleep 0.1
done
ip link set one down
cut=$(date +%s)
code=0; wait $first_host || code=$?
other=0; wait $second_host || other=$?
echo "$code $other $(($(date +%s) - cut))" > codes.txt
