"""Tensors over a slot's bytes, the buffers that rows are copied into, and the copy.

The ring deals in bytes; this file gives them dtype and shape. Views live as long as the lease or
loan they come from: copy before it ends.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from common.contracts.ring_messages import NackReason
from common.contracts.rows import RowSchema
from common.float8 import dequantise
from common.ring import cuda
from common.ring.layout import PAGE_BYTES, Field, SlotLayout
from common.ring.lease import Lease
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
    return field_of(_slot_bytes(memory, field.offset, field.num_bytes), field)


def field_of(raw: Tensor, field: Field) -> Tensor:
    """Return bytes [num_bytes] as a field's dtype and shape."""
    return raw.view(_DTYPES[field.dtype]).view(field.shape)


def _slot_bytes(memory: SlotMemory, offset: int, num_bytes: int) -> Tensor:
    if memory.gpu is None:
        return torch.frombuffer(memory.view[offset : offset + num_bytes], dtype=torch.uint8)
    return torch.as_tensor(
        _DeviceBytes(memory, offset, num_bytes), device=torch.device("cuda", memory.gpu)
    )


def _copy_from_slot(to: Tensor, memory: SlotMemory, offset: int) -> None:
    """Copy bytes of a slot; on CUDA on the current stream, from whichever GPU they lie on."""
    if memory.gpu is None:
        to.copy_(_slot_bytes(memory, offset, to.numel()), non_blocking=True)
    else:
        stream = torch.cuda.current_stream().cuda_stream
        cuda.copy(to.data_ptr(), memory.address + offset, to.numel(), stream)


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
    last_hidden_states_normed: Tensor | None = None  # [T, H], where rows carry them

    @classmethod
    def allocate(cls, schema: RowSchema, device: torch.device, dtype: torch.dtype) -> "RowBuffers":
        """Allocate buffers for rows of a schema; features in `dtype`."""
        tokens, hidden = schema.row_tokens, schema.hidden_size
        width = len(schema.target_layer_ids) * hidden
        last = None
        if schema.has_last_hidden_states_normed:
            last = torch.zeros(tokens, hidden, dtype=dtype, device=device)
        return cls(
            token_ids=torch.zeros(tokens, dtype=torch.int32, device=device),
            document_ids=torch.zeros(tokens, dtype=torch.int32, device=device),
            position_ids=torch.zeros(tokens, dtype=torch.int32, device=device),
            loss_mask=torch.zeros(tokens, dtype=torch.uint8, device=device),
            aux_hidden_states=torch.zeros(tokens, width, dtype=dtype, device=device),
            last_hidden_states_normed=last,
        )

    def copy_from(self, other: "RowBuffers") -> None:
        """Copy another set of buffers in, on the current stream."""
        for name, tensor in vars(self).items():
            if tensor is not None:
                tensor.copy_(getattr(other, name), non_blocking=True)


class StagingBuffers:
    """Where one leased slot is copied to: its payload in one piece, and what proves the copy."""

    def __init__(self, layout: SlotLayout, device: torch.device, dtype: torch.dtype) -> None:
        """Allocate for rows of a layout on `device`, features in `dtype`."""
        self._layout = layout
        self._payload = torch.zeros(layout.payload_bytes, dtype=torch.uint8, device=device)
        tokens = layout.fields["token_ids"]
        last = "last_hidden_states_normed"
        on_cuda = device.type == "cuda"
        self._proof = torch.zeros(
            PAGE_BYTES + tokens.num_bytes, dtype=torch.uint8, pin_memory=on_cuda
        )
        self.row = RowBuffers(
            token_ids=self._field("token_ids"),
            document_ids=self._field("document_ids"),
            position_ids=self._field("position_ids"),
            loss_mask=self._field("loss_mask"),
            aux_hidden_states=self._field("aux_hidden_states").to(dtype),
            last_hidden_states_normed=(
                self._field(last).to(dtype) if last in layout.fields else None
            ),
        )

    def copy_payload(self, memory: SlotMemory) -> None:
        """Copy a leased slot's payload; on CUDA it is enqueued on the current stream."""
        _copy_from_slot(self._payload, memory, PAGE_BYTES)
        self._widen()

    def copy_proof(self, memory: SlotMemory) -> None:
        """Bring the copy's token ids to the host, then the header where only the GPU reads it (R1)."""
        self._proof[PAGE_BYTES:].copy_(self._raw("token_ids"), non_blocking=True)
        if memory.gpu is not None:
            _copy_from_slot(self._proof[:PAGE_BYTES], memory, 0)

    @property
    def header(self) -> memoryview:
        """The header page as it was behind a copy from GPU memory."""
        return memoryview(self._proof.numpy())[:PAGE_BYTES]

    @property
    def token_ids(self) -> memoryview:
        """The copy's token ids, on the host."""
        return memoryview(self._proof.numpy())[PAGE_BYTES:]

    def _widen(self) -> None:
        """Bring the features from the slot's element type into the row's, where they differ."""
        stored, features = self._field("aux_hidden_states"), self.row.aux_hidden_states
        if "aux_scales" in self._layout.fields:
            dequantise(stored, self._field("aux_scales"), features)
        elif stored.dtype != features.dtype:
            features.copy_(stored)
        last = self.row.last_hidden_states_normed
        if last is not None and last.dtype != torch.bfloat16:
            last.copy_(self._field("last_hidden_states_normed"))

    def _raw(self, name: str) -> Tensor:
        field = self._layout.fields[name]
        start = field.offset - PAGE_BYTES
        return self._payload[start : start + field.num_bytes]

    def _field(self, name: str) -> Tensor:
        return field_of(self._raw(name), self._layout.fields[name])


class RowCopier:
    """Copies leased slots into staging buffers; on CUDA on streams of its own, several under way.

    Proofs have a stream to themselves: a small copy to the host can wait for a large one of another
    process, and the next payload must not wait behind it.
    """

    def __init__(self, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self._streams = (torch.cuda.Stream(device), torch.cuda.Stream(device)) if on_cuda else None

    def start(self, lease: Lease, buffers: StagingBuffers) -> "RowCopy":
        """Begin a copy; `RowCopy.finish` tells how it went."""
        if self._streams is None:
            buffers.copy_payload(lease.memory)
            buffers.copy_proof(lease.memory)
            return RowCopy(lease, buffers, None)
        payloads, proofs = self._streams
        with torch.cuda.stream(payloads):
            buffers.copy_payload(lease.memory)
        proofs.wait_stream(payloads)
        with torch.cuda.stream(proofs):
            buffers.copy_proof(lease.memory)
            return RowCopy(lease, buffers, proofs.record_event())

    def wait_for_readers(self) -> None:
        """Later copies come after what the calling thread's stream has been given to do."""
        if self._streams is not None:
            self._streams[0].wait_stream(torch.cuda.current_stream())


@dataclass(frozen=True)
class RowCopy:
    """A copy that may be under way."""

    lease: Lease
    buffers: StagingBuffers
    event: torch.cuda.Event | None

    def finish(self) -> NackReason | None:
        """Wait for the copy, then check it; return what is wrong with it, or None.

        A torn copy means that the lease is over: its nack is stale and costs no attempt.
        """
        lease = self.lease
        if self.event is not None:
            self.event.synchronize()
        # SYNC POINT (R1): the header is read after the copy; only then is the copy believed.
        page = self.buffers.header if lease.memory.gpu is not None else None
        if not lease.is_intact(self.buffers.token_ids, page):
            return "torn"
        return None if lease.is_payload_intact(page) else "corrupt"
