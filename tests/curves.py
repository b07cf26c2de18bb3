"""Reads curves back from where trackers put them."""

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def tensorboard_curves(run: Path, instance: str = "main-0") -> dict[str, dict[int, float]]:
    """Return value by step of each curve that TensorBoard shows of a worker."""
    events = EventAccumulator(str(run / "tensorboard" / instance), purge_orphaned_data=True)
    events.Reload()
    return {
        tag: {event.step: event.value for event in events.Scalars(tag)}
        for tag in events.Tags()["scalars"]
    }
