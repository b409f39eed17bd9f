"""Objects freed in any order, exceptions in the middle, weights shared by threads."""

import copy
import gc
import pickle
import shutil
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
from conftest import Layer, from_bf16

import hexpert


def test_layer_keeps_its_weights(layer):
    weights = layer.weights()
    plan = layer.plan(weights)
    want = plan.forward(*layer.inputs)
    del weights
    gc.collect()
    assert np.array_equal(plan.forward(*layer.inputs), want)


def test_weights_outlive_their_layers(layer):
    weights = layer.weights()
    plans = [layer.plan(weights) for _ in range(3)]
    want = plans[0].forward(*layer.inputs)
    while plans:
        plans.pop(len(plans) // 2)
        gc.collect()
        assert np.array_equal(layer.plan(weights).forward(*layer.inputs), want)


def test_results_outlive_everything(layer):
    plan = layer.plan()
    out = plan.forward(*layer.inputs)
    codes, scales, outer = hexpert.quantize_tokens(layer.hidden_states)
    copies = [a.copy() for a in (out, codes, scales, outer)]
    del plan
    layer.hidden_states = None
    gc.collect()
    assert all(np.array_equal(a, b) for a, b in zip(copies, (out, codes, scales, outer)))


def test_copies(layer):
    weights = layer.weights()
    want = layer.plan(weights).forward(*layer.inputs)
    copies = [copy.deepcopy(weights), pickle.loads(pickle.dumps(weights))]
    weights.refresh(layer.fc1[::-1].copy(), layer.fc2)
    for one in copies:
        assert np.array_equal(layer.plan(one).forward(*layer.inputs), want)
    with pytest.raises(TypeError, match="RoutedMoe"):
        copy.deepcopy(layer.plan())


def test_exceptions_in_the_middle(layer):
    weights = layer.weights()
    plan = layer.plan(weights)
    want = plan.forward(*layer.inputs)
    for _ in range(100):
        with pytest.raises(TypeError):
            plan.forward(layer.hidden_states, layer.routing_map, None)
        with pytest.raises(ValueError):
            weights.refresh(layer.fc1[:2], layer.fc2[:2])
        with pytest.raises(ValueError):
            layer.plan(weights, top_k=-1)
    assert np.array_equal(plan.forward(*layer.inputs), want)


class Exporter:
    """A DLPack exporter that counts what is alive."""

    def __init__(self, array):
        self.array = array
        self.exports = 0

    def __dlpack__(self, **_):
        self.exports += 1
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_exports_are_given_back(layer):
    plan = layer.plan()
    p = Exporter(layer.probabilities)
    want = plan.forward(*layer.inputs)
    before = sys.getrefcount(layer.probabilities)
    for _ in range(20):
        assert np.array_equal(plan.forward(layer.hidden_states, layer.routing_map, p), want)
        with pytest.raises(TypeError):
            plan.forward(p, layer.routing_map, p)
    gc.collect()
    after = sys.getrefcount(layer.probabilities)  # an assert would hold a reference of its own
    assert p.exports == 40 and after == before


def test_types_of_the_program_are_given_back(layer):
    """A type that was kept would keep the globals of its module alive."""
    plan = layer.plan()
    want = plan.forward(*layer.inputs)

    class OwnArray(np.ndarray):
        pass

    class OwnExporter(Exporter):
        pass

    got = plan.forward(*layer.inputs[:2], OwnExporter(layer.probabilities))
    assert np.array_equal(got, want)
    assert np.array_equal(plan.forward(layer.hidden_states.view(OwnArray), *layer.inputs[1:]), want)
    kinds = [weakref.ref(OwnArray), weakref.ref(OwnExporter)]
    del OwnArray, OwnExporter
    gc.collect()
    assert not any(kind() for kind in kinds)


def test_a_cycle_through_the_workspace_is_given_back(layer):
    class Workspace(np.ndarray):
        pass

    weights = layer.weights()
    size = hexpert.RoutedMoe.workspace_bytes_for(weights, **layer.problem)
    memory = np.zeros(size + 256, np.uint8)
    start = -memory.ctypes.data % 256
    workspace = memory[start : start + size].view(Workspace)
    workspace.layer = layer.plan(weights, workspace=workspace)
    gone = weakref.ref(workspace)
    del workspace
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("cycle", [False, True])
def test_an_exported_workspace_lives_as_long_as_the_layer(layer, cycle):
    """Its memory may belong to the export alone, not to the object that was given."""

    class Memory(np.ndarray):
        pass

    class MakesMemory:
        def __dlpack__(self, **_):
            memory = np.zeros(size + 256, np.uint8)
            start = -memory.ctypes.data % 256
            workspace = memory[start : start + size].view(Memory)
            made.append(weakref.ref(workspace))
            return workspace.__dlpack__()

        def __dlpack_device__(self):
            return 1, 0

    weights = layer.weights()
    size = hexpert.RoutedMoe.workspace_bytes_for(weights, **layer.problem)
    made = []
    exporter = MakesMemory()
    plan = layer.plan(weights, workspace=exporter)
    if cycle:
        exporter.layer = plan
    del exporter
    gc.collect()
    assert [memory() is not None for memory in made] == [True]
    assert np.array_equal(plan.forward(*layer.inputs), layer.plan(weights).forward(*layer.inputs))
    del plan
    gc.collect()
    assert made[0]() is None
    with pytest.raises(ValueError, match="top_k"):
        layer.plan(weights, workspace=MakesMemory(), top_k=0)
    assert made[1]() is None, "a refused layer keeps nothing"


def test_memory_does_not_grow(layer):
    resource = pytest.importorskip("resource")
    big = Layer(experts=8, hidden=512, inter=512, tokens=32)
    for i in range(60):
        weights = big.weights()
        big.plan(weights).forward(*big.inputs)
        weights.refresh(big.fc1, big.fc2)
        if i == 20:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20 << 10  # KiB


def test_threads_share_weights(layer):
    """Every forward sees the old weights or the new ones, never a mixture."""
    other = Layer(seed=1)
    weights = layer.weights()
    plan = layer.plan(weights)
    results = {plan.forward(*layer.inputs).tobytes()}
    weights.refresh(other.fc1, other.fc2)
    results.add(plan.forward(*layer.inputs).tobytes())
    assert len(results) == 2
    wrong = []
    done = threading.Event()

    def run(own):
        while not done.is_set():
            if own.forward(*layer.inputs).tobytes() not in results:
                wrong.append(own)

    plans = [plan, plan, layer.plan(weights, num_threads=1)]  # one shared by two threads
    threads = [threading.Thread(target=run, args=(own,)) for own in plans]
    for thread in threads:
        thread.start()
    for i in range(100):
        weights.refresh(*((layer.fc1, layer.fc2) if i % 2 else (other.fc1, other.fc2)))
    done.set()
    for thread in threads:
        thread.join()
    assert not wrong


FIRST_CALLS = """
import sys, threading, time, types
import numpy as np
import hexpert

def new_arrays():
    return weights.export_canonical()

def tensors():
    return hexpert.quantize_tokens(Tensor(), out=tuple(quantized))

class SlowFinder:
    def find_spec(self, name, path=None, target=None):
        if name == "hexpert._arrays":
            time.sleep(0.1)

def missing(name):
    time.sleep(0.1)
    raise AttributeError(name)

torch = types.ModuleType("torch")
torch.bfloat16, torch.strided, torch.__getattr__ = object(), object(), missing
values = np.zeros((2, 16), np.uint16)

class Tensor:
    dtype, layout, shape, is_cuda, is_cpu = torch.bfloat16, torch.strided, (2, 16), False, True
    stride = staticmethod(lambda: (16, 1))
    data_ptr = staticmethod(lambda: values.ctypes.data)

torch.Tensor = Tensor
weights = hexpert.ExpertWeights.allocate(num_local_experts=1, hidden_size=16, intermediate_size=16, gated=False)
call = globals()[sys.argv[1]]
if call is tensors:
    quantized = hexpert.quantize_tokens(values)
    sys.modules["torch"] = torch
else:
    sys.modules.pop("hexpert._arrays", None)
    sys.meta_path.insert(0, SlowFinder())
start = threading.Barrier(4)
results = []
threads = [threading.Thread(target=lambda: (start.wait(), results.append(call()))) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(results) == 4
"""


@pytest.mark.parametrize("call", ["new_arrays", "tensors"])
def test_threads_make_the_first_call(call):
    """What it looks up is Python code, during which other threads run: they must not wait for it."""
    subprocess.run([sys.executable, "-c", FIRST_CALLS, call], check=True, timeout=60)


@pytest.mark.parametrize("kind", ["prepare", "forward"])
def test_interpreter_lock_is_free_during_work(kind):
    big = Layer(experts=4, hidden=1024, inter=1024, tokens=128)
    plan = big.plan(num_threads=1)
    work = {
        "prepare": lambda: hexpert.ExpertWeights.prepare(big.fc1, big.fc2, num_threads=1),
        "forward": lambda: plan.forward(*big.inputs),
    }[kind]
    ticks = []
    done = threading.Event()

    def tick():
        while not done.is_set():
            ticks.append(None)
            done.wait(0.0005)

    def ticks_during_work():
        ticks.clear()
        work()
        return len(ticks)

    thread = threading.Thread(target=tick)
    thread.start()
    # One tick may come at the end of a call that kept the lock, and a busy machine may give none.
    free = any(ticks_during_work() >= 3 for _ in range(50))
    done.set()
    thread.join()
    assert free


def test_imports_no_framework():
    code = "import sys, hexpert; assert not {'torch', 'jax', 'cupy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_exports_nothing():
    """Symbols would be shared with other copies of them in the process: the library's, nanobind's, fmt's."""
    if not shutil.which("nm"):
        pytest.skip("nm is not installed")
    nm = ["nm", "--dynamic", "--defined-only", hexpert._core.__file__]
    symbols = subprocess.run(nm, check=True, capture_output=True, text=True).stdout.split("\n")
    assert [line.split()[-1] for line in symbols if line] == ["PyInit__core"]


def test_values(layer):
    """The numbers are those of a plain computation, up to what NVFP4 costs."""
    x, ids, p = layer.inputs
    got = from_bf16(layer.plan().forward(x, ids, p)).astype(np.float64)
    fc1, fc2 = from_bf16(layer.fc1).astype(np.float64), from_bf16(layer.fc2).astype(np.float64)
    want = np.zeros_like(got)
    for token, row in enumerate(from_bf16(x).astype(np.float64)):
        for expert, probability in zip(ids[token], p[token]):
            if expert >= 0:
                gate, up = np.split(fc1[expert] @ row, 2)
                want[token] += probability * (fc2[expert] @ (gate / (1 + np.exp(-gate)) * up))
    assert np.linalg.norm(got - want) < 0.4 * np.linalg.norm(want)
