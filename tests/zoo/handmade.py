"""Architectures as people write them: sharing, reshaping, indexing, solving."""

import functools

import torch
from torch import nn
from torch.nn import functional as F

from tests import losses
from tests.zoo.entries import (
    SIZE,
    D,
    Entries,
    Net,
    Use,
    classes,
    loops,
    mlp,
    net,
    noise,
    ragged,
    total,
)

ENTRIES = Entries()
row = ENTRIES.row


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
