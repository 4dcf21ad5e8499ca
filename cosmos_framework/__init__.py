# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""Training core of cosmos-framework: data-parallel training whose gradient accumulation saves communication."""
