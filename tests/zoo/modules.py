"""Modules of torch, and modules with a state, with hooks or with draws."""

import copy
import pickle

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

from tests.zoo.entries import (
    SAME,
    SIZE,
    D,
    Entries,
    Exact,
    Net,
    Refused,
    Use,
    classes,
    looks,
    loops,
    mlp,
    net,
    noise,
    ragged,
    total,
)

ENTRIES = Entries()
row = ENTRIES.row


@row("nn.Bilinear")
def bilinear() -> Use:
    model = Net(lambda self, x, y: self.join(x, y), join=nn.Bilinear(4, 5, 3))
    return Use(model, (noise(4), noise(5), classes()))


@row("nn.EmbeddingBag, mean and weighted sum")
def bag_of_words() -> Use:
    def forward(self, ids, weights):
        sums = self.sums(ids, per_sample_weights=weights)
        return self.head(torch.cat([self.mean(ids), sums], 1))

    model = Net(
        forward,
        mean=nn.EmbeddingBag(9, 4),
        sums=nn.EmbeddingBag(9, 4, mode="sum"),
        head=nn.Linear(8, 3),
    )
    return Use(model, (torch.randint(9, (SIZE, 5)), noise(5), classes()))


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).mT


def symmetric(layer: nn.Module) -> nn.Module:
    if layer.weight.shape[0] == layer.weight.shape[1]:
        parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


def pruned(layer: nn.Module) -> nn.Module:
    return prune.l1_unstructured(layer, "weight", amount=0.4)


@row("pruned weights", pruned)
@row("a parametrization of one's own", symmetric)
@row("orthogonal weights", parametrizations.orthogonal)
@row("spectral norm, old style", torch.nn.utils.spectral_norm)
@row("spectral norm", parametrizations.spectral_norm)
@row("weight norm, old style", torch.nn.utils.weight_norm)
@row("weight norm", parametrizations.weight_norm)
def parametrized(which) -> Use:
    model = nn.Sequential(which(nn.Linear(5, 5)), nn.Tanh(), which(nn.Linear(5, 3)))
    return Use(model.eval(), (noise(5), classes()))


@row("norms, evaluated")
def norms() -> Use:
    def forward(self, x):
        x = self.instance(x) + self.group(x) + F.local_response_norm(x, 2)
        return self.out(self.rms(self.batch(x).mT).mean(1))

    model = net(
        forward,
        4,
        5,
        instance=nn.InstanceNorm1d(4, affine=True),
        group=nn.GroupNorm(2, 4),
        batch=nn.BatchNorm1d(4),
        rms=nn.RMSNorm(4),
        out=nn.Linear(4, 3),
    )
    model.model.batch.running_var.uniform_(0.5, 2)
    return model._replace(model=model.model.eval())


@row("batch statistics", today=Refused("batch normalisation with batch statistics"))
def batch_statistics() -> Use:
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.Flatten())
    return Use(model, (noise(2, 5), classes()))


@row("weight standardisation by F.batch_norm")
def standardised_weights() -> Use:
    """The weight passes through batch normalisation, on its own."""

    def forward(self, x):
        flat = self.layer.weight.reshape(1, 4, -1)
        weight = F.batch_norm(flat, None, None, self.gain, training=True)
        return F.conv2d(x, weight.view_as(self.layer.weight)).amax((2, 3))

    parts = dict(layer=nn.Conv2d(2, 4, 3), gain=torch.ones(4))
    return net(forward, 2, 5, 5, output=(4,), **parts)


@row("activations with parameters")
def activations() -> Use:
    def forward(self, x):
        x = self.prelu(self.first(x)) * torch.sigmoid(self.beta * x)
        return F.glu(self.second(x))

    parts = dict(first=nn.Linear(D, D), prelu=nn.PReLU(D), beta=torch.ones(D))
    return net(forward, D, **parts, second=nn.Linear(D, 6))


@row("nn.RReLU, evaluated", today=looks("rrelu"))
def leaky() -> Use:
    model = nn.Sequential(nn.Linear(D, 5), nn.RReLU(), nn.Linear(5, 3))
    return Use(model.eval(), (noise(D), classes()))


@row("results written into a new tensor")
def written_into() -> Use:
    def forward(self, x):
        out = torch.empty(x.shape[0], 4, 8)
        for step in range(4):
            out[:, step] = self.layer(x[:, step])
        out[:, 0] += self.shift
        out[:, :, ::2].mul_(2)
        return self.head(out.mean(1))

    parts = dict(layer=nn.Linear(D, 8), shift=torch.randn(8), head=nn.Linear(8, 3))
    return net(forward, 4, D, **parts)


@row("attributes that the forward pass sets")
def state_kept() -> Use:
    """A running mean in a buffer, a mask that is made once and a counter."""

    def forward(self, x):
        self.calls += 1
        if self.mask is None:
            self.mask = torch.ones(D, D).tril()
        output = self.layer(x @ self.mask)
        self.mean = 0.9 * self.mean + 0.1 * output.detach().mean(0)
        return output - self.mean

    model = Net(forward, layer=nn.Linear(D, 3), mask=None, calls=0)
    model.register_buffer("mean", torch.zeros(3))
    return Use(model, (noise(D), classes()))


