"""Nets by hand: as people write them, modules of torch, branches, features of torch."""

import copy
import functools
import pickle
import warnings

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune, rnn
from torch.utils import checkpoint as checkpointing

from tests import losses
from tests.zoo.entries import (
    DIFFERENT,
    SAME,
    SIZE,
    SPLITS,
    D,
    Entries,
    Exact,
    Impossible,
    Net,
    Refused,
    Use,
    alone,
    classes,
    looks,
    loops,
    mlp,
    net,
    noise,
    ragged,
    total,
    two_layers,
)

HANDMADE = Entries()
"""Architectures as people write them: sharing, reshaping, indexing, solving."""
row = HANDMADE.row


@row("autoencoder with tied weights")
def tied_autoencoder() -> Use:
    def forward(self, x):
        code = torch.tanh(F.linear(x, self.weight, self.bias))
        return F.linear(code, self.weight.t())

    parts = dict(weight=torch.randn(4, D), bias=torch.randn(4))
    return net(forward, D, output=(D,), **parts)


@row("language model with tied embedding")
def tied_language_model() -> Use:
    words = torch.randint(11, (SIZE, 5)), torch.randint(11, (SIZE, 5))
    return Use(losses.TiedLanguageModel(), words, losses.next_token)


@row("one transformer layer six times")
def recursion() -> Use:
    def forward(self, x):
        for _ in range(6):
            x = x + self.layer(x)
        return self.head(x.mean(1))

    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return net(forward, 4, 8, layer=layer, head=nn.Linear(8, 3))


@row("recursive net over halves of a sentence")
def tree_of_sentences() -> Use:
    """A recursive net: one cell joins the halves of a sentence, down to its words."""

    def forward(self, x):
        def join(words):
            if words.shape[1] == 1:
                return words[:, 0]
            middle = words.shape[1] // 2
            pair = join(words[:, :middle]), join(words[:, middle:])
            return torch.tanh(self.cell(torch.cat(pair, 1)))

        return self.head(join(x))

    return net(forward, 5, D, cell=nn.Linear(2 * D, D), head=nn.Linear(D, 3))


@row("attention by einsum")
def einsum_attention() -> Use:
    def forward(self, x):
        q = torch.einsum("bti,hij->bhtj", x, self.query)
        k = torch.einsum("bti,hij->bhtj", x, self.key)
        v = torch.einsum("bti,hij->bhtj", x, self.value)
        weights = torch.einsum("bhtj,bhsj->bhts", q, k).softmax(-1)
        heads = torch.einsum("bhts,bhsj->bthj", weights, v)
        return torch.einsum("bthj,hjo->bo", heads, self.out)

    parts = {name: torch.randn(2, D, 4) for name in ("query", "key", "value")}
    return net(forward, 5, D, **parts, out=torch.randn(2, 4, 3))


@row("graph net by index_add")
def graph_by_index_add() -> Use:
    def forward(self, x, edges):
        for layer in self.layers:
            messages = layer(x[:, edges[0, 0]])
            into = torch.zeros_like(x).index_add(1, edges[0, 1], messages)
            x = torch.relu(x + into)
        return self.head(x.sum(1))

    layers = nn.ModuleList(nn.Linear(D, D) for _ in range(2))
    model = Net(forward, layers=layers, head=nn.Linear(D, 3))
    return Use(model, (noise(5, D), torch.randint(5, (SIZE, 2, 9)), classes()))


@row("graph net by adjacency matrix")
def graph_by_matrix() -> Use:
    def forward(self, x, adjacency):
        degree = adjacency.sum(-1, keepdim=True).clamp(min=1)
        x = torch.relu(self.first(adjacency @ x / degree))
        return self.second(adjacency @ x / degree).amax(1)

    model = Net(forward, first=nn.Linear(D, 8), second=nn.Linear(8, 3))
    return Use(model, (noise(5, D), torch.rand(SIZE, 5, 5).round(), classes()))


@row("U-Net")
def u_net() -> Use:
    def forward(self, x):
        top = F.silu(self.norm(self.down(x)))
        low = F.silu(self.low(F.max_pool2d(top, 2)))
        return self.out(torch.cat([top, self.up(low)], 1))

    return net(
        forward,
        2,
        8,
        8,
        output=(1, 8, 8),
        down=nn.Conv2d(2, 4, 3, padding=1),
        norm=nn.GroupNorm(2, 4),
        low=nn.Conv2d(4, 8, 3, padding=1),
        up=nn.ConvTranspose2d(8, 4, 2, 2),
        out=nn.Conv2d(8, 1, 1),
    )


@row("deep sets with a mask")
def deep_sets() -> Use:
    def forward(self, x, mask):
        each = self.each(x).masked_fill(~mask[..., None], 0)
        return self.all(each.sum(1) / mask.sum(1, keepdim=True))

    each = nn.Sequential(nn.Linear(D, 8), nn.ReLU(), nn.Linear(8, 8))
    model = Net(forward, each=each, all=nn.Linear(8, 3))
    return Use(model, (noise(5, D), ragged(5), classes()))


@row("hypernetwork: the sample makes the kernel")
def hypernetwork() -> Use:
    def forward(self, x, z):
        kernels = self.maker(z).view(4, 2, 3, 3)
        return self.head(F.conv2d(x, kernels, padding=1).tanh().mean((2, 3)))

    model = Net(forward, maker=nn.Linear(5, 72), head=nn.Linear(4, 3))
    return Use(model, (noise(2, 6, 6), noise(5), classes()))


@row("parameters that make parameters")
def generated_weights() -> Use:
    def forward(self, x):
        weight = self.maker(self.code).view(3, D)
        return F.linear(x, weight)

    return net(forward, D, code=torch.randn(4), maker=nn.Linear(4, 3 * D))


@row("Fourier layer with complex weights")
def fourier_layer() -> Use:
    def forward(self, x):
        modes = torch.fft.rfft(x)[..., :4]
        modes = torch.einsum("bim,iom->bom", modes, self.spectrum)
        return self.head(F.gelu(torch.fft.irfft(modes, n=12)).flatten(1))

    spectrum = torch.randn(2, 3, 4, dtype=torch.complex128)
    return net(forward, 2, 12, spectrum=spectrum, head=nn.Linear(36, 3))


