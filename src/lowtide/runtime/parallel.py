"""Refuses models that are spread over several processes or cards.

A session takes gradients away and updates weights by itself, one model on one device. DistributedDataParallel averages
gradients where autograd leaves them: where the session takes them first, ranks would not train, or drift apart, in
silence. So neither may be around the other, whichever came first.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from lowtide import compat
from lowtide.errors import SessionError

_ADVICE = (
    "a session trains one model in one process on one device. Manage the plain model, without the wrapper, in one process, "
    "or train it under the wrapper without Lowtide"
)


def refuse_parallel(model: nn.Module) -> None:
    """Refuse a model that is in, around or of a parallel wrapper, or whose parameters are shards.

    Raises:
        SessionError: It names the wrapper.
    """
    wrappers = compat.parallel_wrappers()
    for path, module in model.named_modules():
        if isinstance(module, wrappers) and _spreads(module):
            where = f"the model's {path}" if path else "the model"
            raise SessionError(f"{where} is a {_name(module)}, and {_ADVICE}")
    for name, parameter in model.named_parameters():
        kind = compat.sharding_of(parameter)
        if kind is not None:
            raise SessionError(f"parameter {name} is a shard, made by {kind}, and {_ADVICE}")
    own = {id(parameter) for parameter in model.parameters()}
    for wrapper in _wrappers_in_process(wrappers):
        if _spreads(wrapper) and any(id(parameter) in own for parameter in wrapper.parameters()):
            raise SessionError(f"the model is inside of a {_name(wrapper)}, and {_ADVICE}")


def refuse_wrapping(wrapper: nn.Module, module: nn.Module, managed_ids: Callable[[], set[int]]) -> None:
    """Refuse a parallel wrapper that is being made around managed modules or parameters.

    Raises:
        SessionError: From the wrapper's constructor.
    """
    if not isinstance(wrapper, compat.parallel_wrappers()):
        return
    # Its devices are not known yet. On one card, or none, it calls the model and does nothing else.
    if isinstance(wrapper, nn.DataParallel) and torch.cuda.device_count() <= 1:
        return
    managed = managed_ids()
    has_parameters = any(id(parameter) in managed for parameter in module.parameters())
    if has_parameters or any(id(each) in managed for each in module.modules()):
        # FSDP takes the parameters before it takes the module.
        rest = (
            "nothing was changed" if has_parameters else "the wrapper has its parameters already: build the model again"
        )
        raise SessionError(
            f"a {_name(wrapper)} is being made around a managed model, and {_ADVICE}: session.close() gives the plain model "
            f"back ({rest})"
        )


def refuse_running_wrapper(parameters: Iterable[torch.Tensor]) -> None:
    """Refuse a call through a DistributedDataParallel that neither `manage` nor its constructor could be seen by.

    Raises:
        SessionError: Before the model is run.
    """
    running = compat.running_data_parallel()
    if running is None:
        return
    spread = {id(parameter) for parameter in running.parameters()}
    # A managed model that is called in another one's forward, and is no part of it, is nobody's concern.
    if any(id(parameter) in spread for parameter in parameters):
        raise SessionError(
            f"the managed model was called by a {_name(running)} around it, and {_ADVICE}: session.close() gives the plain "
            "model back. Nothing was updated"
        )


def _wrappers_in_process(wrappers: tuple[type[nn.Module], ...]) -> Iterator[nn.Module]:
    """All that exist. A module does not know what it is in, and torch keeps no list: Python's collector has one.

    A tenth of a second for a million objects, and only where there can be a wrapper that matters.
    """
    has_ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not has_ranks and torch.cuda.device_count() <= 1:
        return
    for found in gc.get_objects():
        # Not `isinstance`: it asks the object itself, and some answer with a warning.
        if issubclass(type(found), wrappers):
            yield found


def _spreads(wrapper: nn.Module) -> bool:
    """Whether it does more than to call the module: `DataParallel` on one card, or none, does not."""
    return not isinstance(wrapper, nn.DataParallel) or len(wrapper.device_ids) > 1


def _name(wrapper: nn.Module) -> str:
    kind = next(kind for kind in compat.parallel_wrappers() if isinstance(wrapper, kind))
    return "module under fully_shard" if kind.__name__ == "FSDPModule" else kind.__name__
