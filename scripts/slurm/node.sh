#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# What train.sbatch runs on each machine: torchrun with this machine's processes. Exit code 75 when SIGUSR1 (the time limit
# is near) made them save and leave, 143 for SIGTERM (scancel, preemption), else torchrun's.

set -u
python=${PYTHON:-}
if [ -z "$python" ]; then
    python=python
    [ -x .venv/bin/python ] && python=.venv/bin/python
fi
gpus=${SLURM_GPUS_ON_NODE:-$(nvidia-smi --list-gpus 2>/dev/null | wc -l)}
nproc=${NPROC:-$((gpus > 0 ? gpus : 1))}

# Slurm signals a task's process group. torchrun would end at once: it gets a session of its own, and its processes,
# which save when they get SIGUSR1, hear of the signal here.
setsid "$python" -m torch.distributed.run \
    --nnodes="$NNODES" --nproc_per_node="$nproc" --max_restarts=0 \
    --rdzv_id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" --rdzv_backend=c10d --rdzv_endpoint="$MASTER_ADDR:$MASTER_PORT" \
    -m scripts.train --config="${CONFIG:-cosmos_predict2/configs/base/config.py}" -- "$@" &
launcher=$!

asked=0
pass_on() {
    [ "$asked" -eq 0 ] && asked=$1 # srun sends SIGTERM to the machines that leave last
    for process in $(pgrep -P "$launcher"); do
        kill -USR1 "$process" 2>/dev/null
    done
}
trap 'pass_on 75' USR1
trap 'pass_on 143' TERM

while true; do
    wait "$launcher"
    code=$?
    kill -0 "$launcher" 2>/dev/null || break # else a signal only interrupted the wait
done
if [ "$code" -ne 0 ] && [ "$asked" -ne 0 ]; then
    exit "$asked" # torchrun makes 1 of any code of its processes
fi
exit "$code"
