"""A function of tensors as a graph of the ops that it called, and its replay."""

import gc
import operator
import random
import re
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from vgrad import conditions, tree
from vgrad.compiled.captured_values import Closure
from vgrad.compiled.draws import Draws
from vgrad.conditions import Unrepeatable
from vgrad.loss.values import is_library
from vgrad.torch_private import modes, tracing
from vgrad.torch_private.kernels import unsafe_view
from vgrad.torch_private.tensors import (
    GRAPH,
    MEMORY,
    OPS,
    makes_memory,
    may_draw,
    shared,
    with_attributes,
    written,
)

_aten = torch.ops.aten


class Graph(NamedTuple):
    """A captured function: `module(*inputs, *closed) -> [*outputs, flag]`."""

    module: fx.GraphModule
    template: Any  # the result, with an empty tensor for each of its tensors
    closed: list[Tensor]  # tensors of the closure, further inputs
    values: Closure  # that must not have changed
    functions: list[Any]  # among arguments; no other gets the id of one kept here
    nodes: int
    largest: int  # how many numbers the largest tensor has
    draws: bool  # whether there are random ops
    zeros: bool  # whether gradients of only zeros do not raise the flag

    def result(self, outputs: Sequence[Tensor]) -> Any:
        """Put the outputs where the function has them."""
        values = iter(outputs)
        return tree.map_tensors(lambda _: next(values), self.template)


def captured(function: Callable, arguments: tuple, *, zeros: bool = False) -> Graph:
    """Run a function, and keep its ops and the values that it closes over.

    The last output of the graph is a flag: whether one of the conditions holds that
    were taken not to. Then its other outputs are not to be used. With `zeros`
    gradients of only zeros do not raise it.
    """
    leaves, spec = tree.tree_flatten(arguments)
    places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = [leaves[place] for place in places]
    kept: dict[str, Any] = {}
    empty = torch.empty(0)
    functions = [leaf for leaf in leaves if callable(leaf) or isinstance(leaf, Enum)]
    held = [vars(leaf) for leaf in tensors if vars(leaf)]
    values = Closure([function, *functions], held)
    functions += held

    def run(*tensors: Tensor) -> list[Tensor]:
        own = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            own[place] = tensor
        # Backward passes run here, and not in a GPU's thread, which has no mode.
        alone = torch.autograd.set_multithreading_enabled(False)
        draws = Draws(leaves)
        around = torch.no_grad(), alone, _NoValues(), _NoReads(), draws
        with ExitStack() as stack, conditions.collect_checks(zeros=zeros) as found:
            for each in around:
                stack.enter_context(each)
            result = function(*tree.tree_unflatten(own, spec))
            draws.check()
        kept["template"] = tree.map_tensors(lambda _: empty, result)
        flag = found[0] if found else torch.tensor(False)
        flag = torch.stack(found).any() if found[1:] else flag
        return [*tree.tensors(result), flag]

    before = random.getstate(), str(np.random.get_state())
    there = {id(x): x for x in gc.get_objects() if issubclass(type(x), Tensor)}
    module = _traced(run, _stand_ins(tensors))
    if before != (random.getstate(), str(np.random.get_state())):
        raise Unrepeatable("it draws random numbers from Python or numpy")
    if not values.hold():
        raise Unrepeatable("it changes values that it closes over")
    closed = _lifted(module, there)
    values.also(closed)
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    if not written_to(module.graph).isdisjoint(inputs[len(tensors) :]):
        raise Unrepeatable("it writes into a tensor that it closes over")
    _check_shapes(module)
    module.graph.eliminate_dead_code()
    module.recompile()
    ops = [node.target for node in module.graph.nodes if node.op == "call_function"]
    results = [node.meta.get("val") for node in module.graph.nodes]
    return Graph(
        module,
        kept["template"],
        closed,
        values,
        functions,
        nodes=len(ops),
        largest=max(each.numel() for each in results if isinstance(each, Tensor)),
        draws=any(map(may_draw, ops)),
        zeros=zeros,
    )