@row("neural ODE by Runge-Kutta steps")
def ordinary_differential_equation() -> Use:
    def forward(self, x):
        step = 0.25
        for _ in range(4):
            a = self.field(x)
            b = self.field(x + step / 2 * a)
            c = self.field(x + step / 2 * b)
            d = self.field(x + step * c)
            x = x + step / 6 * (a + 2 * b + 2 * c + d)
        return self.head(x)

    return net(forward, D, field=mlp(D), head=nn.Linear(D, 3))


@row("deep equilibrium, one step with a graph")
def equilibrium() -> Use:
    """A fixed point, solved without a graph and attached by one more step."""

    def forward(self, x):
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(20):
                z = torch.tanh(0.3 * self.inner(z) + x)
        return self.head(torch.tanh(0.3 * self.inner(z) + x))

    return net(forward, D, inner=nn.Linear(D, D), head=nn.Linear(D, 3))


@row("mixture of experts by masks")
def experts_by_mask() -> Use:
    def forward(self, x):
        gates = self.router(x).softmax(-1)
        top, which = gates.topk(2, -1)
        gates = torch.zeros_like(gates).scatter(-1, which, top)
        each = torch.stack([expert(x) for expert in self.experts], -1)
        return (each * gates[..., None, :]).sum(-1).mean(1)

    experts = nn.ModuleList(nn.Linear(D, 3) for _ in range(4))
    return net(forward, 5, D, router=nn.Linear(D, 4), experts=experts)


@row("expert weights looked up by index")
def experts_by_rows() -> Use:
    def forward(self, x, which):
        return torch.einsum("bi,bio->bo", x, self.weight[which]) + self.bias[which]

    model = Net(forward, weight=torch.randn(4, D, 3), bias=torch.randn(4, 3))
    return Use(model, (noise(D), torch.tensor([0, 2, 2]), classes()))


@row("Kolmogorov-Arnold layer")
def splines() -> Use:
    """A Kolmogorov-Arnold layer: each weight is a function with coefficients."""

    def forward(self, x):
        basis = torch.exp(-(x[..., None].tanh() - self.knots).square() * 8)
        return torch.einsum("bik,iok->bo", basis, self.weight) + self.base(F.silu(x))

    parts = dict(weight=torch.randn(D, 3, 5), knots=torch.linspace(-1, 1, 5))
    return net(forward, D, **parts, base=nn.Linear(D, 3))


@row("radiance field")
def radiance_field() -> Use:
    def forward(self, x):
        turns = x[..., None] * 2.0 ** torch.arange(3, device=x.device)
        x = torch.cat([turns.sin(), turns.cos()], -1).flatten(-2)
        density, color = self.mlp(x).split([1, 3], -1)
        alpha = 1 - torch.exp(-F.softplus(density))
        passed = torch.cumprod(
            torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha], 1), 1
        )
        return (passed[:, :-1] * alpha * color.sigmoid()).sum(1)

    mlp = nn.Sequential(nn.Linear(18, 8), nn.ReLU(), nn.Linear(8, 4))
    return net(forward, 7, 3, mlp=mlp)


@row("normalising flow")
def flow() -> Use:
    def forward(self, x):
        logdet = torch.zeros(x.shape[0])
        for layer in self.layers:
            a, b = x.chunk(2, -1)
            scale, shift = layer(a).chunk(2, -1)
            x = torch.cat([b * scale.tanh().exp() + shift, a], -1)
            logdet = logdet + scale.tanh().sum(-1)
        x, logdet = x @ self.mix, logdet + torch.linalg.slogdet(self.mix)[1]
        return x.square().sum(-1) / 2 - logdet

    layers = nn.ModuleList(nn.Linear(2, 4) for _ in range(3))
    return net(forward, 4, output=(), layers=layers, mix=torch.randn(4, 4))


@row("Gaussian process: Cholesky factor and solve")
def linear_algebra() -> Use:
    def forward(self, x, y, query):
        x, query = self.features(x), self.features(query)
        kernel = x @ x.mT + self.noise.exp() * torch.eye(x.shape[1])
        factor = torch.linalg.cholesky(kernel)
        return query @ x.mT @ torch.cholesky_solve(y, factor)

    model = Net(forward, features=nn.Linear(D, 8), noise=torch.zeros(()))
    return Use(model, (noise(5, D), noise(5, 1), noise(2, D), noise(2, 1)), total)


@row("eigenvalues and singular values")
def eigenvalues() -> Use:
    def forward(self, x):
        matrix = self.layer(x).view(-1, 4, 4)
        values = torch.linalg.eigvalsh(matrix + matrix.mT)
        return torch.cat([values, torch.linalg.svdvals(matrix)], -1)

    return net(forward, D, output=(8,), layer=nn.Linear(D, 16))


@row("state-space layer by FFT")
def state_space() -> Use:
    def forward(self, x):
        poles = torch.complex(-self.decay.exp(), self.turn)
        times = torch.arange(x.shape[-1])
        kernel = (self.gain[..., None] * torch.exp(poles[..., None] * times)).real.sum(
            1
        )
        both = torch.fft.rfft(x, n=20) * torch.fft.rfft(kernel, n=20)
        return self.head(torch.fft.irfft(both, n=20)[..., :10].mean(-1) + self.skip)

    parts = dict(decay=torch.randn(4, 2) - 1, turn=torch.randn(4, 2))
    parts |= dict(gain=torch.randn(4, 2), skip=torch.randn(4))
    return net(forward, 4, 10, **parts, head=nn.Linear(4, 3))


@row("gated scan, step by step")
def selective_scan() -> Use:
    def forward(self, x):
        state, outputs = torch.zeros(x.shape[0], 4), []
        for word in x.unbind(1):
            gate = self.gate(word).sigmoid()
            state = gate * state + (1 - gate) * self.value(word)
            outputs.append(state)
        return self.head(torch.stack(outputs, 1).mean(1))

    parts = dict(gate=nn.Linear(D, 4), value=nn.Linear(D, 4))
    return net(forward, 5, D, **parts, head=nn.Linear(4, 3))


@row("linear attention by cumulative sums")
def linear_attention() -> Use:
    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        states = torch.cumsum(k[..., :, None] * v[..., None, :], 1)
        weights = (q * k.cumsum(1)).sum(-1, keepdim=True)
        return self.out((q[..., None, :] @ states)[..., 0, :] / weights).mean(1)

    return net(forward, 5, D, qkv=nn.Linear(D, 12), out=nn.Linear(4, 3))


