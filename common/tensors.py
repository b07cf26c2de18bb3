"""Tensors over a slot's bytes, and the buffers that rows are copied into.

The ring deals in bytes; this file gives them dtype and shape. Views live as long as the lease or
loan they come from: copy before it ends.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from common.contracts.rows import RowSchema
from common.ring.layout import SlotLayout
from common.ring.slot_memory import SlotMemory

_DTYPES = {
    "int32": torch.int32,
    "uint8": torch.uint8,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


def slot_tensor(layout: SlotLayout, name: str, memory: SlotMemory) -> Tensor:
    """Return a view of one field of a loaned or leased slot, on the device where the slot lies."""
    field = layout.fields[name]
    if memory.gpu is None:
        view = memory.view[field.offset : field.offset + field.num_bytes]
        raw = torch.frombuffer(view, dtype=torch.uint8)
    else:
        raw = torch.as_tensor(
            _DeviceBytes(memory, field.offset, field.num_bytes),
            device=torch.device("cuda", memory.gpu),
        )
    return raw.view(_DTYPES[field.dtype]).view(field.shape)


class _DeviceBytes:
    """GPU memory that is not torch's; the tensor made of it keeps this, and this the mapping."""

    def __init__(self, memory: SlotMemory, offset: int, num_bytes: int) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (memory.address + offset, False),
            "version": 3,
            "strides": None,
        }


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

    def copy_from_slot(self, layout: SlotLayout, memory: SlotMemory) -> None:
        """Copy a leased slot in; on CUDA it is enqueued on the current stream."""
        for name, tensor in vars(self).items():
            tensor.copy_(slot_tensor(layout, name, memory), non_blocking=True)

    def copy_from(self, other: "RowBuffers") -> None:
        """Copy another set of buffers in, on the current stream."""
        for name, tensor in vars(self).items():
            tensor.copy_(getattr(other, name), non_blocking=True)
