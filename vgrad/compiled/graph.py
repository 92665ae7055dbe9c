"""A function of tensors as a graph of the ops that it called, and its replay."""

import operator
import random
import re
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
from vgrad.compiled.guards import Closure
from vgrad.conditions import Unrepeatable
from vgrad.generators import random_state
from vgrad.loss.values import is_library
from vgrad.torch_private import modes
from vgrad.torch_private.kernels import default_generator
from vgrad.torch_private.tensors import (
    OPS,
    SHOWN,
    arguments_written,
    makes_memory,
    may_draw,
    memory,
    op_name,
    with_attributes,
    writes,
)
from vgrad.torch_private.tracing import DispatchMode, Tensors, TensorWeakRef

_aten = torch.ops.aten


class Place(NamedTuple):
    """A tensor as it lies in memory: the node that made the memory, and where in it."""

    root: fx.Node
    offset: Any
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    plain: bool  # whether it is strided, and no conjugate or negative view


class Graph(NamedTuple):
    """A captured function: `module(*inputs, *closed) -> [*outputs, flag]`."""

    module: fx.GraphModule
    places: dict[fx.Node, Place]
    written: Counter[fx.Node]  # the nodes whose memory ops write into, and how many
    template: Any  # the result, with an empty tensor for each of its tensors
    closed: list[Tensor]  # tensors of the closure, further inputs
    values: Closure  # that must not have changed
    functions: list[Any]  # among arguments; no other gets the id of one kept here
    nodes: int
    draws: bool  # whether there are random ops

    @property
    def largest(self) -> int:
        """How many numbers the largest tensor has."""
        return max(place.shape.numel() for place in self.places.values())

    def result(self, outputs: Sequence[Tensor]) -> Any:
        """Put the outputs where the function has them."""
        values = iter(outputs)
        return tree.map_tensors(partial(next, values), self.template)


def captured(function: Callable, arguments: tuple) -> Graph:
    """Run a function, and keep its ops and the values that it closes over.

    The last output of the graph is a flag: whether one of the conditions holds that
    were taken not to. Then its other outputs are not to be used.
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
    inputs = _stand_ins(tensors)
    tape = _Tape(inputs)

    def run() -> list[Tensor]:
        own = list(leaves)
        for place, tensor in zip(places, inputs, strict=True):
            own[place] = tensor
        # Backward passes run here, and not in a GPU's thread, which has no mode.
        alone = torch.autograd.set_multithreading_enabled(False)
        draws = _Draws(leaves)
        around = torch.no_grad(), alone, _NoValues(), tape, draws
        with ExitStack() as stack, conditions.collect_checks() as found:
            for each in around:
                stack.enter_context(each)
            result = function(*tree.tree_unflatten(own, spec))
            draws.check()
            kept["template"] = tree.map_tensors(lambda _: empty, result)
            flag = found[0] if found else torch.tensor(False)
            flag = torch.stack(found).any() if found[1:] else flag
            return [*tree.tensors(result), flag]

    before = random.getstate(), str(np.random.get_state())
    _run(run, tape)
    if before != (random.getstate(), str(np.random.get_state())):
        raise Unrepeatable("it draws random numbers from Python or numpy")
    if not values.hold():
        raise Unrepeatable("it changes values that it closes over")
    closed = tape.closed()
    values.also(closed)
    if not {*tape.inputs[len(tensors) :]}.isdisjoint(tape.written):
        raise Unrepeatable("it writes into a tensor that it closes over")
    module = fx.GraphModule(tape.literals, tape.graph)
    module.graph.eliminate_dead_code()
    module.recompile()
    ops = [node.target for node in module.graph.nodes if node.op == "call_function"]
    return Graph(
        module,
        tape.places,
        tape.written,
        kept["template"],
        closed,
        values,
        functions,
        nodes=len(ops),
        draws=any(map(may_draw, ops)),
    )


def _run(run: Callable[[], list[Tensor]], tape: "_Tape") -> None:
    """Run a function; an error has the line of the user's code that stopped it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # eager mode has given them
            tape.end(run())
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
    """Refuses reads of values by Python, of which torch tells no mode of ops."""

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
        return func(*args, **(kwargs or {}))


_MAKERS = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor}
"""Functions that read the values of tensors in a list."""

_READS = {"item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__"}
_READS |= {"__index__", "__complex__", "__dlpack__", "equal", "allclose", "is_nonzero"}
_READS |= {"data_ptr", "__repr__", "__str__"}