@row("rotary positions by complex numbers")
def rotary() -> Use:
    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        angles = torch.arange(x.shape[1])[:, None] * self.turn
        turn = torch.polar(torch.ones_like(angles), angles)

        def turned(y):
            pairs = torch.view_as_complex(y.unflatten(-1, (-1, 2)).contiguous())
            return torch.view_as_real(pairs * turn).flatten(-2)

        y = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2)).mean(1)

    parts = dict(qkv=nn.Linear(8, 24), turn=torch.rand(2), out=nn.Linear(8, 3))
    return net(forward, 5, 8, **parts)


@row("spatial transformer", today=loops("aten::affine_grid_generator"))
def spatial_transformer() -> Use:
    def forward(self, x):
        theta = self.where(x.flatten(1)).view(-1, 2, 3)
        grid = F.affine_grid(theta, list(x.shape), align_corners=False)
        return self.head(F.grid_sample(x, grid, align_corners=False).flatten(1))

    return net(forward, 1, 5, 5, where=nn.Linear(25, 6), head=nn.Linear(25, 3))


@row("capsules, routing by agreement")
def capsules() -> Use:
    def forward(self, x):
        votes = torch.einsum("bci,cdio->bcdo", x, self.weight)
        logits = torch.zeros(votes.shape[:3])
        for _ in range(3):
            sums = (logits.softmax(2)[..., None] * votes).sum(1)
            length = sums.norm(dim=-1, keepdim=True)
            out = sums * length / (1 + length.square())
            logits = logits + (votes * out[:, None]).sum(-1)
        return out.norm(dim=-1)

    return net(forward, 4, D, weight=torch.randn(4, 3, D, 5))


@row("convolutions of all kinds")
def convolutions() -> Use:
    def forward(self, x):
        x = F.pixel_shuffle(F.mish(self.depth(self.circular(x))), 2)
        x = self.line(x.flatten(2)).unflatten(-1, (-1, 2, 2))
        return self.body(x).amax((2, 3, 4))

    circular = nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular")
    depth = nn.Conv2d(4, 8, 3, padding=2, dilation=2, groups=4)
    parts = dict(
        circular=circular, depth=depth, line=nn.Conv1d(2, 4, 3, 2, 1, groups=2)
    )
    return net(forward, 2, 4, 4, **parts, body=nn.Conv3d(4, 3, (3, 2, 1)))


@row("unfold and fold")
def unfolded() -> Use:
    def forward(self, x):
        patches = F.unfold(x, 3, padding=1)
        patches = self.layer(patches.mT).mT
        return F.fold(patches, (4, 4), 3, padding=1)

    return net(forward, 2, 4, 4, output=(1, 4, 4), layer=nn.Linear(18, 9))


@row("contrastive, negatives inside a sample")
def contrastive() -> Use:
    def forward(self, anchor, others):
        a, o = (F.normalize(self.body(each), dim=-1) for each in (anchor, others))
        return (o @ a[..., None])[..., 0] * self.scale.exp()

    body = nn.Sequential(nn.Linear(D, 8), nn.ReLU(), nn.Linear(8, 4))
    model = Net(forward, body=body, scale=torch.zeros(()))
    return Use(model, (noise(D), noise(5, D), torch.zeros(SIZE, dtype=torch.long)))


@row("own loss: ignored labels, learned temperature")
def weights_in_the_loss() -> Use:
    def forward(self, x, labels):
        logits = self.head(F.gelu(x)).flatten(0, 1)
        logits = logits / self.heat.exp() + self.prior.log_softmax(0)
        options = dict(ignore_index=-100, label_smoothing=0.1)
        return F.cross_entropy(logits, labels.flatten(), **options)

    labels = torch.randint(4, (SIZE, 5)).masked_fill(~ragged(5), -100)
    parts = dict(prior=torch.zeros(4), heat=torch.zeros(()))
    return Use(Net(forward, head=nn.Linear(D, 4), **parts), (noise(5, D), labels), None)


@row("GRU with CTC loss", today=loops("aten::ctc_loss.Tensor"))
def connectionist() -> Use:
    def forward(self, x, labels, frames, letters):
        logits = self.head(self.body(x)[0]).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(logits, labels, frames, letters, zero_infinity=True)

    parts = dict(body=nn.GRU(D, 5, batch_first=True), head=nn.Linear(5, 4))
    labels = torch.randint(1, 4, (SIZE, 3))
    lengths = torch.tensor([8, 7, 6]), torch.tensor([3, 2, 2])
    return Use(Net(forward, **parts), (noise(8, D), labels, *lengths), None)


@row("channel and spatial attention")
def channel_attention() -> Use:
    def forward(self, x):
        x = self.conv(x)
        x = x * self.squeeze(x.mean((2, 3)))[..., None, None].sigmoid()
        both = torch.stack([x.mean(1), x.amax(1)], 1)
        return (x * self.where(both).sigmoid()).amax((2, 3))

    squeeze = nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 4))
    parts = dict(conv=nn.Conv2d(2, 4, 3), squeeze=squeeze)
    where = nn.Conv2d(2, 1, 3, padding=1)
    return net(forward, 2, 6, 6, output=(4,), **parts, where=where)


@row("pointer network by scatter_add")
def pointer() -> Use:
    """Words are copied: attention is scattered into the vocabulary."""

    def forward(self, ids, query):
        keys = self.table(ids)
        weights = (self.query(query)[:, None] * keys).sum(-1).softmax(-1)
        copied = torch.zeros(ids.shape[0], 9).scatter_add(1, ids, weights)
        made = self.vocabulary(query).softmax(-1)
        return torch.log(0.5 * copied + 0.5 * made)

    model = Net(
        forward,
        table=nn.Embedding(9, 4, padding_idx=0),
        query=nn.Linear(D, 4),
        vocabulary=nn.Linear(D, 9),
    )
    return Use(model, (torch.randint(9, (SIZE, 5)), noise(D), classes(9)), F.nll_loss)


