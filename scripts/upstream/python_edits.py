# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""The edits of Python files. Each takes a file's text and returns it edited, or as it is if that was done before.

An edit finds its anchor by meaning (the class that has `grad_accum_iter`, the calls of `ddp_sync_grad`). It raises
`AnchorError` if there is none, or if somebody changed the anchor so that replacing it would lose what they did.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import libcst as cst
import libcst.matchers as m
from libcst.helpers import get_full_name_for_node

from upstream.fields import FIELDS, Field
from upstream.imports import Import, find_all, imports_used, names_in, with_imports, without_unused

ACCUMULATION = "grad_accum_iter"
DISPATCHER = "ddp_sync_grad"
CLOSURE_HELPER = "_sync_grad_for_closure"
FAKE_SETTER = "set_requires_gradient_sync"
FAKE_RECORD = "gradient_sync_calls"
FAKE_PINNED = m.Comparison(left=m.Attribute(attr=m.Name(FAKE_RECORD)), comparisons=[m.ComparisonTarget(m.Equal())])
STATIC_GRAPH_FLAG = "show_sync_grad_static_graph_warning"

# What upstream's functions do, before and after its own fix for HSDP. A call or a write beyond these is somebody's own.
DISPATCHER_CALLS = frozenset(
    [
        "isinstance",
        "list",
        "log.warning",
        "modules",
        "dist.is_available",
        "dist.is_initialized",
        "append",
        "_get_fsdp_state",
        "set_requires_all_reduce",
    ]
)
DISPATCHER_WRITES = frozenset({"require_backward_grad_sync", STATIC_GRAPH_FLAG})
CLOSURE_HELPER_CALLS = frozenset(
    f"callable getattr modules {FAKE_SETTER} {DISPATCHER} distributed.{DISPATCHER}".split()
)


class AnchorError(ValueError):
    """What an edit would change is missing or was changed; the message says what was looked for."""


# The dispatcher


def replace_dispatcher(text: str, ours: Path) -> str:
    """Makes `ddp_sync_grad` the dispatcher of `ours`, and removes what only the former one used.

    Args:
        text: the text of upstream's utils/distributed.py.
        ours: this project's utils/distributed.py, from which the dispatcher is taken.
    """
    module = cst.parse_module(text)
    dispatcher = _top_level(module, cst.FunctionDef, DISPATCHER)
    if dispatcher is None:
        raise AnchorError(f"the function {DISPATCHER}")
    if FIELDS[0].name in _params(dispatcher):
        return text
    if _params(dispatcher) != ["model", "enabled"]:
        raise AnchorError(f"{DISPATCHER}(model, enabled): its parameters are {', '.join(_params(dispatcher))}")
    _require_known(dispatcher, DISPATCHER_CALLS, DISPATCHER_WRITES)
    source = cst.parse_module(ours.read_text(encoding="utf-8"))
    parts = [part for part in source.body if _defined_name(part) in ("_syncs", DISPATCHER, "grad_sync_of")]
    parts[0] = parts[0].with_changes(leading_lines=dispatcher.leading_lines)
    module = module.with_changes(
        body=[new for old in module.body for new in (parts if old is dispatcher else [old])],
    )
    module = _without_assignments(module, STATIC_GRAPH_FLAG)
    module = with_imports(module, imports_used(source, parts))
    return without_unused(module, [Import("contextlib", "contextmanager")]).code


# The fields


def add_attrs_fields(text: str) -> str:
    """Adds the fields to the attrs class that has `grad_accum_iter`."""
    return _add_fields(text, _attrs_field, imports=())


def add_pydantic_fields(text: str) -> str:
    """Adds the fields to the pydantic model that has `grad_accum_iter`."""
    return _add_fields(text, _pydantic_field, imports=[Import("typing", "Literal")])


def _add_fields(text: str, render: Callable[[Field], str], imports: Sequence[Import]) -> str:
    module = cst.parse_module(text)
    classes = [each for each in module.body if isinstance(each, cst.ClassDef) and ACCUMULATION in _fields(each)]
    if len(classes) != 1:
        raise AnchorError(f"one class with a field {ACCUMULATION}: there are {len(classes)}")
    present = _fields(classes[0])
    missing = [field for field in FIELDS if field.name not in present]
    if not missing:
        return text
    at = present[ACCUMULATION] + 1
    new = [cst.parse_statement(render(field)) for field in missing]
    block = cst.ensure_type(classes[0].body, cst.IndentedBlock)
    edited = classes[0].with_changes(body=block.with_changes(body=[*block.body[:at], *new, *block.body[at:]]))
    module = module.with_changes(body=[edited if each is classes[0] else each for each in module.body])
    return with_imports(module, imports).code


