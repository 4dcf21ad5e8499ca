#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
# From nothing to a robot policy, on the CPU: records demonstrations, trains on four ranks (HSDP, 2 x 2) with gradient
# accumulation whose all-reduce waits, tries the policy in closed loop, and prints what it can do and what waiting saved.
# Started again, it takes up what is there.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
export CUDA_VISIBLE_DEVICES="" IMAGINAIRE_OUTPUT_ROOT="$PWD/outputs"
runs="$IMAGINAIRE_OUTPUT_ROOT/cosmos_framework/quickstart"

say() { printf '\n== %s\n' "$*"; }

# train MODE OVERRIDE…: a finished run of this name ends at once, an interrupted one goes on from its last checkpoint.
train() {
    torchrun --standalone --nproc_per_node=4 scripts/train.py recipe=action_policy parallelism=hsdp \
        trainer.grad_accum_iter=4 trainer.fsdp_accum_mode="$1" trainer.logging_iter=1 \
        job.group=quickstart job.name="$1" "${@:2}"
}

say "demonstrations of Meta-World's scripted experts"
python scripts/collect_demos.py

say "training: HSDP 2x2, 4 micro-steps a window, all_reduce waits for the boundary"
train all_reduce

say "for comparison, a few windows in which nothing waits"
train none trainer.max_iter=20 trainer.run_validation=false

say "the policy in closed loop"
if [[ $runs/all_reduce/evaluation.json -nt $runs/all_reduce/checkpoints/latest_checkpoint.txt ]]; then
    echo "evaluated already: $runs/all_reduce/evaluation.json"
else
    python scripts/eval_policy.py --run "$runs/all_reduce"
fi

say "result"
python scripts/quickstart_table.py "$runs/all_reduce" --against "$runs/none"