@row("distances, sorting and quantiles", today=loops("aten::quantile.scalar"))
def rooted_distance() -> Use:
    def forward(self, x):
        x = self.layer(x)
        near = torch.cdist(x, self.centres).sort(-1)[0]
        return torch.cat(
            [near.amin(1), x.quantile(0.3, 1), x.logcumsumexp(1)[:, -1]], -1
        )

    parts = dict(layer=nn.Linear(D, 4), centres=torch.randn(3, 4))
    return net(forward, 5, D, output=(11,), **parts)


@row("dilated causal convolutions")
def causal_mixer() -> Use:
    def forward(self, x):
        skips = 0
        for number, layer in enumerate(self.layers):
            a, b = layer(F.pad(x, (2**number, 0))).chunk(2, 1)
            skips = skips + (gated := a.tanh() * b.sigmoid())
            x = x + gated
        return self.head(skips).mean(-1)

    layers = nn.ModuleList(nn.Conv1d(4, 8, 2, dilation=2**n) for n in range(3))
    return net(forward, 4, 9, layers=layers, head=nn.Conv1d(4, 3, 1))


@row("MLP-Mixer")
def mixer() -> Use:
    def forward(self, x):
        x = x + self.tokens(self.norm(x).mT).mT
        return self.head((x + self.channels(self.norm(x))).mean(1))

    tokens = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 5))
    channels = nn.Sequential(nn.Linear(D, 8), nn.GELU(), nn.Linear(8, D))
    parts = dict(tokens=tokens, channels=channels, norm=nn.LayerNorm(D))
    return net(forward, 5, D, **parts, head=nn.Linear(D, 3))


@row("update of low rank by hand")
def low_rank() -> Use:
    def forward(self, x):
        return self.base(x) + 2 * self.up(self.down(x))

    parts = dict(down=nn.Linear(D, 2, bias=False), up=nn.Linear(2, 3, bias=False))
    use = net(forward, D, base=nn.Linear(D, 3), **parts)
    use.model.base.requires_grad_(False)
    return use


@row("physics-informed net: Laplacian")
def laplacian() -> Use:
    def forward(self, x):
        x = x.requires_grad_()
        (gradient,) = slope(self.body(x).sum(), x)
        rows = [slope(gradient[..., i].sum(), x)[0][..., i] for i in range(D)]
        return (sum(rows) + x.prod(-1)).square().sum()

    slope = functools.partial(torch.autograd.grad, create_graph=True)
    return Use(Net(forward, body=mlp(1)), (noise(4, D),), None)


@row("critic of pictures with a gradient penalty")
def penalised_critic() -> Use:
    def forward(self, x, mixed):
        mixed = mixed.requires_grad_()
        value = self.body(mixed).sum()
        (slope,) = torch.autograd.grad(value, mixed, create_graph=True)
        return self.body(x).sum() + (slope.flatten(1).norm(dim=1) - 1).square().sum()

    body = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, stride=2), nn.LeakyReLU(0.2))
    body.extend([nn.Conv2d(4, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 1)])
    return Use(Net(forward, body=body), (noise(2, 6, 6), noise(2, 6, 6)), None)


MODULES = Entries()
"""Modules of torch, and modules with a state, with hooks or with draws."""
row = MODULES.row


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


BRANCHING = Entries()
"""Losses whose Python looks at values: branches, lengths and loops of each sample."""
row = BRANCHING.row


LENGTHS = torch.tensor([5, 4, 2])


@row("early exit", today=SPLITS)
def early_exit() -> Use:
    def forward(self, x):
        x = torch.tanh(self.first(x))
        if self.sure(x).sum() > 0:
            return self.exit(x)
        return self.last(torch.tanh(self.second(x)))

    first, sure = (nn.Linear(D, width, bias=False) for width in (D, 1))
    parts = dict(second=nn.Linear(D, D), exit=nn.Linear(D, 3), last=nn.Linear(D, 3))
    use = net(forward, D, first=first, sure=sure, **parts)
    x, target = use.batch
    return use._replace(batch=(x * torch.tensor([[1.0], [-1.0], [1.0]]), target))


@row("adaptive computation time", today=SPLITS)
def adaptive_computation() -> Use:
    def forward(self, x):
        halted = torch.zeros(x.shape[0])
        while (halted < 2).all():
            x = torch.tanh(self.step(x))
            halted = halted + self.halt(x).sigmoid()[:, 0]
        return self.head(x) * halted[:, None]

    parts = dict(step=nn.Linear(D, D), halt=nn.Linear(D, 1), head=nn.Linear(D, 3))
    return net(forward, D, **parts)


@row("assertions about values")
def checked_for_nan() -> Use:
    def forward(self, x):
        assert not torch.isnan(x).any()
        y = self.layer(x)
        if torch.isinf(y).any() or y.isnan().any():
            raise ValueError("not finite")
        if not torch.allclose(y, y + 1e-12):
            y = y + 1
        return y

    return net(forward, D, layer=nn.Linear(D, 3))


@row("item, float and int", today=SPLITS)
def scale_by_item() -> Use:
    def forward(self, x):
        x = x / x.abs().max().item()
        return self.layer(x) * float(x.mean()) + int(x.argmax())

    return net(forward, D, layer=nn.Linear(D, 3))


@row("modules chosen by tolist", today=SPLITS)
def routed_by_list() -> Use:
    def forward(self, words, x):
        for word in words[0].tolist():
            x = torch.tanh(self.layers[word](x))
        return self.head(x)

    layers = nn.ModuleList(nn.Linear(D, D) for _ in range(3))
    model = Net(forward, layers=layers, head=nn.Linear(D, 3))
    words = torch.tensor([[0, 1], [2, 0], [2, 0]])
    return Use(model, (words, noise(D), classes()))


@row("depth of each sample", today=SPLITS)
def depth_of_each() -> Use:
    def forward(self, x, depth):
        for _ in range(int(depth)):
            x = torch.tanh(self.layer(x))
        return self.head(x)

    return Use(two_layers(forward), (noise(D), torch.tensor([1, 3, 1]), classes()))


@row("cut to the sample's length", today=SPLITS)
def cut_to_length() -> Use:
    def forward(self, x, length):
        x = x[:, : int(length.max())]
        return self.head(torch.relu(self.layer(x)).mean(1))

    return Use(two_layers(forward), (noise(5, D), LENGTHS, classes()))


