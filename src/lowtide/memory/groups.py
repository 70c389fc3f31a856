"""Groups: which parameters are needed together, and the modules whose call needs them.

They are found from the model's blocks (the layers of a transformer, the stages of a network built from equal parts, a
shared layer), or given by the names of modules.

`unmanaged_parameters` are those that are left as they are, and why.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lowtide import compat
from lowtide.errors import ConfigError, UnknownNameError
from lowtide.memory.chunk import GroupSpec, ParameterSpec
from lowtide.units import MiB

REST = ""
"""Name and module path of the group of everything that has no group of its own: open for as long as the model runs."""
LEAST_GROUP_BYTES = MiB
LEAST_GROUP_SHARE = 0.02
"""A module outside the repeated blocks is a group of its own from this size, or this share of the model, on."""


def find_groups(model: nn.Module, given: Mapping[str, Sequence[str]] | None = None) -> tuple[GroupSpec, ...]:
    """The groups of a model, in the order of its modules, the rest (named "") last.

    Each repeated or shared block is a group (see `repeated_blocks`); so is each other module that is called, holds all
    its parameters itself and is large enough (an embedding, a head). What remains, norms for the most part, is the rest
    group. Parameters that modules of several groups use (the same `Parameter` under several names) form a group that each
    of them opens. Parameters that cannot be managed are in no group: see `unmanaged_parameters`. Nothing is read but names
    and shapes: the model may be on meta.

    Args:
        model: The model, as it will be trained.
        given: Path of a module that is called, to the names of the parameters (or prefixes of them, such as the path
            itself) that its call needs. Replaces the automatic choice for those parameters.

    Raises:
        UnknownNameError: `given` names a module or a parameter that the model does not have.
        ConfigError: `given` names a parameter twice, a module that is never called, or nothing that can be managed.

    Example:
        >>> model = nn.Sequential(nn.Embedding(50, 8), nn.Tanh(), nn.Linear(8, 50))
        >>> [(group.name, group.nbytes) for group in find_groups(model)]
        [('0', 1600), ('2', 1800)]
    """
    parameters = _managed(model)
    users = _Users(model, given or {}, parameters)
    members: dict[tuple[str, ...], list[_Managed]] = {}
    for parameter in parameters:
        members.setdefault(users.of(parameter), []).append(parameter)
    members = _small_ones_to_the_rest(members, users)

    blocks = {path for path, _ in repeated_blocks(model)}

    def position(key: tuple[str, ...]) -> tuple[bool, int]:
        return key == (REST,), min(users.order[user] for user in key if user != REST or key == (REST,))

    return tuple(
        GroupSpec(
            name=key[0] if len(key) == 1 else members[key][0].spec.name,
            modules=key,
            parameters=tuple(parameter.spec for parameter in members[key]),
            is_block=len(key) == 1 and key[0] in blocks,
        )
        for key in sorted(members, key=position)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Managed:
    """A parameter that can be managed, with every name that it has."""

    spec: ParameterSpec
    names: tuple[str, ...]


def _managed(model: nn.Module) -> list[_Managed]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    left_out = {name for name, _ in unmanaged_parameters(model)}
    return [
        _Managed(
            spec=ParameterSpec(
                name=name,
                shape=tuple(parameter.shape),
                stride=parameter.stride(),
                dtype=parameter.dtype,
                requires_grad=parameter.requires_grad,
                nbytes=parameter.numel() * parameter.element_size(),
            ),
            names=tuple(names[id(parameter)]),
        )
        for name, parameter in model.named_parameters()
        if name not in left_out
    ]


class _Users:
    """Which module's call needs a parameter, by the parameter's names."""

    def __init__(self, model: nn.Module, given: Mapping[str, Sequence[str]], parameters: list[_Managed]) -> None:
        modules = dict(model.named_modules(remove_duplicate=False))
        self.order = {path: index for index, path in enumerate(modules)}
        self.given = _given_users(model, modules, given, parameters)
        self.explicit = frozenset(given)
        called = {id(module): path for path, module in reversed(list(_called_modules(model)))}
        # By module: one that stands at two places is one user.
        self.automatic = {path: called[id(module)] for path, module in modules.items() if id(module) in called}
        equal = _equal_blocks(model)
        self.sized = {user for path, user in self.automatic.items() if id(modules[path]) not in equal}
        """Modules that must be large enough to be worth a group of their own."""

    def of(self, parameter: _Managed) -> tuple[str, ...]:
        """Paths of all modules whose call needs the parameter, in module order."""
        found = {self._of_name(name) for name in parameter.names}
        return tuple(sorted(found, key=self.order.__getitem__))

    def _of_name(self, name: str) -> str:
        if name in self.given:
            return self.given[name]
        path = name
        while path:
            path = path.rpartition(".")[0]
            if path in self.automatic:
                return self.automatic[path]
        return REST


def _given_users(
    model: nn.Module, modules: dict[str, nn.Module], given: Mapping[str, Sequence[str]], parameters: list[_Managed]
) -> dict[str, str]:
    """By the name of a parameter, the module that it was given to."""
    all_names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    managed = {name for parameter in parameters for name in parameter.names}
    found: dict[str, str] = {}
    for user, prefixes in given.items():
        if user not in modules:
            raise UnknownNameError("module", user, modules)
        if user != REST and not is_called(modules[user]):
            raise ConfigError(
                f"the group {user!r} would never open: {type(modules[user]).__name__} has no forward of its own; "
                "give the path of a module that is called",
                key=user,
            )
        for prefix in prefixes:
            named = [name for name in all_names if not prefix or name == prefix or name.startswith(f"{prefix}.")]
            if not named:
                raise UnknownNameError("parameter or module with parameters", prefix, [*all_names, *modules])
            usable = [name for name in named if name in managed]
            if not usable:
                reason = next(reason for name, reason in unmanaged_parameters(model) if name in named)
                raise ConfigError(f"{prefix!r} of the group {user!r} cannot be managed: {reason}", key=user)
            for name in usable:
                if found.setdefault(name, user) != user:
                    raise ConfigError(
                        f"the parameter {name!r} is given to two groups, {found[name]!r} and {user!r}; "
                        "name it in one of them",
                        key=user,
                    )
    return found


def _small_ones_to_the_rest(
    members: dict[tuple[str, ...], list[_Managed]], users: _Users
) -> dict[tuple[str, ...], list[_Managed]]:
    """What is too small for a group of its own joins the rest, which is open whenever the model runs."""
    total = sum(parameter.spec.nbytes for group in members.values() for parameter in group)
    least = min(LEAST_GROUP_BYTES, LEAST_GROUP_SHARE * total)
    kept: dict[tuple[str, ...], list[_Managed]] = {}
    rest: list[_Managed] = list(members.get((REST,), []))
    for key, group in members.items():
        size = sum(parameter.spec.nbytes for parameter in group)
        is_block = len(key) == 1 and key[0] not in users.sized
        if key != (REST,) and (is_block or size >= least or not users.explicit.isdisjoint(key)):
            kept[key] = group
        elif key != (REST,):
            rest += group
    if rest:
        order = {id(p): index for index, p in enumerate(p for group in members.values() for p in group)}
        kept[(REST,)] = sorted(rest, key=lambda parameter: order[id(parameter)])
    return kept


def _called_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that may have groups: blocks, and outside them the smallest modules that are surely called."""
    if _is_compiled(model):
        return  # one piece: all of it is the rest group
    blocks = {id(block) for _, block in repeated_blocks(model)}

    def visit(path: str, module: nn.Module, in_block: bool) -> Iterator[tuple[str, nn.Module]]:
        in_block = in_block or id(module) in blocks
        # The model itself is the rest group's module.
        if path and is_called(module) and (in_block or _is_leaf(module)):
            yield path, module
            return
        for name, child in module.named_children():
            if next(child.parameters(), None) is not None:
                yield from visit(f"{path}.{name}" if path else name, child, in_block)

    yield from visit("", model, in_block=False)


