"""What vgrad expects of each thing that it borrows from torch without a promise.

Where one of these fails, a new torch has changed what the name says, and
`vgrad/torch_private/` is the place to mend.
"""

import shutil
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from vgrad.torch_private import autograd, kernels, modes, shards, tensors, tracing
from vgrad.tree import keystr, tree_flatten_with_path

X = torch.arange(6.0).reshape(3, 2)


class Old(torch.autograd.Function):
    """In the old style, without setup_context."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


class Listing(TorchFunctionMode):
    """Lists the functions that it sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def under_vmap(look, *, randomness="error", grad=False):
    """Return what `look` finds out about a row of X under vmap, or vmap of grad."""
    found = []

    def row(x):
        found.append(look(x))
        return x.sum()

    torch.vmap(torch.func.grad(row) if grad else row, randomness=randomness)(X)
    return found[0]


class TestLevels:
    def test_current_level_is_none_outside_and_rises_inward(self):
        assert modes.current_level() is None
        outer = under_vmap(lambda x: modes.current_level())
        assert under_vmap(lambda x: modes.current_level(), grad=True) == outer + 1

    def test_inside_transform_counts_every_transform_and_forward_mode(self):
        assert not modes.inside_transform()
        assert under_vmap(lambda x: modes.inside_transform())
        with torch.autograd.forward_ad.dual_level():
            assert modes.inside_transform()
        assert not modes.inside_transform()

    def test_a_mapped_tensor_is_wrapped_batched_and_knows_its_axis_and_level(self):
        def look(x):
            wrapped, batched = modes.is_wrapped(x), modes.is_batched(x)
            here = modes.level_of(x) == modes.current_level()
            return wrapped, batched, here, modes.batch_axis(x), modes.unwrapped(x)

        *facts, below = under_vmap(look)
        assert facts == [True, True, True, 0]
        assert below.data_ptr() == X.data_ptr()
        assert modes.level_of(X) == modes.batch_axis(X) == -1
        assert not modes.is_wrapped(X)
        with pytest.raises(RuntimeError, match="No wrappers"):
            modes.unwrapped(X)

    def test_a_gradient_wraps_without_a_batch_and_stored_takes_all_wrappers_off(self):
        def look(x):
            return modes.is_wrapped(x), modes.is_batched(x), modes.unwrap_all(x)

        wrapped, batched, below = under_vmap(look, grad=True)
        assert (wrapped, batched) == (True, False)
        assert below.data_ptr() == X.data_ptr()
        assert modes.unwrap_all(X) is X

    def test_batch_axes_go_on_and_off(self):
        with modes.vmap_level(3, "error") as level:
            x = modes.add_batch_axis(X, 0, level)
            assert x.shape == (2,)
            assert [*modes.split_batch_axis(x, level)][1] == 0
            assert modes.split_batch_axis(X, level) == (X, None)
            out = modes.remove_batch_axis(x * 2, level, 3, 1)
        assert torch.equal(out, (X * 2).T)

    def test_the_innermost_transform_can_be_left_for_a_block(self):
        def look(x):
            interpreter = modes.innermost()
            facts = interpreter.level() == modes.current_level()
            with interpreter.lower():
                inner = modes.current_level()
            with modes.without_innermost():
                popped = modes.current_level()
            return facts, interpreter.batch_size(), inner, popped

        assert under_vmap(look) == (True, 3, None, None)

    def test_decompositions_load_before_the_first_vmap(self):
        assert modes.load_decompositions() is None

    def test_a_mode_sees_an_autograd_function_as_one_call_under_vmap(self):
        class Double(torch.autograd.Function):
            generate_vmap_rule = True

            @staticmethod
            def forward(x):
                return x * 2

            @staticmethod
            def setup_context(ctx, inputs, output): ...

            @staticmethod
            def backward(ctx, g):
                return g * 2

        mode = Listing()

        def row(x):
            with mode:
                return Double.apply(x)

        torch.vmap(row)(X)
        assert modes.custom_function_call in mode.seen

    def test_one_in_the_old_style_is_seen_in_a_block_and_raises_outside(self):
        apply, seen = Old.apply, []

        class Answering(TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                if func is not modes.custom_function_call:
                    return func(*args, **(kwargs or {}))
                seen.append(args[0])
                return args[1] * 2

        def row(x):
            with Answering():
                return apply(x)

        with autograd.old_style_shown():
            with autograd.old_style_shown():
                assert torch.equal(torch.vmap(row)(X), X * 2)
            assert torch.equal(torch.vmap(row)(X), X * 2)
            assert torch.equal(apply(X), X * 2)
        assert seen == [Old, Old]
        with pytest.raises(RuntimeError, match=modes.SETUP_CONTEXT_ERROR):
            torch.vmap(row)(X)

    def test_running_names_the_kinds_of_transforms_from_the_outside(self):
        assert modes.active_transforms() == ()
        assert under_vmap(lambda x: modes.active_transforms()) == ("Vmap",)
        assert under_vmap(lambda x: modes.active_transforms(), grad=True) == (
            "Vmap",
            "Grad",
        )


class TestTensors:
    def test_the_version_counts_writes(self):
        x = torch.zeros(2)
        before = tensors.version_of(x)
        x[0] = 1
        x.view(2).add_(1)
        assert tensors.version_of(x) == before + 2

    @pytest.mark.parametrize(
        "other",
        [
            *(torch.zeros(2, 3).t(), torch.zeros(2, 3), torch.zeros(3, 2).double()),
            *(torch.zeros(3, 2, requires_grad=True), nn.Parameter(torch.zeros(3, 2))),
            *(torch._neg_view(torch.zeros(3, 2)), torch.zeros(3, 2).to_sparse()),
            *(torch.zeros(3, 2, device="meta"), torch.zeros(3, 4)[:, ::2]),
        ],
        ids=repr,
    )
    def test_tensors_of_another_kind_are_not_alike(self, other):
        like = tensors.like([X, X[0]])
        assert like(torch.ones(3, 2), torch.ones(2))
        assert not like(other, torch.ones(2))
        assert not like(torch.ones(2), torch.ones(3, 2))

    def test_a_view_knows_its_base(self):
        x = torch.zeros(2, requires_grad=True) * 1
        assert tensors.viewed(x[:1]) is x
        assert tensors.viewed(x) is None
        assert tensors.IS_VIEW(x[:1])

    def test_a_leaf_shares_memory_even_inside_transforms(self):
        made = under_vmap(lambda x: tensors.leaf(X), grad=True)
        assert made.requires_grad
        assert made.is_leaf
        assert tensors.memory(modes.unwrap_all(made)) == tensors.memory(X)

    def test_memory_and_storage_are_equal_for_views_alone(self):
        assert tensors.memory(X) == tensors.memory(X[1:])
        assert tensors.memory(X) != tensors.memory(X.clone())
        assert tensors.storage(X) == tensors.storage(X.T)
        assert {tensors.storage(X)} != {tensors.storage(X.clone())}
        assert tensors.memory(torch.eye(2).to_sparse()) is None

    def test_hooks_on_tensors_are_seen(self):
        for register in ("register_hook", "register_post_accumulate_grad_hook"):
            x = torch.zeros(2, requires_grad=True)
            assert not tensors.has_hooks(x)
            getattr(x, register)(lambda *_: None)
            assert tensors.has_hooks(x)

    @pytest.mark.parametrize("name", tensors.HOOKS)
    def test_hooks_on_modules_are_where_they_are_looked_for(self, name):
        module = nn.Linear(1, 1)
        full = (name.startswith("_backward") and "full_backward") or "forward"
        full += "_pre_hook" if "pre" in name else "_hook"
        getattr(module, f"register_{full}")(lambda *_: None)
        assert len(getattr(module, name)) == 1
        assert tensors.has_forward_hooks(module) == ("forward" in name)
        assert tensors.has_backward_hooks(module) == ("backward" in name)

    def test_registries_are_the_dictionaries_themselves(self):
        module = nn.BatchNorm1d(2)
        module.register_buffer("constant", torch.ones(1), persistent=False)
        module.child = nn.Identity()
        parameters, buffers, children = tensors.registered(module)
        parameters["weight"] = new = nn.Parameter(torch.ones(2))
        assert module.weight is new
        assert module.child is children["child"]
        kept = [id(each) for each in tensors.persistent(module)]
        assert id(buffers["running_mean"]) in kept
        assert id(module.constant) not in kept

    def test_every_batch_norm_is_one(self):
        for kind in (nn.BatchNorm1d, nn.BatchNorm3d, nn.SyncBatchNorm):
            assert issubclass(kind, tensors.BatchNorm)
        assert issubclass(nn.InstanceNorm2d, tensors.NormBase)
        assert not issubclass(nn.InstanceNorm2d, tensors.BatchNorm)

    @pytest.mark.parametrize("name", [*tensors.GRAPH, *tensors.MEMORY])
    def test_private_attributes_are_read_through_a_descriptor(self, name):
        """A function mode sees `__get__` of it, by which `Truth` refuses."""
        x = torch.zeros(1)
        with Listing() as mode:
            getattr(x, name)
        (found,) = (func.__self__.__name__ for func in mode.seen)
        assert found in (name, name.removeprefix("_"))

    @pytest.mark.parametrize(
        ("op", "expected"),
        [
            (torch.ops.aten.add_, {(0, "self", False)}),
            (torch.ops.aten.add.out, {(3, "out", True)}),
            (torch.ops.aten.add.Tensor, set()),
        ],
    )
    def test_ops_say_what_they_write_into(self, op, expected):
        assert isinstance(op, tensors.OPS)
        assert set(tensors.written(op)) == expected


class TestModes:
    def test_modes_are_listed_and_left_out(self):
        assert not modes.function_modes()
        with Listing() as mode:
            assert modes.function_modes() == [mode]
            with modes.without_modes():
                X + 1
        assert not mode.seen

    def test_subclasses_are_left_out(self):
        class Refusing(Tensor):
            @classmethod
            def __torch_function__(cls, *_):
                raise AssertionError

        with modes.without_subclasses():
            assert (X.as_subclass(Refusing) + 1).shape == X.shape

    def test_autocast_on_any_device_is_seen(self):
        assert not modes.autocast_is_on()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert modes.autocast_is_on()

    def test_an_opened_function_shows_its_calls(self):
        """Its own test of the numbers is the docstring's; here: what is one."""
        assert modes.is_python(F.multi_head_attention_forward)
        assert not modes.is_python(F.linear)
        assert F.multi_head_attention_forward not in modes.ASKING
        assert all(modes.is_python(func) for func in modes.ASKING)

    def test_opened_attention_projects_as_it_is_told(self):
        layer, given = torch.nn.MultiheadAttention(2, 1), []

        def projections(*args):
            given.extend(args)
            return [args[0] * factor for factor in (1, 0, 3)]

        out, weights = modes.opened_attention(projections)(
            X, X, X, 2, 1, layer.in_proj_weight, layer.in_proj_bias, None, None, False,
            0.0, torch.eye(2), None,
        )  # fmt: skip
        same = (X, X, X, layer.in_proj_weight, layer.in_proj_bias)
        assert all(a is b for a, b in zip(given[3:], same[3:], strict=True))
        assert torch.equal(weights, torch.full((3, 3), 1 / 3))
        torch.testing.assert_close(out, 3 * X.mean(0).expand(3, 2))

    def test_scripts_run_unoptimized(self):
        with modes.unoptimized_scripts():
            assert not torch._C._get_graph_executor_optimize()
        assert torch._C._get_graph_executor_optimize()


class TestSaving:
    """Checkpoints need help before torch 2.12, and less of it before 2.13."""

    def test_arguments_are_saved_by_a_function_before_torch_2_12(self):
        assert (autograd.SAVES_ARGUMENTS is None) == (torch.__version__ >= (2, 12))

    def test_saved_arguments_are_those_of_the_call(self):
        x = torch.ones(2)
        saved = autograd.SavedArguments({"y": 1}, x, None)
        assert saved.grad_fn is saved
        found = saved.get_args(saved.saved_tensors)
        assert found == [{"y": 1}, x, None]
        assert found[1] is x
        x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            saved.get_args(())
        with torch.no_grad():
            assert autograd.SavedArguments(x).grad_fn is None

    @pytest.mark.parametrize("requires_grad", [False, True])
    def test_hooks_at_work_pack_saved_arguments(self, requires_grad):
        packed = []
        x = torch.ones(2, requires_grad=requires_grad)
        hooks = torch.autograd.graph.saved_tensors_hooks(packed.append, lambda _: x * 3)
        with hooks:
            saved = autograd.SavedArguments(x)
        assert packed == [x]
        (found,) = saved.get_args(())
        assert found.tolist() == [3, 3]
        assert found.requires_grad == requires_grad
        assert found.is_leaf

    def test_an_exception_leaves_no_hooks_of_checkpoints(self):
        def fails(x):
            raise ValueError("failed")

        def region(x):
            return checkpoint(fails, x.sin(), use_reentrant=False)

        with pytest.raises(ValueError, match="failed") as caught:
            checkpoint(region, X, use_reentrant=False)
        assert (autograd.hooks() is None) == (torch.__version__ >= (2, 13))
        autograd.close(caught.value)
        assert autograd.hooks() is None


class TestKernels:
    def test_attention_without_heads_is_empty(self):
        x = torch.ones(3, 0, 5, 4)
        assert kernels.attention(x, x, x).shape == (3, 0, 5, 4)

    def test_kernels_of_autocast_are_known(self):
        assert kernels.has_autocast("mm", "cuda")
        assert not kernels.has_autocast("relu", "cuda")
        assert kernels.has_autocast("prod", "cpu")
        listed = kernels.has_autocast("rms_norm", "cuda")
        assert listed == (torch.__version__ >= (2, 12))

    def test_an_unsafe_view_is_no_view_to_autograd(self):
        x = torch.zeros(2, 3, requires_grad=True) * 1
        assert tensors.viewed(kernels.unsafe_view(x, (6,))) is None

    @pytest.mark.parametrize(
        ("kernel", "reference", "options"),
        [
            (kernels.fused_adam_, torch.optim.Adam, {}),
            (kernels.fused_adamw_, torch.optim.AdamW, {}),
            (kernels.fused_sgd_, torch.optim.SGD, {"momentum": 0.9}),
        ],
    )
    def test_fused_steps_are_those_of_torch(self, kernel, reference, options):
        start, grad = torch.randn(5), torch.randn(5)
        leaf = start.clone().requires_grad_()
        leaf.grad = grad.clone()
        reference([leaf], lr=0.1, weight_decay=0.01, **options).step()
        own, zeros = start.clone(), torch.zeros(5)
        common = dict(lr=torch.tensor(0.1), weight_decay=0.01, maximize=False)
        if options:
            more = dict(dampening=0.0, nesterov=False, is_first_step=False)
            kernel([own], [grad], [zeros], momentum=0.9, **common, **more)
        else:
            more = dict(beta1=0.9, beta2=0.999, eps=1e-8, amsgrad=False)
            lists = [own], [grad], [zeros], [zeros.clone()], [], [torch.tensor(1.0)]
            kernel(*lists, **common, **more)
        torch.testing.assert_close(own, leaf.detach())

    def test_a_convolution_has_its_weight_gradient_alone(self):
        x, w = torch.randn(2, 3, 5), torch.randn(4, 3, 2, requires_grad=True)
        (expected,) = torch.autograd.grad(F.conv1d(x, w).sum(), w)
        sizes, mask = w.new_empty(()).expand(w.shape), [False, True, False]
        options = (None, (1,), (0,), (1,), False, (0,), 1, mask)
        ones = torch.ones(2, 4, 4)
        found = kernels.convolution_backward(ones, x, sizes, *options)[1]
        torch.testing.assert_close(found, expected)

    @pytest.mark.parametrize("name", ["sigmoid", "tanh"])
    def test_derivatives_take_the_output(self, name):
        x = torch.randn(4, requires_grad=True)
        output = getattr(torch, name)(x)
        (expected,) = torch.autograd.grad(output.sum(), x)
        found = getattr(kernels, f"{name}_backward")(torch.ones(4), output)
        torch.testing.assert_close(found, expected)

    def test_a_cpu_says_what_it_multiplies(self):
        answers = [kernels.cpu_multiplies(d) for d in (torch.bfloat16, torch.float16)]
        assert {type(each) for each in answers} == {bool}
        assert kernels.cpu_multiplies(torch.float32)


def checkpointed(x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        return x.exp()


def written_data(x):
    x.data = torch.zeros(2)


def own_backward(x):
    y = x.detach().requires_grad_()
    return torch.autograd.grad(y.sum(), y)[0]


REFUSED = [
    (modes.RANDOM_ERROR, lambda x: torch.rand(2) + x, {}),
    (modes.SAME_RANDOM_ERROR, torch.bernoulli, {"randomness": "same"}),
    (modes.SETUP_CONTEXT_ERROR, Old.apply, {}),
    (modes.SAVED_HOOKS_ERRORS[0], checkpointed, {"grad": True}),
    (modes.BACKWARD_ERRORS[0], lambda x: x.sum().backward(), {}),
    (modes.BACKWARD_ERRORS[1], own_backward, {"grad": True}),
    (modes.VMAP_ERRORS[0], lambda x: X[:1].clone().add_(0) * x.item(), {}),
    (modes.VMAP_ERRORS[0], lambda x: X[0].clone().mul_(x), {}),
    (modes.VMAP_ERRORS[0], lambda x: x[x.nonzero()], {}),
    (modes.VMAP_ERRORS[1], lambda x: torch.equal(x, x), {}),
    (modes.VMAP_ERRORS[2], lambda x: torch.allclose(x, x), {}),
    (modes.VMAP_ERRORS[3], lambda x: x.data, {}),
    (modes.VMAP_ERRORS[4], lambda x: x.clone().as_strided((2,), (5,)), {}),
    (modes.VMAP_ERRORS[5], lambda x: x.data_ptr(), {}),
    (modes.VMAP_ERRORS[6], lambda x: x.untyped_storage(), {}),
    (modes.VMAP_ERRORS[7], written_data, {}),
    (modes.VMAP_ERRORS[8], lambda x: (x[:, None] * X[:, 0]).mT.view(6), {}),
    (modes.SHAPES_ERROR, lambda x: torch.ones(1).mul_(torch.ones(2)), {}),
]


@pytest.mark.parametrize(("text", "function", "options"), REFUSED)
def test_torch_refuses_in_the_words_that_are_matched(text, function, options):
    with pytest.raises(RuntimeError) as caught:
        under_vmap(function, **options)
    assert text in str(caught.value)


def test_every_text_that_is_matched_has_a_case():
    texts = [*modes.VMAP_ERRORS, *modes.BACKWARD_ERRORS, *modes.SAVED_HOOKS_ERRORS]
    texts += [modes.RANDOM_ERROR, modes.SAME_RANDOM_ERROR, modes.SETUP_CONTEXT_ERROR]
    assert {*texts, modes.SHAPES_ERROR} == {text for text, *_ in REFUSED}


def test_a_warning_of_a_missing_rule_names_the_op():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.vmap(lambda x: F.bilinear(x[None], x[None], torch.ones(1, 2, 2)))(X)
    found = {modes.op_without_rule(str(each.message)) for each in caught}
    assert found == {"aten::bilinear"}
    assert modes.op_without_rule("something else") == ""


def test_trees_have_places_with_names():
    tree = {"moments": (X, [X])}
    leaves, _ = tree_flatten_with_path(tree)
    names = [keystr(path) for path, _ in leaves]
    assert names == ["['moments'][0]", "['moments'][1][0]"]


def test_a_leaf_made_inside_of_a_transform_is_one_outside():
    found = []

    def row(x):
        with modes.exit_all():
            assert modes.current_level() is None
        assert modes.current_level() is not None
        found.append(tensors.leaf(X))
        return x

    torch.vmap(row)(X)
    assert (found[0].is_leaf, found[0].requires_grad) == (True, True)
    assert torch.equal(found[0], X)


def test_a_trace_has_all_ops_but_those_that_are_left_untraced():
    def function(x):
        assert tracing.dispatch_modes() == 1
        with tracing.untraced():
            assert bool((torch.ones(2) > 0).all())
        return x.sin() + 1

    graph = tracing.traced(function, X)
    ops = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert ops == [torch.ops.aten.sin.default, torch.ops.aten.add.Tensor]
    assert torch.equal(graph(X + 1), (X + 1).sin() + 1)
    sizes = [tuple(n.meta["val"].shape) for n in graph.graph.nodes if "val" in n.meta]
    assert set(sizes) == {(3, 2)}
    assert tracing.dispatch_modes() == 0


def test_a_trace_refuses_to_hand_out_values():
    with pytest.raises(RuntimeError, match="get value out of a tracing tensor"):
        tracing.traced(lambda x: x if x.sum() > 0 else -x, X)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("small", [False, True])
def test_a_graph_is_compiled_for_shapes_and_draws_as_eager_mode_does(small):
    graph = tracing.traced(lambda x: [x.sin() * torch.rand_like(x)], X)
    compiled = tracing.compiled(graph, [X], small=small)
    torch.manual_seed(1)
    expected = (X + 1).sin() * torch.rand_like(X)
    torch.manual_seed(1)
    torch.testing.assert_close(compiled(X + 1)[0], expected)


def test_switches_of_rounding_are_read():
    backend = torch.backends.mkldnn.matmul
    before = kernels.fp32_precision("mkldnn", "matmul")
    assert before == backend.fp32_precision
    backend.fp32_precision = "bf16"
    try:
        assert kernels.fp32_precision("mkldnn", "matmul") == "bf16"
    finally:
        backend.fp32_precision = before


def test_the_default_device_is_a_mode():
    with torch.device("cpu"):
        assert [type(each) for each in modes.function_modes()] == [modes.DeviceMode]


def test_ops_tell_whether_they_return_memory_of_their_own():
    aten = torch.ops.aten
    assert tensors.makes_memory(aten.add.Tensor)
    assert not tensors.makes_memory(aten.view.default)
    assert not tensors.makes_memory(aten.add_.Tensor)
    assert not tensors.makes_memory(len)


def test_random_ops_are_tagged_and_their_calls_can_be_read():
    aten = torch.ops.aten
    for name in tensors.SHOWN & set(dir(aten)):
        packet = getattr(aten, name)
        for each in [getattr(packet, overload) for overload in packet.overloads()]:
            assert tensors.may_draw(each), each
            assert tensors.op_name(each) == name
    assert not tensors.may_draw(aten.add.Tensor)
    assert not tensors.may_draw(len)
    x, op = torch.ones(3), aten.bernoulli_.float
    assert tensors.named(op, (x,), {}) == {"self": x, "p": 0.5, "generator": None}
    assert tensors.writes(op)
    assert not tensors.writes(aten.bernoulli.p)
    assert [*map(id, tensors.shown_results(op, (x,), {}, x))] == [id(x)]
    out = aten.rand.out
    assert tensors.shown_results(out, ([3],), {"out": x}, x)[0] is x
    noise = torch.empty(3)
    shown = tensors.shown_results(
        aten.rrelu_with_noise.default, (x, noise, 0.1, 0.3, True), {}, x.clone()
    )
    assert len(shown) == 2
    assert shown[0] is noise


def test_shards_know_their_place():
    dist = pytest.importorskip("torch.distributed.tensor")
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert not shards.is_distributed(X)
    init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        placements = [dist.Shard(1)]
        whole = dist.DTensor.from_local(
            X[:, :1], mesh, placements, run_check=False, shape=(3, 2), stride=(2, 1)
        )
        assert shards.is_distributed(whole)
        assert shards.offsets(whole) == (0, 1)
        assert torch.equal(shards.local(whole), X[:, :1])
        assert not shards.unsupported_placements(whole)
        again = shards.like(whole, X[:, 1:])
        assert again.placements == whole.placements
        assert (again.shape, again.stride()) == ((3, 2), (2, 1))
        terms = dist.DTensor.from_local(X, mesh, [dist.Partial()], run_check=False)
        assert shards.unsupported_placements(terms) == [dist.Partial()]
    finally:
        destroy_process_group()


def test_lazy_tensors_are_computed_where_an_op_reads_them():
    torch.manual_seed(0)
    weight, x = torch.randn(4, 3), torch.randn(2, 3)
    asked = []

    def compute():
        asked.append(weight)
        return weight

    made = tensors.Lazy(compute, weight.shape, weight.dtype, weight.device)
    given = made.detach().requires_grad_()
    first, *rest = given.t()[:, 1:].double().chunk(2, dim=1)
    assert first.shape == (3, 2)
    assert len(rest) == 1
    assert given.new_zeros(2).shape == (2,)
    assert not asked

    inputs = x.clone().requires_grad_()
    F.linear(inputs, given).sum().backward()
    assert torch.equal(inputs.grad, weight.sum(0).expand(2, 3))
    assert len(asked) == 2  # in the forward and in the backward pass
    assert torch.equal(first.detach() + 0, weight.t()[:, 1:3].double())
    assert "Lazy(shape=(4, 3)" in repr(made)

    with pytest.raises(RuntimeError, match="only read, got one that is written to"):
        made.mul_(2)
    with pytest.raises(RuntimeError, match="only read"):
        torch.add(weight, 1, out=made)
    for read in (made.data_ptr, made.__dlpack__):
        with pytest.raises(RuntimeError, match="expected a tensor with memory"):
            read()
    with pytest.raises(RuntimeError, match="not supported for tensor subclasses"):
        made.tolist()


def test_blocks_that_cache_parametrizations_are_counted():
    assert not tensors.keeps_parametrized()
    with parametrize.cached(), parametrize.cached():
        assert tensors.keeps_parametrized()
    assert not tensors.keeps_parametrized()


def test_nodes_and_ops_that_are_not_torchs_own_are_named():
    x = X.clone().requires_grad_()
    own = F.layer_norm(torch.sin(x) @ x.t(), (3,)).view(9)[:2].expand(4, 2).sum()
    assert len([*autograd.graph_nodes([own])]) >= 8
    assert autograd.foreign_nodes([own, X]) == []
    assert autograd.foreign_nodes([own + Old.apply(x * 1).sum()]) == ["OldBackward"]

    @torch.library.custom_op("vgrad_nodes::double", mutates_args=())
    def double(x: Tensor) -> Tensor:
        return x * 2

    double.register_autograd(lambda ctx, grad: grad * 2)
    assert len(autograd.foreign_nodes([double(x)])) == 1
    with Listing() as mode:
        torch.ops.vgrad_nodes.double(X)
        torch.ops.aten.mul(X, X)
        torch.ops.aten.mul.Tensor(X, X)
        X + X
    assert [*map(autograd.is_foreign_op, mode.seen)] == [True, False, False, False]
