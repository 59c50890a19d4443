#!/bin/bash
# SLURM, 4 nodes of 8 GPUs with NVLink, one InfiniBand card per GPU. Options of sdp launch may follow: infiniband.sh --dry-run
set -eu
settings=(
    --env NCCL_IB_HCA=mlx5               # every card whose name begins so; =mlx5_0,mlx5_3 names them, ^mlx5_2 leaves one out (storage)
    --env NCCL_SOCKET_IFNAME=ib0         # NCCL meets over TCP before it uses the cards: an interface that all nodes reach
    --env GLOO_SOCKET_IFNAME=ib0         # gloo (checkpoints, counted facts) would take the address of the host's name, perhaps 127.0.1.1
    --env NCCL_DEBUG=WARN                # INFO shows once that NET/IB is used, and not NET/Socket
)
exec sdp launch --launcher slurm --nodes 4 --gpus-per-node 8 --cpus-per-task 12 --time 24:00:00 "${settings[@]}" "$@" \
    "${CONFIG:-configs/llama_1b.json}"
