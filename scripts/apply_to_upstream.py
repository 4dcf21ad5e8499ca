# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""Puts this project's gradient accumulation into a checkout of upstream cosmos-framework, or takes it out again.

    python scripts/apply_to_upstream.py PATH              # prints the diff and writes it
    python scripts/apply_to_upstream.py PATH --check      # prints the diff, writes nothing
    python scripts/apply_to_upstream.py PATH --revert     # restores every file, byte for byte

Needs libcst (extra `upstream`). docs/upstream.md says what changes and why.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from upstream.checkout import Checkout, CheckoutError, Content
from upstream.pull_request import NotFoundError, edited, new_files


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns:
        0 if the checkout is as asked (or could be, with --check), 1 if it was refused and left untouched.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", type=Path, metavar="PATH", help="the root of a git checkout of upstream")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="print the diff and write nothing")
    what.add_argument("--revert", action="store_true", help="restore every file as it was before")
    parser.add_argument("--force", action="store_true", help="go on although there are uncommitted changes")
    args = parser.parse_args(argv)
    try:
        checkout = Checkout(args.path)
        if args.revert:
            _revert(checkout, args.force)
        else:
            _apply(checkout, args.check, args.force)
    except NotFoundError as error:
        print("Not found in this checkout, which is left untouched:", file=sys.stderr)
        print("\n".join(f"  {line}" for line in error.missing), file=sys.stderr)
        return 1
    except CheckoutError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _apply(checkout: Checkout, check: bool, force: bool) -> None:
    files = edited(checkout.read_original)
    changes = {path: content for path, content in files.items() if content != checkout.read(path)}
    if not changes:
        print("Applied already: nothing changes.")
        return
    if not force:
        _refuse(checkout.uncommitted(), "Uncommitted changes", "Commit or stash them")
        in_the_way = [path for path in new_files() if checkout.read_original(path) not in (None, files[path])]
        _refuse(in_the_way, "Files that would be replaced", "Move them away")
    _print_diff(checkout, changes)
    if check:
        print(f"{len(changes)} files would change; nothing was written.")
        return
    checkout.write(changes)
    print(f"{len(changes)} files changed; --revert restores them.")


def _revert(checkout: Checkout, force: bool) -> None:
    record = checkout.record()
    if not record:
        print("Nothing to restore: this checkout has no record of an earlier run.")
        return
    if not force:
        _refuse(checkout.edited_since(), "Edited since they were written", "Save these edits elsewhere")
    _print_diff(checkout, {path: entry.original for path, entry in record.items()})
    checkout.restore()
    print(f"{len(record)} files restored.")


def _refuse(paths: Sequence[str], what: str, remedy: str) -> None:
    if paths:
        listed = "\n".join(f"  {path}" for path in paths)
        raise CheckoutError(f"{what}, so nothing was written:\n{listed}\n{remedy}, or give --force.")


def _print_diff(checkout: Checkout, files: Mapping[str, Content]) -> None:
    for path, content in files.items():
        before = checkout.read(path)
        lines = difflib.unified_diff(
            _lines(before),
            _lines(content),
            "/dev/null" if before is None else f"a/{path}",
            "/dev/null" if content is None else f"b/{path}",
        )
        print("".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines))


def _lines(content: Content) -> list[str]:
    return (content or b"").decode("utf-8", "replace").splitlines(keepends=True)


if __name__ == "__main__":
    sys.exit(main())