class _Tape(DispatchMode):
    """Notes the ops below torch's transforms and autograd as the nodes of a graph.

    Refuses ops that read values, as of an index that is a tensor, or whose results have
    shapes that depend on values. Literals of the code, and numbers computed from them
    alone, may be read.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.graph, self.literals = fx.Graph(), nn.Module()
        self.places: dict[fx.Node, Place] = {}
        self.written: Counter[fx.Node] = Counter()
        self.inputs: list[fx.Node] = []
        self._nodes: Any = Tensors()
        self._known: set[fx.Node] = set()  # whose memory depends on literals alone
        self._closed: list[tuple[fx.Node, TensorWeakRef]] = []
        for each in tensors:
            self._input(f"input_{len(self.inputs)}", each)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not conditions.checks_collected():  # values of shapes and options alone
            return func(*args, **kwargs)
        if func is _aten.lift_fresh.default and args[0] not in self._nodes:
            # The function may write into it later.
            name = f"literal_{len(self._known)}"
            self.literals.register_buffer(name, args[0].clone())
            node = self.graph.call_function(
                _aten.clone.default, (self.graph.get_attr(name),)
            )
            self._known.add(node)
            self._note(node, args[0])
            return args[0]
        given = tree.map_tensors(self._node, (args, kwargs))
        inputs = tree.tensors((args, kwargs))
        roots = [self.places[self._nodes[each]].root for each in inputs]
        known = self._known.issuperset(roots)
        if not known:
            _check_values(func, args)
        output = func(*args, **kwargs)
        if known and torch.Tag.data_dependent_output in func.tags:
            return output
        known &= not may_draw(func)
        for each in tree.tensors([*arguments_written(func, args, kwargs)]):
            root = self.places[self._nodes[each]].root
            self.written[root] += 1
            if not known:
                self._known.discard(root)
        node = self.graph.call_function(func, *given)
        self._note(node, output, [*zip(map(memory, inputs), roots, strict=True)], known)
        return output

    def end(self, outputs: list[Tensor]) -> None:
        """Take tensors for the results."""
        self.graph.output([*map(self._node, outputs)])

    def closed(self) -> list[Tensor]:
        """Return the tensors that the function closes over, the last inputs.

        They outlive its run. Others come of code that the tape does not see.
        """
        found: list[Tensor] = []
        for node, reference in self._closed:
            if (tensor := reference()) is None:
                shape = tuple(self.places[node].shape)
                raise Unrepeatable(
                    f"it makes a tensor of shape {shape} by code that is not torch's"
                )
            found.append(tensor)
        return found

    def _node(self, tensor: Tensor) -> fx.Node:
        if tensor not in self._nodes:
            self._input(f"closed_{len(self._closed)}", tensor)
            self._closed.append((self._nodes[tensor], TensorWeakRef(tensor)))
        return self._nodes[tensor]

    def _input(self, name: str, tensor: Tensor) -> None:
        last = self.inputs[-1:]
        at = self.graph.inserting_after if last else self.graph.inserting_before
        with at(*last):
            self.inputs.append(self.graph.placeholder(name))
        self._note(self.inputs[-1], tensor)

    def _note(
        self,
        node: fx.Node,
        output: Any,
        inputs: Sequence[tuple[int | None, fx.Node]] = (),
        constant: bool = False,
    ) -> None:
        """Note the node of each tensor of a result."""
        if isinstance(output, list | tuple):
            for number, each in enumerate(output):
                part = self.graph.call_function(operator.getitem, (node, number))
                self._note(part, each, inputs, constant)
        if not isinstance(output, Tensor):
            return
        root, own = node, memory(output)
        if own is not None:
            root = next((root for place, root in inputs if place == own), node)
        if constant and root is node:
            self._known.add(node)
        plain = output.layout is torch.strided
        where = (output.storage_offset(), output.shape, output.stride())
        self.places[node] = Place(
            root,
            *(where if plain else (0, output.shape, ())),
            output.dtype,
            output.device,
            plain and not (output.is_conj() or output.is_neg()),
        )
        self._nodes[output] = node


def _check_values(func: Any, args: tuple) -> None:
    """Refuse ops that read values, or whose results have shapes that depend on them."""
    if torch.Tag.data_dependent_output in func.tags:
        raise Unrepeatable("an op takes the value of a tensor for a number")
    if torch.Tag.dynamic_output_shape in func.tags:
        indices = args[1] if func is _aten.index.Tensor else ()
        masks = {torch.bool, torch.uint8}  # which select entries, and not by numbers
        kinds = {each.dtype for each in indices if each is not None}
        if func is not _aten.index.Tensor or masks & kinds:
            raise Unrepeatable(f"the shape of a result of {func} depends on values")


# Random ops, drawn once where a checkpoint runs them again.


class _Draw(NamedTuple):
    """A random op, and the state of its generator before and after."""

    before: Tensor
    after: Tensor
    op: str  # and its arguments, shapes for tensors
    inputs: list[Tensor]
    result: Any  # a copy, to which no later op writes


class _Draws(DispatchMode):
    """Repeats the results of random ops where the generator's state is restored."""

    def __init__(self, arguments: list) -> None:
        super().__init__()
        host, others = random_state(tree.tensors(arguments))
        self._states = {torch.device("cpu"): host, **others}  # after the last new draw
        self._drawn: list[_Draw] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not may_draw(func):
            return func(*args, **kwargs)
        if kwargs.get("generator") is not None:
            raise Unrepeatable("it draws from a generator of its own")
        tensors, name = tree.tensors((args, kwargs)), op_name(func)
        place = tensors[0].device if tensors else kwargs.get("device") or "cpu"
        device = torch.device(place)
        generator = default_generator(device)
        before = generator.get_state()
        # The first argument may be memory that is not read.
        unread = writes(func) or name in _OF_SHAPE or (name, len(args)) in _OF_SHAPE
        with conditions.static_values():
            inputs = [each.clone() for each in tensors[unread:]]
        shapes = tree.map_tensors(lambda x: (x.shape, x.device), args)
        op = f"{func} {shapes} {kwargs}"
        for draw in self._drawn:
            if _equal(draw.before, before):
                same = op == draw.op and all(map(_equal, draw.inputs, inputs))
                if not same or (writes(func) and name not in SHOWN):
                    raise Unrepeatable(f"{name} draws from a state a second time")
                generator.set_state(draw.after)
                if writes(func):
                    return tensors[0].copy_(draw.result)
                return tree.map_tensors(Tensor.clone, draw.result)
        result, after = func(*args, **kwargs), generator.get_state()
        if not _equal(before, after):
            self._check(device, before)
            self._states[device] = after
            kept = tree.map_tensors(Tensor.clone, result)
            self._drawn.append(_Draw(before, after, op, inputs, kept))
        return result

    def check(self) -> None:
        """Refuse a function that leaves generators in another state than its graph."""
        for device in self._states:
            self._check(device, default_generator(device).get_state())

    def _check(self, device: torch.device, state: Tensor) -> None:
        if device in self._states and not _equal(self._states[device], state):
            raise Unrepeatable("it seeds torch's generators, or puts them back")