def _attrs_field(field: Field) -> str:
    comment = "".join(f"# {line}\n" for line in _wrapped(f"{field.summary} {field.details}", 114))
    if field.type == "bool":
        return f"{comment}{field.name}: bool = {field.default}\n"
    choices = ", ".join(f'"{choice}"' for choice in field.choices)
    accepts = f"in_(({choices}))" if choices else "ge(0)"
    return (
        f"{comment}{field.name}: {field.type} = attrs.field(\n"
        f"    default={field.default}, validator=attrs.validators.{accepts}\n)\n"
    )


def _pydantic_field(field: Field) -> str:
    kind = f"Literal[{', '.join(map(repr, field.choices))}]".replace("'", '"') if field.choices else field.type
    arguments = f"    default={field.default},\n" + ("    ge=0,\n" if kind == "float" else "")
    lines = _wrapped(f"{field.summary} {field.details}".replace('"', "'"), 80)
    description = "".join(f'        "{line} "\n' for line in lines[:-1]) + f'        "{lines[-1]}"\n'
    return f"{field.name}: {kind} = Field(\n{arguments}    description=(\n{description}    ),\n)\n"


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False)


# The trainers


def pass_fields(text: str) -> str:
    """Passes the fields to `ddp_sync_grad` in `training_step`."""
    module = cst.parse_module(text)
    if not _calls_of(_training_step(module), DISPATCHER):
        raise AnchorError(f"a call of {DISPATCHER} in training_step")
    return _with_calls_replaced(module, DISPATCHER).code


def retire_closure_helper(text: str) -> str:
    """Removes the distillation trainer's own way to put gradient synchronisation off; closures use the dispatcher."""
    module = cst.parse_module(text)
    step = _training_step(module)
    helper = _top_level(module, cst.FunctionDef, CLOSURE_HELPER)
    if helper is None:
        if _calls_of(step, DISPATCHER):
            return pass_fields(text)
        raise AnchorError(f"the function {CLOSURE_HELPER}")
    if _params(helper) != ["model", "enabled"]:
        raise AnchorError(f"{CLOSURE_HELPER}(model, enabled): its parameters are {', '.join(_params(helper))}")
    _require_known(helper, CLOSURE_HELPER_CALLS, frozenset())
    if not _calls_of(step, CLOSURE_HELPER):
        raise AnchorError(f"a call of {CLOSURE_HELPER} in training_step")
    module = _without_statements(module, [helper])
    module = _with_calls_replaced(module, CLOSURE_HELPER)
    if CLOSURE_HELPER in names_in([module]):
        raise AnchorError(f"{CLOSURE_HELPER} used only as a context in training_step")
    module = with_imports(module, [Import("cosmos_framework.utils", "distributed")])
    return without_unused(module, [Import("contextlib", "contextmanager"), Import("collections.abc", "Iterator")]).code


def _training_step(module: cst.Module) -> cst.FunctionDef:
    steps = [each for each in find_all(module, cst.FunctionDef) if each.name.value == "training_step"]
    if len(steps) != 1:
        raise AnchorError(f"one method training_step: there are {len(steps)}")
    return steps[0]


def _with_calls_replaced(module: cst.Module, name: str) -> cst.Module:
    class Replacer(cst.CSTTransformer):
        def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
            if _last_name(original_node.func) != name:
                return updated_node
            keywords = [_last_name(arg.keyword) for arg in original_node.args if arg.keyword]
            if keywords == [field.name for field in FIELDS]:
                return updated_node
            if keywords or len(original_node.args) != 2:
                raise AnchorError(
                    f"{name} called with a model and a flag, not as {module.code_for_node(original_node)}"
                )
            lines = [module.code_for_node(arg.value) for arg in original_node.args]
            lines += [f"{field.name}=self.config.trainer.{field.name}" for field in FIELDS]
            return _call_in_lines(f"distributed.{DISPATCHER}", lines)

    return module.visit(Replacer())


# The tests


