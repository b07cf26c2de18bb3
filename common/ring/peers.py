"""Which GPUs of the machine can read one another's memory, asked of the driver by NVML.

NVML sees every GPU, whatever CUDA_VISIBLE_DEVICES hides from this process: a worker may be on one
that the target server does not see.
"""

# nvmlGpuP2PCapsIndex_t; pynvml's own constant of this name is a tuple.
_READ = 0


def gpus_without_peer_access(uuid: str) -> list[str]:
    """Return the UUIDs of GPUs that cannot read this GPU's memory; empty where NVML cannot tell."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        own = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        others = {pynvml.nvmlDeviceGetUUID(handle): handle for handle in handles}
        others.pop(uuid, None)
        return sorted(other for other, handle in others.items() if not _can_read(handle, own))
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def _can_read(reader: object, owner: object) -> bool:
    import pynvml

    status = pynvml.nvmlDeviceGetP2PStatus(reader, owner, _READ)
    return status == pynvml.NVML_P2P_STATUS_OK