@row("sizes and slices by tensors", today=SPLITS)
def cut_by_tensors() -> Use:
    def forward(self, x, length):
        last, count = length.max(), length.sum()
        x = self.layer(x[:, :last]) + torch.arange(last)[:, None]
        return self.head(torch.cat([x, x.new_zeros(1, count, D)], 1).sin().sum(1))

    return Use(two_layers(forward), (noise(5, D), LENGTHS, classes()))


@row("boolean index", today=SPLITS)
def boolean_index() -> Use:
    def forward(self, x, mask):
        return self.head(torch.relu(self.layer(x[mask])).mean(0, keepdim=True))

    return Use(two_layers(forward), (noise(5, D), ragged(5), classes()))


@row("masked language model by boolean index", today=SPLITS)
def masked_language_model() -> Use:
    def forward(self, words, labels):
        hidden = torch.tanh(self.table(words))
        return F.cross_entropy(
            self.head(hidden[labels != -100]), labels[labels != -100]
        )

    labels = torch.randint(9, (SIZE, 5)).masked_fill(ragged(5), -100)
    labels[:, -1] = 3
    model = Net(forward, table=nn.Embedding(9, D), head=nn.Linear(D, 9))
    return Use(model, (torch.randint(9, (SIZE, 5)), labels), None)


@row("masked_select and where", today=SPLITS)
def masked_select() -> Use:
    def forward(self, x):
        y = self.layer(x)
        return y.masked_select(x[:, :3] > 0).sum() + y[torch.where(x[:, :3] < 0)].prod()

    return Use(Net(forward, layer=nn.Linear(D, 3)), (noise(D),), None)


def experts() -> dict[str, nn.Module]:
    layers = nn.ModuleList(nn.Linear(D, D) for _ in range(4))
    return dict(router=nn.Linear(D, 4), experts=layers, head=nn.Linear(D, 3))


@row("mixture of experts in a loop", today=SPLITS)
def experts_in_a_loop() -> Use:
    def forward(self, x):
        x = x.flatten(0, 1)
        gates, which = self.router(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(which == number)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, expert(x[token]) * gates[token, place, None])
        return self.head(out.mean(0, keepdim=True))

    return net(forward, 5, D, **experts())


@row("mixture of experts that are hit", today=SPLITS)
def experts_that_are_hit() -> Use:
    def forward(self, x):
        x = x.flatten(0, 1)
        which = self.router(x).argmax(-1)
        hit = F.one_hot(which, 4).sum(0).nonzero()
        out = torch.zeros_like(x)
        for number in hit.flatten():
            token = (which == number).nonzero().flatten()
            out = out.index_add(0, token, self.experts[int(number)](x[token]))
        return self.head(out.mean(0, keepdim=True))

    return net(forward, 5, D, **experts())


@row("length regulator by repeat_interleave", today=SPLITS)
def length_regulator() -> Use:
    """Each word is repeated as often as its duration says, as in FastSpeech."""

    def forward(self, x, times):
        x = torch.repeat_interleave(self.layer(x)[0], times[0], dim=0)
        return self.head(torch.tanh(x).mean(0, keepdim=True))

    times = torch.tensor([[1, 2, 3], [2, 0, 1], [0, 3, 3]])
    return Use(two_layers(forward), (noise(3, D), times, classes()))


@row("pooling by unique", today=SPLITS)
def pooled_by_unique() -> Use:
    def forward(self, x, group):
        names, group = group.unique(return_inverse=True)
        sums = torch.zeros(len(names), D).index_add(0, group[0], self.layer(x)[0])
        return self.head(sums.tanh().amax(0, keepdim=True))

    groups = torch.tensor([[4, 4, 7, 1], [2, 2, 2, 2], [0, 1, 0, 1]])
    return Use(two_layers(forward), (noise(4, D), groups, classes()))


@row("packed GRU", nn.GRU, today=SPLITS)
@row("packed LSTM", nn.LSTM, today=SPLITS)
def packed(kind) -> Use:
    def forward(self, x, lengths):
        words = rnn.pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=False
        )
        output, _ = rnn.pad_packed_sequence(self.body(words)[0], batch_first=True)
        return self.head(output.mean(1))

    model = Net(forward, body=kind(D, 4, batch_first=True), head=nn.Linear(4, 3))
    return Use(model, (noise(5, D), LENGTHS, classes()))


@row("nn.Transformer, evaluated", train=False)
@row("nn.Transformer, src_key_padding_mask", train=True)
def padded_transformer(*, train: bool) -> Use:
    def forward(self, source, target, mask):
        hidden = self.body(
            source, target, src_key_padding_mask=mask, memory_key_padding_mask=mask
        )
        return self.head(hidden.mean(1))

    body = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
    model = Net(forward, body=body, head=nn.Linear(8, 3)).train(train)
    return Use(model, (noise(5, 8), noise(4, 8), ~ragged(5), classes()))


@row("nn.TransformerEncoder, evaluated", train=False)
@row("nn.TransformerEncoder, padding mask", train=True)
def padded_encoder(*, train: bool) -> Use:
    def forward(self, x, mask):
        return self.head(self.body(x, src_key_padding_mask=mask)[:, 0])

    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    body = nn.TransformerEncoder(layer, 2)
    model = Net(forward, body=body, head=nn.Linear(8, 3)).train(train)
    return Use(model, (noise(5, 8), ~ragged(5), classes()))


@row(
    "dropout, and a mask left out where it hides nothing",
    drop=0.3,
    options=DIFFERENT,
    today=SPLITS,
)
@row("a mask left out where it hides nothing", today=SPLITS)
def skips_a_mask(*, drop: float = 0.0) -> Use:
    def forward(self, x, mask):
        x = F.dropout(x, p=drop) if drop else x
        hidden = None if mask.all() else mask[:, None, None, :]
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=hidden)
        return self.head(y.transpose(1, 2).flatten(2)[:, 0])

    model = Net(forward, qkv=nn.Linear(8, 24), head=nn.Linear(8, 3))
    return Use(model, (noise(5, 8), ragged(5), classes()))


@row("LayerDrop by hand, each sample its own", options=DIFFERENT, today=SPLITS)
@row("LayerDrop by hand", options=SAME)
def dropped_layers() -> Use:
    def forward(self, x):
        for layer in self.layers:
            if self.training and torch.rand([]) < 0.5:
                continue
            x = x + torch.tanh(layer(x))
        return self.head(x)

    layers = nn.ModuleList(nn.Linear(D, D) for _ in range(4))
    return net(forward, D, layers=layers, head=nn.Linear(D, 3))


