"""Every public function says what it does, and its example runs."""

import doctest
import importlib
import inspect
import pkgutil

import pytest
import torch

import vgrad

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(vgrad.__path__, "vgrad.")
    if not module.name.endswith("__main__")
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    torch.manual_seed(0)
    module = importlib.import_module(name)
    globs = {**vars(module), "torch": torch, "vgrad": vgrad}
    assert doctest.testmod(module, globs=globs).failed == 0


def public():
    schedules = vgrad.optim.schedules
    for holder in (vgrad, vgrad.optim, schedules, vgrad.dp, vgrad.ensemble):
        for name in holder.__all__:
            value = getattr(holder, name)
            own = getattr(value, "__module__", "").startswith("vgrad")
            if own and inspect.isfunction(value):
                yield pytest.param(value, id=f"{holder.__name__}.{name}")


@pytest.mark.parametrize("function", list(public()))
def test_public_functions_have_an_example(function):
    text = inspect.getdoc(function)
    assert text
    assert text.splitlines()[0].endswith((".", ":", "`"))
    # Optimizers are called alike, and so are their directions.
    optimizer = next(iter(inspect.signature(function).parameters), "") == "lr"
    alike = optimizer and function.__module__ != "vgrad.optim.schedules"
    assert ">>>" in text or alike or function.__name__.startswith("scale_by_")
