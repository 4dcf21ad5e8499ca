# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
# Sourced by the launch scripts: checks what torchrun is told.

fail() {
  echo "$(basename "$0"): $1" >&2
  exit 2
}

# need_number NAME SMALLEST: the environment variable is set, to a whole number that is large enough.
need_number() {
  local value="${!1:-}"
  [ -n "$value" ] || fail "set $1, for example $1=$2"
  [[ "$value" =~ ^[0-9]+$ ]] && [ "$value" -ge "$2" ] || fail "$1=$value must be a whole number of at least $2"
}

default_processes() {
  nvidia-smi --list-gpus 2>/dev/null | grep -c . || echo 1
}

NPROC_PER_NODE="${NPROC_PER_NODE:-$(default_processes)}"
need_number NPROC_PER_NODE 1
train="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/train.py"