@row("Newton steps until convergence", today=SPLITS)
def newton() -> Use:
    def forward(self, x):
        target = F.softplus(self.layer(x)) + 0.5
        root = torch.ones_like(target)
        while (root * root - target).abs().max() > 1e-3:
            root = (root + target / root) / 2
        return root

    return net(forward, D, layer=nn.Linear(D, 3))


@row("Huber loss by an if", today=SPLITS)
def huber_by_hand() -> Use:
    def forward(self, x, y):
        error = (self.layer(x) - y).norm()
        return 0.5 * error**2 if error < 3 else error - 0.5

    model = Net(forward, layer=nn.Linear(D, 3))
    return Use(model, (noise(D), noise(3) * torch.tensor([[0.1], [3.0], [9.0]])), None)


@row("max and sorted of Python", today=SPLITS)
def largest_by_python() -> Use:
    def forward(self, x):
        values = list(self.layer(x)[0])
        return max(values) + sorted(values)[1] * 2

    return Use(Net(forward, layer=nn.Linear(D, 4)), (noise(D),), None)


@row("statistics by numpy", today=looks("numpy"))
def through_numpy() -> Use:
    def forward(self, x):
        scale = x.detach().cpu().numpy().std(axis=-1, keepdims=True)
        return self.layer(x / torch.from_numpy(scale))

    return net(forward, D, layer=nn.Linear(D, 3))


@row("values in a log line", today=SPLITS)
def printed() -> Use:
    def forward(self, x):
        self.lines.append(f"{x.shape} {x.dtype}")
        self.lines.append(f"mean {x.mean():.3f} of {x}")
        return self.layer(x)

    return net(forward, D, layer=nn.Linear(D, 3), lines=[])


@row("greedy decoding until the end", today=SPLITS)
def decoded_greedily() -> Use:
    def forward(self, x):
        loss, word = 0, torch.zeros(x.shape[0], dtype=torch.long)
        for _ in range(6):
            x = self.cell(self.table(word), x)
            logits = self.head(x)
            word = logits.argmax(-1)
            loss = loss + logits.logsumexp(-1).sum()
            if word[0] == 3:
                break
        return loss

    parts = dict(table=nn.Embedding(4, D), cell=nn.GRUCell(D, D), head=nn.Linear(D, 4))
    return Use(Net(forward, **parts), (noise(D),), None)


@row("outputs matched by scipy", today=looks("numpy"))
def matched() -> Use:
    """A set loss: outputs are matched with targets by scipy, as DETR does."""

    def forward(self, x, y):
        from scipy.optimize import linear_sum_assignment

        out = self.layer(x)
        cost = torch.cdist(out, y)[0].detach()
        rows, columns = linear_sum_assignment(cost.numpy())
        return (out[0, rows] - y[0, columns]).square().sum()

    return Use(Net(forward, layer=nn.Linear(D, 2)), (noise(4, D), noise(4, 2)), None)


@row("nested tensor of ragged rows", today=SPLITS)
def nested() -> Use:
    def forward(self, x, length):
        rows = [each[: int(n)] for each, n in zip(x, length, strict=True)]
        ragged_rows = torch.nested.nested_tensor(rows, layout=torch.jagged)
        return self.head(self.layer(ragged_rows).to_padded_tensor(0.0).sum(1))

    return Use(two_layers(forward), (noise(5, D), LENGTHS, classes()))


@row("module chosen by a dictionary", today=SPLITS)
def dates() -> Use:
    def forward(self, x, key):
        choices = {0: self.a, 1: self.b}
        return choices[key.item()](x) if key in (0, 1) else self.a(x) + self.b(x)

    model = Net(forward, a=nn.Linear(D, 3), b=nn.Linear(D, 3))
    return Use(model, (noise(D), torch.tensor([0, 1, 2]), classes()))


FEATURES = Entries()
"""Features of torch that rewrite, compile, replay or hide what a module does."""
row = FEATURES.row


JITTED = Refused("expected modules whose tensors can be exchanged")
SPARSE = Refused("expected dense tensors, got sparse ones")
PLAIN = Refused("expected a plain torch.nn.Module")
NO_FLEX = Impossible("FlexAttention does not support backward on CPU")
ON_META = "expected parameters with values"
AVERAGE, MAXIMUM = nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d


@row("checkpoint with dropout", drop=0.5, options=SAME)
@row(
    "checkpoint, re-entrant", reentrant=True, today=Refused("Pass use_reentrant=False")
)
@row("checkpoint")
def checkpointed(*, reentrant: bool = False, drop: float = 0.0) -> Use:
    """Blocks whose activations are computed again; one of them is used twice."""

    def forward(self, x):
        for block in (*self.blocks, self.blocks[0]):
            x = x + checkpointing.checkpoint(block, x, use_reentrant=reentrant)
        return self.head(x)

    def block():
        return nn.Sequential(
            nn.Linear(D, 8), nn.Tanh(), nn.Dropout(drop), nn.Linear(8, D)
        )

    parts = dict(first=nn.Linear(D, D), blocks=nn.ModuleList(block() for _ in range(2)))

    return net(
        lambda self, x: forward(self, self.first(x)), D, **parts, head=nn.Linear(D, 3)
    )


@row("checkpoint_sequential")
def checkpointed_in_parts() -> Use:
    def forward(self, x):
        return checkpointing.checkpoint_sequential(self.body, 2, x, use_reentrant=False)

    body = nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))
    return net(forward, D, body=body)


@row(
    "checkpoint inside a checkpoint",
    today=Exact("loop", "expected a region that runs again by itself", "checkpoint"),
)
def checkpointed_twice() -> Use:
    def forward(self, x):
        def inner(y):
            return torch.tanh(self.first(y))

        def outer(y):
            return self.second(checkpointing.checkpoint(inner, y, use_reentrant=False))

        return checkpointing.checkpoint(outer, x, use_reentrant=False)

    return net(forward, D, first=nn.Linear(D, 5), second=nn.Linear(5, 3))


