# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""Reading and changing the imports of a module, in the order that isort and ruff ask for."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import libcst as cst
from libcst.helpers import get_full_name_for_node

Node = TypeVar("Node", bound=cst.CSTNode)


@dataclass(frozen=True)
class Import:
    """`import module`, or `from module import name`."""

    module: str
    name: str = ""

    @property
    def order(self) -> tuple[int, bool, str]:
        """The place of the statement: standard library, others, this package; `import` before `from`."""
        top = self.module.partition(".")[0]
        section = 0 if top in sys.stdlib_module_names else 2 if top == "cosmos_framework" else 1
        return section, bool(self.name), self.module


def find_all(node: cst.CSTNode, kind: type[Node]) -> list[Node]:
    """Returns every node of a kind in `node`, in the order of the text."""
    found: list[Node] = []

    class Finder(cst.CSTVisitor):
        def on_visit(self, node: cst.CSTNode) -> bool:
            if isinstance(node, kind):
                found.append(node)
            return True

    node.visit(Finder())
    return found


def names_in(nodes: Iterable[cst.CSTNode]) -> set[str]:
    """Returns every identifier in `nodes`."""
    return {name.value for node in nodes for name in find_all(node, cst.Name)}


def imports_used(source: cst.Module, statements: Iterable[cst.CSTNode]) -> list[Import]:
    """Returns those imports of `source` that its `statements` need."""
    used = names_in(statements)
    return [
        each
        for statement in source.body
        for each in _imports_of(statement)
        if each.module != "__future__" and (each.name or each.module.partition(".")[0]) in used
    ]


def with_imports(module: cst.Module, wanted: Iterable[Import]) -> cst.Module:
    """Adds the imports that `module` lacks, each at its place."""
    for each in wanted:
        if each not in [one for statement in module.body for one in _imports_of(statement)]:
            module = _with_import(module, each)
    return module


def without_unused(module: cst.Module, candidates: Iterable[Import]) -> cst.Module:
    """Removes the `candidates`, each a `from` import, that nothing in `module` uses."""
    used = names_in(statement for statement in module.body if not _imports_of(statement))
    gone = [each for each in candidates if each.name not in used]
    body = [_without(statement, gone) for statement in module.body]
    return module.with_changes(body=[statement for statement in body if statement is not None])


def _imports_of(statement: cst.CSTNode) -> list[Import]:
    node = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) else None
    if isinstance(node, cst.Import):
        return [Import(alias.evaluated_name) for alias in node.names if alias.asname is None]
    if isinstance(node, cst.ImportFrom) and node.module is not None and not isinstance(node.names, cst.ImportStar):
        package = get_full_name_for_node(node.module) or ""
        return [Import(package, alias.evaluated_name) for alias in node.names if alias.asname is None]
    return []


def _with_import(module: cst.Module, new: Import) -> cst.Module:
    places = [(i, found[0]) for i, statement in enumerate(module.body) if (found := _imports_of(statement))]
    for i, first in places:
        if new.name and first.name and first.module == new.module:
            return _with_statement(module, i, _with_name(module.body[i], new.name), replaces=True)
    before = [i for i, first in places if first.order <= new.order and first.module != "__future__"]
    at = before[-1] + 1 if before else places[0][0] if places else 0
    text = f"from {new.module} import {new.name}\n" if new.name else f"import {new.module}\n"
    return _with_statement(module, at, cst.parse_statement(text), replaces=False)


def _with_statement(module: cst.Module, at: int, statement: cst.CSTNode, replaces: bool) -> cst.Module:
    return module.with_changes(body=[*module.body[:at], statement, *module.body[at + replaces :]])


def _with_name(statement: cst.CSTNode, name: str) -> cst.CSTNode:
    line = cst.ensure_type(statement, cst.SimpleStatementLine)
    node = cst.ensure_type(line.body[0], cst.ImportFrom)
    assert not isinstance(node.names, cst.ImportStar)
    aliases = list(node.names)
    space = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    at = next((i for i, each in enumerate(aliases) if _name_order(each.evaluated_name) > _name_order(name)), None)
    if at is None:
        aliases[-1] = aliases[-1].with_changes(comma=space)
        aliases.append(cst.ImportAlias(name=cst.Name(name)))
    else:
        aliases.insert(at, cst.ImportAlias(name=cst.Name(name), comma=space))
    return line.with_changes(body=[node.with_changes(names=aliases)])


def _name_order(name: str) -> tuple[bool, bool, str]:
    return not name.isupper(), not name[0].isupper(), name


def _without(statement: Node, gone: list[Import]) -> Node | None:
    left = [each for each in _imports_of(statement) if each not in gone]
    if len(left) == len(_imports_of(statement)):
        return statement
    if not left:
        return None
    line = cst.ensure_type(statement, cst.SimpleStatementLine)
    node = cst.ensure_type(line.body[0], cst.ImportFrom)
    assert not isinstance(node.names, cst.ImportStar)
    names = [each for each in node.names if each.evaluated_name in {one.name for one in left}]
    names[-1] = names[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
    return line.with_changes(body=[node.with_changes(names=names)])  # type: ignore[return-value]
