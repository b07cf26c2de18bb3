"""Runs the target over a packed row and writes what a drafter needs into a slot."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from common.errors import NonFiniteTensorError
from common.float8 import quantise
from common.ring.layout import SlotLayout
from common.ring.owner import WritableSlot
from common.ring.slot_memory import SlotMemory
from common.target.features import FeatureTap, RowFeatures, run_row
from common.tensors import slot_tensor
from services.target_server.packing import PackedRow

_SMALL_FIELDS = ("token_ids", "document_ids", "position_ids", "loss_mask")


@dataclass(frozen=True)
class RowCopies:
    """Copies into a slot that may still be under way, and what they read from."""

    row: PackedRow
    features: RowFeatures
    is_finite: Tensor  # [] bool on the host, valid after the event
    event: torch.cuda.Event | None

    def wait(self) -> None:
        """Return when the slot is filled; raise `NonFiniteTensorError` for NaN and infinity."""
        if self.event is not None:
            self.event.synchronize()
        if not self.is_finite:
            samples = [document.sample_id for document in self.row.documents]
            raise NonFiniteTensorError(
                f"row {self.row.sequence} (samples {samples}): the target's hidden states hold NaN "
                f"or infinity; run the target in bfloat16 or float32"
            )


class Capture:
    """One target on one device; not for use from two threads."""

    def __init__(
        self, model: PreTrainedModel, tap: FeatureTap, layout: SlotLayout, *, is_packed: bool
    ) -> None:
        self._model = model
        self._tap = tap
        self._layout = layout
        self._is_packed = is_packed
        self._device = next(model.parameters()).device
        self._stream = torch.cuda.Stream() if self._device.type == "cuda" else None
        is_float8 = layout.schema.aux_dtype == "float8_e4m3fn"
        self._filler = Float8Filler(layout) if is_float8 else Bfloat16Filler(layout)

    def write(self, row: PackedRow, slot: WritableSlot) -> RowCopies:
        """Run the target and fill every field of the slot; wait for the result before publishing."""
        for name in _SMALL_FIELDS:
            slot.field(name)[:] = memoryview(getattr(row, name)).cast("B")
        used = row.used_tokens
        features = run_row(
            self._model,
            self._tap,
            torch.from_numpy(row.token_ids[:used]).to(self._device),
            torch.from_numpy(row.position_ids[:used]).to(self._device),
            is_packed=self._is_packed,
        )
        is_finite = torch.stack([torch.isfinite(x).all() for x in features if x is not None]).all()
        if self._stream is None:
            self._fill(slot.memory, features)
            return RowCopies(row, features, is_finite, None)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._fill(slot.memory, features)
            told = torch.empty((), dtype=torch.bool, pin_memory=True)
            told.copy_(is_finite, non_blocking=True)
            event = self._stream.record_event(torch.cuda.Event(blocking=True))
        return RowCopies(row, features, told, event)

    def _fill(self, memory: SlotMemory, features: RowFeatures) -> None:
        self._filler.fill(memory, features.aux_hidden_states)
        if features.last_hidden_states_normed is not None:
            last = slot_tensor(self._layout, "last_hidden_states_normed", memory)
            fill_with_zeros_behind(last, features.last_hidden_states_normed)


class Bfloat16Filler:
    """Copies features into slots."""

    def __init__(self, layout: SlotLayout) -> None:
        self._layout = layout

    def fill(self, memory: SlotMemory, features: Tensor) -> None:
        """Write features [used, L*H], and zeros over what an older row left behind them."""
        fill_with_zeros_behind(slot_tensor(self._layout, "aux_hidden_states", memory), features)


class Float8Filler:
    """Turns features into float8 on the target's device, straight into slots that lie there."""

    def __init__(self, layout: SlotLayout) -> None:
        self._layout = layout
        # For slots on the host: kernels and copies are on one stream, so one set serves every row.
        self._on_gpu: tuple[Tensor, Tensor] | None = None

    def fill(self, memory: SlotMemory, features: Tensor) -> None:
        """Write features [used, L*H], and zeros behind them."""
        values = slot_tensor(self._layout, "aux_hidden_states", memory)
        scales = slot_tensor(self._layout, "aux_scales", memory)
        if values.device == features.device:
            quantise(features, values, scales)
            return
        if self._on_gpu is None:
            self._on_gpu = (
                torch.empty_like(values, device=features.device),
                torch.empty_like(scales, device=features.device),
            )
        quantise(features, *self._on_gpu)
        values.copy_(self._on_gpu[0], non_blocking=True)
        scales.copy_(self._on_gpu[1], non_blocking=True)


def fill_with_zeros_behind(field: Tensor, values: Tensor) -> None:
    """Write values [used, w] into a slot's field [T, w], and zeros over what an older row left."""
    field[: len(values)].copy_(values, non_blocking=True)
    field[len(values) :].zero_()