_OF_SHAPE = {"cauchy", "exponential", "geometric", "log_normal", "normal_functional"}
_OF_SHAPE |= {"rand_like", "randint_like", "randn_like", "random", "uniform"}
_OF_SHAPE |= {("bernoulli", 2)}
"""Ops that read no more than the shape of a tensor; with a number of arguments."""


def _equal(one: Tensor, other: Tensor) -> bool:
    with conditions.static_values():
        return torch.equal(one, other)


# The replay.


_CONSTANTS = _aten.scalar_tensor.default, _aten.clone.default
"""The ops that make tensors of a number and of a literal."""


def replayed(graph: Graph) -> Callable[..., Sequence[Tensor]]:
    """Return a function that calls the ops of a graph, one by one.

    Ops that compute nothing are left out; a chain of views is one of the memory.
    """
    copy, copies = fx.Graph(), {}
    copy.output(copy.graph_copy(graph.module.graph, copies))
    module = fx.GraphModule(graph.module, copy)
    results = graph.module.graph.output_node().all_input_nodes
    changed = {*graph.written, *(graph.places[each].root for each in results)}
    views: dict[Place, fx.Node] = {}
    for node, own in copies.items():
        place = graph.places.get(node)
        if place is None or node.op != "call_function":
            continue
        root, source = place.root, copies[place.root]
        whole = graph.places[root]
        if node is root and node.target in _CONSTANTS and node not in changed:
            literal = node.all_input_nodes
            if not literal:
                name = f"number_{node.name}"
                module.register_buffer(name, node.target(*node.args, **node.kwargs))
                own.op, own.target, own.args, own.kwargs = "get_attr", name, (), {}
            elif literal[0].op == "get_attr":
                own.replace_all_uses_with(copies[literal[0]])
            continue
        alike = place.plain and whole.plain and place.dtype == whole.dtype
        if node is root or not alike or _writes(node):
            continue
        if node in results and root.op == "placeholder":
            continue  # an argument may require grad where a view of it does not
        if place[1:4] == whole[1:4]:
            own.replace_all_uses_with(source)
        elif place in views:
            own.replace_all_uses_with(views[place])
        else:
            # An input may begin anywhere in its memory.
            maker: Any = root.args[0] if root.target is operator.getitem else root
            if makes_memory(maker.target):
                own.target = _aten.as_strided.default
                layout = [*place.shape], [*place.stride], place.offset
                own.args, own.kwargs = (source, *layout), {}
            views[place] = own
    copy.eliminate_dead_code()
    module.recompile()
    return _as_function(module)


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, OPS) and writes(node.target)


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
