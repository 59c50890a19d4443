#!/bin/bash
# SLURM, 4 nodes of 8 GPUs, RDMA over converged Ethernet. Options of sdp launch may follow: roce.sh --dry-run
set -eu
settings=(
    --env NCCL_IB_HCA=mlx5               # RoCE cards are verbs devices too
    --env NCCL_IB_GID_INDEX=3            # the RoCE v2 address with IPv4 on most hosts (show_gids); NCCL from 2.21 finds it by itself
    --env NCCL_IB_TC=106                 # the traffic class that your switches treat as lossless; ask: a wrong one works, slowly
    --env NCCL_SOCKET_IFNAME=bond0       # for NCCL's rendezvous
    --env GLOO_SOCKET_IFNAME=bond0       # for gloo
)
exec sdp launch --launcher slurm --nodes 4 --gpus-per-node 8 --cpus-per-task 12 --time 24:00:00 "${settings[@]}" "$@" \
    "${CONFIG:-configs/llama_1b.json}"
