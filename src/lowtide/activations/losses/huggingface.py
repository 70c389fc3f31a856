"""Drop-in for Hugging Face models with a language model head: `model(**batch, labels=...)` without the logits.

Note [How a model is taken over]
While the model's forward runs in training with labels, `self.lm_head` finds a stand-in, which gives `DeferredLogits`
instead of logits. The model's own code then scales, caps, casts, shifts and flattens them, divides by the number of
items in the batch and adds the losses of its routers, as it always does: none of that is known here. Where it calls
`F.cross_entropy`, the head is called with hidden states and targets, through its hooks and the session's window, and
gives the loss. Nothing is changed but one attribute of the model and of its head, `forward`; names and parameters stay. The
head's stays between the model's calls: a policy that recomputes the head calls it again in the backward, with the
same arguments.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.activations.losses.chunked_loss import chunked_loss
from lowtide.activations.losses.deferred_logits import DeferredLogits
from lowtide.activations.losses.settings import LossSettings
from lowtide.errors import LogitsNotMadeError, UnsupportedHeadError


class ChunkedHeadWarning(UserWarning):
    """Says once what becomes of `.logits`."""


class ChunkedHeadHandle:
    """A model whose loss is chunked; `remove()` makes it as it was."""

    def __init__(self, model: nn.Module, call: _TrainingForward) -> None:
        self.model, self._call = model, call

    def remove(self) -> None:
        """Undo it. Calling it again does nothing.

        Where a policy recomputes the head, backwards through losses that were made before must be over.
        """
        if vars(self.model).get("forward") is not self._call:
            return
        self._call.head_forward.remove()
        if self._call.is_own_forward:
            del self.model.forward
        else:
            self.model.forward = self._call.__wrapped__

    def __enter__(self) -> ChunkedHeadHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def chunked_head(model: nn.Module, *, settings: LossSettings | None = None) -> ChunkedHeadHandle:
    """Let a Hugging Face model compute its training loss without logits; undone by the handle's `remove()`.

    In training, with labels, the loss and all gradients are the same up to rounding, and `output.logits` is an object
    that has a shape and raises when its values are asked for (a warning says so once). In eval mode, without labels,
    and inside `torch.compile`, nothing changes. Shifted labels, `num_items_in_batch`, `logits_to_keep`, capped and scaled
    logits, tied heads, biases and router losses are the model's own code and stay what they are.

    Args:
        model: With `get_output_embeddings()`, a plain linear head and a forward that takes `labels`. It may be on meta,
            and be managed before or after.
        settings: `z_loss`, `chunk_tokens`, `accumulation`; what the model itself decides (reduction, ignored index,
            smoothing, cap, scale) is taken from it.

    Raises:
        UnsupportedHeadError: The model has no such head, or something else has taken its forward over.

    Example:
        >>> handle = chunked_head(model)  # doctest: +SKIP
        >>> model(input_ids=ids, labels=ids).loss.backward()  # doctest: +SKIP
        >>> handle.remove()  # doctest: +SKIP
    """
    given = settings or LossSettings()
    for key in ("ignore_index", "reduction", "label_smoothing", "softcap", "logit_scale"):
        if getattr(given, key) != getattr(LossSettings(), key):
            raise UnsupportedHeadError(
                f"{key}={getattr(given, key)!r} is what {type(model).__name__} decides itself; set it in the model's "
                "configuration, or use linear_cross_entropy"
            )
    owner, name = _find_head(model)
    call = _TrainingForward(model, owner, name, given)
    model.forward = call
    return ChunkedHeadHandle(model, call)


def _find_head(model: nn.Module) -> tuple[nn.Module, str]:
    """The module that has the head, and the head's name there."""
    kind = type(model).__name__

    def refuse(reason: str) -> UnsupportedHeadError:
        return UnsupportedHeadError(f"the head of {kind} cannot be chunked: {reason}")

    if isinstance(vars(model).get("forward"), _TrainingForward):
        raise refuse("it is already; remove() the first one")
    getter = getattr(model, "get_output_embeddings", None)
    if getter is None:
        raise refuse(
            "it has no get_output_embeddings(); give the Hugging Face model itself, not what is wrapped around it"
        )
    if "labels" not in inspect.signature(model.forward).parameters:
        raise refuse("its forward takes no labels, so that it computes no loss")
    head = getter()
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        raise refuse(
            f"its head is {'missing' if head is None else type(head).__name__}, not a linear layer"
            + ("" if head is None else "; adapters and quantised heads are used as they are")
        )
    if getattr(model, "final_logits_bias", None) is not None:
        raise refuse(
            "its forward adds final_logits_bias to the logits, which would not be made; use the model as it is"
        )
    if "forward" in vars(head) and not isinstance(vars(head)["forward"], _HeadForward):
        raise refuse("something else has replaced the forward of the head; undo that first")
    for module in model.modules():
        for name, child in vars(module)["_modules"].items():
            if child is head:
                return module, name
    raise refuse("its get_output_embeddings() gives a module that is not part of it")


