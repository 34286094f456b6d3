#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Does this project work on this GPU? Under 8 minutes on one device, without released weights:
#
#   bash scripts/gpu_check.sh
#
# Looks over the machine, compares attention, network and videos with the CPU's, trains two tiny twins on NCCL, learns
# from rewards (a world model; policies in a simulator and in imagination; a service that decodes) as the CPU does, and
# takes training steps of the 2B network with random weights at 480p and 720p, with memory and speed beside what plan
# predicted.
# Exit code: 0 all is well, 1 a step failed, 2 there is no GPU. Logs lie in $GPU_CHECK_DIR (a new folder in /tmp).

set -u
cd "$(dirname "$0")/.." || exit 2
limit=${GPU_CHECK_SECONDS:-480} # for all steps together
python=${PYTHON:-}
if [ -z "$python" ]; then
    python=python
    [ -x .venv/bin/python ] && python=.venv/bin/python
fi
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    echo "no GPU here: torch sees no CUDA device ($python -m scripts.doctor says why)" >&2
    exit 2
fi

logs=${GPU_CHECK_DIR:-$(mktemp -d /tmp/gpu_check.XXXXXX)}
mkdir -p "$logs"
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0} # one device is enough
export WANDB_MODE=disabled OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} IMAGINAIRE_OUTPUT_ROOT=$logs/runs
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
start=$SECONDS
summary=()
failed=0

# step NAME SECONDS COMMAND...: runs it within its limit and what is left of the whole, shows the end of its output
step() {
    local name=$1 most=$2 begin=$SECONDS code left
    shift 2
    left=$((limit - (SECONDS - start)))
    if [ "$left" -lt 5 ]; then
        summary+=("not run  $name: the $limit seconds are over")
        failed=1
        return
    fi
    echo "=== $name"
    timeout --kill-after=10 "$((most < left ? most : left))" "$@" >"$logs/${name// /_}.log" 2>&1
    code=$?
    if [ "$code" -eq 0 ]; then
        tail -n 12 "$logs/${name// /_}.log"
        summary+=("ok       $name ($((SECONDS - begin)) s)")
    else
        tail -n 40 "$logs/${name// /_}.log"
        [ "$code" -eq 124 ] && code="124: took longer than its limit"
        summary+=("FAILED   $name ($((SECONDS - begin)) s, exit code $code)")
        failed=1
    fi
}

train=("$python" -m torch.distributed.run --standalone --nproc_per_node=1 -m scripts.train)
train+=(--config=cosmos_predict2/configs/base/config.py --)
short=(trainer.max_iter=60 checkpoint.save_iter=60 trainer.run_validation=False)
step_of=("$python" -m benchmarks.train_step --model_size 2B --random_weights --steps 2)

step "doctor" 90 "$python" -m scripts.doctor
step "doctor on NCCL" 90 "$python" -m torch.distributed.run --standalone --nproc_per_node=1 -m scripts.doctor --dist
step "parity" 150 "$python" -m pytest -q -m gpu -p no:cacheprovider tests/pipelines tests/parity tests/nn
step "parity of learning from rewards" 150 "$python" -m pytest -q -m gpu -p no:cacheprovider tests/rl
step "GR00T twin" 90 "${train[@]}" experiment=predict2_video2world_training_tiny_groot_gr1_480 "${short[@]}"
step "LoRA twin" 90 "${train[@]}" experiment=predict2_video2world_lora_training_tiny_cosmos_nemo_assets "${short[@]}"
step "iterations of learning from rewards" 90 "$python" -m benchmarks.rl_step --released --size tiny --architecture lora
step "2B at 480p" 150 "${step_of[@]}" --resolution 480 --json "$logs/480.json"
step "2B at 720p" 180 "${step_of[@]}" --resolution 720 --json "$logs/720.json"

echo "=== summary ($((SECONDS - start)) s; logs in $logs)"
printf '%s\n' "${summary[@]}"
exit "$failed"