def _traced(run: Callable, tensors: list[Tensor]) -> fx.GraphModule:
    """Trace a function; an error has the line of the user's code that stopped it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # eager mode has given them
            return tracing.traced(run, *tensors)
    except Exception as error:
        lines = traceback.extract_tb(error.__traceback__)
        own = [x for x in lines if x.line and not is_library(x.filename)]
        where = f"{own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else ""
        text = str(error).partition("\n")[0]
        if not isinstance(error, Unrepeatable):
            text = f"{type(error).__name__}: {text}"
        raise Unrepeatable(f"{text} {where}".rstrip()) from error


def _stand_ins(tensors: list[Tensor]) -> list[Tensor]:
    """Return other objects for tensors, one that is there twice stays one."""
    # An argument that is closed over too must not become the graph's argument.
    stand_ins: dict[int, Tensor] = {}
    for each in tensors:
        other = each.detach().requires_grad_(each.requires_grad)
        if isinstance(each, nn.Parameter):
            other = nn.Parameter(other, requires_grad=each.requires_grad)
        stand_ins[id(each)] = with_attributes(other, each)
    return [stand_ins[id(each)] for each in tensors]


class _NoValues(TorchFunctionMode):
    """Refuses reads of values, and code of users reads of memory and history."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if conditions.checks_collected():
            name, data = modes.op_name(func), (*args, *(kwargs or {}).values())
            lists = (each for each in data if isinstance(each, list | tuple))
            if (
                name in _READS
                or (func in _MAKERS and any(map(tree.tensors, lists)))
                or (name == "tensor_split" and len(tree.tensors(data)) > 1)
            ):
                raise Unrepeatable(f"{name} hands values to Python")
        if func in _HISTORY and _is_read_by_users(func):
            raise Unrepeatable(f"it reads {_HISTORY[func]} of a tensor")
        return func(*args, **(kwargs or {}))


class _NoReads(tracing.DispatchMode):
    """Refuses reads below torch's functions, as of an index that is a tensor.

    Literals of the code, and numbers computed from them alone, may be read.
    """

    def __init__(self) -> None:
        super().__init__()
        self._literals: dict[int, Tensor] = {}  # kept, so that no other gets its id

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        inputs = tree.tensors((args, kwargs or {}))
        known = bool(inputs) and all(id(each) in self._literals for each in inputs)
        reads = torch.Tag.data_dependent_output in func.tags
        if reads and inputs and not known and conditions.checks_collected():
            raise Unrepeatable("an op takes the value of a tensor for a number")
        output = func(*args, **(kwargs or {}))
        known &= torch.Tag.nondeterministic_seeded not in func.tags
        if func is _aten.lift_fresh.default or known:
            self._literals |= {id(each): each for each in tree.tensors(output)}
        elif {*map(id, inputs)} & {*map(id, tree.tensors(output))}:
            self._literals.clear()  # one may be a view of the tensor written to
        return output


_MAKERS = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor}
"""Functions that read the values of tensors in a list."""

_READS = {"item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__"}
_READS |= {"__index__", "__complex__", "__dlpack__", "equal", "allclose", "is_nonzero"}
_READS |= {"data_ptr", "__repr__", "__str__"}

_HISTORY: dict[Any, str] = {
    getattr(Tensor, name).__get__: f"`.{name}`"
    for name in (
        *("grad", "grad_fn", "is_leaf", "output_nr", "retains_grad", "names", "name"),
        *(*GRAPH, *MEMORY),
    )
    if hasattr(Tensor, name)
}
_HISTORY |= {
    getattr(Tensor, name): f"the memory (`{name}`)"
    for name in ("storage_offset", "untyped_storage", "is_set_to", "_is_view")
}


