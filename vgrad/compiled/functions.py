"""Functions of an ensemble that run as graphs."""

from collections.abc import Callable
from typing import Any

from vgrad.compiled.captures import Captures
from vgrad.compiled.reports import CaptureReport, CompiledExplanation


class CompiledFunction:
    """What `compile` returns for a function of an ensemble: the same function.

    It has the attributes of what was compiled, and `reports()`.
    """

    def __init__(self, function: Callable, captures: Captures) -> None:
        self._function = function
        self._captures = captures

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._function, name)

    def reports(self) -> tuple[CaptureReport, ...]:
        """Return what is known of every capture."""
        return self._captures.reports()

    def explain(self, *arguments: Any) -> CompiledExplanation:
        """Say what is known of captures, and how the function runs in eager mode."""
        found = self._function.explain(*arguments)
        return CompiledExplanation(self.reports(), found)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Run the function."""
        if options:
            return self._captures(self._with, arguments, options)
        return self._captures(self._function, *arguments)

    def with_buffers(self, *arguments: Any) -> Any:
        """Run the function, and return new buffers too."""
        return self._captures(self._function.with_buffers, *arguments)

    def _with(self, arguments: tuple, options: dict[str, Any]) -> Any:
        return self._function(*arguments, **options)


class CompiledStep:
    """What `compile` returns for a training step: the same step.

    It has the attributes of what was compiled, and `reports()`.
    """

    def __init__(self, step: Callable, captures: Captures) -> None:
        self._step = step
        self._captures = captures

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._step, name)

    def reports(self) -> tuple[CaptureReport, ...]:
        """Return what is known of every capture."""
        return self._captures.reports()

    def explain(self, *_: Any) -> CompiledExplanation:
        """Say what is known of captures."""
        return CompiledExplanation(self.reports(), None)

    @property
    def plain(self) -> Any:
        """The step, which runs what it computes as graphs."""
        return self._step

    def __call__(self, *arguments: Any) -> Any:
        """Take a step."""
        return self._step(*arguments)
