"""Losses whose Python looks at values: branches, lengths and loops of each sample."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import rnn

from tests.zoo.entries import (
    DIFFERENT,
    SAME,
    SIZE,
    SPLITS,
    D,
    Entries,
    Net,
    Use,
    classes,
    looks,
    net,
    noise,
    ragged,
    two_layers,
)

ENTRIES = Entries()
row = ENTRIES.row

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
