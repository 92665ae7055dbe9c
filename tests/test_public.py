"""What users see of the package: its names, and what help says of them."""

import importlib
import inspect
import re
import types
from typing import get_args

import pytest

import vgrad
from vgrad.dp import accounting
from vgrad.optim import schedules
from vgrad.persample import engine


def rooms(module=vgrad):
    yield module
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, types.ModuleType):
            yield from rooms(value)


ROOMS = [*dict.fromkeys(rooms())]
ROOMS += [importlib.import_module(f"vgrad.{n}") for n in ("cli", "distributed")]
every_room = pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.__name__)


@every_room
def test_completion_shows_the_public_names_alone(room):
    assert dir(room) == sorted(room.__all__)
    assert len(room.__all__) == len({*room.__all__})
    assert not [name for name in room.__all__ if name.startswith("_")]
    assert all(hasattr(room, name) for name in room.__all__)


def listed(room):
    """Return the names that a docstring explains in lines such as "* `a`, `b`: ..."."""
    bullets = re.findall(r"^\* ([^:]+):(?= \S)", room.__doc__, re.MULTILINE)
    return [name for bullet in bullets for name in re.findall(r"`(\w+)`", bullet)]


@pytest.mark.parametrize(
    "room",
    [room for room in ROOMS if hasattr(room, "__path__")],
    ids=lambda r: r.__name__,
)
def test_help_has_a_line_for_every_name(room):
    names = [name for name in listed(room) if name not in WORDS]
    assert sorted(names) == sorted(room.__all__)


WORDS = {
    "strategy": ("how gradients come about: ", "how members run: "),
    "chunk_size": ("samples at a time; None for all",),
    "randomness": ('of random ops: `"error"`, `"different"` for each ',),
    "has_aux": ("the loss returns `(scalar, aux)`, and ",),
    "loss_scale": (
        "multiplies losses before the backward pass; results are without it",
    ),
    "mask": ("which samples count, bool `[B]`; the others add nothing", "parameters"),
    "policy": ("dtypes of the passes, a `Policy` or its text; None for those given",),
    "donate": ("the step may write into the old state, which must not be used again",),
    "in_dims": ("0 where each member has a batch of its own, None where all have one",),
    "shared": ("patterns of the entries without a member axis",),
}
"""Words that explain an option, the same wherever there is one."""


def callables():
    for room in ROOMS:
        for name in room.__all__:
            value = getattr(room, name)
            own = getattr(value, "__module__", "").startswith("vgrad")
            if own and inspect.isfunction(value):
                yield value
            elif own and inspect.isclass(value):
                yield value
                yield from (
                    method
                    for name, method in inspect.getmembers(value, inspect.isroutine)
                    if not name.startswith("_") and name in vars(value)
                )
    for make in (vgrad.per_sample_norm, vgrad.per_sample_gram, vgrad.weighted_grad):
        yield type(make(lambda params, buffers, x: x)).__call__


def parameters(function):
    try:
        return inspect.signature(function).parameters.items()
    except ValueError:  # of classes written in C
        return ()


PER_SAMPLE = {*vgrad.persample.Options.__annotations__, "has_aux"}
ELSEWHERE = {
    "`vgrad.persample.Options`": PER_SAMPLE,
    "as in `train_step`": {"policy", "loss_scale", "donate", "has_aux"},
    "as in `ensemble_grad`": {"in_dims", "randomness", "strategy", "shared"},
}
"""References of a text, and the options that are explained there."""


def test_shared_options_are_explained_in_the_same_words():
    told, missing = 0, []
    for function in dict.fromkeys(callables()):
        text = " ".join(inspect.getdoc(function).split())
        elsewhere = set().union(
            *(ELSEWHERE[each] for each in ELSEWHERE if each in text)
        )
        for option, parameter in parameters(function):
            own = getattr(inspect.unwrap(function), "__code__", None)
            if own is not None and option not in own.co_varnames:
                continue  # of `**options`, which `Options` explains
            if option in WORDS and parameter.kind == parameter.KEYWORD_ONLY:
                told += 1
                explained = any(words in text for words in WORDS[option])
                if not explained and option not in elsewhere:
                    missing.append(f"{function.__qualname__}: {option}")
    assert not missing
    assert told > 40
    assert {f"{name}:" for name in vgrad.persample.Options.__annotations__} <= {
        *vgrad.persample.Options.__doc__.split()
    }


@pytest.mark.parametrize(
    "room", [vgrad, vgrad.optim, schedules, vgrad.dp, vgrad.ensemble]
)
def test_public_functions_have_an_example(room):
    for function in (getattr(room, name) for name in room.__all__):
        if inspect.isfunction(function) and function.__module__.startswith("vgrad"):
            text = inspect.getdoc(function)
            assert text.splitlines()[0].endswith((".", ":", "`")), function
            # Optimizers are called alike, and so are their directions.
            first = next(iter(inspect.signature(function).parameters), "")
            alike = first == "lr" and room is not schedules
            alike |= function.__name__.startswith("scale_by_")
            assert ">>>" in text or alike, function


def loss(params, buffers, x):
    return (params["w"] * x).sum()


@pytest.mark.parametrize(
    ("call", "known"),
    [
        (lambda **o: vgrad.per_sample_grad(loss, **o), "has_aux, strategy, chunk_size"),
        (lambda **o: vgrad.per_sample_norm(loss, **o), "groups, has_aux, strategy"),
        (lambda **o: vgrad.per_sample_gram(loss, **o), "among groups, strategy"),
        (lambda **o: vgrad.clipped_grad(loss, max_norm=1.0, **o), "max_norm, clipping"),
        (
            lambda **o: vgrad.ensemble.ensemble_per_sample_grad(loss, **o),
            "in_dims, shared, has_aux, strategy",
        ),
    ],
)
def test_an_unknown_option_raises_with_the_known_ones(call, known):
    with pytest.raises(
        TypeError, match=rf"chunks=\.\.\.\): expected .*{known}"
    ) as raised:
        call(chunks=4)
    assert "verify, got 'chunks'." in str(raised.value)


@pytest.mark.parametrize(
    ("names", "table"),
    [
        (vgrad.typing.Strategy, engine.STRATEGIES),
        (accounting.Accountant, accounting.ACCOUNTANTS),
        (schedules.Anneal, schedules.ANNEAL),
    ],
)
def test_types_have_the_names_of_the_tables(names, table):
    assert get_args(names) == tuple(table)
