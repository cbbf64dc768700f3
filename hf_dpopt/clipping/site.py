"""A site: one method of a module under capture, run by a rule that hands over what the records contribute."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from hf_dpopt.clipping.contributions import Contribution

Rule = Callable[..., Any]


class Sink(Protocol):
    """Taker of the contributions of a step: `hf_dpopt.clipping.capture.Capture`."""

    num_records: int

    def add(self, site: Site, name: str, contribution: Contribution) -> None: ...

    def copy_of(self, parameter: torch.Tensor, kind: Any, make: Callable[[], torch.Tensor]) -> torch.Tensor: ...

    def paused(self) -> AbstractContextManager[None]: ...


@dataclasses.dataclass(eq=False, repr=False)
class Site:
    """One method under capture (mostly a layer's forward), with its rule, parameter names and sink.

    Args:
        name: path of the module in the model, for messages.
        module: owner of the method and of the parameters.
        parameter_names: path of a trained parameter below the module -> its name in the model.
        rule: called with (site, *args) in place of the method.
        sink: receives the contributions.
        method: name of the method.
        changes_shapes: the rule also replaces the method where no gradient is taken.

    Attributes:
        original: the method itself, inside a step.
        shared: arguments that are the same for all records.
    """

    name: str
    module: nn.Module
    parameter_names: dict[str, str]
    rule: Rule
    sink: Sink
    method: str = "forward"
    changes_shapes: bool = False
    original: Any = dataclasses.field(default=None, init=False)
    shared: set[tuple[Any, int]] = dataclasses.field(default_factory=set, init=False)  # see `rules.fallback`

    @property
    def num_records(self) -> int:
        return self.sink.num_records

    def trains(self, attribute: str) -> bool:
        return attribute in self.parameter_names

    def add(self, attribute: str, contribution: Contribution) -> None:
        self.sink.add(self, self.parameter_names[attribute], contribution)

    def paused(self) -> AbstractContextManager[None]:
        """All modules run as they are inside the context: nothing is captured."""
        return self.sink.paused()

    def cast(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The parameter in `dtype`, converted once in a step."""
        return (
            parameter if parameter.dtype == dtype else self.sink.copy_of(parameter, dtype, lambda: parameter.to(dtype))
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # The recorded run is the one autograd follows: checkpointing runs two, and both must have the same shapes,
        # which rules for whole methods change.
        if not torch.is_grad_enabled() and not self.changes_shapes:
            return self.original(*args, **kwargs)
        return self.rule(self, *args, **kwargs)

    def install(self) -> None:
        self.had_its_own = self.method in self.module.__dict__
        self.original = getattr(self.module, self.method)
        setattr(self.module, self.method, self)

    def remove(self) -> None:
        if self.had_its_own:
            setattr(self.module, self.method, self.original)
        else:
            delattr(self.module, self.method)
