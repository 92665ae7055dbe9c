"""A function of tensors, run once and kept as a graph of the ops that it called."""

import random
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from vgrad import conditions, tree
from vgrad.compiled.closures import Closed
from vgrad.compiled.kinds import SYSTEM_PLACES
from vgrad.conditions import Unrepeatable
from vgrad.torch_private import modes, tracing
from vgrad.torch_private.tensors import with_attributes


class Graph(NamedTuple):
    """A captured function: `module(*inputs, *closed) -> [*outputs, flag]`."""

    module: fx.GraphModule
    template: Any  # the result, with an empty tensor for each of its tensors
    closed: list[Tensor]  # what the function closes over, further inputs
    guards: Any  # what must not have changed
    functions: list[Any]  # among arguments; no other gets the id of one kept here
    nodes: int
    largest: int  # how many numbers the largest tensor has
    draws: bool  # whether there are random ops

    def result(self, outputs: Sequence[Tensor]) -> Any:
        """Put the outputs where the function has them."""
        given = iter(outputs)
        return tree.map_tensors(lambda _: next(given), self.template)


def captured(function: Callable, arguments: tuple) -> Graph:
    """Run a function, and keep its ops and the values that it closes over.

    The last output of the graph says whether one of the conditions holds that were
    taken not to: then its other outputs are not to be used.

    Raises:
        Unrepeatable: the function does what a graph cannot repeat.
    """
    leaves, spec = tree.tree_flatten(arguments)
    places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = [leaves[place] for place in places]
    kept: dict[str, Any] = {}
    empty = torch.empty(0)
    functions = [leaf for leaf in leaves if callable(leaf) or isinstance(leaf, Enum)]
    functions += [vars(leaf) for leaf in tensors if vars(leaf)]
    closed = Closed((function, functions))

    def run(*tensors: Tensor) -> list[Tensor]:
        own = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            own[place] = tensor
        # Backward passes run here, and not in a GPU's thread, which nobody watches.
        alone = torch.autograd.set_multithreading_enabled(False)
        around = torch.no_grad(), alone, _NoValues(), closed.watched()
        with ExitStack() as stack, conditions.collect_checks() as found:
            for each in around:
                stack.enter_context(each)
            result = function(*tree.tree_unflatten(own, spec))
        kept["template"] = tree.map_tensors(lambda _: empty, result)
        flag = torch.stack(found).any() if found else torch.tensor(False)
        return [*tree.tensors(result), flag]

    drawn = random.getstate(), str(np.random.get_state())
    module = _traced(run, _others(tensors))
    if drawn != (random.getstate(), str(np.random.get_state())):
        raise Unrepeatable("it draws random numbers from Python or numpy")
    constants = _lifted(module, closed)
    _check(module)
    module.graph.eliminate_dead_code()
    module.recompile()
    ops = [node.target for node in module.graph.nodes if node.op == "call_function"]
    values = [node.meta.get("val") for node in module.graph.nodes]
    sizes = [each.numel() for each in values if isinstance(each, Tensor)]
    draws = any(torch.Tag.nondeterministic_seeded in _tags(op) for op in ops)
    return Graph(
        module,
        kept["template"],
        constants,
        closed.guards,
        functions,
        len(ops),
        max(sizes),
        draws,
    )


def _traced(run: Callable, tensors: list[Tensor]) -> fx.GraphModule:
    """Trace a function, and say which line of the user's stopped it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # eager mode has given them
            return tracing.traced(run, *tensors)
    except Exception as error:
        lines = traceback.extract_tb(error.__traceback__)
        own = [each for each in lines if each.line and not _is_library(each.filename)]
        where = f"{own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else ""
        text = str(error).partition("\n")[0]
        if not isinstance(error, Unrepeatable):
            text = f"{type(error).__name__}: {text}"
        raise Unrepeatable(f"{text} {where}".rstrip()) from error


def _others(tensors: list[Tensor]) -> list[Tensor]:
    """Return other objects for tensors, one that is there twice stays one.

    The function may close over an argument, as a loss does that pulls parameters to
    those it was first called with: that one must not become the graph's argument.
    """
    found: dict[int, Tensor] = {}
    for each in tensors:
        other = each.detach().requires_grad_(each.requires_grad)
        if isinstance(each, nn.Parameter):
            other = nn.Parameter(other, requires_grad=each.requires_grad)
        found[id(each)] = with_attributes(other, each)
    return [found[id(each)] for each in tensors]


class _NoValues(TorchFunctionMode):
    """Refuses to hand values of tensors to Python, where a graph would bake them in."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if conditions.checks_collected() and modes.op_name(func) in _READS:
            raise Unrepeatable(f"{modes.op_name(func)} hands values to Python")
        return func(*args, **(kwargs or {}))


_READS = {"item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__"}
_READS |= {"__index__", "__complex__", "__dlpack__", "equal", "allclose", "is_nonzero"}
_READS |= {"data_ptr"}


def _lifted(module: fx.GraphModule, closed: Closed) -> list[Tensor]:
    """Make inputs of the tensors that the function closes over.

    Those that it makes of plain numbers are constants.
    """
    found: list[Tensor] = []
    graph = module.graph
    last = [node for node in graph.nodes if node.op == "placeholder"][-1:]
    inputs: dict[int, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "get_attr":
            continue
        value = getattr(module, str(node.target))
        if all(user.target in _LITERAL for user in node.users):
            continue
        if id(value) not in closed.tensors:
            raise Unrepeatable(
                f"it uses a tensor of shape {tuple(value.shape)} that is neither among "
                f"its arguments nor found where it closes over it"
            )
        if id(value) not in inputs:
            with graph.inserting_after(last[0]) if last else graph.inserting_before():
                inputs[id(value)] = graph.placeholder(f"closed_{len(found)}")
            last = [inputs[id(value)]]
            last[0].meta["val"] = torch.empty_strided(  # as of all traced nodes
                value.shape, value.stride(), dtype=value.dtype, device="meta"
            )
            found.append(value)
        node.replace_all_uses_with(inputs[id(value)])
        graph.erase_node(node)
    return found


_LITERAL = (
    torch.ops.aten.lift_fresh.default,
    torch.ops.aten.lift_fresh_copy.default,
)
"""What torch calls on tensors that are made of numbers of Python."""


def _check(module: fx.GraphModule) -> None:
    """Refuse ops whose results have shapes that depend on values."""
    depends = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    for node in module.graph.nodes:
        if node.op == "call_function" and depends & _tags(node.target):
            if node.target is torch.ops.aten.index.Tensor and not _by_mask(node):
                continue
            raise Unrepeatable(
                f"the shape of what {node.target} returns depends on values"
            )


def _by_mask(node: fx.Node) -> bool:
    """Tell whether a mask says which entries are taken, and not their numbers."""
    indices: Any = node.args[1]
    masks = (torch.bool, torch.uint8)
    return any(each is not None and each.meta["val"].dtype in masks for each in indices)


def _tags(op: Any) -> set[torch.Tag]:
    return set(getattr(op, "tags", ()))


def _is_library(file: str) -> bool:
    return file.startswith(SYSTEM_PLACES)
