"""GPU memory that training a drafter takes, by arithmetic on its settings. No torch.

Left out is what follows from the rows, whose length a worker learns of its target server.
"""

from typing import Protocol

from common.drafters.dflash.config import DrafterTable

# Of a parameter: bfloat16 and its gradient, float32 master, two float32 moments.
_BYTES_A_PARAMETER = 2 + 2 + 4 + 8
# CUDA's context, the libraries' workspaces, kernels, the pool of captured graphs.
RUNTIME_BYTES = 3 << 29
_ELEMENT_BYTES = 2
# Of a product of the head: float32 logits, and what their gradient is made of.
_LOGIT_BYTES = 6


class Shape(Protocol):
    """What a drafter takes over from its target where its own settings are 0."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def num_aux_layers(self) -> int: ...
    @property
    def table_bytes(self) -> int: ...


def num_parameters(table: DrafterTable, target: Shape) -> int:
    """Return the trained parameters, norms left out."""
    hidden = target.hidden_size
    head_dim = table.head_dim or target.head_dim
    queries = (table.num_heads or target.num_heads) * head_dim
    keys = (table.num_kv_heads or target.num_kv_heads) * head_dim
    inner = table.intermediate_size or target.intermediate_size
    layer = hidden * (2 * queries + 2 * keys + 3 * inner)
    return table.num_layers * layer + target.num_aux_layers * hidden * hidden


def worker_bytes(table: DrafterTable, target: Shape) -> int:
    """Return what a worker's GPU holds: frozen tables, weights with optimizer, one micro-step."""
    inner = table.intermediate_size or target.intermediate_size
    # What backward needs of a slot: a layer's inputs, norms, projections and the MLP's products.
    slots = table.num_anchors * table.block_size
    activations = slots * table.num_layers * (10 * target.hidden_size + 3 * inner) * _ELEMENT_BYTES
    logits = table.loss_chunk_rows * target.vocab_size * _LOGIT_BYTES
    weights = num_parameters(table, target) * _BYTES_A_PARAMETER
    return target.table_bytes + weights + activations + logits + RUNTIME_BYTES
