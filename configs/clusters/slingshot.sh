#!/bin/bash
# SLURM, 8 nodes of 4 GPUs on HPE Slingshot. NCCL speaks to it through the plugin aws-ofi-nccl, which a module puts on LD_LIBRARY_PATH:
#   module load nccl-ofi; slingshot.sh --dry-run
# Values as in NERSC's documentation of Perlmutter.
set -eu
settings=(
    --env "NCCL_NET=AWS Libfabric"       # stop where the plugin is missing, rather than fall back to TCP
    --env NCCL_NET_GDR_LEVEL=PHB         # the cards read GPU memory directly
    --env NCCL_CROSS_NIC=1               # rings may change cards: the four cards of a node reach the same network
    --env NCCL_SOCKET_IFNAME=hsn         # hsn0 to hsn3
    --env GLOO_SOCKET_IFNAME=hsn0
    --env FI_CXI_DISABLE_HOST_REGISTER=1
    --env FI_MR_CACHE_MONITOR=userfaultfd  # the default monitor can deadlock with NCCL
    --env FI_CXI_DEFAULT_CQ_SIZE=131072
)
exec sdp launch --launcher slurm --nodes 8 --gpus-per-node 4 --cpus-per-task 16 --time 24:00:00 --constraint gpu "${settings[@]}" "$@" \
    "${CONFIG:-configs/llama_1b.json}"
