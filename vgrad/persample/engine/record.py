"""Run the loss of one sample under vmap, keeping a factor of each use of a parameter.

An op of the rule table runs on the physical tensors `[B, ...]`, and a hook on the node
that autograd makes for it sees the gradient at its output during the one backward pass:
with the op's input that is the factor. A parameter that reaches any other op is
expanded over the samples there, so that autograd's gradient of the expansion is the
per-sample gradient.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor

from vgrad import tree
from vgrad.lowering.functions import once
from vgrad.lowering.grad_flags import ASKED, Truth, among, own_backward_pass
from vgrad.lowering.value_reads import NONE
from vgrad.persample.engine import views
from vgrad.persample.engine.captured import packed
from vgrad.persample.engine.guard import ASKING, LossGuard, UnsupportedOp
from vgrad.persample.engine.plans import FUSED, Plan, planned
from vgrad.persample.engine.problem import Problem
from vgrad.persample.engine.sites import Site, Sites, Take, Use, replaced
from vgrad.persample.engine.taps import Taps
from vgrad.persample.factors.base import Factor
from vgrad.persample.rules.table import Lowering, Rule
from vgrad.torch_private import autograd, modes
from vgrad.torch_private.autograd import foreign_nodes, is_foreign_op
from vgrad.torch_private.tensors import leaf
from vgrad.tree import tree_map_only
from vgrad.typing import Tree


class Recorder(LossGuard):
    """The function mode under which the loss runs, for B samples.

    `take(name, factor)` is called once for each parameter, during the backward pass
    where possible, so that what it drops is freed before the next factor comes. `tell`
    is an optional callback, invoked once per use.
    """

    def __init__(
        self,
        rules: Mapping[Callable, Rule | Lowering],
        problem: Problem,
        size: int,
        take: Take,
        tell: Callable[[Use], None] | None = None,
    ) -> None:
        """Make the stand-ins for the parameters."""
        given = {**problem.params, **problem.buffers}
        super().__init__(
            given=given, draws=problem.draws, looped=problem.fallbacks.looped
        )
        self._rules = rules
        self._sites = Sites(problem.params, size, take, tell)
        self._lowering: Callable | None = None
        self._level = 0
        self._repeats = False  # whether a checkpoint runs again
        self._later: list[list[Callable[[], AbstractContextManager]]] = []
        self._taps = Taps(self._sites)
        self._foreign: dict[str, None] = {}  # ops of libraries
        self._ends: dict[int, Tensor] = {}
        self.params = self._sites.params
        self.unreached = self._sites.unreached

    @contextmanager
    def inside(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Watch a loss that runs under vmap."""
        self._level = modes.current_level()
        self._truth = Truth(self._level, "sample", 'strategy="vmap" or "loop"')
        with super().inside(*args, **kwargs):
            yield

    def saves(self, pack: Callable) -> None:
        """Have a checkpoint inside of the loss run again as it ran first."""
        if not autograd.keeps_values(pack):
            raise UnsupportedOp(
                "loss: expected tensors that are saved for the backward pass as they "
                "are, by an activation checkpoint or by save_on_cpu, got other hooks "
                'on saved tensors, which would see all samples. Use strategy="loop".'
            )
        self._sites.repeats = True
        super().saves(pack)

    def until_later(
        self, around: Callable[[], AbstractContextManager]
    ) -> Callable[[], AbstractContextManager]:
        """Return what a checkpoint keeps, which refers to nothing once this closes."""
        later = [around]
        self._later.append(later)

        def again() -> AbstractContextManager:
            if not later:
                raise own_backward_pass("loss")
            return later[0]()

        return again

    def close(self) -> None:
        """Let go of checkpoints that never ran again, in cycles Python cannot see."""
        self._taps.close()
        for later in self._later:
            later.clear()

    @contextmanager
    def repeating(self, *args: Any) -> Iterator[None]:
        """Be what the mode was when a checkpoint began.

        What runs again is what the backward pass needs the values of. It is not
        differentiated, so no use of a parameter counts twice.
        """
        self._repeats = True
        try:
            with super().repeating(*args):
                yield
        finally:
            self._repeats = False

    def check_result(self, result: Tree) -> None:
        """Refuse results that are not those of one sample."""
        self._truth.end(tree.tensors(result))
        self._truth = self._truth.afresh()  # nor does it keep their memory

    def foreign(self, losses: Tensor) -> list[str]:
        """Name the nodes and ops, not torch's own, that run in a backward pass.

        They may write into all tensors that they reach, also in ways that move no
        version. So factors hold copies from here on.
        """
        found = foreign_nodes([losses, *self._sites.sources])
        found = list(dict.fromkeys([*found, *self._foreign]))
        self._sites.owns = bool(found)
        return found

    def backward(self, losses: Tensor, scales: Tensor, *, last: bool = True) -> None:
        """Run a backward pass, and hand on the factors of every parameter.

        `scales` are what the losses are multiplied by, ones as a rule. Nothing is freed
        before the `last` pass; as a rule there is one.
        """
        ends = list(self._ends.values())
        with self._taps.open(last=last):
            self._sites.differentiate(losses, scales, ends, last=last)
        if last:
            self._taps.check_reached(losses)

    def run(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Run one call of a torch function."""
        if func in ASKING and (found := self.asked(func, args, kwargs)) is not NONE:
            return found
        if self._repeats:
            args, kwargs = tree_map_only(Tensor, self._sites.original, (args, kwargs))
        reads = views.only_reads(func)
        if reads and func not in ASKED:
            return func(*args, **kwargs)
        tensors = among(args, kwargs)
        sites, batched = self._seen(tensors)
        if func is Tensor.requires_grad_ and all((*args[1:], *kwargs.values())):
            if modes.current_level() == self._level:  # not a transform inside
                return self._requiring_grad(args[0])
        self._truth.refuse(func, tensors)
        if reads:
            self._sites.check_read(func, sites)
            return func(*args, **kwargs)
        output = self._run(func, args, kwargs, sites, batched)
        self._truth.after(func, tensors, output)
        return output

    def _seen(self, tensors: Sequence[Tensor]) -> tuple[list[Site], bool]:
        """Return stand-ins among arguments, and whether some differ between samples.

        What the loss closes over may require grad for the caller. The backward pass
        must visit the ops between that and the loss, since they may use parameters.
        """
        sites, batched = [], False
        for tensor in tensors:
            if self._truth.tell(tensor):
                batched = True
            elif (site := self._sites.find(tensor)) is not None:
                if site not in sites:
                    sites.append(site)
            elif tensor.requires_grad:
                if not modes.is_wrapped(tensor) and not self._repeats:
                    self._ends[id(tensor)] = tensor
        return sites, batched

    def _run(
        self,
        func: Callable,
        args: tuple,
        kwargs: dict,
        sites: list[Site],
        batched: bool,
    ) -> Any:
        """Run one call that computes something."""
        if is_foreign_op(func):
            self._foreign[str(func)] = None
        entry = self._rules.get(func)
        here = modes.current_level() == self._level
        if entry is not None and here:
            output = None
            if isinstance(entry, Lowering):
                if batched:
                    output = self._lowered(entry, func, args, kwargs)
            elif sites or (batched and func in FUSED):
                output = self._by_rule(entry, func, args, kwargs)
            if output is not None:
                return output
        if func in modes.ASKING:
            with self:
                return modes.opened(func)(*args, **kwargs)
        if not sites:
            return self.op(func, args, kwargs)
        if here and not batched:
            if func is modes.custom_function_call:
                func = self._function
            # What is derived is kept: factors are taken back through it in the end.
            with autograd.plain():
                return self._sites.derive(func, args, kwargs, sites)
        op = args[0] if func is modes.custom_function_call else func
        copies = {id(site.handed): self.expanded(site, op) for site in sites}
        return self.op(func, *replaced((args, kwargs), copies))

    def _requiring_grad(self, tensor: Tensor) -> Tensor:
        """Do as a loss asks that has its inputs require grad, as for checkpoints."""
        if not tensor.requires_grad:
            with modes.exit_all():
                stored = modes.unwrap_all(tensor).requires_grad_()
            self._ends[id(stored)] = stored
            self._truth.tell(tensor)
        return tensor

    def _function(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Run an autograd.Function of parameters alone."""
        return once(function, args, kwargs, self.knows)

    def physical(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the loss with the samples in front."""
        if not modes.is_batched(tensor):
            return tensor.expand(self.size, *tensor.shape)
        axis = modes.batch_axis(tensor)
        tensor = modes.unwrapped(tensor)
        return tensor.movedim(axis, 0) if axis else tensor

    def logical(self, tensor: Tensor) -> Tensor:
        """Hide the samples of a physical tensor."""
        return modes.add_batch_axis(tensor, 0, self._level)

    def below(self) -> AbstractContextManager:
        """Compute with physical tensors."""
        return modes.without_innermost()

    def drawing(self, axis: int) -> AbstractContextManager:
        """Say which axis of what is drawn below has the samples."""
        return self._draws.samples_at(axis)

    def watching(self) -> AbstractContextManager:
        """Run ops as if the loss had called them, each by its own rule."""
        return self

    def site(self, tensor: Tensor) -> Site | None:
        """Return the site of a tensor that stands for a parameter."""
        return self._sites.find(tensor)

    def knows(self, tensor: Tensor) -> bool:
        """Tell whether a tensor stands for a parameter."""
        return self.site(tensor) is not None

    def is_batched(self, tensor: Tensor) -> bool:
        """Tell whether a tensor differs from sample to sample."""
        return modes.is_batched(tensor)

    def copies(self, tensor: Tensor) -> Tensor:
        """Return what is `physical` of a tensor, or a parameter's expansion."""
        site = self._sites.find(tensor)
        if site is None:
            return self.physical(tensor)
        return self._sites.expand(site, self._lowering, ruled=True)

    def plain(self, tensor: Tensor) -> Tensor:
        """Return the values of a parameter, for an op that needs no gradient of it."""
        site = self._sites.find(tensor)
        return tensor if site is None else site.plain

    def anchor(self, value: Tensor) -> Tensor:
        """Return a leaf of these values at which the backward pass ends."""
        anchor = leaf(value)
        if not self._repeats:
            self._ends[id(anchor)] = anchor
        return anchor

    def use(self, tensor: Tensor) -> Callable[[Factor], None] | None:
        """Return what the factor of a use of a parameter has to be given to."""
        site = self._sites.find(tensor)
        if site is None:
            return None
        if self._repeats:
            return lambda _: None
        name = modes.op_name(self._lowering)
        self._sites.expect(site)

        def arrived(factor: Factor) -> None:
            self._taps.check_open()
            self._sites.arrived(site, factor, name)

        return arrived

    def _lowered(self, entry: Lowering, func: Callable, args: tuple, kwargs: dict):
        """Run an op by its lowering; None where that does not fit this call."""
        around, self._lowering = self._lowering, self._lowering or func
        try:
            return entry.run(self, *args, **kwargs)
        finally:
            self._lowering = around

    def _by_rule(self, rule: Rule, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Run an op of the table; None where its rule does not fit this call."""
        bound = rule.bind(args, kwargs)
        plan = None if bound is None else planned(self, rule, func, bound)
        if plan is None:
            return None
        with self.below():
            output = rule.run(*plan.arguments.values())
            if not plan.batched:  # the same for all samples: computed once
                output = output.expand(self.size, *output.shape)
            if output.requires_grad and plan.weights:  # not under no_grad
                output = self._tapped(rule, func, plan, output)
            return self.logical(output)

    def _tapped(self, rule: Rule, func: Callable, plan: Plan, output: Tensor) -> Tensor:
        """Hook the output of an op; what its factors need is saved as autograd does."""
        makers, hooks = plan.makers, autograd.hooks()
        if hooks is not None:
            makers = packed(rule.factors, plan.kept, plan.weights, hooks)
        if self._repeats:
            return output
        uses = [(site, makers[name]) for name, site in plan.weights.items()]
        name = modes.op_name(self._lowering or func)
        kept = hooks is None
        return self._taps.tap(name, output, uses, ends=not plan.follows, kept=kept)

    def expanded(self, site: Site, op: Callable) -> Tensor:
        """Return a parameter's copies for the samples, which an op asks for."""
        copies = self._sites.expand(site, op, ruled=op is self._lowering)
        tensor = self.logical(copies)
        self._truth.tell(tensor)
        return tensor
