# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
# Sourced by test.sh and quickstart.sh: goes to the checkout's root and puts .venv there first on PATH.
# PYTHON=python3.12 chooses the interpreter that a new environment is made of.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

# What an environment depends on; the checkout's place is written into an editable install.
wanted_environment() {
    pwd
    cat setup.py constraints.txt
}

make_venv() {
    local python=${PYTHON:-python3}
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "the pinned packages need Python 3.11 or newer; PYTHON=$python is not, or does not run" >&2
        return 1
    fi
    echo "installing into $PWD/.venv"
    "$python" -m venv --clear .venv
    # Twice quiet leaves the errors.
    .venv/bin/python -m pip install --quiet --quiet --constraint constraints.txt \
        --editable '.[sim,data,report,dev,upstream]'
    wanted_environment >.venv/installed_from
}

cmp --silent .venv/installed_from <(wanted_environment) || make_venv
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=1
