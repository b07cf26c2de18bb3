"""Every exception this project raises on purpose.

    RingdraftError
      ConfigError              a file, key or combination that cannot be run; exit code 2
        TargetCheckError       a target that fails a check at start-up
      RingError
        LayoutMismatchError    magic, version, geometry or schema differ at attach
        SlotStateError         a transition that the tables do not allow: a bug in the caller
        StaleEpochError        a fenced owner tried to publish
        CorruptSlotError       a header or a checksum that does not hold
        SegmentError           shared memory that cannot be had: full, taken, foreign
        GpuError               a call of the CUDA runtime that failed
      MessageError             a message that cannot be decoded; counted and dropped by receivers
      CaptureError
        CaptureMismatchError   features unlike the model's own hidden states, or of another width
        NonFiniteTensorError   NaN or infinity in features, loss or gradients
      RowRejectedError         a sample that cannot be used; carries the reason it is counted under
      CheckpointError          a checkpoint that is missing, partial or of another shape
        DiskFullError          a checkpoint that the disk has no space for; a worker waits for some
      PeerLostError            a peer's heartbeat is gone
      PlacementError           no GPU has room for this process
      AnswerError              answers that a server did not give; starting again asks again

Ring full, ring empty, a timeout, the end of the stream and a late release are values.
Messages read: what failed, on which id, got X expected Y, what to do.
"""


class RingdraftError(Exception):
    """Root of the tree above."""


class ConfigError(RingdraftError):
    """A configuration that cannot be run; the process exits with code 2."""


class TargetCheckError(ConfigError):
    """A target that fails a check at start-up. `results` has every result up to the failure."""

    def __init__(self, message: str, results: dict[str, str]) -> None:
        super().__init__(message)
        self.results = results


class RingError(RingdraftError):
    """Something about a ring."""


class LayoutMismatchError(RingError):
    """A segment or peer speaks of another magic, version, geometry or schema."""


class SlotStateError(RingError):
    """A transition outside the table: a bug in the caller."""


class StaleEpochError(RingError):
    """A fenced owner tried to publish."""


class CorruptSlotError(RingError):
    """A slot's header or checksum does not hold."""


class SegmentError(RingError):
    """Shared memory that cannot be had: full, taken, or foreign."""


class GpuError(RingError):
    """A call of the CUDA runtime failed; the message names the call and its error."""


class MessageError(RingdraftError):
    """A message that cannot be decoded. `reason` is the counter it goes to."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class CaptureError(RingdraftError):
    """Something about running the target and keeping its hidden states."""


class CaptureMismatchError(CaptureError):
    """Captured features differ from the model's own hidden states, or have another width."""


class NonFiniteTensorError(CaptureError):
    """NaN or infinity where a finite number is needed."""


class RowRejectedError(RingdraftError):
    """A sample that cannot be used. `reason` is the counter it goes to."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class CheckpointError(RingdraftError):
    """A checkpoint that is missing, partial, or of another shape."""


class DiskFullError(CheckpointError):
    """A checkpoint that the disk has no space for; those before it are whole."""


class PeerLostError(RingdraftError):
    """A peer's heartbeat is gone."""


class PlacementError(RingdraftError):
    """No GPU has room for this process; the message says why of each, and what to change."""


class AnswerError(RingdraftError):
    """Answers that could not be had from a server; starting again asks for them again."""
