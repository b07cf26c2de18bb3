"""Rows in float8: e4m3 values with one float32 scale a token, half the bytes of bfloat16.

    scale = max(largest |x| of the token / 448, LEAST_SCALE)            float32
    value = e4m3(x * (1 / scale))                                       round to nearest even
    x'    = out's element type(value * scale)

448 is e4m3's largest finite value, so a token's largest channel keeps its value and the others
three bits behind their leading one, down to 2^-15 of the largest; below that the step is fixed.
Rounding takes no product past 448 by more than 2^-22 of it, which rounds to 448: nothing overflows.
A token of zeros has LEAST_SCALE and comes back as zeros.

On CUDA each direction is one kernel on the current stream, without a host sync or an allocation;
on the CPU the same formula runs in torch, bit for bit. Input must be finite: the caller checks.
"""

from types import ModuleType

import torch
from torch import Tensor

from common.errors import ConfigError, LayoutMismatchError

E4M3_MAX = 448.0
LEAST_SCALE = 2.0**-100
"""Keeps scale, reciprocal and products normal numbers; no residual stream comes near it."""
_CHUNK_TOKENS = 64
_LEAST_CAPABILITY = (8, 9)


def quantise(features: Tensor, values: Tensor, scales: Tensor) -> None:
    """Write a row as float8; tokens behind those of `features` become zeros.

    Args:
        features: [N, W] finite, bfloat16 or float32, N <= T.
        values: [T, W] float8_e4m3fn, overwritten.
        scales: [T] float32, overwritten; each is positive.

    Raises:
        LayoutMismatchError: shapes, element types or devices do not fit together.
    """
    _check_row(values, scales, features, "features")
    if len(features) > len(values):
        raise LayoutMismatchError(
            f"row in float8: features got {len(features)} tokens, expected at most {len(values)}; "
            f"give quantise the tokens of one row"
        )
    if values.is_cuda:
        _kernels().quantise(features, values, scales, largest=E4M3_MAX, least_scale=LEAST_SCALE)
        return
    used = len(features)
    for x, value, scale in zip(*_chunks(features, values[:used], scales[:used]), strict=True):
        _quantise_chunk(x.float(), value, scale)
    values[used:].zero_()
    scales[used:].fill_(LEAST_SCALE)


def dequantise(values: Tensor, scales: Tensor, out: Tensor) -> None:
    """Write `values * scales` into `out`.

    Args:
        values: [T, W] float8_e4m3fn.
        scales: [T] float32.
        out: [T, W] bfloat16 or float32, overwritten.

    Raises:
        LayoutMismatchError: shapes, element types or devices do not fit together.
    """
    _check_row(values, scales, out, "out")
    if len(out) != len(values):
        raise LayoutMismatchError(
            f"row in float8: out got {len(out)} tokens, expected {len(values)}; "
            f"give dequantise a buffer of one row"
        )
    if values.is_cuda:
        _kernels().dequantise(values, scales, out)
        return
    for value, scale, part in zip(*_chunks(values, scales, out), strict=True):
        part.copy_(value.float() * scale[:, None])


def check_device(device: torch.device, setting: str = "ring.aux_dtype") -> None:
    """Refuse a GPU that has no float8, which a setting asks for, before anything runs on it."""
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        raise ConfigError(
            f"{setting} = 'fp8': {torch.cuda.get_device_name(device)} has compute capability "
            f"{capability[0]}.{capability[1]}, expected 8.9 or higher; set it to 'bf16'"
        )
    _kernels(setting)


def _kernels(setting: str = "ring.aux_dtype") -> ModuleType:
    """Import the kernels; triton is there only where GPUs are."""
    try:
        from common import float8_kernels
    except ImportError as error:
        raise ConfigError(
            f"{setting} = 'fp8' on a GPU needs triton: {error}; install ringdraft[gpu], "
            f"or set it to 'bf16'"
        ) from error
    return float8_kernels


def _quantise_chunk(x: Tensor, values: Tensor, scales: Tensor) -> None:
    torch.amax(x.abs(), -1, out=scales)
    scales.mul_(1 / E4M3_MAX).clamp_min_(LEAST_SCALE)
    values.copy_(x * scales.reciprocal()[:, None])


def _chunks(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Cut tensors along their tokens, so that a chunk's temporaries stay in the cache."""
    return [tensor.split(_CHUNK_TOKENS) for tensor in tensors]


def _check_row(values: Tensor, scales: Tensor, wide: Tensor, name: str) -> None:
    """Refuse tensors that are no row in float8 and its wide twin `wide`."""
    expected = {
        "values": (values, (torch.float8_e4m3fn,), (len(values), wide.shape[-1])),
        "scales": (scales, (torch.float32,), (len(values),)),
        name: (wide, (torch.bfloat16, torch.float32), (len(wide), wide.shape[-1])),
    }
    for field, (tensor, dtypes, shape) in expected.items():
        fits = tensor.dtype in dtypes and tensor.shape == shape and tensor.device == values.device
        if not fits or not tensor.is_contiguous():
            raise LayoutMismatchError(
                f"row in float8: {field} got {_describe(tensor)}, expected contiguous "
                f"{' or '.join(str(dtype) for dtype in dtypes)} {list(shape)} on {values.device}; "
                f"give it buffers of one row schema"
            )


def _describe(tensor: Tensor) -> str:
    strided = "" if tensor.is_contiguous() else f" with strides {tensor.stride()}"
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}{strided}"
