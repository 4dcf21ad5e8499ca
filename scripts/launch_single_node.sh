#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
# Trains on this machine: bash scripts/launch_single_node.sh recipe=action_policy parallelism=fsdp
# NPROC_PER_NODE: number of ranks; one a GPU if it is not set, or one on the CPU.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_launch.sh"
set_ranks_per_node
exec torchrun --standalone --nproc_per_node="$NPROC_PER_NODE" "$train_py" "$@"
