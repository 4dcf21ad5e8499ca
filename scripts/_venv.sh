# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
# Sourced by the scripts that need the project's virtual environment: makes .venv, or takes the one that fits.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

wanted="$(cat setup.py pyproject.toml constraints.txt | sha256sum)"
if [ "$(cat .venv/installed.sha256 2>/dev/null)" != "$wanted" ]; then
  echo "installing into .venv" >&2
  rm -rf .venv
  "${PYTHON:-python3}" -m venv .venv
  .venv/bin/pip install --quiet --disable-pip-version-check -e '.[sim,data,report,upstream,dev]' -c constraints.txt
  echo "$wanted" > .venv/installed.sha256
fi

# A rank is a process of its own; more threads than cores make all of them slower.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