class _TrainingForward:
    """Stands in the place of a model's forward. An object, so that a copy of the model gets a copy that runs the copy."""

    def __init__(self, model: nn.Module, owner: nn.Module, name: str, settings: LossSettings) -> None:
        self.__wrapped__ = model.forward
        """The forward that it stands for; also where `inspect.signature` looks."""
        self._model, self._owner, self._name, self._settings = model, owner, name, settings
        self._has_warned = False
        head = owner.get_submodule(name)
        assert isinstance(head, nn.Linear)
        self.head_forward = _HeadForward(head)
        self.is_own_forward = "forward" not in vars(model)
        """Whether it stands for the forward of the model's class, not for one that somebody else has put there."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._model.training or torch.compiler.is_compiling() or not self._has_labels(args, kwargs):
            return self.__wrapped__(*args, **kwargs)
        # Where another model with the same head has put its own there, that one will do.
        vars(self.head_forward.head).setdefault("forward", self.head_forward)
        head = _StandIn(self.head_forward.head, self._settings)
        # In the instance's own dictionary it is found before the modules; those stay as they are.
        vars(self._owner)[self._name] = head
        try:
            output = self.__wrapped__(*args, **kwargs)
        finally:
            del vars(self._owner)[self._name]
            head.release()
        if head.num_calls and not head.num_losses:
            raise LogitsNotMadeError(
                f"{type(self._model).__name__} was given labels, called its head and took no cross entropy of its logits, "
                "so that they would be missing; undo the chunked head with its remove()"
            )
        if head.num_losses and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"the loss of {type(self._model).__name__} is computed chunk by chunk: in training with labels, "
                "output.logits has a shape and no values",
                ChunkedHeadWarning,
                stacklevel=2,
            )
        return output

    def _has_labels(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if not args:
            return kwargs.get("labels") is not None
        given = inspect.signature(self.__wrapped__).bind_partial(*args, **kwargs).arguments
        return given.get("labels") is not None


class _HeadForward:
    """Stands in the place of a head's forward: with a target it gives the loss. An object, as `_TrainingForward` is."""

    def __init__(self, head: nn.Linear) -> None:
        self.head = head

    def __call__(self, hidden: Tensor, target: Tensor | None = None, settings: LossSettings | None = None) -> Tensor:
        head = self.head
        if target is None or settings is None:
            return nn.Linear.forward(head, hidden)
        return chunked_loss(hidden, head.weight, target, head.bias, settings)

    def remove(self) -> None:
        """Let the head be a linear layer again."""
        if vars(self.head).get("forward") is self:
            del self.head.forward


class _StandIn:
    """What `self.lm_head` is during one forward: gives deferred logits, and is the head for whoever reads its weight."""

    def __init__(self, head: nn.Linear, settings: LossSettings) -> None:
        self._head, self._settings = head, settings
        self._made: list[DeferredLogits] = []
        self.num_calls = 0
        self.num_losses = 0

    def __call__(self, hidden: Tensor) -> DeferredLogits:
        self.num_calls += 1
        head = self._head
        device = hidden.device.type
        is_autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if is_autocast else hidden.dtype
        return DeferredLogits(hidden, head.out_features, dtype, self._take_loss, self._made)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)

    def release(self) -> None:
        """The output's logits outlive the forward; the hidden states must not with them."""
        for logits in self._made:
            logits.release()
        self._made.clear()

    def _take_loss(self, hidden: Tensor, target: Tensor, settings: dict[str, Any]) -> Tensor:
        head, mine = self._head, self._settings
        full = LossSettings(
            z_loss=mine.z_loss,
            chunk_tokens=mine.chunk_tokens,
            accumulation=mine.accumulation,
            implementation=mine.implementation,
            **settings,
        )
        self.num_losses += 1
        # The call goes through the head's hooks and through the window that brings its weight.
        loss: Tensor = head(hidden, target, full)
        return loss
