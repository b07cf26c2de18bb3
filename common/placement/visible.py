"""What CUDA_VISIBLE_DEVICES leaves of the machine's GPUs, without asking CUDA.

As CUDA reads it: indices, UUIDs or their first letters, MIG UUIDs, in that order; the first entry
that names nothing hides what follows; an empty value hides all. Indices count as nvidia-smi does, by
PCI address; an index or UUID of a GPU in MIG mode means its MIG devices.
"""

from collections.abc import Iterator, Sequence

from common.contracts.placement_messages import Gpu


def visible_gpus(gpus: Sequence[Gpu], variable: str | None) -> tuple[Gpu, ...]:
    """Return the places that a process may take, in the order in which the variable names them."""
    if variable is None:
        return tuple(gpus)
    return tuple(dict.fromkeys(_named(gpus, variable)))


def _named(gpus: Sequence[Gpu], variable: str) -> Iterator[Gpu]:
    for entry in variable.split(","):
        found = _one_named(gpus, entry.strip())
        if found is None:
            return
        yield from [each for each in gpus if found.uuid in (each.uuid, each.parent)]


def _one_named(gpus: Sequence[Gpu], entry: str) -> Gpu | None:
    if entry.isdecimal():
        found = [gpu for gpu in gpus if not gpu.parent and gpu.index == int(entry)]
    elif entry.startswith(("GPU-", "MIG-")):
        found = [gpu for gpu in gpus if gpu.uuid.startswith(entry)]
    else:
        found = []
    return found[0] if len(found) == 1 else None
