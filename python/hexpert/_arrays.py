"""New arrays of the framework that an argument came from. Called by the extension module."""

import math
import sys

ALIGNMENT = 64  # bytes: more than any kernel asks for


def new(beside, shape, dtype):
    """An array of the framework and device of `beside`, with undefined content. dtype: "uint8" or "float32".

    What stands beside a jax array on the CPU is a numpy array, which `finish` turns into one.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(beside, torch.Tensor):
        return beside.new_empty(shape, dtype=getattr(torch, dtype))
    return _new(beside, shape, dtype, False)


def host(like, shape, dtype):
    """An array in host memory, whatever the device of `like`: a tensor if that is one, else numpy's."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(like, torch.Tensor):
        return torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
    if like is not None and not hasattr(like, "__dlpack__"):
        raise TypeError(f"like: expected an array or None, got {type(like).__name__}")
    return _new(None, shape, dtype, False)


def like(array, shape, zeroed):
    """An array of the framework, device and element type of `array`, and its shape, which not every one tells."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return torch.zeros_like(array) if zeroed else torch.empty_like(array)
    return _new(array, shape, _dtype(array), zeroed)


def _new(beside, shape, dtype, zeroed):
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(beside, cupy.ndarray):
        with beside.device:
            return (cupy.zeros if zeroed else cupy.empty)(shape, dtype)
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(beside, jax.Array) and _on_gpu(beside):
        # Nobody else has it yet, so it may be written.
        return jax.numpy.zeros(shape, dtype, device=beside.device)
    import numpy

    if not isinstance(beside, numpy.ndarray) and _on_gpu(beside):
        raise TypeError(f"out: expected an array, for none can be made beside {type(beside).__name__} on a GPU")
    dtype = numpy.dtype(dtype)
    size = dtype.itemsize * math.prod(shape)
    memory = (numpy.zeros if zeroed else numpy.empty)(size + ALIGNMENT, numpy.uint8)
    start = -memory.__array_interface__["data"][0] % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _on_gpu(array):
    kDLCPU, kDLCUDAHost = 1, 3
    return hasattr(array, "__dlpack_device__") and array.__dlpack_device__()[0] not in (kDLCPU, kDLCUDAHost)


def finish(beside, array):
    """`array`, or beside a jax array a jax array that takes its memory over."""
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(beside, jax.Array):
        return jax.numpy.asarray(array)
    return array


def _dtype(array):
    import numpy

    try:
        return numpy.dtype(array.dtype)  # jax: ml_dtypes.bfloat16
    except (AttributeError, TypeError):
        return numpy.dtype(numpy.uint16)  # the bits of BF16
