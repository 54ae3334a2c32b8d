#!/bin/sh
# sbatch --nodes 2 --gpus-per-node 8 examples/cluster/slurm.sh COMMAND, in the clone. COMMAND is as for run.sh, and so are NPROC and PYTHON.
#SBATCH --job-name=deepep_moe
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=00:20:00
#SBATCH --output=%x-%j.out
set -eu

# Slurm runs a copy of this file; the folder that sbatch was called in has the clone.
here=${SLURM_SUBMIT_DIR:?start this by sbatch}/examples/cluster
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
export MASTER_ADDR MASTER_PORT NNODES="$SLURM_JOB_NUM_NODES"
exec srun sh -c 'export NODE_RANK=$SLURM_NODEID; exec "$0" "$@"' "$here/run.sh" "$@"
