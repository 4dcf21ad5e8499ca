# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""Puts this project's gradient accumulation into a checkout of upstream cosmos-framework.

The modules, in the order in which to read them: `fields` (the settings that are added), `python_edits` and
`text_edits` (how each file is edited, found by what it means and not by line number), `pull_request` (which edit goes
to which file) and `checkout` (git, the record of the originals, writing all files or none).
"""