@row("buffer updated in place")
def written_buffer() -> Use:
    def forward(self, x):
        output = self.layer(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * output.mean(0))
        return output

    model = Net(forward, layer=nn.Linear(D, 3))
    model.register_buffer("mean", torch.zeros(3))
    return Use(model, (noise(D), classes()))


@row("parameters held in a list and a dictionary")
def unregistered() -> Use:
    def forward(self, x):
        return self.layers["b"](x) + F.linear(x, self.held[0], self.by_name["bias"])

    layers = nn.ModuleDict({"a": nn.Linear(D, 3), "b": nn.Linear(D, 3)})
    held, by_name = [layers["a"].weight], {"bias": layers["b"].bias}
    model = Net(forward, layers=layers, held=held, by_name=by_name)
    return Use(model, (noise(D), classes()))


@row("parameter held in a tuple")
def in_a_tuple() -> Use:
    def forward(self, x):
        return self.layer(x) + F.linear(x, self.held[0])

    layer = nn.Linear(D, 3)
    return Use(Net(forward, layer=layer, held=(layer.weight,)), (noise(D), classes()))


@row("lazy modules")
def lazy() -> Use:
    model = nn.Sequential(nn.LazyConv1d(4, 3), nn.Flatten(), nn.LazyLinear(3))
    model(torch.zeros(1, 2, 6))
    return Use(model, (noise(2, 6), classes()))


@row("forward hooks")
def hooked() -> Use:
    def keep(module, args, output):
        module.kept = output

    def forward(self, x):
        return self.head(self.body(x) + self.body.kept)

    use = net(forward, D, body=nn.Linear(D, 4), head=nn.Linear(4, 3))
    use.model.body.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    use.model.body.register_forward_hook(keep)
    use.model.head.register_forward_hook(lambda module, args, output: output.tanh())
    return use


@row("forward hook registered at the first call")
def hooked_at_first() -> Use:
    def forward(self, x):
        if not self.ready:
            self.body.register_forward_hook(lambda module, args, output: 2 * output)
            self.ready = True
        return self.body(x)

    return Use(Net(forward, body=nn.Linear(D, 3), ready=False), (noise(D), classes()))


@row(
    "forward hook that holds the model",
    today=Refused("whose closure holds a part of the model"),
)
def closed_over() -> Use:
    def forward(self, x):
        return self.head(self.body(x))

    use = net(forward, D, body=nn.Linear(D, 4), head=nn.Linear(4, 3))
    model = use.model

    model.body.register_forward_hook(
        lambda module, args, output: output + model.head.bias.sum()
    )
    return use


@row("hook on an activation's gradient")
def gradient_hook() -> Use:
    """A hook on an activation, which reverses its gradient."""

    def forward(self, x):
        x = self.body(x)
        x.register_hook(lambda grad: -grad)
        return self.head(x)

    return net(forward, D, body=nn.Linear(D, 4), head=nn.Linear(4, 3))


@row("full backward hook")
def backward_hook() -> Use:
    model = nn.Sequential(nn.Linear(D, 4), nn.Linear(4, 3))
    model[1].register_full_backward_hook(lambda module, into, out: (into[0] * 2,))
    return Use(model, (noise(D), classes()))


@row("straight-through rounding")
def straight_through() -> Use:
    def forward(self, x):
        x = self.first(x)
        x = x + (x.sign() - x).detach()
        weight = self.second.weight
        weight = weight + ((weight * 4).round() / 4 - weight).detach()
        return F.linear(x, weight)

    return net(forward, D, first=nn.Linear(D, 5), second=nn.Linear(5, 3))


@row("fake quantisation", today=loops("aten::fake_quantize_per_tensor_affine"))
def quantised() -> Use:
    def forward(self, x):
        q = torch.fake_quantize_per_tensor_affine(self.first(x), 0.1, 0, -8, 7)
        return self.second(q)

    return net(forward, D, first=nn.Linear(D, 5), second=nn.Linear(5, 3))


@row("target network without a gradient")
def target_network() -> Use:
    def forward(self, a, b):
        with torch.no_grad():
            target = F.normalize(self.target(b), dim=-1)
        return F.normalize(self.head(self.online(a)), dim=-1) - target

    parts = dict(online=nn.Linear(D, 4), head=nn.Linear(4, 4), target=nn.Linear(D, 4))
    model = Net(forward, **parts)
    model.target.requires_grad_(False)
    return Use(model, (noise(D), noise(D), noise(4)), total)


