#!/bin/bash
# Hosts on several sites, each a group of its own, over a VPN. sdp plan says that averages of gradients take minutes here, so groups take local steps.
# HOSTFILE has lines such as: site-a slots=8
# Options of sdp launch may follow: HOSTFILE=hosts internet.sh --dry-run
set -eu
settings=(
    --env NCCL_IB_DISABLE=1
    --env NCCL_SOCKET_IFNAME=wg0         # the VPN (here WireGuard): neither torch's store nor gloo nor NCCL authenticates or encrypts
    --env GLOO_SOCKET_IFNAME=wg0
)
# sdp.groups must be the number of hosts: FSDP then stays inside a host. sdp plan CONFIG --inter-node 200Mbit says how long a step takes.
local_steps=(
    --set sdp.groups="${SITES:-4}"
    --set sdp.lr_scale=none              # local steps refuse rates by holders
    --set 'sdp.sync={"every": 128, "fragments": 4, "overlap": 16, "compression": "bf16"}'
)
exec sdp launch --launcher deepspeed --hostfile "${HOSTFILE:-hosts}" "${settings[@]}" "$@" "${CONFIG:-configs/llama_1b.json}" "${local_steps[@]}"
