#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
# Installs the pinned packages into .venv and runs the tests. Arguments go to pytest: bash scripts/test.sh -m "not slow"
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
exec python -m pytest "$@"