def _is_read_by_users(func: Callable) -> bool:
    """Return whether code of users called a function that several modes may handle."""
    frame, caller = sys._getframe(1), None
    while frame is not None:
        handles = frame.f_code.co_name == "__torch_function__"
        if handles and frame.f_locals.get("func") == func:
            caller = frame.f_back
        frame = frame.f_back
    return caller is not None and not is_library(caller.f_code.co_filename)


def _lifted(module: fx.GraphModule, there: dict[int, Tensor]) -> list[Tensor]:
    """Make inputs of the tensors that the function closes over, but for literals.

    These were `there` before it ran. Others come of code that the trace did not see.
    """
    lifted: list[Tensor] = []
    graph = module.graph
    last = [node for node in graph.nodes if node.op == "placeholder"][-1:]
    inputs: dict[int, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "get_attr":
            continue
        value = getattr(module, str(node.target))
        if all(user.target in _LITERAL for user in node.users):
            continue
        if id(value) not in there:
            raise Unrepeatable(
                f"it makes a tensor of shape {tuple(value.shape)} by code that is not "
                f"torch's"
            )
        if id(value) not in inputs:
            with graph.inserting_after(last[0]) if last else graph.inserting_before():
                inputs[id(value)] = graph.placeholder(f"closed_{len(lifted)}")
            last = [inputs[id(value)]]
            last[0].meta["val"] = tracing.fake(value, graph)  # as of all traced nodes
            lifted.append(value)
        node.replace_all_uses_with(inputs[id(value)])
        graph.erase_node(node)
    return lifted


_LITERAL = (_aten.lift_fresh.default, _aten.lift_fresh_copy.default)
"""The ops that torch calls on tensors that are made of numbers of Python."""


def _check_shapes(module: fx.GraphModule) -> None:
    """Refuse ops whose results have shapes that depend on values."""
    depends = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    masks = {torch.bool, torch.uint8}  # which select entries, and not by numbers
    for node in module.graph.nodes:
        op: Any = node.target
        if node.op != "call_function" or depends.isdisjoint(getattr(op, "tags", ())):
            continue
        indices: Any = node.args[1] if op is _aten.index.Tensor else ()
        kinds = {each.meta["val"].dtype for each in indices if each is not None}
        if op is not _aten.index.Tensor or masks & kinds:
            raise Unrepeatable(f"the shape of a result of {op} depends on values")


# The replay.


_SAME = {_aten.detach.default, _aten.alias.default, _aten.lift_fresh.default}
"""Ops that return their argument."""

_VIEWS = {
    *(_aten.view.default, _aten.unsqueeze.default, _aten.squeeze.dim),
    *(_aten.squeeze.default, _aten.squeeze.dims, _aten.permute.default),
    *(_aten.t.default, _aten.transpose.int, _aten.expand.default),
    *(_aten.slice.Tensor, _aten.select.int, unsafe_view.default),
    *(_aten.split.Tensor, _aten.unbind.int),
}
"""Ops that return the memory of their argument, in another shape or in parts."""

_NUMBER = _aten.scalar_tensor.default
"""The op that makes a number a tensor."""


def replayed(module: fx.GraphModule) -> Callable[..., Sequence[Tensor]]:
    """Return a function that calls the ops of a graph, one by one."""
    graph = fx.Graph()
    output = graph.graph_copy(module.graph, {})
    graph.output(output)
    own = fx.GraphModule(module, graph)
    _simplify(own)
    return _as_function(own)


def _simplify(module: fx.GraphModule) -> None:
    """Take out ops that compute nothing; a chain of views becomes one of the memory."""
    graph = module.graph
    results = {*graph.output_node().all_input_nodes}
    changed = written_to(graph) | _in_memory_of([*results])
    views: dict[Any, fx.Node] = {}
    # The node in whose memory each one lies, and the same view of no memory at all.
    places: dict[fx.Node, tuple[fx.Node, Any]] = {}
    for node in graph.nodes:
        source, place = places[node] = _placed(node, places)
        if node.op != "call_function":
            continue
        if node in results and source.op == "placeholder":
            continue  # an argument may require grad where a view of it does not
        if node.target in _SAME:
            node.replace_all_uses_with(node.args[0])
        elif node.target is _NUMBER and node not in changed:  # no caller writes to it
            name = f"_number_{node.name}"
            module.register_buffer(name, node.target(*node.args, **node.kwargs))
            node.op, node.target, node.args, node.kwargs = "get_attr", name, (), {}
        elif source is not node and isinstance(place, Tensor):
            start, whole = place.storage_offset(), places[source][1]
            layout = place.shape, place.stride()
            if start == 0 and layout == (whole.shape, whole.stride()):
                node.replace_all_uses_with(source)
                continue
            # An input may begin anywhere in its memory.
            several: Any = source
            if source.target is operator.getitem:
                several = source.args[0]
            if makes_memory(several.target):
                node.target = _aten.as_strided.default
                node.args, node.kwargs = (source, *map(list, layout), start), {}
            key = (node.target, repr(node.args), repr(node.kwargs))
            if key in views:
                node.replace_all_uses_with(views[key])
            views.setdefault(key, node)
    graph.eliminate_dead_code()
    module.recompile()


def _as_function(module: fx.GraphModule) -> Callable[..., Sequence[Tensor]]:
    """Return a graph as a function of Python that calls the kernels directly."""
    # Torch's own code looks up an op by four names and calls two functions around it.
    code = module.graph.python_code(root_module="self")
    names = dict(code.globals)
    ops: dict[str, str] = {}

    def local(match: re.Match) -> str:
        path = match.group(1)
        if path not in ops:
            ops[path] = f"_op_{len(ops)}"
            op = operator.attrgetter(path)(torch.ops)
            names[ops[path]] = getattr(op, "_op", op)
        return ops[path]

    source = re.sub(r"\btorch\.ops\.([\w.]+)(?=\()", local, code.src)
    exec(compile(source, "<graph>", "exec"), names)
    return partial(names["forward"], module)


def written_to(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes whose memory an op writes to, and the nodes that lie in it."""
    return _in_memory_of(_writes(graph))


def most_writes(graph: fx.Graph) -> int:
    """Return how many ops write into the tensor that most of them write into."""
    counts = Counter(node for each in _writes(graph) for node in _in_memory_of([each]))
    return max(counts.values(), default=0)


def _writes(graph: fx.Graph) -> list[Any]:
    """Return the arguments that ops write into, once for each op."""
    return [
        _argument(node, *place[:2])
        for node in graph.nodes
        if isinstance(node.target, OPS)
        for place in written(node.target)
    ]


def _in_memory_of(left: list[Any]) -> set[fx.Node]:
    """Return nodes, also in lists, and the nodes in whose memory they may lie."""
    nodes: set[fx.Node] = set()
    while left:
        node = left.pop()
        if isinstance(node, list | tuple):
            left += node
        elif isinstance(node, fx.Node) and node not in nodes:
            nodes.add(node)
            if node.target in _VIEWS or not isinstance(node.target, OPS):
                left += node.all_input_nodes
            else:
                left += [_argument(node, *place) for place in shared(node.target)]
    return nodes


def _argument(node: fx.Node, place: int, name: str) -> Any:
    return node.args[place] if place < len(node.args) else node.kwargs.get(name)


def _placed(
    node: fx.Node, places: dict[fx.Node, tuple[fx.Node, Any]]
) -> tuple[fx.Node, Any]:
    """Return the node in whose memory a node lies, and its view of no memory."""
    first: Any = node.args[0] if node.args else None
    source, whole = places.get(first, (node, None))
    parts = node.target is operator.getitem and isinstance(whole, list | tuple)
    view: Any = node.target
    if whole is not None and (parts or view in _VIEWS | _SAME):
        return source, view(whole, *node.args[1:], **node.kwargs)
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.is_conj() or value.is_neg():
        return node, None
    kind = {"dtype": value.dtype, "device": "meta"}
    return node, torch.empty_strided(value.shape, value.stride(), **kind)
