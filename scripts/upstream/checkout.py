# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""A git checkout whose files are written all together or not at all, with a record from which they are restored.

The record lies in the checkout's git folder, so that it is neither tracked nor cleaned away. It keeps the originals
themselves: git's own copies would miss what was uncommitted when --force was given, and the pull request may be
committed by the time that it is taken back.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

Content = bytes | None  # None: there is no such file

RECORD = "cosmos_grad_sync_originals.json"


class CheckoutError(RuntimeError):
    """The folder cannot be written to as asked; the message says why and what would help."""


@dataclass(frozen=True)
class Entry:
    """What the record keeps of one file.

    Attributes:
        original: the file before.
        applied: the file as it was written.
    """

    original: Content
    applied: Content


class Checkout:
    """The work tree of a git repository."""

    def __init__(self, path: Path) -> None:
        """Finds the work tree that `path` is the root of.

        Raises:
            CheckoutError: `path` is not the root of a git work tree.
        """
        found = subprocess.run(
            ["git", "-C", str(path), "rev-parse", "--show-toplevel", "--absolute-git-dir"],
            capture_output=True,
            text=True,
        )
        if found.returncode:
            raise CheckoutError(f"{path} is not a git checkout: give the root of a clone of upstream's repository.")
        root, git_folder = found.stdout.splitlines()
        if path.resolve() != Path(root).resolve():
            raise CheckoutError(f"{path} lies inside of a checkout: give its root, {root}.")
        self.root = Path(root)
        self._record_path = Path(git_folder) / RECORD

    def read(self, path: str) -> Content:
        """Returns a file's bytes, or None if there is no such file."""
        file = self.root / path
        return file.read_bytes() if file.is_file() else None

    def record(self) -> dict[str, Entry]:
        """Returns what was written here and not taken back, by path."""
        if not self._record_path.exists():
            return {}
        stored = json.loads(self._record_path.read_text(encoding="utf-8"))
        return {path: Entry(*map(_decoded, pair)) for path, pair in stored.items()}

    def read_original(self, path: str) -> Content:
        """Returns a file as it would be without what was written here; also one that was edited since."""
        entry = self.record().get(path)
        now = self.read(path)
        return entry.original if entry is not None and now == entry.applied else now

    def uncommitted(self) -> list[str]:
        """Lists the tracked files that differ from the last commit, apart from what was written here."""
        status = subprocess.run(
            ["git", "-C", str(self.root), "status", "--porcelain", "-z", "--untracked-files=no", "--no-renames"],
            capture_output=True,
            text=True,
            check=True,
        )
        paths = [line[3:] for line in status.stdout.split("\0") if line]
        record = self.record()
        return [path for path in paths if path not in record or self.read(path) != record[path].applied]

    def write(self, files: Mapping[str, Content]) -> None:
        """Writes all of `files`, or none if that fails; the record keeps what they replace."""
        record = self.record()
        entries = {path: Entry(self.read_original(path), content) for path, content in files.items()}
        self._store(record | entries)
        try:
            self._replace(files)
        except BaseException:
            self._store(record)
            raise

    def edited_since(self) -> list[str]:
        """Lists the files that are neither as they were written here nor as they were before."""
        return [path for path, entry in self.record().items() if self.read(path) not in (entry.applied, entry.original)]

    def restore(self) -> None:
        """Brings every recorded file back as it was before, byte for byte, and forgets the record."""
        self._replace({path: entry.original for path, entry in self.record().items()})
        self._record_path.unlink(missing_ok=True)

    def _store(self, record: Mapping[str, Entry]) -> None:
        if not record:
            self._record_path.unlink(missing_ok=True)
            return
        stored = {path: [_encoded(entry.original), _encoded(entry.applied)] for path, entry in record.items()}
        staged = self._record_path.with_suffix(".tmp")
        staged.write_text(json.dumps(stored), encoding="utf-8")
        staged.replace(self._record_path)

    def _replace(self, files: Mapping[str, Content]) -> None:
        before = {path: now for path, content in files.items() if (now := self.read(path)) != content}
        done: list[str] = []
        with tempfile.TemporaryDirectory(dir=self._record_path.parent) as folder:
            # Everything is on the disk, the way back as well, before the first file changes.
            back = {path: self._stage(path, content, Path(folder)) for path, content in before.items()}
            staged = {path: self._stage(path, files[path], Path(folder)) for path in before}
            try:
                for path, file in staged.items():
                    done.append(path)
                    self._put(path, file)
            except BaseException:
                for path in done:
                    self._put(path, back[path])
                raise

    def _stage(self, path: str, content: Content, folder: Path) -> Path | None:
        if content is None:
            return None
        handle, name = tempfile.mkstemp(dir=folder)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        target = self.root / path
        if target.exists():
            shutil.copymode(target, name)
        else:
            os.chmod(name, 0o644)
        return Path(name)

    def _put(self, path: str, staged: Path | None) -> None:
        target = self.root / path
        if staged is not None:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(staged, target)
            return
        target.unlink(missing_ok=True)
        if target.parent.is_dir() and all(each.name == "__pycache__" for each in target.parent.iterdir()):
            shutil.rmtree(target.parent)


def _encoded(content: Content) -> str | None:
    return None if content is None else base64.b64encode(content).decode("ascii")


def _decoded(text: str | None) -> Content:
    return None if text is None else base64.b64decode(text)
