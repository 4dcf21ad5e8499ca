#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
# From nothing to a robot policy: installs, records demonstrations, trains four ranks as HSDP 2x2 with gradient
# accumulation whose all-reduce waits, tries the policy in closed loop, and says what waiting saved. What is there
# already is used again.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
python=.venv/bin/python
export IMAGINAIRE_OUTPUT_ROOT="${IMAGINAIRE_OUTPUT_ROOT:-$PWD/outputs}"
demos="$PWD/datasets/metaworld"
runs="$IMAGINAIRE_OUTPUT_ROOT/cosmos_framework/quickstart"

train() { # train NAME MODE [OVERRIDE...]
  .venv/bin/torchrun --standalone --nproc_per_node=4 scripts/train.py recipe=action_policy parallelism=hsdp \
    trainer.grad_accum_iter=4 trainer.fsdp_accum_mode="$2" dataset.root="$demos" job.group=quickstart job.name="$1" "${@:3}"
}

$python scripts/collect_demos.py --root "$demos"
# A run that has finished resumes at its end, and does nothing.
train policy all_reduce
[ -f "$runs/none/comm_ledger.json" ] || train none none trainer.max_iter=20 trainer.logging_iter=5 trainer.run_validation=false
[ -f "$runs/all_reduce/comm_ledger.json" ] || train all_reduce all_reduce trainer.max_iter=20 trainer.logging_iter=5 trainer.run_validation=false
[ -f "$runs/policy/evaluation.json" ] || $python scripts/eval_policy.py --run "$runs/policy"
$python scripts/quickstart_table.py --policy "$runs/policy" --deferred "$runs/all_reduce" --none "$runs/none"
