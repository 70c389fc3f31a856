#!/usr/bin/env bash
# One run on two nodes with four GPUs each: sbatch examples/slurm.sh RECIPE OUT
# OUT is on a file system that all nodes see. A rank that ends is started again with all others, from the last checkpoint.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --signal=TERM@60
set -euo pipefail

first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun \
  --nnodes "$SLURM_NNODES" --nproc-per-node 4 --max-restarts 3 \
  --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$first_node:29500" \
  -m lowtide train "$1" --out "$2"
