#!/bin/bash
# Hosts over ssh, plain Ethernet: the network that SDP is for. HOSTFILE has lines such as: worker-0 slots=8
# Options of sdp launch may follow: HOSTFILE=hosts ethernet.sh --dry-run
set -eu
settings=(
    --env NCCL_IB_DISABLE=1              # do not look for RDMA
    --env NCCL_SOCKET_IFNAME=eth0
    --env GLOO_SOCKET_IFNAME=eth0
    --env NCCL_SOCKET_NTHREADS=4         # one TCP stream rarely fills 25 Gbit/s and more: 4 threads …
    --env NCCL_NSOCKS_PERTHREAD=2        # … of 2 sockets
)
exec sdp launch --launcher deepspeed --hostfile "${HOSTFILE:-hosts}" "${settings[@]}" "$@" "${CONFIG:-configs/llama_134m.json}"
