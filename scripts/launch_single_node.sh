#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
# Trains on this host: NPROC_PER_NODE processes (default: one for each GPU, or one). Arguments override the configuration:
#   NPROC_PER_NODE=4 bash scripts/launch_single_node.sh recipe=action_policy parallelism=hsdp trainer.grad_accum_iter=4
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_torchrun.sh"
exec torchrun --standalone --nproc_per_node="$NPROC_PER_NODE" "$train" "$@"
