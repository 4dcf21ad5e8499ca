# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""The edits of Markdown files. Each takes a file's text and returns it edited, or as it is if that was done before."""

from __future__ import annotations

import re
from collections.abc import Sequence

from upstream.fields import FIELDS
from upstream.python_edits import ACCUMULATION, AnchorError

ENTRY = (
    "  - Add `trainer.fsdp_accum_mode`, `trainer.fsdp_accum_reshard`, `trainer.fsdp_reduce_unused_params`,\n"
    "    `trainer.fsdp_accum_memory_gib`: gradient accumulation synchronizes once per window, with exact gradients\n"
    "    whichever parameters each micro-batch uses. The distillation trainer follows them too;\n"
    '    `fsdp_accum_mode = "grad_sync"` is what it did before.\n'
).splitlines()


def add_table_rows(text: str) -> str:
    """Adds a row for each field to the table that documents `grad_accum_iter`; the columns stay aligned."""
    lines = text.split("\n")
    at = _only_line(lines, rf"\| `{ACCUMULATION}` +\|", f"a table row for `{ACCUMULATION}`")
    start, end = at, at
    while lines[start - 1].startswith("|"):
        start -= 1
    while lines[end + 1].startswith("|"):
        end += 1
    rows = [_cells(line) for line in lines[start : end + 1]]
    if any(len(row) != 3 for row in rows):
        raise AnchorError(f"a table of name, default and description around `{ACCUMULATION}`")
    documented = {row[0] for row in rows}
    new = [
        [f"`{field.name}`", f"`{field.toml_default}`", f"{field.summary} {_as_code(field.details)}"]
        for field in FIELDS
        if f"`{field.name}`" not in documented
    ]
    if not new:
        return text
    rows[at - start + 1 : at - start + 1] = new
    return "\n".join([*lines[:start], *_aligned(rows), *lines[end + 1 :]])


def add_list_items(text: str) -> str:
    """Adds an item for each field to the list that explains `grad_accum_iter`."""
    lines = text.split("\n")
    at = _only_line(lines, rf"\s*\S+ `{ACCUMULATION}` ", f"a list item for `{ACCUMULATION}`")
    bullet, _, _ = lines[at].partition("`")
    new = [
        f"{bullet}`{field.name}` — {field.summary}"
        for field in FIELDS
        if not any(line.startswith(f"{bullet}`{field.name}`") for line in lines)
    ]
    return "\n".join([*lines[: at + 1], *new, *lines[at + 1 :]])


def add_changelog_entry(text: str) -> str:
    """Adds the entry at the end of the unreleased new features."""
    lines = text.split("\n")
    if ENTRY[0] in lines:
        return text
    at = _only_line(lines, r"## Unreleased\s*$", "a section Unreleased")
    end = next((i for i in range(at + 1, len(lines)) if lines[i].startswith("## ")), len(lines))
    features = [i for i in range(at, end) if lines[i].rstrip() == "- New features"]
    if not features:
        raise AnchorError("a list New features under Unreleased")
    last = features[0]
    while last + 1 < end and lines[last + 1].startswith("  "):
        last += 1
    return "\n".join([*lines[: last + 1], *ENTRY, *lines[last + 1 :]])


def _only_line(lines: Sequence[str], pattern: str, what: str) -> int:
    found = [i for i, line in enumerate(lines) if re.match(pattern, line)]
    if len(found) != 1:
        raise AnchorError(f"{what}: there are {len(found)}")
    return found[0]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def _aligned(rows: list[list[str]]) -> list[str]:
    rules = [set(row[0]) <= set("-: ") for row in rows]
    widths = [max(len(row[i]) for row, rule in zip(rows, rules, strict=True) if not rule) for i in range(3)]
    return [
        "| " + " | ".join("-" * w if rule else cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |"
        for row, rule in zip(rows, rules, strict=True)
    ]


def _as_code(details: str) -> str:
    """Sets values, as TOML writes them, and names in code style."""
    details = details.replace("False", "`false`").replace("True", "`true`")
    return re.sub(r'("[a-z_]+"|\b(?:None|find_unused_parameters)\b)', r"`\1`", details)
