"""Tensors over a slot's bytes, and the buffers that rows are copied into.

The ring deals in bytes; this file gives them dtype and shape. Views live as long as the lease or
loan they come from: copy before it ends.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from common.contracts.rows import RowSchema
from common.errors import RingError
from common.ring.layout import Field, SlotLayout

_DTYPES = {
    "int32": torch.int32,
    "uint8": torch.uint8,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
}
FieldBytes = Callable[[str], memoryview]
_CUDA_HOST_REGISTER_PORTABLE = 1


def field_tensor(field: Field, memory: memoryview) -> Tensor:
    """Return a view of a field's bytes with its dtype and shape."""
    return torch.frombuffer(memory, dtype=_DTYPES[field.dtype]).view(field.shape)


def slot_tensor(layout: SlotLayout, name: str, field_bytes: FieldBytes) -> Tensor:
    """Return a view of one field of a loaned or leased slot."""
    return field_tensor(layout.fields[name], field_bytes(name))


@dataclass
class RowBuffers:
    """Device tensors that hold one row; allocated once, refilled in place."""

    token_ids: Tensor  # [T] int32
    document_ids: Tensor  # [T] int32
    position_ids: Tensor  # [T] int32
    loss_mask: Tensor  # [T] uint8
    aux_hidden_states: Tensor  # [T, L*H]

    @classmethod
    def allocate(cls, schema: RowSchema, device: torch.device, dtype: torch.dtype) -> "RowBuffers":
        """Allocate buffers for rows of a schema; features in `dtype`."""
        tokens = schema.row_tokens
        width = len(schema.target_layer_ids) * schema.hidden_size
        return cls(
            token_ids=torch.zeros(tokens, dtype=torch.int32, device=device),
            document_ids=torch.zeros(tokens, dtype=torch.int32, device=device),
            position_ids=torch.zeros(tokens, dtype=torch.int32, device=device),
            loss_mask=torch.zeros(tokens, dtype=torch.uint8, device=device),
            aux_hidden_states=torch.zeros(tokens, width, dtype=dtype, device=device),
        )

    def copy_from_slot(self, layout: SlotLayout, field_bytes: FieldBytes) -> None:
        """Copy a leased slot in; asynchronous on CUDA where the segment is pinned."""
        for name, tensor in vars(self).items():
            tensor.copy_(slot_tensor(layout, name, field_bytes), non_blocking=True)

    def copy_from(self, other: "RowBuffers") -> None:
        """Copy another set of buffers in, on the current stream."""
        for name, tensor in vars(self).items():
            tensor.copy_(getattr(other, name), non_blocking=True)


def pin(memory: memoryview) -> None:
    """Register a mapping with CUDA in this process, so that its copies are asynchronous."""
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    torch.cuda.init()
    code = torch.cuda.cudart().cudaHostRegister(
        address, memory.nbytes, _CUDA_HOST_REGISTER_PORTABLE
    )
    if int(code) != 0:
        raise RingError(
            f"cudaHostRegister of {memory.nbytes} bytes failed with code {int(code)}; "
            f"lower ring.num_slots, or raise the memory-lock limit"
        )


def unpin(memory: memoryview) -> None:
    """Undo `pin`; call before the mapping is closed."""
    torch.cuda.cudart().cudaHostUnregister(torch.frombuffer(memory, dtype=torch.uint8).data_ptr())
