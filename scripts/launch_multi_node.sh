#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
# Trains on several hosts; run it on each of them with its own NODE_RANK. Arguments override the configuration:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=host0 bash scripts/launch_multi_node.sh parallelism=hsdp trainer.grad_accum_iter=4
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_torchrun.sh"
need_number NNODES 1
need_number NODE_RANK 0
[ "$NODE_RANK" -lt "$NNODES" ] || fail "NODE_RANK=$NODE_RANK must be below NNODES=$NNODES"
[ -n "${MASTER_ADDR:-}" ] || fail "set MASTER_ADDR to the host name or address of the host with NODE_RANK=0"
MASTER_PORT="${MASTER_PORT:-29500}"
need_number MASTER_PORT 1
exec torchrun --nnodes="$NNODES" --node_rank="$NODE_RANK" --nproc_per_node="$NPROC_PER_NODE" \
  --master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT" "$train" "$@"