def _equal_blocks(model: nn.Module) -> set[int]:
    """Ids of the blocks that there are several of; a norm or a head at the end of their container is none."""
    blocks = [(block, type(compat.compiled_original(block) or block)) for _, block in repeated_blocks(model)]
    kinds = Counter(kind for _, kind in blocks)
    return {id(block) for block, kind in blocks if kinds[kind] > 1 and not issubclass(kind, _SIMPLE_KINDS)}


def is_called(module: nn.Module) -> bool:
    """Whether calling the module can do anything: a `ModuleList` or a `ParameterList` is only walked through."""
    # `torch.compile` puts the forward on the instance.
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` or `Module.compile` made one piece of the module: nothing inside is called by itself."""
    return compat.compiled_original(module) is not None or compat.uncompiled(compat.call_of(module)) is not None


def _is_leaf(module: nn.Module) -> bool:
    """Whether nothing inside the module is sure to be called by itself.

    So for modules that hold all their parameters themselves, and for those that read their children's weights instead
    of calling them (attention's output projection; the whole layer on the fast path of an encoder) or compile them
    together with everything around them.
    """
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase | nn.TransformerEncoderLayer):
        return True
    if _is_compiled(module):
        return True
    skipped = () if compat.parametrized_names(module) is None else ("parametrizations",)
    return not any(
        is_called(inner) and next(inner.parameters(), None) is not None
        for name, child in module.named_children()
        if name not in skipped
        for inner in child.modules()
    )


def find_named_groups(model: nn.Module, names: Iterable[str]) -> tuple[GroupSpec, ...]:
    """As `find_groups`, but each module of these names has a group of its own, also where it would be in another one.

    A small table joins the rest of a deep model and not that of a shallow one: who names it means it in both. A module that
    is made of others, none of them a block, is one group when it is named, and they are in it. The name of a tied parameter
    keeps its group apart likewise, so that the names of a plan's groups find those groups again. Names that say nothing of
    the kind are passed over.

    Example:
        >>> model = nn.Sequential(nn.Embedding(2, 4), nn.Linear(4, 4000))
        >>> [group.name for group in find_groups(model)]
        ['1', '']
        >>> [group.name for group in find_named_groups(model, ["*", "0", "head"])]
        ['0', '1']
    """
    automatic = find_groups(model)
    known = {group.name for group in automatic}
    wanted = [name for name in dict.fromkeys(names) if name and name not in known]
    if not wanted:
        return automatic
    given = _given_by_names(model, automatic, wanted)
    return find_groups(model, given) if given else automatic


def _given_by_names(model: nn.Module, automatic: Sequence[GroupSpec], wanted: Iterable[str]) -> dict[str, list[str]]:
    """What `find_groups` is to be given: by module, what it is to have."""
    modules = dict(model.named_modules(remove_duplicate=False))
    left_out = {name for name, _ in unmanaged_parameters(model)}
    parameters = {name: p for name, p in model.named_parameters(remove_duplicate=False) if name not in left_out}
    users = {path for group in automatic for path in group.modules}
    blocks = {group.name for group in automatic if group.is_block}
    tied = {id(parameters[p.name]) for group in automatic if len(group.modules) > 1 for p in group.parameters}
    given: dict[str, list[str]] = {}
    for name in wanted:
        path = name.rpartition(".")[0] if name in parameters else name
        held = [parameters[other] for other in parameters if f"{other}.".startswith(f"{name}.")]
        if not path or path not in modules or not held or not _is_called_by_itself(modules, path):
            continue
        holds_blocks = any(block.startswith(f"{path}.") for block in blocks)
        is_apart = path not in users and all(id(parameter) in tied for parameter in held)
        if not holds_blocks and not is_apart:
            given.setdefault(path, []).append(name)
    return given


def _is_called_by_itself(modules: dict[str, nn.Module], path: str) -> bool:
    # The inside of a compiled module, or of attention, is not.
    outer = ["", *(path.rsplit(".", depth)[0] for depth in range(1, path.count(".") + 1))]
    return is_called(modules[path]) and not any(_is_leaf(modules[other]) for other in outer)


_SIMPLE_KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.LayerNorm, nn.BatchNorm2d, nn.Embedding)
"""Several of these in a row are a chain of plain layers, not a stack of blocks."""
_BLOCK_NAME = re.compile(r"(block|layer|cell)_?\d*$", re.IGNORECASE)
"""How the name of a block, or of its class, ends."""

_Named = tuple[str, nn.Module]


def repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules that there are several of, and shared ones, which a forward may call several times; in order.

    Members of the outermost `ModuleList`s and `Sequential`s that hold at least two modules of one class, or one module
    twice; a list of lists counts as one list. Also the only member of a `ModuleList`, as the layer that all layers of an
    ALBERT share, unless it has such a stack inside. A model without any of these may have its block outside of a list: the
    outermost modules that are made of others, and that are named a block, a layer or a cell, themselves or by their class.
    """
    found = list(_in_stacks("", model, with_single_ones=True))
    return found or list(_named_so("", model))


def _in_stacks(path: str, module: nn.Module, *, with_single_ones: bool) -> Iterator[_Named]:
    members = list(_members(path, module)) if isinstance(module, nn.ModuleList | nn.Sequential) else []
    if _repeats(members):
        first_places = {id(member): place for place, member in reversed(members)}
        yield from ((place, member) for place, member in members if first_places[id(member)] == place)
        return
    if with_single_ones and isinstance(module, nn.ModuleList) and len(members) == 1 and _is_composed(members[0][1]):
        yield from list(_in_stacks(*members[0], with_single_ones=False)) or members
        return
    for name, child in module.named_children():
        yield from _in_stacks(_joined(path, name), child, with_single_ones=with_single_ones)


def _members(path: str, container: nn.Module) -> Iterator[_Named]:
    """With weights, by place: the same module may stand at several."""
    for name, child in container.named_modules(remove_duplicate=False):
        if not name or "." in name or next(child.parameters(), None) is None:
            continue  # the container itself, or deeper than its children
        if isinstance(child, nn.ModuleList):
            yield from _members(_joined(path, name), child)  # never called itself
        else:
            yield _joined(path, name), child


def _repeats(members: list[_Named]) -> bool:
    kinds = Counter(_kind(member) for _, member in members)
    return any(count > 1 for kind, count in kinds.items() if not issubclass(kind, _SIMPLE_KINDS))


def _named_so(path: str, module: nn.Module) -> Iterator[_Named]:
    for name, child in module.named_children():
        is_list = isinstance(child, nn.ModuleList | nn.ModuleDict)  # never called itself
        names_say_so = any(_BLOCK_NAME.search(word) for word in (name, _kind(child).__name__))
        if names_say_so and not is_list and _is_composed(child):
            yield _joined(path, name), child
        else:
            yield from _named_so(_joined(path, name), child)


def _is_composed(module: nn.Module) -> bool:
    """Whether the weights of other modules are inside."""
    original = compat.compiled_original(module) or module
    return any(next(child.parameters(), None) is not None for child in original.children())


def _kind(module: nn.Module) -> type[nn.Module]:
    return type(compat.compiled_original(module) or module)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


_INTEGERS = frozenset({
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64,
})  # fmt: skip

SPARSE_GRADIENT = "its gradient is sparse (sparse=True)"
"""The reason of a table whose lookups give sparse gradients."""


def unmanaged_parameters(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """(name, reason) of each parameter that Lowtide does not move: plain, dense tensors alone can live in a chunk.

    Example:
        >>> unmanaged_parameters(nn.Embedding(4, 2, sparse=True))
        (('weight', 'its gradient is sparse (sparse=True)'),)
    """
    by_module = _by_module(model)
    with compat.without_torch_function():  # nobody reads a value
        aliases = _aliases(model)
    found = []
    for name, parameter in model.named_parameters():
        reason = _reason(parameter) or by_module.get(id(parameter)) or aliases.get(id(parameter))
        if reason is not None:
            found.append((name, reason))
    return tuple(found)


def _reason(parameter: Tensor) -> str | None:
    if isinstance(parameter, nn.UninitializedParameter):
        return "it has no shape yet; run one batch through the lazy module first"
    # A plan may be made for a model that is managed: while something is pending its parameters are of a class of ours.
    if type(parameter) is not nn.Parameter and not getattr(type(parameter), "is_plain_when_settled", False):
        return f"it is a {type(parameter).__name__}, not a plain Parameter"
    if parameter.layout is not torch.strided:
        return f"its layout is {str(parameter.layout).removeprefix('torch.')}, not strided"
    if parameter.is_quantized:
        return f"it is quantised ({str(parameter.dtype).removeprefix('torch.')})"
    if not (parameter.dtype.is_floating_point or parameter.dtype.is_complex or parameter.dtype in _INTEGERS):
        return f"its dtype is {str(parameter.dtype).removeprefix('torch.')}"
    if parameter.numel() == 0:
        return "it has no elements"
    if not is_dense(tuple(parameter.shape), parameter.stride()):
        return f"its elements overlap or have gaps between them (shape {tuple(parameter.shape)}, stride {parameter.stride()})"
    return None


def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether a tensor's elements fill its bytes exactly once, in whatever order of dimensions.

    Example:
        >>> is_dense((2, 3), (1, 2)), is_dense((2, 3), (4, 1)), is_dense((2, 3), (0, 1))
        (True, False, False)
    """
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


def _by_module(model: nn.Module) -> dict[int, str]:
    """Reasons that lie in how a module uses its weight."""
    found = {}
    for module in model.modules():
        # A lazy or a parametrized module may not have it: only what is registered counts.
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            for parameter in module.parameters():
                if module.sparse:
                    found[id(parameter)] = SPARSE_GRADIENT
                elif module.max_norm is not None:
                    # The change would be made to the device's copy, which is dropped after the call.
                    found[id(parameter)] = f"the forward rewrites it in place (max_norm={module.max_norm})"
    return found


def _aliases(model: nn.Module) -> dict[int, str]:
    """Different parameters over the same bytes: each would get a place of its own, and their tie would be cut."""
    by_storage: dict[int, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        if _reason(parameter) is None:
            by_storage.setdefault(compat.storage_key(parameter), []).append((name, parameter))
    found = {}
    for sharing in by_storage.values():
        end, last = -1, None
        for name, parameter in sorted(sharing, key=lambda item: item[1].storage_offset() * item[1].element_size()):
            start = int(parameter.storage_offset()) * parameter.element_size()
            if last is not None and start < end:
                found[id(parameter)] = f"it shares its bytes with {last[0]!r}; tie them by one Parameter object instead"
                found[id(last[1])] = f"it shares its bytes with {name!r}; tie them by one Parameter object instead"
            if start + parameter.nbytes > end:
                end, last = start + parameter.nbytes, (name, parameter)
    return found