@row("variational autoencoder", options=SAME)
def variational() -> Use:
    def forward(self, x):
        mean, spread = self.encoder(x).chunk(2, -1)
        drawn = torch.distributions.Normal(mean, F.softplus(spread)).rsample()
        prior = (mean.square() + spread.exp() - spread).sum()
        return (self.decoder(drawn) - x).square().sum() + prior

    model = Net(forward, encoder=nn.Linear(D, 6), decoder=nn.Linear(3, D))
    return Use(model, (noise(D),), None)


@row("Gumbel softmax", options=SAME)
def gumbel() -> Use:
    def forward(self, x):
        return F.gumbel_softmax(self.first(x), tau=0.7) @ self.table

    return net(forward, D, first=nn.Linear(D, 5), table=torch.randn(5, 3))


@row("dropout of three kinds", options=SAME)
def dropouts() -> Use:
    model = nn.Sequential(
        nn.Conv1d(2, 4, 3),
        nn.Dropout1d(0.4),
        nn.Flatten(),
        nn.Linear(16, 8),
        nn.AlphaDropout(0.3),
        nn.Dropout(0.5),
        nn.Linear(8, 3),
    )
    return Use(model, (noise(2, 6), classes()))


@row("stochastic depth", options=SAME)
def stochastic_depth() -> Use:
    def forward(self, x):
        for layer in self.layers:
            keep = torch.rand(x.shape[0], 1).add(0.5).floor()
            x = x + layer(x) * keep / 0.5
        return self.head(x)

    layers = nn.ModuleList(nn.Linear(D, D) for _ in range(3))
    return net(forward, D, layers=layers, head=nn.Linear(D, 3))


@row("nn.RNN, two layers, both directions", nn.RNN)
@row("nn.GRU, two layers, both directions", nn.GRU)
@row("nn.LSTM with projections", nn.LSTM, proj_size=3)
@row("nn.LSTM, two layers, both directions", nn.LSTM)
def recurrent(kind, **options) -> Use:
    def forward(self, x):
        return self.head(self.body(x)[0].mean(1))

    body = kind(D, 4, 2, batch_first=True, bidirectional=True, **options)
    width = 2 * options.get("proj_size", 4)
    return net(forward, 5, D, body=body, head=nn.Linear(width, 3))


@row("recurrent cells in a loop")
def cells() -> Use:
    def forward(self, x):
        h, (g, c), e = torch.zeros(1, 4), (torch.zeros(1, 4),) * 2, torch.zeros(1, 4)
        for word in x.unbind(1):
            h = self.gru(word, h)
            g, c = self.lstm(h, (g, c))
            e = self.rnn(g, e)
        return self.head(e + c)

    parts = dict(gru=nn.GRUCell(D, 4), lstm=nn.LSTMCell(4, 4), rnn=nn.RNNCell(4, 4))
    return net(forward, 5, D, **parts, head=nn.Linear(4, 3))


@row("nn.MultiheadAttention, padding mask")
def attention_with_masks() -> Use:
    def forward(self, x, mask):
        y, _ = self.layer(x, x, x, key_padding_mask=~mask, need_weights=False)
        return self.head(y.mean(1))

    layer = nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True)
    model = Net(forward, layer=layer, head=nn.Linear(8, 3))
    return Use(model, (noise(5, 8), ragged(5), classes()))


@row("nn.Embedding with sparse gradients", sparse=True)
@row("nn.Embedding with max_norm", max_norm=1.0, today=loops("aten::embedding_renorm_"))
def looked_up(**options) -> Use:
    def forward(self, ids):
        return self.head(self.table(ids).sum(1))

    parts = dict(table=nn.Embedding(9, 4, **options), head=nn.Linear(4, 3))
    return Use(Net(forward, **parts), (torch.randint(9, (SIZE, 5)), classes()))


@row("derivative in the loss, by torch.func")
def differentiates_by_function() -> Use:
    def forward(self, x):
        slope = torch.func.jacrev(lambda y: self.body(y)[0])(x[0])
        return (slope + self.body(x[0])).square().sum()

    return Use(Net(forward, body=mlp(1)), (noise(D),), None)


@row("torch.func.vmap in the loss")
def maps_by_function() -> Use:
    def forward(self, x):
        return torch.func.vmap(self.body, in_dims=1, out_dims=1)(x).mean(1)

    return net(forward, 5, D, body=nn.Linear(D, 3))


@row(
    "one inner step of SGD",
    today=Exact("vmap", "expected ops that a function mode sees"),
)
def meta_learning() -> Use:
    def forward(self, x, y):
        def inner(weight):
            return (F.linear(x[:, 0], weight) - y[:, 0]).square().sum()

        weight = self.weight - 0.1 * torch.func.grad(inner)(self.weight)
        return (F.linear(x[:, 1], weight) - y[:, 1]).square().sum()

    return Use(Net(forward, weight=torch.randn(3, D)), (noise(2, D), noise(2, 3)), None)


def pickled(transform):
    return pickle.loads(pickle.dumps(transform))


@row("MLP, transforms copied", through=copy.deepcopy)
@row("MLP, transforms pickled", through=pickled)
def plain() -> Use:
    return Use(mlp(), (noise(D), classes()))
