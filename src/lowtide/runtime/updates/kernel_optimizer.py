"""KernelOptimizer: updates through Lowtide's own kernels, and the state that they keep.

The settings are those of the user's torch optimizer, live; its own step is not run. State lies flat in the chosen formats,
in the order of the weight's memory, beside the update: on the device or on the host. `optimizer.state_dict()` has torch's
own form: the moments in fp32, in the parameter's shape, and a master where there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lowtide import compat
from lowtide.errors import ConfigError
from lowtide.optim import reference
from lowtide.optim.device import kernel as device_kernel
from lowtide.optim.host import kernel as host_kernel
from lowtide.optim.rules import (
    Adafactor,
    ElementwiseRule,
    Rule,
    Sgd,
    as_numbers,
    names_of_states,
    require_rule,
)
from lowtide.optim.state import (
    MASTER,
    MOMENTS,
    LoadTarget,
    ParameterState,
    SavedState,
    check_form,
    complete,
    from_torch_state,
    new_state,
    read_state_dict,
    to_torch_state,
)
from lowtide.optim.update_types import (
    MatrixPiece,
    Numerics,
    Piece,
    Repeatable,
    Rounding,
    rounding_for,
    update_key,
)
from lowtide.runtime.parameters.gradients import refuse_sparse_gradient
from lowtide.runtime.updates.chunk_optimizer import ChunkOptimizer, Settings, Update
from lowtide.runtime.updates.paged_state import Pages
from lowtide.runtime.updates.repeated import LastUpdate


class KernelStates:
    """The state of each parameter, taken over from the user's optimizer and handed back in torch's form.

    Args:
        optimizer: The user's.
        numerics: Which numbers the updates work on.
        pages: Where states lie that visit the device; None without any.
        leaves: By the `id` of each parameter that is spread over ranks, this rank's piece.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        numerics: Numerics,
        pages: Pages | None,
        leaves: Mapping[int, torch.Tensor],
    ) -> None:
        self.optimizer = optimizer
        self._leaves = leaves
        self.numerics = numerics
        self.pages = pages
        self.by_parameter: dict[int, ParameterState] = {}
        """By the `id` of the parameter, which the optimizer keeps alive."""
        self._accepted: list[tuple[LoadTarget, SavedState]] = []
        self._before: dict[torch.Tensor, Any] | None = None
        """What the optimizer had of its own, for as long as it may be given back untouched."""

    def fill(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """What torch's `state_dict` gave, with the states in fp32 and the masters; all updates must have been made."""
        state: dict[int, dict[str, Any]] = {}
        for group, saved in zip(self.optimizer.param_groups, state_dict["param_groups"], strict=True):
            for parameter, key in zip(group["params"], saved["params"], strict=True):
                if id(parameter) in self.by_parameter:
                    state[key] = self._in_torchs_form(parameter)
        return {**state_dict, "state": state}

    def go_on_from(self, other: KernelStates) -> None:
        """Another plan of the same session had these states."""
        self.by_parameter = other.by_parameter
        self.numerics = other.numerics

    def settle(self) -> None:
        """Wait until states that visit the device are home."""
        if self.pages is not None:
            self.pages.settle()

    def begin_loading(self, seed: int | None) -> None:
        """See `KernelOptimizer.begin_loading`."""
        self.by_parameter = {}
        if self.pages is not None:
            self.pages.clear()
        if seed is not None:
            self.numerics = replace(self.numerics, seed=seed)

    def put(self, parameter: torch.Tensor, state: ParameterState) -> None:
        """A state of a parameter, in the formats of `numerics`; `place_state` brings it to its place."""
        self.by_parameter[id(parameter)] = state

    def in_torchs_form(self) -> dict[torch.Tensor, dict[str, Any]]:
        """What `fill` writes, by parameter."""
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return {each: self._in_torchs_form(each) for each in parameters if id(each) in self.by_parameter}

    def _in_torchs_form(self, parameter: torch.Tensor) -> dict[str, Any]:
        """On the host, one parameter at a time: expanded state may not fit the device."""
        self.settle()
        state = self.by_parameter[id(parameter)]
        weight = self._leaves.get(id(parameter), parameter).detach()
        with compat.without_modes():
            here = state.with_tensors([tensor.cpu() for tensor in state.all_tensors()])
            return to_torch_state(weight.cpu(), here, self.numerics)

    def accept(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Check a state that is about to be loaded, torch's own or `fill`'s; what is left of it for torch to load.

        Raises:
            OptimizerStateError: It is of another model or optimizer. Nothing was changed.
        """
        check_form(state_dict, [len(group["params"]) for group in self.optimizer.param_groups])
        names = {id(value): name for value, name in named_parameters(self.optimizer)}
        groups: list[list[LoadTarget]] = []
        for group, loaded in zip(self.optimizer.param_groups, state_dict["param_groups"], strict=True):
            # The settings that torch is about to load say what is kept: amsgrad's maximum, a momentum.
            rule = require_rule(self.optimizer, {**group, **loaded, "params": group["params"]})
            groups.append([LoadTarget(name=names[id(value)], weight=value, rule=rule) for value in group["params"]])
        with compat.without_modes():
            saved = read_state_dict(state_dict, groups)
        self._accepted = [
            (target, entries)
            for targets, found in zip(groups, saved, strict=True)
            for target, entries in zip(targets, found, strict=True)
        ]
        return {**state_dict, "state": {}}

    def load_accepted(self) -> None:
        """Take over the states that `accept` has checked; they are made on the host, and `place_state` brings them."""
        accepted, self._accepted, self.by_parameter = self._accepted, [], {}
        if self.pages is not None:
            self.pages.clear()
        for target, entries in accepted:
            if not entries.num_steps and not entries.tensors:
                continue
            weight = target.weight.detach()
            with compat.without_modes(), torch.no_grad():
                copied = torch.empty_strided(weight.size(), weight.stride(), dtype=weight.dtype, device="cpu").copy_(
                    weight
                )
                on_host = replace(target, weight=copied)
                self.by_parameter[id(target.weight)] = from_torch_state(on_host, entries, self.numerics)
                if entries.master is not None:
                    weight.copy_(copied)

    def take_over(self) -> None:
        """What the optimizer has of its own from before, loaded or stepped: it goes on from there."""
        if self.optimizer.state:
            self._before = dict(self.optimizer.state)
            self.accept(self.optimizer.state_dict())
            self.load_accepted()
            self.optimizer.state.clear()

    def keep(self) -> None:
        """The session has begun: what was taken over is not needed as it was."""
        self._before = None

    def hand_back(self) -> None:
        """Give the optimizer its state in the form that its own step works on: of the type of each parameter.

        Before the session has begun it is what was taken over, as it was. Where this breaks off, a second call goes on with
        the states that are left.
        """
        if self._before is not None:
            self.optimizer.state.update(self._before)
            self.by_parameter, self._before = {}, None
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in self.by_parameter:
                    continue
                entries = self._in_torchs_form(parameter)
                entries.pop(MASTER, None)
                entries.pop(MOMENTS, None)
                self.optimizer.state[parameter] = {
                    name: value if name == "step" else value.to(parameter.dtype) for name, value in entries.items()
                }
                del self.by_parameter[id(parameter)]
        self.by_parameter = {}
        if self.pages is not None:
            self.pages.close()


def named_parameters(optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, str]]:
    """With names for messages: an optimizer does not know the model's."""
    return [
        (parameter, f"parameter {number} of param group {index}")
        for index, group in enumerate(optimizer.param_groups)
        for number, parameter in enumerate(group["params"])
    ]


class KernelOptimizer(ChunkOptimizer):
    """Stands where a `ChunkOptimizer` does, and runs the kernels instead of the class's own step.

    Args:
        optimizer: The user's: its class says the rule, its param groups the settings.
        numerics: Which numbers the update works on.
        pages: Where states lie that visit the device; None without any.
        paged: `id`s of the parameters whose states do.
        on_host_memory: Told of memory that is the host's: an emulated device must not count it.
        leaves: By the `id` of each parameter that is spread over ranks, this rank's piece.

    Raises:
        UnsupportedOptimizerError: There is no kernel for its rule.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        numerics: Numerics,
        *,
        pages: Pages | None = None,
        paged: Collection[int] = (),
        on_host_memory: Callable[[torch.Tensor], None] = lambda memory: None,
        leaves: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        self._number_of: dict[int, int] = {}
        super().__init__(optimizer)
        self.pages = pages
        self._paged = frozenset(paged)
        self._on_host_memory = on_host_memory
        self._leaves = leaves or {}
        self.kept = KernelStates(optimizer, numerics, pages, self._leaves)
        self._checked: set[int] = set()
        """`id`s of the parameters that the kernels can update."""
        self._needs_rate = False  # the rules ask for each of their numbers
        self._rules_of: tuple[object, list[Rule]] = (None, [])
        """The groups of settings, and the rules that they mean."""
        self._last: dict[int, LastUpdate] = {}
        """By the `id` of its first parameter: an update as it was made in the step before."""
        self._check_parameters()

    @property
    def numerics(self) -> Numerics:
        """Which numbers the updates work on; the seed may be a checkpoint's."""
        return self.kept.numerics

    def begin_loading(self, seed: int | None) -> None:
        """All states go, others are put in their place; rounding goes on with this seed, unless it is None."""
        self._last.clear()  # or it would keep their memory
        self.kept.begin_loading(seed)

    def refresh_groups(self) -> None:
        """Read again which parameter is in which group."""
        super().refresh_groups()
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        self._number_of = {id(parameter): number for number, parameter in enumerate(parameters)}

    def settings(self) -> Settings:
        """The groups' settings now, as the kernels take them: numbers. One that lies on the device is waited for, here."""
        taken = super().settings()
        taken = replace(taken, groups=tuple(map(as_numbers, taken.groups)))
        # All of them before the first update: what one chunk stopped at would leave the step half made.
        self._check_parameters()
        self._check_visitors(self._rules(taken))
        return taken

    def _rules(self, settings: Settings) -> list[Rule]:
        """The rule of each param group when the settings were taken: the user may have changed them since."""
        groups, rules = self._rules_of  # in one: the worker may ask beside the loop
        if groups is not settings.groups:
            rules = [require_rule(self.optimizer, {**group, "params": ()}) for group in settings.groups]
            self._rules_of = settings.groups, rules
        return rules

    def _check_parameters(self) -> None:
        """Refuse a parameter that no kernel is for; one may have been added since."""
        for group in self.optimizer.param_groups:
            added = [parameter for parameter in group["params"] if id(parameter) not in self._checked]
            if added:
                require_rule(self.optimizer, {**group, "params": added})
                for parameter in added:
                    if parameter.requires_grad:
                        rounding_for(parameter, self.numerics)
                self._checked.update(map(id, added))

    def _check_visitors(self, rules: Sequence[Rule]) -> None:
        """Refuse a setting that adds to a state that visits the device: its place on the host is as large as it was."""
        for rule, group in zip(rules, self.optimizer.param_groups, strict=True):
            for parameter in group["params"] if self._paged else ():
                known = self.kept.by_parameter.get(id(parameter)) if self._visits(parameter) else None
                names = () if known is None else names_of_states(rule, parameter.shape)
                if known is not None and not set(names) <= set(known.names):
                    raise ConfigError(
                        f"a setting that adds state ({', '.join(names)}) was switched on while the state visits the device; "
                        "choose it before the model is managed, or update on the device or the host. Nothing was updated",
                        key="update",
                    )

    def claim_state(self, updates: Sequence[Update], settings: Settings) -> None:
        """Make the states exist, in the thread that owns the dictionary."""
        self._claim(updates, self._rules(settings))

    def _claim(self, updates: Sequence[Update], rules: Sequence[Rule]) -> None:
        for update in updates:
            rule = rules[self._group_of[id(update.parameter)]]
            known = self.kept.by_parameter.get(id(update.parameter))
            names = names_of_states(rule, update.target.shape)
            if known is None:
                self.kept.by_parameter[id(update.parameter)] = self._new_state(update, rule)
            elif not all(name in known.tensors for name in names):
                assert not self._visits(update.parameter), "the settings were checked"
                complete(known, update.target, rule, self.numerics)

    def needs_values(self, updates: Sequence[Update]) -> bool:
        """Whether weights are read now, and not only by the update: a master begins as its weight."""
        return any(
            id(update.parameter) not in self.kept.by_parameter
            and rounding_for(update.target, self.numerics) is Rounding.MASTER
            for update in updates
        )

    def _new_state(self, update: Update, rule: Rule) -> ParameterState:
        if self.pages is not None and self._visits(update.parameter):
            return self.pages.new(update.target, rule, self.numerics)
        if update.target is update.parameter or update.target is self._leaves.get(id(update.parameter)):
            return new_state(update.target, rule, self.numerics)
        with compat.without_modes():  # on the host, what it keeps is the host's
            state = new_state(update.target, rule, self.numerics)
        for tensor in state.all_tensors():
            self._on_host_memory(tensor)
        return state

    def forget_empty_state(self) -> None:
        """Torch's own dictionary is not used."""

    def prepare(self, updates: Sequence[Update], settings: Settings) -> Callable[[], bool]:
        """What takes one step on these tensors."""
        return partial(self._step, updates, settings)

    def _step(self, updates: Sequence[Update], settings: Settings) -> bool:
        found_inf = settings.scaler.get("found_inf")
        if not updates or (found_inf is not None and float(found_inf)):
            return True
        rules = self._rules(settings)
        if self._repeat(updates, rules, settings):
            return True
        self._claim(updates, rules)
        pieces: dict[tuple[torch.device, Rounding], list[Piece]] = {}
        wholes: dict[tuple[torch.device, Rounding], list[MatrixPiece]] = {}
        visits: list[ParameterState] = []
        for update in updates:
            state = home = self.kept.by_parameter[id(update.parameter)]
            if self.pages is not None and self._visits(update.parameter):
                state = self.pages.take(home)
                visits.append(home)
            rounding = rounding_for(update.target, self.numerics)
            if rounding is Rounding.MASTER:
                follow_writes(update.target, state)
            rule, kind = rules[self._group_of[id(update.parameter)]], (update.target.device, rounding)
            step = home.step + 1
            key = self._key(update.parameter, step)
            if isinstance(rule, Adafactor):
                wholes.setdefault(kind, []).append(_whole(update.target, state, rule, step, key))
            else:
                number = 1 if isinstance(rule, Sgd) and home.lacks_momentum else step
                piece = _piece(update.target, state, rule, number, key, update.first_element)
                pieces.setdefault(kind, []).append(piece)
        made: Repeatable | None = None
        for (device, rounding), alike in pieces.items():
            kernel = _kernel(device)
            factor = _factor(device, settings)
            made = kernel(alike, rounding=rounding, moments=self.numerics.moments, gradient_factor=factor)
        for (device, rounding), whole in wholes.items():
            device_kernel.update_matrices(whole, rounding=rounding, gradient_factor=_factor(device, settings))
        # Not before: an update that failed was not made.
        self._count(updates, rules)
        for home in visits:
            assert self.pages is not None
            self.pages.give_back(home)
        # A visitor is elsewhere each time, and a master must follow what was written to its weight.
        if made is not None and len(pieces) == 1 and not wholes and not visits and rounding is not Rounding.MASTER:
            states, chosen = (
                [self._state(update) for update in updates],
                [self._rule(update, rules) for update in updates],
            )
            last = LastUpdate(made, updates, states, chosen, draws=rounding is Rounding.STOCHASTIC)
            self._last[id(updates[0].parameter)] = last
        return True

    def _repeat(self, updates: Sequence[Update], rules: Sequence[Rule], settings: Settings) -> bool:
        """Make the update as in the step before; False where anything but numbers and addresses has changed."""
        last = self._last.get(id(updates[0].parameter))
        if last is None:
            return False
        states = [self.kept.by_parameter.get(id(update.parameter)) for update in updates]
        turn = last.turn(updates, states, [self._rule(update, rules) for update in updates], self._key)
        if turn is None:
            return False
        targets = [update.target for update in updates]
        last.made.run(turn, _factor(targets[0].device, settings))
        # As for any operation in place: a backward through the old values is caught.
        torch.autograd.graph.increment_version(targets)
        self._count(updates, rules)
        return True

    def _count(self, updates: Sequence[Update], rules: Sequence[Rule]) -> None:
        for update in updates:
            rule, state = self._rule(update, rules), self._state(update)
            state.step += 1
            if isinstance(rule, Sgd) and rule.momentum:
                state.lacks_momentum = False

    def _key(self, parameter: torch.Tensor, step: int) -> int:
        return update_key(self.numerics.seed, self._number_of[id(parameter)], step)

    def _rule(self, update: Update, rules: Sequence[Rule]) -> Rule:
        return rules[self._group_of[id(update.parameter)]]

    def _state(self, update: Update) -> ParameterState:
        return self.kept.by_parameter[id(update.parameter)]

    def undo_of(self, parameters: Sequence[torch.Tensor]) -> Callable[[], None]:
        """What takes the count of their next update back, if its gate leaves it out."""
        known = {id(parameter): self.kept.by_parameter.get(id(parameter)) for parameter in parameters}
        before = {
            key: (0, False) if state is None else (state.step, state.lacks_momentum) for key, state in known.items()
        }

        def undo() -> None:
            for key, counts in before.items():
                if (state := self.kept.by_parameter.get(key)) is not None:
                    state.step, state.lacks_momentum = counts

        return undo

    checks_gradients = True

    def check_gradient(self, parameter: torch.Tensor, gradient: torch.Tensor | None, name: str | None = None) -> None:
        """Refuse a gradient that no kernel is for."""
        if gradient is not None and gradient.layout is not torch.strided:
            names = {id(known): place for known, place in named_parameters(self.optimizer)}
            refuse_sparse_gradient(gradient, name or names[id(parameter)])

    def prefetch(self, parameters: Sequence[torch.Tensor]) -> None:
        """Their updates on the device are near: send visiting states on their way."""
        if self.pages is not None:
            self.pages.prefetch(
                self.kept.by_parameter[id(parameter)]
                for parameter in parameters
                if self._visits(parameter) and id(parameter) in self.kept.by_parameter
            )

    def dismiss(self) -> None:
        """A backward is over; what was prefetched and not used leaves."""
        if self.pages is not None:
            self.pages.dismiss()

    def _visits(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._paged

    def place_state(self, parameter: torch.Tensor, device: torch.device) -> None:
        """Move a parameter's state to where its update runs."""
        state = self.kept.by_parameter.get(id(parameter))
        if state is None:
            return
        if self.pages is not None and self._visits(parameter):
            self.pages.adopt(state)
        else:
            state.move_to(device)


def _piece(
    weight: torch.Tensor, state: ParameterState, rule: ElementwiseRule, step: int, key: int, first_element: int
) -> Piece:
    return Piece(
        weight=_flat(weight),
        gradient=_flat_beside(weight),
        state=state.tensors,
        rule=rule,
        step=step,
        remainder=state.remainder,
        master=state.master,
        key=key,
        first_element=first_element,
    )


def _whole(weight: torch.Tensor, state: ParameterState, rule: Adafactor, step: int, key: int) -> MatrixPiece:
    return MatrixPiece(
        weight=_flat(weight),
        gradient=_flat_beside(weight),
        state=state.tensors,
        rule=rule,
        step=step,
        shape=tuple(weight.shape),
        stride=weight.stride(),
        remainder=state.remainder,
        master=state.master,
        key=key,
    )


def _kernel(device: torch.device) -> Callable[..., Repeatable | None]:
    if device.type != "cpu":
        return device_kernel.update
    return host_kernel.update if host_kernel.is_available() else reference.update


def _factor(device: torch.device, settings: Settings) -> float | torch.Tensor:
    """What gradients are multiplied by: the clipping, and the inverse of a scaler's scale. Neither is there in a backward."""
    if settings.gate is not None and device.type == settings.gate.device.type:
        return settings.gate
    scale = settings.scaler.get("grad_scale")
    factor: float | torch.Tensor = 1.0
    if settings.clip is not None:
        factor = settings.clip.on_host() if device.type == "cpu" else settings.clip.on_device
    return factor if scale is None else factor / float(scale)


def follow_writes(weight: torch.Tensor, state: ParameterState) -> None:
    """What somebody wrote to the weight since the last update is the master from now on."""
    assert state.master is not None
    flat = _flat(weight)
    is_written = state.master.to(flat.dtype) != flat
    torch.where(is_written, flat.float(), state.master, out=state.master)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements in the order of their memory; weights are dense."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _flat_beside(weight: torch.Tensor) -> torch.Tensor:
    """The weight's gradient in the order of the weight's memory."""
    gradient = weight.grad
    assert gradient is not None
    if gradient.stride() != weight.stride():
        gradient = torch.empty_strided(
            weight.size(), weight.stride(), dtype=gradient.dtype, device=gradient.device
        ).copy_(gradient)
    return _flat(gradient)
