#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
# Trains on several machines; run the same command on each, with its own NODE_RANK:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 bash scripts/launch_multi_node.sh recipe=action_policy parallelism=hsdp
# NNODES: number of machines. NODE_RANK: this one's, from 0. MASTER_ADDR, MASTER_PORT (29500): where node 0 listens.
# NPROC_PER_NODE: number of ranks on each; one a GPU if it is not set, or one on the CPU.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_launch.sh"
require_number NNODES 1
require_number NODE_RANK 0
((10#$NODE_RANK < 10#$NNODES)) || fail "NODE_RANK=$NODE_RANK must be below NNODES=$NNODES; machines count from 0"
[[ -n ${MASTER_ADDR-} ]] || fail "MASTER_ADDR is not set; give the host name or address of node 0"
MASTER_PORT=${MASTER_PORT-29500}
require_number MASTER_PORT 1
set_ranks_per_node
exec torchrun --nnodes="$NNODES" --node_rank="$NODE_RANK" --nproc_per_node="$NPROC_PER_NODE" \
    --master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT" "$train_py" "$@"