@row("selective checkpoint")
def selectively_checkpointed() -> Use:
    """Results of matrix products are kept, all else is computed again."""

    def forward(self, x):
        contexts = functools.partial(
            checkpointing.create_selective_checkpoint_contexts,
            [torch.ops.aten.mm.default],
        )
        return checkpointing.checkpoint(
            self.body, x, use_reentrant=False, context_fn=contexts
        )

    return net(forward, D, body=mlp())


@row("save_on_cpu")
def saved_elsewhere() -> Use:
    """What autograd saves goes through hooks, as with `save_on_cpu`."""

    def forward(self, x):
        with torch.autograd.graph.save_on_cpu():
            return self.body(x)

    return net(forward, D, body=mlp())


@row("sparse COO matrix in a buffer", "coo", today=SPARSE)
@row("sparse CSR matrix in a buffer", "csr", today=SPARSE)
def sparse_matrix(layout: str) -> Use:
    def forward(self, x):
        spread = self.graph @ self.layer(x[0])
        return torch.tanh(spread).sum(0, keepdim=True)

    use = net(forward, 5, D, layer=nn.Linear(D, 3))
    graph = torch.rand(5, 5).round().double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that sparse CSR is in beta state
        graph = graph.to_sparse_csr() if layout == "csr" else graph.to_sparse()
    use.model.register_buffer("graph", graph)
    return use


@row(
    "sparse matrix of a sample's edges",
    today=Exact(
        "loop",
        "Could not run 'aten::view' with arguments from the 'SparseCPU' backend",
    ),
)
def sparse_sample() -> Use:
    def forward(self, x, edges):
        ones = torch.ones(edges.shape[-1])
        graph = torch.sparse_coo_tensor(edges[0], ones, (5, 5))
        return torch.sparse.mm(graph, self.layer(x[0])).tanh().sum(0, keepdim=True)

    model = Net(forward, layer=nn.Linear(D, 3))
    return Use(model, (noise(5, D), torch.randint(5, (SIZE, 2, 8)), classes()))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, 8)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.layer(x).chunk(2, -1)
        return a * torch.sigmoid(b) * self.scale


@row("scripted model", whole=True, today=PLAIN)
@row("scripted submodule", whole=False, today=JITTED)
def scripted(*, whole: bool) -> Use:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        body = nn.Sequential(Gated(), nn.Linear(4, 3))
        if whole:
            return Use(torch.jit.script(body.double()), (noise(D), classes()))
        body[0] = torch.jit.script(body[0].double())
    return Use(body, (noise(D), classes()))


def in_a_sequence() -> torch.jit.ScriptModule:
    return torch.jit.script(nn.Sequential(nn.Linear(D, 4), nn.Tanh()).double())


def traced() -> torch.jit.ScriptModule:
    return torch.jit.trace(Gated().double(), torch.zeros(2, D).double())


@row("traced submodule", traced, today=JITTED)
@row("scripted submodule beside others", in_a_sequence, today=JITTED)
def jitted(make) -> Use:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        body = make()
    return Use(nn.Sequential(body, nn.Linear(4, 3)), (noise(D), classes()))


def old_square(ctx, grad):
    return 2 * ctx.saved_tensors[0] * grad


def old_linear(ctx, grad):
    x, weight, *_ = ctx.saved_tensors
    return grad @ weight, grad.mT @ x, grad.sum(0)


def saving(function):
    def forward(ctx, *inputs):
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    return forward


def affine(x, weight, bias):
    return x @ weight.t() + bias


OldSquare = losses.old_function(saving(torch.square), old_square)
OldLinear = losses.old_function(saving(affine), old_linear)
NewLinear = losses.new_function("NewLinear", affine, old_linear, **losses.RULED)
Unmapped = losses.new_function("Unmapped", affine, old_linear)


def sharing(info, in_dims, x, weight):
    assert in_dims[1] is None  # taken for granted
    return SharedWeight.apply(x.movedim(in_dims[0], 0), weight), 0


SharedWeight = losses.new_function(
    "SharedWeight",
    lambda x, weight: x @ weight.t(),
    lambda ctx, grad: old_linear(ctx, grad)[:2],
    vmap=sharing,
)


@row(
    "autograd.Function whose vmap rule shares the weight",
    SharedWeight,
    bias=False,
    today=alone("SharedWeight"),
)
@row("autograd.Function, no vmap rule", Unmapped, today=alone("Unmapped"))
@row("autograd.Function, generated vmap rule", NewLinear)
@row("autograd.Function, old style, a layer", OldLinear, today=alone("OldLinear"))
def own_function(function, *, bias: bool = True) -> Use:
    def forward(self, x):
        parts = (self.first.weight, self.first.bias)[: 1 + bias]
        return self.head(torch.tanh(function.apply(x, *parts)))

    return net(forward, D, first=nn.Linear(D, 5, bias=bias), head=nn.Linear(5, 3))


@row("autograd.Function, old style, an activation", today=alone("OldSquare"))
def own_activation() -> Use:
    def forward(self, x):
        return self.head(OldSquare.apply(self.first(x)))

    return net(forward, D, first=nn.Linear(D, 5), head=nn.Linear(5, 3))


@torch.compile(backend="eager")
def compiled_scale(x, weight):
    return torch.sin(x * weight.exp())


@torch.compile(backend="eager")
def compiled_norm(x):
    return x / (1 + x.square().mean(-1, keepdim=True))


@row("compiled function of an activation", of_parameter=False)
@row("compiled function of a parameter", of_parameter=True)
def compiled_function(*, of_parameter: bool) -> Use:
    def forward(self, x):
        x = self.layer(x)
        return compiled_scale(x, self.weight) if of_parameter else compiled_norm(x)

    parts = dict(weight=torch.zeros(3)) if of_parameter else {}
    return net(forward, D, layer=nn.Linear(D, 3), **parts)


@row("torch.compile of a model", today=PLAIN)
def compiled_model() -> Use:
    return Use(torch.compile(Gated(), backend="eager"), (noise(D), noise(4)), total)


@row("module.compile()")
def compiled_in_place() -> Use:
    model = Gated()
    model.compile(backend="eager")
    return Use(model, (noise(D), noise(4)), total)


@row("module.compile() of a layer")
def compiled_layer() -> Use:
    def forward(self, x):
        return self.head(self.body(x))

    use = net(forward, D, body=Gated(), head=nn.Linear(4, 3))
    use.model.body.compile(backend="eager")
    return use


