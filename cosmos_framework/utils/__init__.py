# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""What every layer above uses: process group, meshes, configuration, gradient synchronisation."""
