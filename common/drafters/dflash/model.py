"""The DFlash network: Qwen3-style layers whose keys are the fused context and the block itself.

    c = hidden_norm(fc(aux hidden states))         once, shared by all layers
    layer: q from the block; k, v from [context c | block], same projections for both
    out = norm(...)                                 the target's frozen head makes logits of it

Parameter names are those of the published checkpoints. Positions restart in each document; slot k
of a block has the anchor's position + k.

Every slot but the first of a block has the mask token's embedding, so the first layer projects A + 1
distinct rows and spreads the results: A * (S - 1) products are the same one. Nothing asks for slot 0
behind the last layer, which goes on without it once it has made its keys.

T context tokens, H hidden, L kept target layers, A blocks of S slots, Q = A * S, n heads, d head width,
R = Q query rows, or A * (S - 1) in the last layer.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from common.drafters.dflash.config import DrafterSpec

KeysValues = tuple[Tensor, Tensor]
Attend = Callable[[Tensor, KeysValues, KeysValues], Tensor]
"""(q [n_h, R, d], k, v of the context [n_kv, T, d], k, v of the blocks [n_kv, Q, d]) -> [n_h, R, d]."""
Rotary = tuple[Tensor, Tensor]
Spread = Callable[[Tensor], Tensor]
"""From rows that are computed on to block rows, in the last dimension but one."""
Products = Callable[[Tensor, Sequence[Tensor]], list[Tensor]]
"""(rows [M, K], weights [N_i, K] each) -> their products [M, N_i]."""


def plain_products(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Multiply in the tensors' own type."""
    return [nn.functional.linear(x, weight) for weight in weights]


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class DraftAttention(nn.Module):
    """Block queries over context and block keys; the context never passes q_proj or o_proj."""

    def __init__(self, spec: DrafterSpec, products: Products) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.products = products
        hidden, width = spec.hidden_size, spec.head_dim
        self.q_proj = nn.Linear(hidden, spec.num_heads * width, bias=False)
        self.k_proj = nn.Linear(hidden, spec.num_kv_heads * width, bias=False)
        self.v_proj = nn.Linear(hidden, spec.num_kv_heads * width, bias=False)
        self.o_proj = nn.Linear(spec.num_heads * width, hidden, bias=False)
        self.q_norm = RMSNorm(width, spec.rms_norm_eps)
        self.k_norm = RMSNorm(width, spec.rms_norm_eps)

    def project(self, x: Tensor) -> list[Tensor]:
        """Return what rows x are projected to for queries, keys and values."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        return self.products(x, [projection.weight for projection in projections])

    def arrange(self, k: Tensor, v: Tensor, rotary: Rotary, spread: Spread) -> KeysValues:
        """Return normed and rotated keys, and values, [n_kv, rows, d] of projected rows."""
        return rotate(spread(self.k_norm(self._split(k))), rotary), spread(self._split(v))

    def queries(self, q: Tensor, rotary: Rotary, spread: Spread) -> Tensor:
        """Return normed and rotated queries [n_h, R, d] of projected rows."""
        return rotate(spread(self.q_norm(self._split(q))), rotary)

    def merge(self, heads: Tensor) -> Tensor:
        """Return [R, H] from attention output [n_h, R, d]."""
        return self.products(heads.transpose(0, 1).flatten(1), [self.o_proj.weight])[0]

    def _split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], -1, self.head_dim).transpose(0, 1)


class DraftMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, spec: DrafterSpec, products: Products) -> None:
        super().__init__()
        self.products = products
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.products(x, [self.gate_proj.weight, self.up_proj.weight])
        return self.products(nn.functional.silu(gate) * up, [self.down_proj.weight])[0]


class DraftLayer(nn.Module):
    """One pre-norm decoder layer over the block stream."""

    def __init__(self, spec: DrafterSpec, products: Products) -> None:
        super().__init__()
        self.self_attn = DraftAttention(spec, products)
        self.mlp = DraftMLP(spec, products)
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        context: KeysValues,
        rotary: Rotary,
        attend: Attend,
        spread: Spread,
        keep: Spread,
    ) -> Tensor:
        """Return block rows [R, H] of rows x: `spread` makes block rows of them, `keep` takes R of these."""
        q, k, v = self.self_attn.project(self.input_layernorm(x))
        block = self.self_attn.arrange(k, v, rotary, spread)
        kept_rotary = (keep(rotary[0]), keep(rotary[1]))
        queries = self.self_attn.queries(q, kept_rotary, lambda rows: keep(spread(rows)))
        heads = attend(queries, context, block)
        x = keep(spread(x)) + self.self_attn.merge(heads)
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlashDrafter(nn.Module):
    """The drafter without embedding and head, which are the target's."""

    inv_freq: Tensor

    def __init__(self, spec: DrafterSpec, products: Products = plain_products) -> None:
        super().__init__()
        self.spec = spec
        self.products = products
        num_aux = len(spec.target_layer_ids)
        self.fc = nn.Linear(num_aux * spec.hidden_size, spec.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(spec, products) for _ in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        inv_freq, self.rotary_scale = _rotary_constants(spec)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def fuse(self, aux_hidden_states: Tensor) -> Tensor:
        """Return context rows c [T, H] from aux hidden states [T, L*H]."""
        return self.hidden_norm(self.products(aux_hidden_states, [self.fc.weight])[0])

    def rotary(self, positions: Tensor, dtype: torch.dtype) -> Rotary:
        """Return cos and sin [rows, d] for positions [rows]."""
        cos, sin = rotary_table(positions, self.inv_freq, self.rotary_scale)
        return cos.to(dtype), sin.to(dtype)

    def context_keys_values(self, context: Tensor, positions: Tensor) -> list[KeysValues]:
        """Return each layer's keys and values [n_kv, T, d] of fused context rows [T, H]."""
        rotary = self.rotary(positions, context.dtype)
        layers = [layer.self_attn for layer in self.layers]
        # One wide product: each layer's is too narrow to fill a GPU.
        weights = [proj.weight for layer in layers for proj in (layer.k_proj, layer.v_proj)]
        (joined,) = self.products(context, [torch.cat(weights)])
        parts = joined.chunk(len(weights), -1)
        return [
            layer.arrange(k, v, rotary, same_rows)
            for layer, k, v in zip(layers, parts[::2], parts[1::2], strict=True)
        ]

    def forward(
        self,
        aux_hidden_states: Tensor,  # [T, L*H]
        position_ids: Tensor,  # [T]
        block_inputs: Tensor,  # [A + 1, H]: the anchors' embeddings, then the mask token's
        block_position_ids: Tensor,  # [Q]
        attends: Sequence[Attend],  # one a layer
    ) -> Tensor:
        """Return the draft rows' final hidden states [A * (S - 1), H], normed."""
        context = self.fuse(aux_hidden_states)
        keys_values = self.context_keys_values(context, position_ids)
        return self.run_blocks(block_inputs, block_position_ids, keys_values, attends)

    def run_blocks(
        self,
        block_inputs: Tensor,  # [A + 1, H]
        block_position_ids: Tensor,  # [Q]
        context: list[KeysValues],
        attends: Sequence[Attend],  # one a layer
    ) -> Tensor:
        """Return [A * (S - 1), H] given the context's keys and values of every layer."""
        x = block_inputs
        rotary = self.rotary(block_position_ids, x.dtype)
        size, last = self.spec.block_size, len(self.layers) - 1
        parts = zip(self.layers, context, attends, strict=True)
        for number, (layer, keys_values, attend) in enumerate(parts):
            spread = partial(spread_blocks, size) if number == 0 else same_rows
            keep = partial(draft_rows, size) if number == last else same_rows
            x = layer(x, keys_values, rotary, attend, spread, keep)
        return self.norm(x)


@torch.library.custom_op("ringdraft::rotary_table", mutates_args=())
def rotary_table(positions: Tensor, inv_freq: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return scaled cos and sin [rows, d] in float32, made once: fused, each use would make them again."""
    angles = positions.float()[:, None] * inv_freq[None]
    angles = torch.cat([angles, angles], -1)
    return angles.cos() * scale, angles.sin() * scale


@rotary_table.register_fake
def _(positions: Tensor, inv_freq: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    del scale
    shape = (len(positions), 2 * len(inv_freq))
    cos, sin = (inv_freq.new_empty(shape, dtype=torch.float32) for _ in range(2))
    return cos, sin


def same_rows(x: Tensor) -> Tensor:
    """Return block rows as they are."""
    return x


def spread_blocks(block_size: int, x: Tensor) -> Tensor:
    """Return block rows [..., A * S, w] of distinct rows [..., A + 1, w]: one anchor's, then the last's."""
    anchors, mask = x[..., :-1, None, :], x[..., -1:, None, :]
    shape = (*anchors.shape[:-2], block_size - 1, anchors.shape[-1])
    return torch.cat([anchors, mask.expand(shape)], -2).flatten(-3, -2)


def draft_rows(block_size: int, x: Tensor) -> Tensor:
    """Drop slot 0, which is never supervised: [..., A * S, w] -> [..., A * (S - 1), w]."""
    return x.unflatten(-2, (-1, block_size))[..., 1:, :].flatten(-3, -2)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate [n, rows, d] by half-rotation (NeoX) rotary embedding."""
    cos, sin = rotary
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def _rotary_constants(spec: DrafterSpec) -> tuple[Tensor, float]:
    """Return inverse frequencies [d/2] and the scale of cos and sin.

    Taken from the class that serves published checkpoints, so that every rotary type means here
    what it means there.
    """
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Config, Qwen3RotaryEmbedding

    config = Qwen3Config(
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_position_embeddings,
        rope_parameters=dict(spec.rope_parameters),
    )
    rotary = Qwen3RotaryEmbedding(config)
    return rotary.inv_freq.detach().clone().float(), float(rotary.attention_scaling)
