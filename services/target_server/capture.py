"""Runs the target over a packed row and writes what a drafter needs into a slot."""

import torch
from transformers import PreTrainedModel

from common.errors import NonFiniteTensorError
from common.ring.layout import SlotLayout
from common.ring.owner import WritableSlot
from common.target.features import FeatureTap, run_packed, run_separately
from common.tensors import slot_tensor
from services.target_server.packing import PackedRow


class Capture:
    """One target on one device; not for use from two threads."""

    def __init__(
        self, model: PreTrainedModel, tap: FeatureTap, layout: SlotLayout, *, is_packed: bool
    ) -> None:
        self._model = model
        self._tap = tap
        self._layout = layout
        self._run = run_packed if is_packed else run_separately
        self._device = next(model.parameters()).device

    def write(self, row: PackedRow, slot: WritableSlot) -> None:
        """Fill every field of the slot; on return the copies are complete (publish may follow)."""
        for name in ("token_ids", "document_ids", "position_ids", "loss_mask"):
            self._tensor(name, slot).copy_(torch.from_numpy(getattr(row, name)))
        used = row.used_tokens
        features = self._run(
            self._model,
            self._tap,
            torch.from_numpy(row.token_ids[:used]).to(self._device),
            torch.from_numpy(row.position_ids[:used]).to(self._device),
        )
        if not torch.isfinite(features).all():
            samples = [document.sample_id for document in row.documents]
            raise NonFiniteTensorError(
                f"row {row.sequence} (samples {samples}): the target's hidden states hold NaN or "
                f"infinity; run the target in bfloat16 or float32"
            )
        aux_hidden_states = self._tensor("aux_hidden_states", slot)
        aux_hidden_states[:used].copy_(features)
        # Nobody attends to padding, but what an older row left there may not stay finite.
        aux_hidden_states[used:].zero_()
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def _tensor(self, name: str, slot: WritableSlot) -> torch.Tensor:
        return slot_tensor(self._layout, name, slot.field)
