# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
# Sourced by launch_*.sh: reading the settings that come by environment variable.

train_py="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/train.py"

fail() {
    echo "$(basename "$0"): $1" >&2
    exit 2
}

# require_number NAME LOWEST: ends the script unless the variable NAME is a whole number of at least LOWEST.
require_number() {
    local value=${!1-}
    [[ -n $value ]] || fail "$1 is not set; give a whole number of at least $2"
    [[ $value =~ ^[0-9]{1,9}$ ]] && ((10#$value >= $2)) || fail "$1=$value must be a whole number of at least $2"
}

# Sets NPROC_PER_NODE, the ranks on this machine: one a GPU, or one on the CPU.
set_ranks_per_node() {
    NPROC_PER_NODE=${NPROC_PER_NODE-$(python -c 'import torch; print(torch.cuda.device_count() or 1)')}
    require_number NPROC_PER_NODE 1
}