def repin_closure_tests(text: str) -> str:
    """Makes the tests that pin the retired helper's calls pin those of the dispatcher.

    The stand-in configuration gets the fields; the fake module, which only the retired helper took for FSDP2, goes.
    """
    module = _with_fields_in_namespaces(cst.parse_module(text))
    fakes = [each for each in module.body if isinstance(each, cst.ClassDef) and FAKE_SETTER in _methods(each)]
    pinning = [each for each in module.body if isinstance(each, cst.FunctionDef) and _pins_fake(each)]
    if not fakes and not pinning and DISPATCHER in names_in([module]):
        return module.code
    if len(fakes) != 1 or not pinning:
        raise AnchorError(f"one class with {FAKE_SETTER} and tests that assert {FAKE_RECORD}")
    model = _model_around(module, fakes[0])
    base = _last_name(model.bases[0].value)
    repinned = {each: _repinned(each, model.name.value, base) for each in pinning}
    module = module.with_changes(body=[repinned.get(each, each) for each in module.body])  # type: ignore[call-overload]
    module = _without_statements(module, [fakes[0], model])
    left = [name for name in (fakes[0].name.value, model.name.value) if name in names_in([module])]
    if left:
        raise AnchorError(f"{' and '.join(left)} used by the tests that assert {FAKE_RECORD} alone")
    return with_imports(module, [Import("unittest.mock", name) for name in ("MagicMock", "call", "patch")]).code


def _with_fields_in_namespaces(module: cst.Module) -> cst.Module:
    class Adder(cst.CSTTransformer):
        found = False

        def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
            keywords = [_last_name(arg.keyword) for arg in updated_node.args if arg.keyword]
            if _last_name(updated_node.func) != "SimpleNamespace" or ACCUMULATION not in keywords:
                return updated_node
            self.found = True
            at = keywords.index(ACCUMULATION)
            model = updated_node.args[at]
            new = [
                model.with_changes(keyword=cst.Name(field.name), value=cst.parse_expression(field.default))
                for field in FIELDS
                if field.name not in keywords
            ]
            return updated_node.with_changes(args=[*updated_node.args[: at + 1], *new, *updated_node.args[at + 1 :]])

    adder = Adder()
    module = module.visit(adder)
    if not adder.found:
        raise AnchorError(f"a SimpleNamespace with {ACCUMULATION} that stands for the trainer's configuration")
    return module


def _pins_fake(test: cst.FunctionDef) -> bool:
    return any(m.matches(each.test, FAKE_PINNED) for each in find_all(test, cst.Assert))


def _model_around(module: cst.Module, fake: cst.ClassDef) -> cst.ClassDef:
    """Finds the class whose __init__ does nothing but hold a fake."""
    models = [
        each
        for each in module.body
        if isinstance(each, cst.ClassDef)
        and each is not fake
        and _methods(each) == ["__init__"]
        and len(each.bases) == 1
        and fake.name.value in names_in([each.body])
    ]
    if len(models) != 1:
        raise AnchorError(f"one class that does nothing but hold a {fake.name.value}")
    return models[0]


def _repinned(test: cst.FunctionDef, model: str, base: str) -> cst.FunctionDef:
    class Repinner(cst.CSTTransformer):
        def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.Name:
            return updated_node.with_changes(value=base) if updated_node.value == model else updated_node

        def leave_Assert(self, original_node: cst.Assert, updated_node: cst.Assert) -> cst.Assert:
            if not m.matches(original_node.test, FAKE_PINNED):
                return updated_node
            comparison = cst.ensure_type(original_node.test, cst.Comparison)
            flags = _flags_on_entry(comparison.comparisons[0].comparator)
            lines = ["model", "enabled", *(f"{field.name}={field.default}" for field in FIELDS)]
            calls = "".join(f"        {line},\n" for line in lines)
            pinned = f"{DISPATCHER}.call_args_list == [\n    call(\n{calls}    )\n    for enabled in {flags}\n]"
            return updated_node.with_changes(test=cst.parse_expression(pinned))

    patched = f"trainer_module.distributed.{DISPATCHER}"
    decorator = f'patch.object(trainer_module.distributed, "{DISPATCHER}", wraps={patched})'
    param = cst.Param(cst.Name(DISPATCHER), cst.Annotation(cst.Name("MagicMock")))
    test = cst.ensure_type(test.visit(Repinner()), cst.FunctionDef)
    return test.with_changes(
        decorators=[*test.decorators, cst.Decorator(cst.parse_expression(decorator))],
        params=test.params.with_changes(params=[param, *test.params.params]),
    )


