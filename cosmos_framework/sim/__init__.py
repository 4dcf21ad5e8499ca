# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""Simulated robots: scripted experts and closed-loop rollouts (extra `sim`)."""
