"""New arrays of the framework that an argument came from. Called by the extension module."""

import sys

ALIGNMENT = 64  # bytes: more than any kernel asks for


def new(like, shape, dtype, zeroed):
    """An array beside `like`: same framework, same device.

    dtype is "uint8", "float32" or "like": the element type of `like`. What stands beside a jax array on
    the CPU is a numpy array, which `finish` turns into one.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(like, torch.Tensor):
        kind = like.dtype if dtype == "like" else getattr(torch, dtype)
        make = torch.zeros if zeroed else torch.empty
        return make(shape, dtype=kind, device=like.device)
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(like, cupy.ndarray):
        make = cupy.zeros if zeroed else cupy.empty
        with like.device:
            return make(shape, like.dtype if dtype == "like" else dtype)
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(like, jax.Array) and next(iter(like.devices())).platform != "cpu":
        # Nobody else has it yet, so it may be written.
        return jax.numpy.zeros(shape, like.dtype if dtype == "like" else dtype, device=like.device)
    import numpy

    kind = _numpy_dtype(numpy, like) if dtype == "like" else numpy.dtype(dtype)
    size = kind.itemsize
    for extent in shape:
        size *= extent
    memory = (numpy.zeros if zeroed else numpy.empty)(size + ALIGNMENT, numpy.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(kind).reshape(shape)


def finish(like, array):
    """`array`, or for a jax `like` a jax array that takes its memory over."""
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(like, jax.Array):
        return jax.numpy.asarray(array)
    return array


def _numpy_dtype(numpy, like):
    if isinstance(like, numpy.ndarray):
        return like.dtype
    try:
        return numpy.dtype(like.dtype)  # jax: ml_dtypes.bfloat16
    except (AttributeError, TypeError):
        return numpy.dtype(numpy.uint16)  # the bits of BF16
