#!/bin/sh
# Start the ranks of this node by torchrun. On every node: NNODES=2 NODE_RANK=0 MASTER_ADDR=first-node examples/cluster/run.sh COMMAND
#   COMMAND      correctness, bandwidth or environment, and options of main.py
#   NPROC        ranks on this node (default: a rank for each GPU; without GPUs 2)
#   MASTER_PORT  a free port of the first node (default: 29500)
#   PYTHON       the interpreter that has deepep_moe (default: python)
# One node needs none of them.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
PYTHON=${PYTHON:-python}
if [ -z "${NPROC:-}" ]; then
    NPROC=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count() or 2)')
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$PYTHON" -m torch.distributed.run --nnodes "${NNODES:-1}" --node-rank "${NODE_RANK:-0}" --nproc-per-node "$NPROC" \
    --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}" "$here/main.py" "$@"
