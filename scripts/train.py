# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""Trains: `torchrun --nproc_per_node=4 scripts/train.py recipe=action_policy parallelism=hsdp`."""

import sys

from cosmos_framework.scripts.train import main

sys.exit(main())
