# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""Two hosts with a slow link between them, on one machine, and what gradient accumulation costs there.

The modules, in the order in which to read them: `network` (the hosts and the link), `launch` (torchrun in both),
`cases` (what is compared), `windows` (how long one takes, and what it weighs), `worker` (what each rank runs),
`summary` (medians, ratios, the ideal), `plots` and `report` (the files that are written).
"""