def _flags_on_entry(pinned: cst.BaseExpression) -> str:
    """Reads the helper's pinned calls: for each closure one on entry, (enabled, recurse), and one that reset it."""
    entries = [
        _last_name(cst.ensure_type(element.value, cst.Tuple).elements[0].value)
        for element in cst.ensure_type(pinned, cst.List).elements
    ]
    if len(entries) % 2 or set(entries[1::2]) != {"True"}:
        raise AnchorError(f"{FAKE_RECORD} with one call on entry and one that resets to True")
    return f"({', '.join(entries[::2])})"


def add_tests(text: str, source_path: Path) -> str:
    """Appends the tests of `source_path` that `text` lacks, with the imports that they need."""
    module, source = cst.parse_module(text), cst.parse_module(source_path.read_text(encoding="utf-8"))
    defined = {_defined_name(each) for each in module.body}
    new = [
        each
        for each in source.body
        if isinstance(each, cst.FunctionDef | cst.ClassDef) and each.name.value not in defined
    ]
    if not new:
        return text
    two_blank = [cst.EmptyLine(indent=False), cst.EmptyLine(indent=False)]
    module = module.with_changes(body=[*module.body, *(each.with_changes(leading_lines=two_blank) for each in new)])
    return with_imports(module, imports_used(source, new)).code


# Reading and writing syntax trees


def _top_level(module: cst.Module, kind: type[cst.FunctionDef], name: str) -> cst.FunctionDef | None:
    found = [each for each in module.body if isinstance(each, kind) and each.name.value == name]
    return found[0] if len(found) == 1 else None


def _defined_name(statement: cst.CSTNode) -> str:
    if isinstance(statement, cst.FunctionDef | cst.ClassDef):
        return statement.name.value
    if isinstance(statement, cst.SimpleStatementLine) and isinstance(statement.body[0], cst.AnnAssign):
        return get_full_name_for_node(statement.body[0].target) or ""
    return ""


def _fields(owner: cst.ClassDef) -> dict[str, int]:
    return {name: i for i, each in enumerate(owner.body.body) if (name := _defined_name(each))}


def _methods(owner: cst.ClassDef) -> list[str]:
    return [each.name.value for each in owner.body.body if isinstance(each, cst.FunctionDef)]


def _params(function: cst.FunctionDef) -> list[str]:
    params = function.params
    return [param.name.value for param in (*params.posonly_params, *params.params, *params.kwonly_params)]


def _last_name(node: cst.CSTNode | None) -> str:
    return (get_full_name_for_node(node) or "").rpartition(".")[2] if node is not None else ""


def _calls_of(function: cst.FunctionDef, name: str) -> list[cst.Call]:
    return [call for call in find_all(function, cst.Call) if _last_name(call.func) == name]


def _require_known(function: cst.FunctionDef, calls: frozenset[str], writes: frozenset[str]) -> None:
    """Raises AnchorError if a function does something that upstream's did not."""
    called = [call.func for call in find_all(function.body, cst.Call)]
    own = {name for func in called if not {name := get_full_name_for_node(func) or "", _last_name(func)} & calls}
    targets = [each.target for each in find_all(function.body, cst.AssignTarget)]
    own |= {each.attr.value for each in targets if isinstance(each, cst.Attribute)} - writes
    if own:
        raise AnchorError(f"{function.name.value} as upstream wrote it: this one also uses {', '.join(sorted(own))}")


def _call_in_lines(func: str, lines: Iterable[str]) -> cst.BaseExpression:
    return cst.parse_expression(f"{func}(\n" + "".join(f"    {line},\n" for line in lines) + ")")


def _without_statements(module: cst.Module, statements: list[cst.FunctionDef | cst.ClassDef]) -> cst.Module:
    return module.with_changes(body=[each for each in module.body if all(each is not gone for gone in statements)])


def _without_assignments(module: cst.Module, attribute: str) -> cst.Module:
    class Remover(cst.CSTTransformer):
        def leave_SimpleStatementLine(
            self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
        ) -> cst.SimpleStatementLine | cst.RemovalSentinel:
            assignment = m.Assign(targets=[m.AssignTarget(target=m.Attribute(attr=m.Name(attribute)))])
            return cst.RemoveFromParent() if m.matches(original_node.body[0], assignment) else updated_node

    return module.visit(Remover())
