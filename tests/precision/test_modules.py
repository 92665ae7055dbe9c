"""Policies of models and losses, against eager models under `torch.autocast`."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vgrad
from tests import oracle
from tests.losses import Net, Ops, Pick, TiedLanguageModel
from vgrad import explain
from vgrad.precision import Policy, loss_under, policy_for
from vgrad.torch_private import modes

split = vgrad.make_functional_with_buffers
STRATEGIES = ("auto", "recorded", "vmap", "loop")
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
SEEN: dict[str, tuple] = {}
"""What each `Spy` computed in, and the dtype of its weight."""


class Spy(nn.Module):
    """Notes the dtype of a product with its weight, then calls its children."""

    def __init__(self, tag="", **children):
        super().__init__()
        self.tag = tag
        self.weight = nn.Parameter(torch.randn(3, 3))
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x):
        product = F.linear(x.to(self.weight.dtype), self.weight)
        SEEN[self.tag] = product.dtype, self.weight.dtype
        for child in self.children():
            x = child(x)
        return x


def spies():
    """Make a tree of modules: a, a.x, a.x.deep, a.y, b, b.x."""
    return Spy(
        a=Spy("a", x=Spy("a.x", deep=Spy("a.x.deep")), y=Spy("a.y")),
        b=Spy("b", x=Spy("b.x")),
    )


def everywhere(dtype, **others):
    """What every spy of the tree sees: the dtype of products, and that of weights."""
    tags = ("", "a", "a.x", "a.x.deep", "a.y", "b", "b.x")
    named = {name.replace("_", "."): each for name, each in others.items()}
    return {tag: named.get(tag, dtype) for tag in tags}


def mlp():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(5, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 6), nn.Linear(6, 3)
    )
    x, y = torch.randn(7, 5), torch.randint(3, (7,))
    return model, *split(model), x, y


def eager(model, x, dtype):
    with torch.autocast("cpu", dtype=dtype):
        return model(x)


def to(model, dtype):
    return copy.deepcopy(model).to(dtype)


def compute_dtype(policy):
    return Policy.parse(policy).compute_dtype


def grads_of(model):
    return {name: each.grad for name, each in model.named_parameters()}


def nothing_is_left_on():
    return not torch.is_autocast_enabled("cpu") and not modes.function_modes()


# Which policy holds where.


def listed():
    """Has modules in containers, and calls the child of a child past its parent."""

    def forward(self, x):
        for block in (*self.blocks, *self.named.values()):
            x = block(x)
        return self.a.x(x)

    named = nn.ModuleDict({"one": Spy("dict.one", x=Spy("dict.one.x"))})
    blocks = nn.ModuleList([Spy("list.0"), Spy("list.1")])
    return Net(forward, blocks=blocks, named=named, a=Spy("a", x=Spy("a.x")))


def failing(error):
    """Raises inside of a region within a region."""

    def forward(self, x):
        self.layer(x)
        raise error("on purpose")

    return Net(forward, layer=nn.Linear(3, 3))


def recovering():
    """Goes on when its child raises."""

    def forward(self, x):
        try:
            self.child(x)
        except ValueError:
            SEEN["itself"] = torch.mm(x, torch.ones(3, 3)).dtype, x.dtype
            return self.spy(x)

    return Net(forward, child=nn.Sequential(failing(ValueError)), spy=Spy("after"))


def twice():
    """One module in two places."""
    shared = Spy("shared")
    return nn.Sequential(shared, Spy("between"), shared)


LOW, HALF, FULL, WIDE = (BF16, F32), (F16, F32), (F32, F32), (F64, F64)
PURE = BF16, BF16
HOLDING = [
    (spies, "mixed_bfloat16", everywhere(LOW)),
    (spies, "bfloat16", everywhere(PURE)),
    (spies, "float32", everywhere(FULL)),
    (spies, "float64", everywhere(WIDE)),
    (spies, "p=bf16,c=f32", everywhere(FULL)),
    (spies, Policy(F32, BF16, F16), everywhere(LOW)),
    (spies, {"": "float64", "a": "mixed_bfloat16", "a.x": "float32"},
     everywhere(WIDE, a=LOW, a_y=LOW, a_x=FULL, a_x_deep=FULL)),
    (spies, {"": "mixed_bfloat16", ("a.y", "*.x"): "float32", ("a.x",): "float64"},
     everywhere(LOW, a_y=FULL, b_x=FULL, a_x=WIDE, a_x_deep=WIDE)),
    # Three letters against two, whichever comes first.
    (spies, {"*.x": "float32", "": "mixed_bfloat16", "a.x": "float64"},
     everywhere(LOW, a_x=WIDE, a_x_deep=WIDE, b_x=FULL)),
    # What is said of the parent is more specific than the pattern.
    (spies, {"?*p": "float64", "a.x": "mixed_bfloat16", "": "float32"},
     everywhere(FULL, a_x=LOW, a_x_deep=LOW)),
    # A set of letters fixes none.
    (spies, {"[ab]": "mixed_bfloat16", "a": "float64", "": "float32"},
     everywhere(FULL, a=WIDE, a_x=WIDE, a_x_deep=WIDE, a_y=WIDE, b=LOW, b_x=LOW)),
    (spies, {"*": "mixed_float16"}, everywhere(HALF)),
    (spies, {"b": "mixed_bfloat16"}, everywhere(FULL, b=LOW, b_x=LOW)),
    # Two patterns that agree.
    (spies, {"": "float32", "?.x": "bfloat16", "*.x": "bfloat16"},
     everywhere(FULL, a_x=PURE, a_x_deep=PURE, b_x=PURE)),
    # What a module holds itself follows its own policy and not its children's.
    (spies, {"": "float32", "a": "bfloat16", "a.x": "float64"},
     everywhere(FULL, a=PURE, a_y=PURE, a_x=WIDE, a_x_deep=WIDE)),
    # What is not called, but what is in it.
    (listed, {"": "mixed_bfloat16", "blocks": "f32", "named": "float64", "a": "f32"},
     {"list.0": FULL, "list.1": FULL, "dict.one": WIDE, "dict.one.x": WIDE,
      "a.x": FULL}),
    # The first name of what has two.
    (twice, {"": "mixed_bfloat16", "0": "f32"}, {"shared": FULL, "between": LOW}),
    # After an exception, the policy around it.
    (recovering, {"": "mixed_bfloat16", "child": "float64"},
     {"itself": LOW, "after": LOW}),
]  # fmt: skip


@pytest.mark.parametrize(("make", "policies", "expected"), HOLDING)
def test_the_most_specific_policy_holds(make, policies, expected):
    fmodel, params, buffers = split(make())
    SEEN.clear()
    policy_for(fmodel, policies)(params, buffers, torch.ones(2, 3))
    assert SEEN == expected
    assert nothing_is_left_on()


SPIES, *_ = split(spies())
UNPARSED = (TypeError, "expected a string, got a dtype")
SEVERAL = "most specific pattern for the module "
NONE = "matches a module, got none"


@pytest.mark.parametrize(
    ("fmodel", "policies", "error", "message"),
    [
        (SPIES, {"a.*": "bf16", "*.x": "f32"}, ValueError, SEVERAL + "'a.x'"),
        (SPIES, {"": "float32", "*": "bfloat16"}, ValueError, SEVERAL + "''"),
        (SPIES, {"": "f32", "hedd": "bf16"}, ValueError, f"'hedd'.*{NONE}"),
        (SPIES, {("a", "hedd"): "bf16"}, ValueError, f"'hedd'.*{NONE}"),
        (SPIES, {"a.weight": "bf16"}, ValueError, f"'a.weight'.*{NONE}"),
        (SPIES, {3: "bf16"}, TypeError, r"policy_for\(policy=3\): expected a list or"),
        (spies(), "float32", TypeError, "make_functional_with_buffers.*Spy"),
        (SPIES, torch.bfloat16, *UNPARSED),
        (SPIES, {"": "mixed_float8"}, ValueError, "dtypes among.*'mixed_float8'"),
        (policy_for(SPIES, "f32"), "bf16", TypeError, "a model without policies"),
    ],
)
def test_what_is_no_model_or_no_policy_is_refused(fmodel, policies, error, message):
    with pytest.raises(error, match=message):
        policy_for(fmodel, policies)
    with pytest.raises(UNPARSED[0], match=UNPARSED[1]):
        loss_under(torch.bfloat16, lambda params, buffers: params["w"])


# What comes out.


def by_hand(model, x):
    """Cast by hand for policies of the first, second and last module."""
    hidden = eager(model[0], x, BF16)
    hidden = to(model[1], F64)(hidden.double()).float()
    hidden = eager(model[3], torch.tanh(hidden), BF16)
    return model[4](hidden.float()).to(BF16).float()


OF_MODULES = {"": "mixed_bfloat16", "1": "c=f64,o=f32", "4": "p=f32,c=f32,o=bf16"}
BITS = [
    ("mixed_bfloat16", lambda model, x: eager(model, x, BF16).float()),
    ("mixed_float16", lambda model, x: eager(model, x, F16).float()),
    ("bfloat16", lambda model, x: eager(to(model, BF16), x, BF16)),
    ("float16", lambda model, x: eager(to(model, F16), x, F16)),
    ("float32", lambda model, x: model(x)),
    ("float64", lambda model, x: to(model, F64)(x.double())),
    (OF_MODULES, by_hand),
]


@pytest.mark.parametrize(("policy", "expected"), BITS)
def test_a_model_equals_casts_by_hand_bit_for_bit_whatever_is_around(policy, expected):
    model, fmodel, params, buffers, x, _ = mlp()
    under, right = policy_for(fmodel, policy), expected(model, x)
    before, plain = copy.deepcopy((params, x)), fmodel(params, buffers, x)
    found = under(params, buffers, x)
    with torch.autocast("cpu", dtype=BF16):
        around = under(params, buffers, x)
        assert torch.get_autocast_dtype("cpu") == BF16
        assert torch.is_autocast_enabled("cpu")
    oracle.assert_exact((found, around), (right, right), 0)
    # Nothing that was given has changed.
    assert torch.equal(fmodel(params, buffers, x), plain)
    oracle.assert_exact((params, x), before, 0)


def test_tied_parameters_have_one_dtype_and_may_be_computed_with_in_several():
    model, tokens = TiedLanguageModel(), torch.randint(11, (3, 5))
    fmodel, params, buffers = split(model)
    mixed = policy_for(fmodel, {"": "mixed_bfloat16", "head": "float32"})
    with torch.autocast("cpu", dtype=BF16):
        hidden = torch.tanh(model.norm(model.embed(tokens) + model.position.weight[:5]))
    expected = model.head(hidden.float())
    assert torch.equal(mixed(params, buffers, tokens), expected)
    for other in ("bfloat16", "float64"):
        with pytest.raises(ValueError, match="one dtype for the tied.*'head.weight'"):
            policy_for(fmodel, {"": "mixed_bfloat16", "head": other})
    pure = policy_for(fmodel, "bfloat16")
    found = pure(model.state_dict(), {}, tokens)
    assert torch.equal(found, pure(params, buffers, tokens))


@pytest.mark.parametrize("output", [F16, BF16, F32, F64])
def test_every_floating_output_has_the_output_dtype(output):
    several = Pick(
        lambda x: {"a": (x.half(), [x.double()]), "n": x.argmax(-1), "t": ""}
    )
    fmodel, params, buffers = split(several)
    for compute in (BF16, F32, F64):
        under = policy_for(fmodel, Policy(F32, compute, output))
        found = under(params, buffers, torch.ones(2, 3))
        assert found["a"][0].dtype == found["a"][1][0].dtype == output
        assert found["n"].dtype == torch.int64
        assert found["t"] == ""


# Buffers.

LOW_POLICIES = ["mixed_bfloat16", "mixed_float16", "bfloat16", "float16"]
in_both_modes = pytest.mark.parametrize("training", [True, False])


@pytest.mark.parametrize("policy", [*LOW_POLICIES, "float32", "float64"])
@in_both_modes
def test_batch_norm_keeps_its_statistics_in_float32(policy, training):
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).train(training)
    model[1].running_mean.normal_()
    fmodel, params, buffers = split(model)
    x = torch.randn(6, 5)
    under = policy_for(fmodel, policy)
    for given in ((params, buffers), ({**params, **buffers}, {})):
        found, new = under.call_and_update(*given, x)
        assert {n: b.dtype for n, b in new.items()} == {
            n: b.dtype for n, b in buffers.items()
        }
        assert found.dtype == Policy.parse(policy).output_dtype
        reference = to(model, F64)
        expected = reference(x.double())
        torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=0.02)
        for name in ("running_mean", "running_var"):
            stays, left = new[f"1.{name}"].double(), getattr(reference[1], name)
            torch.testing.assert_close(stays, left, rtol=4e-3, atol=4e-3)
        assert int(new["1.num_batches_tracked"]) == int(training)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@in_both_modes
def test_a_mixed_batch_norm_is_eager_autocast_bit_for_bit(policy, training):
    """Autograd saves the low input: a float32 copy of it would double the memory."""
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    model.train(training)
    fmodel, params, buffers = split(model)
    x = torch.randn(6, 2, 5, 5)
    under = policy_for(fmodel, policy)
    outputs, updated = under.call_and_update(params, buffers, x)

    def loss(params):
        return under(params, buffers, x).square().mean()

    with Ops() as ops:
        found = torch.func.grad(loss)(params)
    norms = [args[0] for name, args, _ in ops.calls if name == "native_batch_norm"]
    assert [x.dtype for x in norms] == [compute_dtype(policy)]
    output = eager(model, x, compute_dtype(policy))
    assert torch.equal(outputs, output.float())
    oracle.assert_exact(updated, dict(model.named_buffers()), 0)
    output.float().square().mean().backward()
    oracle.assert_exact(found, grads_of(model), 0)


@pytest.mark.parametrize("policy", ["bfloat16", "mixed_bfloat16", "float64"])
def test_buffers_and_frozen_parameters_come_back_in_the_dtype_they_had(policy):
    def average(self, x):
        x = self.layer(x)
        self.mean, self.count = x.mean(0), self.count + 1
        return x

    model = Net(average, layer=nn.Linear(3, 3))
    model.register_buffer("mean", torch.zeros(3))
    model.register_buffer("count", torch.tensor(0))
    fmodel, params, buffers = split(model)
    under = policy_for(fmodel, policy)
    _, new = under.call_and_update(params, buffers, torch.ones(2, 3))
    assert (new["mean"].dtype, new["count"].dtype) == (F32, torch.int64)
    assert new["mean"].any()
    _, fmodel, params, buffers, x, _ = mlp()
    under = policy_for(fmodel, policy)
    trained, constant = vgrad.freeze(params, buffers, ["0.*"])
    found, new = under.call_and_update(trained, constant, x)
    assert torch.equal(found, under(params, buffers, x))
    assert all(new[name] is constant[name] for name in constant)


# Nothing is left behind.


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("around", [True, False])
@pytest.mark.parametrize("hooked", [True, False])
def test_an_exception_leaves_no_autocast_and_no_mode(error, around, hooked):
    """Of a module, or of a hook before it has run."""

    def refuse(module, args):
        raise error("on purpose")

    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(failing(error)))
    if hooked:
        model[1].register_forward_pre_hook(refuse)
    fmodel, params, buffers = split(model)
    policies = {"": "mixed_bfloat16", "1": "float32", "1.0": "mixed_float16"}
    under = policy_for(fmodel, policies)
    with torch.autocast("cpu", dtype=BF16, enabled=around):
        for _ in range(2):
            with pytest.raises(error, match="on purpose"):
                under(params, buffers, torch.ones(2, 3))
            assert torch.is_autocast_enabled("cpu") == around
            assert not modes.function_modes()
    loss = loss_under("mixed_bfloat16", lambda p, b, x: fmodel(p, b, x).sum())
    with pytest.raises(error, match="on purpose"):
        loss(params, buffers, torch.ones(2, 3))
    assert nothing_is_left_on()


# Copies.


# Transforms.


def losses_under(policy, fmodel):
    """Return the loss of a model under a policy, and a loss under it."""
    yield vgrad.sample_loss(policy_for(fmodel, policy), F.cross_entropy)
    yield loss_under(policy, vgrad.sample_loss(fmodel, F.cross_entropy))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("policy", LOW_POLICIES)
def test_per_sample_gradients_are_those_of_eager_autocast(strategy, policy):
    model, fmodel, params, buffers, x, y = mlp()
    dtype = compute_dtype(policy)
    reference = model if policy.startswith("mixed") else to(model, dtype)
    rows = []
    for row, target in zip(x, y, strict=True):
        loss = F.cross_entropy(eager(reference, row[None], dtype).float(), target[None])
        rows.append(torch.autograd.grad(loss, list(reference.parameters())))
    stacked = (torch.stack(each).float() for each in zip(*rows, strict=True))
    expected = dict(zip(params, stacked, strict=True))
    tolerance = 8 * torch.finfo(dtype).eps
    for loss in losses_under(policy, fmodel):
        options = {"strategy": strategy}
        grads = vgrad.per_sample_grad(loss, **options)(params, buffers, x, y)
        assert {grad.dtype for grad in grads.values()} == {F32}
        assert oracle.error(grads, expected) < tolerance
        norms = vgrad.per_sample_norm(loss, **options)(params, buffers, x, y)
        torch.testing.assert_close(
            norms, oracle.norms(expected), rtol=tolerance, atol=0, check_dtype=False
        )
    assert nothing_is_left_on()


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16", "float32"])
def test_gradients_have_the_dtype_of_the_parameters_that_are_given(dtype, policy):
    _, fmodel, params, buffers, x, y = mlp()
    params = {name: value.detach().to(dtype) for name, value in params.items()}
    of_model, of_loss = losses_under(policy, fmodel)
    found = [torch.func.grad(of_model)(params, buffers, x[0], y[0])]
    for strategy in STRATEGIES:
        compute = vgrad.per_sample_grad(of_loss, strategy=strategy)
        found.append(compute(params, buffers, x, y))
    assert {grad.dtype for grads in found for grad in grads.values()} == {dtype}


@pytest.mark.parametrize("policy", ["bfloat16", "mixed_bfloat16", "float64"])
def test_linear_layers_keep_their_compact_form(policy):
    _, fmodel, params, buffers, x, y = mlp()
    for loss in losses_under(policy, fmodel):
        explanation = explain(vgrad.per_sample_norm(loss))(params, buffers, x, y)
        assert explanation.strategy == "recorded"
        found = {row.names: (row.op, row.factor) for row in explanation.rows}
        for layer in ("0", "3", "4"):
            assert found[f"{layer}.weight",] == ("linear", "Outer")


# Losses.


def test_a_loss_under_a_policy_is_the_loss_under_autocast():
    model, fmodel, params, buffers, x, y = mlp()
    loss = vgrad.batch_loss(fmodel, F.cross_entropy)
    with torch.autocast("cpu", dtype=BF16):
        low = F.cross_entropy(model(x), y)
    wide = F.cross_entropy(to(model, F64)(x.double()), y)
    plain = F.cross_entropy(model(x), y)
    for around in (False, True):
        with torch.autocast("cpu", dtype=BF16, enabled=around):
            for policy, expected in (
                ("mixed_bfloat16", low),
                ("float64", wide),
                ("float32", plain),
            ):
                found = loss_under(policy, loss)(params, buffers, x, y)
                assert torch.equal(found, expected)
    assert nothing_is_left_on()


@pytest.mark.parametrize(
    ("policy", "dtypes"),
    [
        ("bfloat16", (BF16, F32, F32, BF16)),
        ("mixed_float16", (F32, F32, F32, F16)),
        ("float64", (F64, F64, F64, F64)),
    ],
)
def test_a_loss_on_dictionaries_gets_cast_parameters_and_its_batch(policy, dtypes):
    seen = []

    def loss(params, buffers, x, index):
        product = x @ params["w"]
        seen[:] = (
            each.dtype for each in (params["w"], buffers["b"], x, product, index)
        )
        return product.sum() * buffers["b"]

    params, buffers = {"w": torch.ones(2)}, {"b": torch.ones(())}
    loss_under(policy, loss)(params, buffers, torch.ones(3, 2), torch.arange(3))
    assert seen == [*dtypes, torch.int64]