@row("torch.cond", today=SPLITS)
def conditional() -> Use:
    def forward(self, x):
        def yes(y):
            return self.a(y)

        def no(y):
            return self.b(y).sin()

        return torch.cond(x.sum() > 0, yes, no, (x,))

    return net(forward, D, a=nn.Linear(D, 3), b=nn.Linear(D, 3))


@row("flex_attention with a captured parameter", learned=True, today=NO_FLEX)
@row("flex_attention", learned=False, today=NO_FLEX)
def flexible_attention(*, learned: bool) -> Use:
    def forward(self, x):
        from torch.nn.attention.flex_attention import flex_attention

        def score(value, b, h, i, j):
            return value + (self.bias[h] * (i - j) if learned else 0.1 * (i - j))

        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is not compiled
            y = flex_attention(q, k, v, score_mod=score)
        return self.head(y.transpose(1, 2).flatten(2)[:, 0])

    parts = dict(qkv=nn.Linear(8, 96), bias=torch.zeros(2), head=nn.Linear(32, 3))
    return net(forward, 5, 8, **parts)


@row("model on meta, no values", filled=False, today=Refused(ON_META))
@row("model on meta, values given", filled=True)
def hidden_in_meta(*, filled: bool) -> Use:
    """Built on the device `meta`, as large models are before they are loaded."""
    values = nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, 3)).state_dict()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, 3))
    return Use(model, (noise(D), classes()), values=values if filled else None)


@row("adaptive max pooling to 3", MAXIMUM, 3)
@row("adaptive average pooling to 3", AVERAGE, 3)
@row("adaptive average pooling to 1", AVERAGE, 1)
def adaptive_pooling(kind, size) -> Use:
    def forward(self, x):
        return self.head(self.pool(self.conv(x)).flatten(1))

    pool = kind(size)
    width = pool(torch.zeros(1, 4, 7, 7)).numel()
    parts = dict(conv=nn.Conv2d(2, 4, 3, padding=1), pool=pool)
    return net(forward, 2, 7, 7, **parts, head=nn.Linear(width, 3))


@row("max pooling and unpooling by indices", today=loops("aten::max_unpool2d"))
def with_indices() -> Use:
    def forward(self, x):
        x, indices = F.max_pool2d(self.conv(x), 2, return_indices=True)
        return F.max_unpool2d(x, indices, 2)

    return net(forward, 1, 4, 4, output=(2, 4, 4), conv=nn.Conv2d(1, 2, 3, padding=1))


@row("fractional max pooling", options=SAME, today=loops("aten::fractional_max_pool2d"))
def fractional_pooling() -> Use:
    def forward(self, x):
        return self.pool(self.conv(x))

    parts = dict(conv=nn.Conv2d(1, 2, 3), pool=nn.FractionalMaxPool2d(2, 3))
    return net(forward, 1, 7, 7, output=(2, 3, 3), **parts)


@row(
    "evaluated batch norm before tokens, by the loop",
    twice=True,
    options={"strategy": "loop"},
    today=Exact("loop", 'strategy="loop"'),
)
@row(
    "evaluated batch norm before tokens, chunks of one",
    twice=True,
    options={"chunk_size": 1},
)
@row("evaluated batch norm before tokens", twice=True)
def normed_and_transposed() -> Use:
    """Evaluated batch norm before tokens, whose gradient comes transposed."""

    def forward(self, x):
        tokens = self.norm(self.conv(x)).flatten(2).transpose(1, 2)
        return self.head(tokens.mean(1))

    parts = dict(conv=nn.Conv2d(2, 4, 3, padding=1), norm=nn.BatchNorm2d(4))
    model = Net(forward, **parts, head=nn.Linear(4, 3)).eval()
    return Use(model, (noise(2, 2, 2), classes()))


@row("interpolation", today=loops("aten::_upsample_nearest_exact2d.vec"))
def resized() -> Use:
    def forward(self, x):
        x = self.conv(x)
        modes = "nearest", "bilinear", "bicubic", "area", "nearest-exact"
        return sum(F.interpolate(x, size=(6, 5), mode=mode) for mode in modes)

    return net(forward, 1, 5, 5, output=(2, 6, 5), conv=nn.Conv2d(1, 2, 3))


@row("autocast switched off inside")
def in_mixed_precision() -> Use:
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
            return self.body(x)

    return net(forward, D, body=mlp())


class Labelled(torch.Tensor):
    """A subclass of tensors, which keeps its class."""


@row("subclass of tensors")
def of_a_subclass() -> Use:
    def forward(self, x):
        return self.layer(x.as_subclass(Labelled)).as_subclass(torch.Tensor)

    return net(forward, D, layer=nn.Linear(D, 3))


@row("functional_call inside the model")
def called_functionally() -> Use:
    def forward(self, x):
        weights = {"weight": self.maker(self.code).view(3, D), "bias": self.shift}
        return torch.func.functional_call(self.held[0], weights, (x,))

    parts = dict(maker=nn.Linear(4, 3 * D), code=torch.randn(4), shift=torch.zeros(3))
    with torch.device("meta"):
        held = [nn.Linear(D, 3)]
    return net(forward, D, **parts, held=held)


@row("associative_scan")
def scanned() -> Use:
    def forward(self, x):
        from torch._higher_order_ops import associative_scan

        x = self.layer(x).sigmoid()
        return associative_scan(torch.mul, x, dim=1, combine_mode="generic").sum(1)

    return net(forward, 5, D, layer=nn.Linear(D, 3))


@row("a weight read through .data")
def read_through_data() -> Use:
    def forward(self, x):
        scale = self.layer.weight.data.abs().mean()
        return self.layer(x) / scale

    return net(forward, D, layer=nn.Linear(D, 3))


@row("questions about requires_grad")
def asks_for_gradients() -> Use:
    def forward(self, x):
        y = self.layer(x)
        assert self.layer.weight.requires_grad
        return y * 2 if y.requires_grad and torch.is_grad_enabled() else y

    return net(forward, D, layer=nn.Linear(D, 3))


@row("no_grad and enable_grad inside")
def quiet_gradient() -> Use:
    def forward(self, x):
        with torch.no_grad():
            first = self.a(x)
            with torch.enable_grad():
                second = self.b(x)
        return first + second + self.a(x)

    return net(forward, D, a=nn.Linear(D, 3), b=nn.Linear(D, 3))
