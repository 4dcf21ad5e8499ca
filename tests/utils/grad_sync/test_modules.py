# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""Kinds of modules, and of ways to run them, whose gradients equal mode "none" in every other mode."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from cosmos_framework.utils.grad_sync import GradSync, Settings
from tests.utils.grad_sync.windows import MIXED, gradients, mesh_of, worst_error

DIM = 8
TWO_WINDOWS = [3, 2]

Loss = Callable[[nn.ModuleDict, Tensor, int, int], Tensor]


@dataclasses.dataclass
class Case:
    """A model, and the loss of micro-step `step` of a window of `length`."""

    model: nn.ModuleDict
    loss: Loss
    backward: Callable[[Tensor], None] = Tensor.backward


def linear() -> nn.Linear:
    return nn.Linear(DIM, DIM)


def square(out: Tensor) -> Tensor:
    return out.float().pow(2).mean()


@dataclasses.dataclass(frozen=True)
class Wrap:
    """The arguments of `fully_shard`, for the mesh and the precision under test."""

    mesh: str
    mixed: bool
    reshard_after_forward: bool | int = True

    def __call__(self, *modules: nn.Module | list[nn.Module], mesh: DeviceMesh | None = None, **more: Any) -> None:
        policy = MIXED if self.mixed else MixedPrecisionPolicy()
        for module in modules:
            fully_shard(
                module,  # type: ignore[arg-type]
                mesh=mesh or mesh_of(self.mesh),
                mp_policy=policy,
                reshard_after_forward=self.reshard_after_forward,
                **more,
            )


# Models


