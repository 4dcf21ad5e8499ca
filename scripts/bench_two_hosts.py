#!/usr/bin/env python
# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""Measures what each mode of gradient accumulation costs and saves between two hosts, on one machine.

    sudo python scripts/bench_two_hosts.py --calibrate
    sudo python scripts/bench_two_hosts.py --rate-mbit 120 --rounds 3 --parallelisms hsdp --out /tmp/mine model.depth=4
"""

import json
from two_hosts.cases import PARALLELISMS, Settings
from two_hosts.launch import measure
from two_hosts.network import Link
m = json.loads(measure(Settings(Link(300), True, 2, tuple(PARALLELISMS), (1,4))))
import statistics
for c in m["cases"]:
    print(c["parallelism"],c["mode"],c["reshard"],c["accum"],[round(w["seconds"],3) for w in c["windows"]],c["windows"][0]["inner_s"], c["windows"][0]["link_bytes"]/2**20,{k:round(v/2**20,2) for k,v in c["weight"].items()})
