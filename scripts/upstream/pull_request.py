# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""Which edit goes to which file of upstream, and which files are new there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import libcst as cst

from upstream import python_edits, text_edits
from upstream.python_edits import AnchorError

OURS = Path(__file__).resolve().parents[2]
ADDED_TESTS = Path(__file__).resolve().parent / "added_tests"
CORE = Path("cosmos_framework/utils/grad_sync")
DISTRIBUTED = Path("cosmos_framework/utils/distributed.py")

Edit = Callable[[str], str]

EDITS: Mapping[str, Edit] = {
    str(DISTRIBUTED): partial(python_edits.replace_dispatcher, ours=OURS / DISTRIBUTED),
    "cosmos_framework/utils/config.py": python_edits.add_attrs_fields,
    "cosmos_framework/configs/toml_config/sft_config.py": python_edits.add_pydantic_fields,
    "cosmos_framework/trainer/__init__.py": python_edits.pass_fields,
    "cosmos_framework/trainer/distillation.py": python_edits.retire_closure_helper,
    "cosmos_framework/trainer/distillation_test.py": python_edits.repin_closure_tests,
    "cosmos_framework/utils/distributed_test.py": partial(
        python_edits.add_tests, source_path=ADDED_TESTS / "distributed_test.py"
    ),
    "cosmos_framework/configs/toml_config/sft_config_test.py": partial(
        python_edits.add_tests, source_path=ADDED_TESTS / "sft_config_test.py"
    ),
    "docs/sft_config.md": text_edits.add_table_rows,
    "docs/training.md": text_edits.add_list_items,
    "CHANGELOG.md": text_edits.add_changelog_entry,
}


class NotFoundError(ValueError):
    """Upstream's files are not as the edits expect them.

    Attributes:
        missing: what was not found, one line each, with the file in which it was looked for.
    """

    def __init__(self, missing: list[str]) -> None:
        super().__init__("\n".join(missing))
        self.missing = missing


def new_files() -> dict[str, bytes]:
    """Returns the files that upstream gets, by path: the core and its test."""
    core = {str(CORE / path.name): path.read_bytes() for path in sorted((OURS / CORE).glob("*.py"))}
    return core | {str(CORE / "grad_sync_test.py"): (ADDED_TESTS / "grad_sync_test.py").read_bytes()}


def edited(read: Callable[[str], bytes | None]) -> dict[str, bytes]:
    """Returns each file of the pull request, by path, as it leaves it.

    Args:
        read: gives a file of the checkout by its path, None if there is no such file.

    Raises:
        NotFoundError: an anchor, or a file, is missing or was changed; lists all of them.
    """
    files, missing = new_files(), []
    for path, edit in EDITS.items():
        content = read(path)
        if content is None:
            missing.append(f"{path}: the file")
            continue
        try:
            files[path] = edit(content.decode("utf-8")).encode("utf-8")
        except AnchorError as error:
            missing.append(f"{path}: {error}")
        except (UnicodeDecodeError, cst.ParserSyntaxError) as error:
            missing.append(f"{path}: text that can be read ({str(error).splitlines()[0]})")
    if missing:
        raise NotFoundError(missing)
    return files