class LoRA(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = linear().requires_grad_(False)
        self.down = nn.Linear(DIM, 2, bias=False)
        self.up = nn.Linear(2, DIM, bias=False)

    def forward(self, x: Tensor, adapted: bool) -> Tensor:
        return self.base(x) + (self.up(self.down(x)) if adapted else 0)


class Chain(nn.Module):
    """Runs its blocks one after the other."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, *skipped: int) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = torch.tanh(block(x)) if i not in skipped else x
        return x


def three() -> Chain:
    return Chain(linear(), linear(), linear())


class LoRAChain(Chain):
    def forward(self, x: Tensor, *plain: int) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = torch.tanh(block(x, i not in plain))
        return x


def lora(wrap: Wrap) -> Case:
    """The base is frozen, in the group of its adapter; an adapter rests in some micro-steps."""
    net = LoRAChain(LoRA(), LoRA(), LoRA())
    wrap(*net.blocks, net)
    return Case(nn.ModuleDict({"net": net}), lambda m, x, step, length: square(m["net"](x, *range(step))))


def frozen_groups(wrap: Wrap) -> Case:
    """A whole group is frozen, before and between trained ones; another has one frozen parameter."""
    net = Chain(linear().requires_grad_(False), linear(), linear().requires_grad_(False), linear())
    net.blocks[3].bias.requires_grad_(False)  # type: ignore[union-attr]
    wrap(*net.blocks, net)
    return Case(nn.ModuleDict({"net": net}), lambda m, x, step, length: square(m["net"](x, *range(step))))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle, self.head = linear(), linear(), linear()
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor, ends: str) -> Tensor:
        x = self.embed(x) if "e" in ends else x
        x = torch.tanh(self.middle(x))
        return self.head(x) if "h" in ends else x


def tied(wrap: Wrap) -> Case:
    """One parameter under two names, used under one or the other or none."""
    net = Tied()
    wrap(net.middle, net)
    return Case(nn.ModuleDict({"net": net}), lambda m, x, step, length: square(m["net"](x, ["eh", "e", ""][step])))


class Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = linear(), Forked()

    def forward(self, x: Tensor, times: int) -> Tensor:
        x = self.first(x)
        for i in range(times):
            x = self.again(x, left=i % 2 == 0)
        return x


class Forked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = linear(), linear()

    def forward(self, x: Tensor, left: bool) -> Tensor:
        return torch.tanh(self.left(x) if left else self.right(x))


def called_several_times(wrap: Wrap) -> Case:
    """A group runs several times in a forward and uses another parameter each time."""
    net = Repeated()
    wrap(net.again, net)
    return Case(nn.ModuleDict({"net": net}), lambda m, x, step, length: square(m["net"](x, [1, 3, 2][step])))


def one_branch(wrap: Wrap) -> Case:
    """A group runs in each micro-step, and half of it in none."""
    net = Repeated()
    wrap(net.again, net)
    return Case(nn.ModuleDict({"net": net}), lambda m, x, step, length: square(m["net"](x, min(step, 1))))


class Checkpointed(Chain):
    def __init__(self, *blocks: nn.Module, use_reentrant: bool) -> None:
        super().__init__(*blocks)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor, *skipped: int) -> Tensor:
        for i, block in enumerate(self.blocks):
            if i not in skipped:
                x = torch.tanh(checkpoint(block, x, use_reentrant=self.use_reentrant))
        return x


def checkpointed(wrap: Wrap, use_reentrant: bool, inside: bool) -> Case:
    """Activations are recomputed in backward, of the sharded blocks or of layers inside them."""
    if inside:
        blocks: list[nn.Module] = [Checkpointed(linear(), linear(), use_reentrant=use_reentrant) for _ in range(2)]
        net = Chain(*blocks, linear())
    else:
        net = Checkpointed(linear(), linear(), linear(), use_reentrant=use_reentrant)
    wrap(*net.blocks, net)
    return Case(
        nn.ModuleDict({"net": net}),
        lambda m, x, step, length: square(m["net"](x.clone().requires_grad_(), *[step] * (step < length - 1))),
    )


@dataclasses.dataclass
class Features:
    out: Tensor
    rest: dict[str, tuple[Tensor, int]]


class Structured(nn.Module):
    """A block whose output is no tensor."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.main, self.side = linear(), linear()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        out, side = torch.tanh(self.main(x)), self.side(x)
        if self.kind == "dict":
            return {"out": out, "nested": {"side": side, "text": "kept"}}
        if self.kind == "tuple":
            return (out, [side], None)
        return Features(out, {"side": (side, 1)})


def first_tensor(output: Any, side: bool) -> Tensor:
    if isinstance(output, dict):
        return output["nested"]["side"] if side else output["out"]
    if isinstance(output, tuple):
        return output[1][0] if side else output[0]
    return output.rest["side"][0] if side else output.out


class StructuredNet(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.block, self.last = Structured(kind), linear()

    def forward(self, x: Tensor, side: bool) -> Tensor:
        return self.last(first_tensor(self.block(x), side))


def structured(wrap: Wrap, kind: str) -> Case:
    net = StructuredNet(kind)
    wrap(net.block, net)
    return Case(nn.ModuleDict({"net": net}), lambda m, x, step, length: square(m["net"](x, side=step == 1)))


def several_meshes(wrap: Wrap) -> Case:
    """Modules over 2x2 and over 1x4 ranks side by side, and one that no mesh knows, whose gradient stays local."""
    nets = nn.ModuleDict({"hsdp": three(), "fsdp": three(), "local": linear()})
    for kind in ("hsdp", "fsdp"):
        wrap(*nets[kind].blocks, nets[kind], mesh=mesh_of(kind))  # type: ignore[misc, arg-type]

    def loss(m: nn.ModuleDict, x: Tensor, step: int, length: int) -> Tensor:
        return square(m["local"](m["fsdp"](m["hsdp"](x, *range(step)), *range(1 - step, 1)).float()))

    return Case(nets, loss)


def nested_meshes(wrap: Wrap) -> Case:
    """One root whose blocks are sharded over another mesh than it is."""
    net = three()
    wrap(net.blocks[1], mesh=mesh_of("fsdp"))
    wrap(net.blocks[2], mesh=mesh_of("hsdp"))
    wrap(net)
    return Case(nn.ModuleDict({"net": net}), lambda m, x, step, length: square(m["net"](x, *range(3 - step, 3))))


def plain_root(wrap: Wrap) -> Case:
    """A root that is not sharded itself, with blocks that are, and whose own weight nobody synchronises."""
    net = three()
    wrap(*net.blocks[1:])
    return Case(nn.ModuleDict({"net": net}), lambda m, x, step, length: square(m["net"](x, *range(3 - step, 3))))


def groups_in_one_module(wrap: Wrap) -> Case:
    """The module's weights go to another mesh than its biases: two groups, one `fully_shard`."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult

    meshes = {
        1: FSDPMeshInfo(mesh_of("fsdp"), shard_mesh_dim=0),
        2: HSDPMeshInfo(mesh_of("hsdp"), shard_mesh_dim=1, replicate_mesh_dim=0),
    }
    net = Chain(Repeated(), Repeated())

    def place(param: nn.Parameter) -> Any:
        return ShardPlacementResult(placement=Shard(0), mesh_info=meshes[param.ndim])

    wrap(*net.blocks, net, mesh=mesh_of("fsdp"), shard_placement_fn=place)

    def loss(m: nn.ModuleDict, x: Tensor, step: int, length: int) -> Tensor:
        for block in m["net"].blocks:  # type: ignore[union-attr]
            x = block(x, step)
        return square(x)

    # The blocks are roots of their own, as they run without the module around them.
    return Case(nn.ModuleDict({"net": net}), loss)


def grouped_modules(wrap: Wrap) -> Case:
    """Two modules in one group, by `fully_shard([a, b])`."""
    net = three()
    wrap(list(net.blocks[:2]), net.blocks[2], net)
    return Case(nn.ModuleDict({"net": net}), lambda m, x, step, length: square(m["net"](x, *[2] * (step % 2))))


def second_dimension(wrap: Wrap) -> Case:
    """Parameters are sharded along their second dimension."""
    net = three()
    place = lambda param: Shard(1) if param.ndim == 2 else None  # noqa: E731
    wrap(*net.blocks, net, shard_placement_fn=place)
    return Case(nn.ModuleDict({"net": net}), lambda m, x, step, length: square(m["net"](x, *range(step))))


def student_and_critic(wrap: Wrap) -> Case:
    """Two roots, of which the critic does not run at the boundary."""
    nets = nn.ModuleDict({"student": three(), "critic": three()})
    for net in nets.values():
        wrap(*net.blocks, net)  # type: ignore[misc, arg-type]

    def loss(m: nn.ModuleDict, x: Tensor, step: int, length: int) -> Tensor:
        x = m["student"](x, *range(step))
        return square(x if step == length - 1 else m["critic"](x))

    return Case(nets, loss)


def two_backwards(wrap: Wrap) -> Case:
    """Two graphs, and two `backward()` calls, in each micro-step; the second uses other parameters."""
    net = Repeated()
    wrap(net.again, net)

    def loss(m: nn.ModuleDict, x: Tensor, step: int, length: int) -> Tensor:
        square(m["net"](x, 1) / length).backward()
        return square(m["net"](x, step))

    return Case(nn.ModuleDict({"net": net}), loss)


def backward_of_parts(wrap: Wrap) -> Case:
    """One forward whose graph is walked twice."""
    net = Repeated()
    wrap(net.again, net)

    def backward(loss: Tensor) -> None:
        loss.backward(retain_graph=True)
        loss.backward()

    return Case(nn.ModuleDict({"net": net}), lambda m, x, step, length: square(m["net"](x, [2, 0, 1][step])), backward)


def compiled(wrap: Wrap) -> Case:
    """A sharded block that `torch.compile` has replaced."""
    net = Chain(Chain(linear()), Chain(linear()), linear())
    wrap(*net.blocks, net)
    net.blocks[0].compile(backend="eager")
    net.blocks[1] = torch.compile(net.blocks[1], backend="eager")  # type: ignore[assignment]
    return Case(nn.ModuleDict({"net": net}), lambda m, x, step, length: square(m["net"](x, *range(step))))


CASES: dict[str, Callable[[Wrap], Case]] = {
    "LoRA": lora,
    "frozen groups": frozen_groups,
    "tied": tied,
    "called several times": called_several_times,
    "one branch": one_branch,
    "several meshes": several_meshes,
    "nested meshes": nested_meshes,
    "plain root": plain_root,
    "grouped modules": grouped_modules,
    "second dimension": second_dimension,
    "student and critic": student_and_critic,
    "two backwards": two_backwards,
    "backward of parts": backward_of_parts,
    "compiled": compiled,
    **{
        f"checkpointed {'inside' if inside else 'blocks'}, {'' if reentrant else 'not '}reentrant": functools.partial(
            checkpointed, use_reentrant=reentrant, inside=inside
        )
        for reentrant, inside in itertools.product([True, False], repeat=2)
    },
    **{f"output is a {kind}": functools.partial(structured, kind=kind) for kind in ("dict", "tuple")},
}
WALKS_DATACLASSES = hasattr(torch_fsdp.FSDPModule, "reset_iter_state")  # both came with torch 2.13
SHARDS_BY_PARAMETER = hasattr(torch_fsdp._fully_shard._fsdp_common, "ShardPlacementResult")
if WALKS_DATACLASSES:
    CASES["output is a dataclass"] = functools.partial(structured, kind="dataclass")
if SHARDS_BY_PARAMETER:
    CASES["groups in one module"] = groups_in_one_module

QUICK = (
    "LoRA",
    "tied",
    "called several times",
    "one branch",
    "several meshes",
    "grouped modules",
    "checkpointed inside, not reentrant",
    "checkpointed blocks, reentrant",
    "output is a dict",
)
MODES = list(itertools.product(["all_reduce", "grad_sync"], [True, False]))
WRAPS = [
    Wrap("hsdp", mixed=False),
    Wrap("hsdp", mixed=True, reshard_after_forward=False),
]
TO_TWO_RANKS = Wrap("fsdp", mixed=True, reshard_after_forward=2)


def batch(index: int) -> Tensor:
    return torch.randn(3, DIM, generator=torch.Generator().manual_seed(100 * index + dist.get_rank()))


def run(case: Case, sync: GradSync, windows: list[int]) -> Iterator[dict[str, Tensor | None]]:
    """Runs windows of so many micro-steps; yields the gradients after each."""
    index = 0
    for length in windows:
        for step in range(length):
            with sync.micro_step(boundary=step == length - 1):
                case.backward(case.loss(case.model, batch(index), step, length) / length)
            index += 1
        yield gradients(case.model)


def build(name: str, wrap: Wrap) -> Case:
    torch.manual_seed(0)
    return CASES[name](wrap)


def roots(case: Case) -> list[nn.Module]:
    return list(case.model.values())


def errors(name: str, wraps: list[Wrap], zeroes: bool) -> dict[tuple[Wrap, str, bool], float]:
    """The worst error against mode "none" in each mode; None-ness counts as well."""
    mesh_of.cache_clear()
    torch._dynamo.reset()
    found: dict[tuple[Wrap, str, bool], float] = {}

    def windows(wrap: Wrap, mode: str, reshard: bool) -> list[dict[str, Tensor | None]]:
        case = build(name, wrap)
        seen = []
        for grads in run(case, GradSync(roots(case), mode, reshard), TWO_WINDOWS):
            seen.append(grads)
            if zeroes:
                case.model.zero_grad()
        return seen

    for wrap in wraps:
        wanted = windows(wrap, "none", True)
        assert any(grad is not None for grad in wanted[-1].values())
        for mode, reshard in MODES:
            found[wrap, mode, reshard] = max(map(worst_error, windows(wrap, mode, reshard), wanted))
    return found


def assert_equal(errors_by_setup: dict[tuple[Wrap, str, bool], float]) -> None:
    for (wrap, mode, reshard), error in errors_by_setup.items():
        assert error < (2e-2 if wrap.mixed else 1e-5), (wrap, mode, reshard)


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
@pytest.mark.parametrize(
    "wrap", [pytest.param(WRAPS[0], id="float32"), pytest.param(WRAPS[1], id="mixed", marks=pytest.mark.slow)]
)
def test_module_equals_none(rank_pool: Any, wrap: Wrap, name: str) -> None:
    for found in rank_pool.run(errors, name, [wrap], True):
        assert_equal(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["called several times", "nested meshes", "checkpointed blocks, not reentrant"])
def test_module_that_reshards_to_two_ranks(rank_pool: Any, name: str) -> None:
    for found in rank_pool.run(errors, name, [TO_TWO_RANKS], True):
        assert_equal(found)


@pytest.mark.parametrize("name", ["LoRA", pytest.param("student and critic", marks=pytest.mark.slow)])
def test_windows_add_to_gradients_that_nobody_zeroed(rank_pool: Any, name: str) -> None:
    for found in rank_pool.run(errors, name, WRAPS[:1], False):
        assert_equal(found)


# Settings that change

SWITCHES = [
    settings
    for first, second, third in itertools.permutations(["none", "all_reduce", "grad_sync"])
    for settings in ([(first, True), (second, False), (third, True)], [(first, False), (second, True), (third, True)])
]


def errors_when_switched(name: str, wraps: list[Wrap]) -> list[float]:
    mesh_of.cache_clear()
    worst = []
    for wrap in wraps:
        case = build(name, wrap)
        wanted = next(run(case, GradSync(roots(case), "none"), [3]))
        for switch in SWITCHES:
            case = build(name, wrap)
            sync = GradSync(roots(case))
            for step, (mode, reshard) in enumerate(switch):
                sync.settings = Settings(type(sync.settings.mode)(mode), reshard)
                with sync.micro_step(boundary=step == 2):
                    (case.loss(case.model, batch(step), step, 3) / 3).backward()
            assert not sync.held_back()
            assert_resharded(case.model)
            worst.append(worst_error(gradients(case.model), wanted))
    return worst


def assert_resharded(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        assert "local" in name or hasattr(param, "full_tensor"), f"{name} is still gathered"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LoRA", "student and critic"])
def test_settings_switched_in_mid_window(rank_pool: Any, name: str) -> None:
    wraps = [Wrap("hsdp", mixed=False), Wrap("fsdp", mixed=False)]
    for worst in rank_pool.run(errors_when_switched, name, wraps):
        assert max(worst) < 1e-5


def errors_after_validation() -> float:
    """A forward without gradients, outside the block, between windows, of modules that reshard to two ranks."""
    mesh_of.cache_clear()
    wrap = Wrap("fsdp", mixed=False, reshard_after_forward=2)
    seen = []
    for mode, reshard in [("none", True), ("grad_sync", False)]:
        case = build("LoRA", wrap)
        sync = GradSync(roots(case), mode, reshard)
        for grads in run(case, sync, TWO_WINDOWS):
            with torch.no_grad():
                case.loss(case.model, batch(9), 0, 1)
            seen.append(grads)
            case.model.zero_grad()
    return max(map(worst_error, seen[2:], seen[:2]))


def test_validation_between_windows(rank_pool: Any) -> None:
    assert max(rank_pool.run(errors_after_validation)) < 1e-5


# Hooks on sharded gradients: an optimizer that steps in backward


@contextmanager
def steps_in_backward(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Records the gradients that each parameter's hook sees, and drops them as an optimizer in backward does."""
    seen: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}

    def step(param: Tensor, name: str) -> None:
        assert param.grad is not None
        seen[name].append(param.grad.to_local().clone())  # type: ignore[attr-defined]
        param.grad = None

    handles = [
        param.register_post_accumulate_grad_hook(functools.partial(step, name=name))
        for name, param in model.named_parameters()
        if param.requires_grad
    ]
    yield seen
    for handle in handles:
        handle.remove()


def hooked(name: str, mode: str, reshard: bool, windows: list[int]) -> dict[str, list[Tensor]]:
    case = build(name, Wrap("hsdp", mixed=False))
    with steps_in_backward(case.model) as seen:
        for grads in run(case, GradSync(roots(case), mode, reshard), windows):
            assert all(grad is None for grad in grads.values())
    return seen


def hooks_in_each_mode(name: str) -> None:
    mesh_of.cache_clear()
    none = hooked(name, "none", True, [3])
    assert any(len(grads) > 1 for grads in none.values())
    for mode, reshard in MODES:
        found = hooked(name, mode, reshard, [3])
        for param, grads in none.items():
            assert len(found[param]) == min(len(grads), 1), (mode, reshard, param)
            if grads:
                torch.testing.assert_close(found[param][0], torch.stack(grads).sum(0))


@pytest.mark.parametrize("name", ["LoRA", "one branch", "tied"])
def test_optimizer_in_backward_steps_once_a_window(rank_pool: Any, name: str) -> None:
    """And not at all for a parameter that no micro-step used."""
    rank_pool.run(hooks_in_each_mode, name)


def steps_when_ranks_differ() -> list[dict[str, int]]:
    """How often each parameter steps in backward in each mode, where every rank takes a branch of its own."""
    mesh_of.cache_clear()
    counts = []
    for mesh, mode in itertools.product(["hsdp", "fsdp"], ["none", "all_reduce", "grad_sync"]):
        torch.manual_seed(0)
        net = nn.ModuleDict({"forked": Forked(), "last": linear(), "unused": Forked()})
        wrap = Wrap(mesh, mixed=False)
        wrap(*net.values())
        sync = GradSync(net, mode, reduce_unused_params=True)
        with steps_in_backward(net) as seen:
            for step in range(3):
                with sync.micro_step(boundary=step == 2):
                    square(net["last"](net["forked"](batch(step), left=dist.get_rank() == 1))).backward()
            counts.append({name: len(grads) for name, grads in seen.items()})
        assert all(param.grad is None for param in net.parameters())
    return counts


def test_all_ranks_step_in_backward_equally_often(rank_pool: Any) -> None:
    first, *others = rank_pool.run(steps_when_ranks_differ)
    assert all(each == first for each in others)
    hsdp_none, _, hsdp_grad_sync, *_, fsdp_grad_sync = first
    assert hsdp_none["forked.left.weight"] == 3
    assert hsdp_grad_sync["forked.left.weight"] == fsdp_grad_sync["forked.right.bias"] == 1
    assert not any(count for each in first for name, count in each.items() if name.startswith("unused"))
