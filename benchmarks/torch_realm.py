"""A REALM training step written plainly in PyTorch: the other side of `realm_step.py`.

The same networks, retrieval, loss and optimiser as `realm_jax`, with scaled_dot_product_attention, `torch.autocast` and
the fused AdamW. Modules are called like the parameters of realm_jax, so that weights can be copied by name.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

NEG_INF = -1e9
NO_CORRECTION = 1e9  # a step at which Adam's bias correction is 1, as in BERT's optimiser, which has none


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the networks and of a step. needed: compute the last layer at needed positions only."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    feed_forward: int
    max_length: int
    projection: int
    candidates: int
    special: tuple[int, int]
    needed: bool


class Index(NamedTuple):
    """vectors [rows, projection] float32; document rows in int64: ids [rows, length], lengths, title_lengths [rows]."""

    vectors: Tensor
    ids: Tensor
    lengths: Tensor
    title_lengths: Tensor


class Layer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.heads = sizes.heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.attention_output = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width, eps=1e-12)
        self.intermediate = nn.Linear(width, sizes.feed_forward)
        self.output = nn.Linear(sizes.feed_forward, width)
        self.output_norm = nn.LayerNorm(width, eps=1e-12)

    def forward(self, queries: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        def split(x: Tensor) -> Tensor:
            return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        query, key, value = split(self.query(queries)), split(self.key(keys)), split(self.value(keys))
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None])
        attended = self.attention_output(attended.transpose(1, 2).flatten(2))
        x = self.attention_norm(queries + attended)
        return self.output_norm(x + self.output(F.gelu(self.intermediate(x), approximate="tanh")))


class Bert(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.needed = sizes.needed
        self.words = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.max_length, sizes.width)
        self.segments = nn.Embedding(2, sizes.width)
        self.embedding_norm = nn.LayerNorm(sizes.width, eps=1e-12)
        self.layers = [Layer(sizes) for _ in range(sizes.layers)]
        for number, layer in enumerate(self.layers):
            self.add_module(f"layer_{number}", layer)

    def forward(self, ids: Tensor, segments: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        """Hidden states of the last layer at `positions` [batch, m] → [batch, m, width]."""
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.embedding_norm(self.words(ids) + self.segments(segments) + self.positions(places))
        for layer in self.layers[:-1]:
            x = layer(x, x, mask)
        if self.needed:
            return self.layers[-1](pick(x, positions), x, mask)
        return pick(self.layers[-1](x, x, mask), positions)


class Embedder(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.bert = Bert(sizes)
        self.pooler = nn.Linear(sizes.width, sizes.width)
        self.projection = nn.Linear(sizes.width, sizes.projection)
        self.projection_norm = nn.LayerNorm(sizes.projection, eps=1e-12)

    def forward(self, ids: Tensor, segments: Tensor, mask: Tensor) -> Tensor:
        """→ vectors [batch, projection]."""
        first = torch.zeros((len(ids), 1), dtype=torch.long, device=ids.device)
        hidden = self.bert(ids, segments, mask, first)[:, 0]
        return self.projection_norm(self.projection(torch.tanh(self.pooler(hidden)))).float()


class Reader(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.bert = Bert(sizes)
        self.mlm_transform = nn.Linear(sizes.width, sizes.width)
        self.mlm_norm = nn.LayerNorm(sizes.width, eps=1e-12)
        self.mlm_bias = nn.Parameter(torch.zeros(sizes.vocabulary))

    def forward(self, ids: Tensor, segments: Tensor, mask: Tensor, positions: Tensor, targets: Tensor) -> Tensor:
        """→ log p(target) [batch, m]."""
        hidden = self.bert(ids, segments, mask, positions)
        hidden = self.mlm_norm(F.gelu(self.mlm_transform(hidden), approximate="tanh"))
        logits = F.linear(hidden, self.bert.words.weight, self.mlm_bias)
        return -F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)


class Realm(nn.Module):
    """Three networks; the call gives the loss of a batch."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.query_embedder, self.document_embedder, self.reader = Embedder(sizes), Embedder(sizes), Reader(sizes)

    def forward(self, batch: dict[str, Tensor], index: Index) -> Tensor:
        """−log Σ_z p(z|x) p(y|z,x), mean over examples; batch as in `realm_jax`."""
        query, query_length = batch["query"], batch["query_length"]
        mask = within(query_length, query.shape[1])
        queries = self.query_embedder(query, torch.zeros_like(query), mask)
        rows, valid = self.retrieve(queries.detach(), batch, index)
        documents = tuple(part[rows] for part in index[1:])
        scores, log_p = self.score(queries, documents), self.read(batch, documents)
        valid = F.pad(valid, (1, 0), value=True)
        prior = F.log_softmax(scores.masked_fill(~valid, NEG_INF), dim=-1)
        reading = (log_p.float() * batch["weights"][:, None]).sum(-1)
        counted = batch["weights"].amax(-1)
        return -(torch.logsumexp(prior + reading, -1) * counted).sum() / counted.sum()

    @torch.no_grad()
    def retrieve(self, queries: Tensor, batch: dict[str, Tensor], index: Index) -> tuple[Tensor, Tensor]:
        """Rows [batch, k − 1] of the best documents that are not the example's own, and which of them are valid."""
        with torch.autocast(queries.device.type, enabled=False):
            rows = torch.topk(queries @ index.vectors.T, self.sizes.candidates).indices
        found = contains(index.ids[rows], batch["sentence"], batch["sentence_length"])
        own = (rows == batch["own_row"][:, None]) | found
        order = torch.argsort(own.int(), dim=1, stable=True)[:, : self.sizes.candidates - 1]
        return rows.gather(1, order), ~own.gather(1, order)

    def score(self, queries: Tensor, documents: tuple[Tensor, ...]) -> Tensor:
        """Inner products, null document first: [batch, k]."""
        vectors = self.embed(*(part.flatten(0, 1) for part in documents)).unflatten(0, (len(queries), -1))
        null = self.embed(*self.null_passages(1, documents[0])).expand(len(queries), 1, -1)
        every = torch.cat([null, vectors], dim=1)
        return (queries[:, None] * every).sum(-1)

    def embed(self, ids: Tensor, lengths: Tensor, titles: Tensor) -> Tensor:
        """Document rows to vectors."""
        length = ids.shape[1]
        return self.document_embedder(ids, document_segments(lengths, titles, length), within(lengths, length))

    def read(self, batch: dict[str, Tensor], documents: tuple[Tensor, ...]) -> Tensor:
        """log p(y_j|z,x), null document first and at its own length: [batch, k, m]."""
        null = tuple(part[:, None] for part in self.null_passages(len(batch["query"]), documents[0]))
        return torch.cat([self._read(batch, null), self._read(batch, documents)], dim=1)

    def _read(self, batch: dict[str, Tensor], documents: tuple[Tensor, ...]) -> Tensor:
        joint = join(batch["query"], batch["query_length"], *documents)
        repeats = documents[0].shape[1]
        positions, targets = (batch[name].repeat_interleave(repeats, dim=0) for name in ("positions", "targets"))
        log_p = self.reader(*(part.flatten(0, 1) for part in joint), positions, targets)
        return log_p.view(-1, repeats, log_p.shape[-1])

    def null_passages(self, batch: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        cls, sep = self.sizes.special
        ids = like.new_tensor([cls, sep, sep]).expand(batch, 3)
        return ids, like.new_full((batch,), 3), like.new_zeros(batch)


def pick(x: Tensor, positions: Tensor) -> Tensor:
    """x [batch, length, width] at positions [batch, m]."""
    return x.gather(1, positions[..., None].expand(-1, -1, x.shape[-1]))


def within(lengths: Tensor, length: int) -> Tensor:
    """True on the first `lengths` of `length` places."""
    return torch.arange(length, device=lengths.device) < lengths[..., None]


def document_segments(lengths: Tensor, titles: Tensor, length: int) -> Tensor:
    place = torch.arange(length, device=lengths.device)
    return ((place >= titles[..., None] + 2) & (place < lengths[..., None])).long()


def join(query: Tensor, query_lengths: Tensor, ids: Tensor, lengths: Tensor, titles: Tensor) -> tuple[Tensor, ...]:
    """`[CLS] query [SEP] body [SEP]`: ids, segments and mask [batch, k, joint]."""
    width = ids.shape[-1]
    place = torch.arange(query.shape[1] + width - 2, device=ids.device)
    in_body = (place - query_lengths[:, None])[:, None]
    offset = titles + 2
    body = ids.gather(-1, (in_body + offset[..., None]).clamp(0, width - 1))
    mask = place < (query_lengths[:, None] + lengths - offset)[..., None]
    is_body = (in_body >= 0) & mask
    front = F.pad(query, (0, width - 2))[:, None] * mask
    return torch.where(is_body, body, front), is_body.long(), mask


def contains(documents: Tensor, phrase: Tensor, lengths: Tensor) -> Tensor:
    """Whether the phrase [batch, p] occurs in documents [batch, k, d]: [batch, k]."""
    width = phrase.shape[1]
    windows = F.pad(documents, (0, width - 1), value=-1).unfold(-1, width, 1)
    same = (windows == phrase[:, None, None]) | ~within(lengths, width)[:, None, None]
    return same.all(-1).any(-1) & (lengths > 0)[:, None]


def copy_weights(model: nn.Module, params: Any) -> None:
    """The weights of realm_jax, by name; those that a step does not use (the span head) are left out."""
    found = dict(_named(params, ""))
    model.load_state_dict({name: torch.tensor(np.asarray(found[name])) for name in model.state_dict()})


def _named(tree: Any, prefix: str) -> Any:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _named(value, f"{prefix}{name}.")
        elif name == "kernel":
            yield f"{prefix}weight", value.T
        else:
            yield prefix + {"embedding": "weight", "scale": "weight"}.get(name, name), value


class Trainer:
    """One step after another: loss, gradient, clipping, AdamW. mode: None for eager, else of `torch.compile`."""

    def __init__(self, model: Realm, mode: str | None, bfloat16: bool, decay: float, clip: float) -> None:
        self.model, self.bfloat16, self.clip = model, bfloat16, clip
        self.loss = model if mode is None else torch.compile(model, mode=mode)
        self.parameters = list(model.parameters())
        plain = [p for name, p in model.named_parameters() if name.endswith("bias") or "norm." in name]
        decayed = [p for name, p in model.named_parameters() if not (name.endswith("bias") or "norm." in name)]
        groups = [{"params": plain, "weight_decay": 0.0}, {"params": decayed, "weight_decay": decay}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.999), eps=1e-6, fused=True)
        for p in self.parameters:
            step = torch.tensor(NO_CORRECTION, device=p.device)
            self.optimizer.state[p] = {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}

    def step(self, batch: dict[str, Tensor], index: Index, learning_rate: float) -> Tensor:
        """The loss, after its gradient has been followed."""
        loss = self.gradient(batch, index)
        self.update(learning_rate)
        return loss

    def gradient(self, batch: dict[str, Tensor], index: Index) -> Tensor:
        with torch.autocast(index.vectors.device.type, torch.bfloat16, enabled=self.bfloat16):
            loss = self.loss(batch, index)
        loss.backward()
        return loss.detach()

    def update(self, learning_rate: float) -> None:
        nn.utils.clip_grad_norm_(self.parameters, self.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradient_norm(self) -> Tensor:
        """In float64: PyTorch's own norm of a large tensor is off by 1e-4 on a CPU."""
        return torch.stack([p.grad.double().square().sum() for p in self.parameters]).sum().sqrt()
