"""torch: an independent implementation of the rules, tensors in and out, the module and the custom op."""

import copy
import pickle

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import reference  # noqa: E402
from conftest import GROUPS, golden_cases  # noqa: E402

import hexpert  # noqa: E402
import hexpert.torch  # noqa: E402

LAYOUTS = {
    hexpert.ScaleLayout.LINEAR: lambda scales: scales.reshape(-1),
    hexpert.ScaleLayout.L128X4: lambda scales: reference.tiled(scales, 128),
    hexpert.ScaleLayout.L8X4: lambda scales: reference.tiled(scales, 8),
}
# Shapes of FlashInfer's quantizer tests.
SHAPES = [
    *[(1, 64), (1, 1024), (3, 128), (16, 64), (64, 128), (128, 64), (256, 128), (512, 256), (128, 1024)],
    *[(1024, 2048), (128, 16384), (120, 64), (200, 256), (2048, 2048)],
]


def inputs(kind, rows, cols):
    generator = torch.Generator().manual_seed(rows * cols)
    if kind == "random":
        x = torch.randn(rows, cols, generator=generator)
        x[0] = 0
    elif kind == "boundary":
        x = torch.linspace(-12, 12, rows * cols).view(rows, cols)
        x = x.round(decimals=2) + 1e-3 * torch.randint(-1, 2, x.shape, generator=generator)
    elif kind == "zeros":
        x = torch.zeros(rows, cols)
        x[-1] = -0.0
    elif kind == "maxima":
        x = torch.full((rows, cols), torch.finfo(torch.bfloat16).max)
    else:  # nonfinite
        x = torch.randn(rows, cols, generator=generator)
        x[0, cols // 2] = torch.nan
        x[rows // 2, 0] = torch.inf
    return x.bfloat16()


def same(got, want):
    return torch.equal(got.reshape(-1).view(torch.uint8), want.reshape(-1).contiguous().view(torch.uint8))


@pytest.mark.parametrize("kind", ["random", "boundary", "zeros", "maxima", "nonfinite"])
@pytest.mark.parametrize("rows, cols", SHAPES)
def test_quantizers(rows, cols, kind):
    x = inputs(kind, rows, cols)
    for per_row, quantize in ((True, hexpert.quantize_tokens), (False, hexpert.quantize_matrix)):
        codes, scales, outer = reference.quantize(x, per_row)
        for layout, arrange in LAYOUTS.items():
            got = quantize(x, scale_layout=layout)
            assert all(isinstance(tensor, torch.Tensor) for tensor in got)
            assert same(got[0], codes), "codes"
            assert same(got[1], arrange(scales)), "block scales"
            assert same(got[2].nan_to_num(-1.0), outer.nan_to_num(-1.0)), "outer scales"


@pytest.mark.parametrize("kind", ["random", "boundary", "zeros", "maxima", "nonfinite"])
@pytest.mark.parametrize("rows, cols", SHAPES[:9])
def test_transformer_engine(rows, cols, kind):
    """The same bytes but for zeros: -0.0 keeps its sign here, and a matrix of zeros has the scale 1."""
    x = inputs(kind, rows, cols)
    x[:, ::5] = -0.0
    codes, scales, alpha = hexpert.quantize_matrix(x)
    their_codes, their_scales, their_alpha = reference.transformer_engine(x)
    assert same(scales, their_scales)
    negative_zeros = reference.pack(8 * ((x == 0) & torch.signbit(x)).to(torch.uint8))
    assert same(codes, torch.where(alpha.isnan(), their_codes, their_codes | negative_zeros))
    if not x.any():
        assert alpha.item() == 1 and their_alpha.view(torch.int32).item() == 0x00200000
    else:
        assert same(alpha.nan_to_num(-1.0), their_alpha.nan_to_num(-1.0))


@pytest.mark.parametrize("kind", ["random", "boundary", "zeros", "maxima"])
@pytest.mark.parametrize("rows, cols", SHAPES[:9])
def test_four_over_six(rows, cols, kind):
    x = inputs(kind, rows, cols)
    for squared, e4m3_max in ((False, 448), (False, 256), (True, 448), (True, 256)):
        error = hexpert.FourOverSix.MSE if squared else hexpert.FourOverSix.MAE
        for per_row, quantize in ((True, hexpert.quantize_tokens), (False, hexpert.quantize_matrix)):
            want = reference.four_over_six(x, per_row, squared, e4m3_max)
            got = quantize(x, four_over_six=error, e4m3_max=e4m3_max)
            assert all(same(a, b) for a, b in zip(got, want)), (squared, e4m3_max, per_row)


@pytest.mark.parametrize("group", ["per_token", "per_tensor", "four_over_six"])
def test_reference_gives_the_golden_bits(group):
    for name, golden in GROUPS[group].items():
        x = torch.from_numpy(golden["x"]).view(torch.bfloat16)
        x = reference.padded(x, x.shape[0], 2 * golden["data"].shape[1])
        per_row = "row_scale" in golden
        if group == "four_over_six":
            codes, scales, outer = reference.four_over_six(x, per_row, name[:3] == "mse", 256 if "256" in name else 448)
        else:
            codes, scales, outer = reference.quantize(x, per_row)
        assert same(codes, torch.from_numpy(golden["data"]))
        assert same(scales, torch.from_numpy(golden["scale_linear"]))
        if per_row or "alpha" in golden:
            assert same(outer, torch.from_numpy(golden["row_scale" if per_row else "alpha"]))


# (experts, top_k, hidden, inter, tokens, local, offset, gated): Megatron's inference tests; FlashInfer's with
# partial output tiles, of its accuracy grid, of some ranks of its expert parallelism, and of its other back end (with
# fewer experts on this rank, since preparing takes the time); 22 experts a token; sizes that are multiples of nothing.
LAYERS = [
    (4, 1, 64, 64, 1, 4, 0, False),
    (4, 2, 64, 64, 4, 4, 0, False),
    (4, 2, 64, 64, 4, 4, 0, True),
    (8, 2, 128, 128, 8, 8, 0, False),
    (8, 4, 128, 128, 16, 8, 0, True),
    (8, 4, 128, 128, 16, 8, 0, False),
    (8, 6, 128, 128, 32, 8, 0, False),
    (8, 6, 128, 256, 32, 8, 0, True),
    (8, 4, 128, 256, 64, 8, 0, False),
    (16, 8, 64, 128, 128, 16, 0, True),
    (16, 8, 64, 128, 128, 16, 0, False),
    (8, 4, 128, 128, 32, 4, 0, False),
    (8, 4, 128, 128, 32, 4, 4, False),
    (8, 4, 128, 128, 32, 2, 0, False),
    (8, 4, 128, 128, 32, 2, 6, False),
    (8, 2, 256, 512, 128, 8, 0, False),
    (8, 2, 384, 512, 128, 8, 0, False),
    (256, 8, 256, 512, 128, 256, 0, True),
    (384, 2, 256, 512, 515, 384, 0, False),
    (256, 8, 256, 512, 256, 8, 0, True),
    (256, 8, 256, 512, 256, 8, 248, True),
    (256, 8, 256, 512, 256, 32, 224, True),
    (256, 8, 256, 512, 256, 32, 128, True),
    (256, 8, 256, 512, 256, 16, 0, True),
    (256, 8, 256, 512, 1280, 16, 0, True),
    (256, 8, 256, 512, 1280, 32, 0, True),
    (256, 8, 64, 128, 1280, 256, 0, True),
    (32, 4, 1024, 2048, 1024, 4, 8, True),
    (32, 4, 4096, 2048, 1024, 1, 31, True),
    (32, 4, 1024, 2048, 1, 4, 0, True),
    (32, 4, 4096, 2048, 1, 1, 23, True),
    (32, 22, 64, 128, 16, 32, 0, False),
    (32, 22, 64, 128, 16, 8, 16, True),
    (8, 2, 16, 64, 9, 8, 0, True),
    (8, 2, 16, 16, 9, 8, 0, False),
    (8, 2, 80, 104, 17, 8, 0, True),
]


class Case:
    def __init__(self, experts, top_k, hidden, inter, tokens, local, offset, gated, **activation):
        generator = torch.Generator().manual_seed(experts + tokens)
        shape = (local, 2 * inter if gated else inter, hidden)
        self.fc1 = (torch.randn(shape, generator=generator) / 10).bfloat16()
        self.fc2 = (torch.randn(local, hidden, inter, generator=generator) / 10).bfloat16()
        self.x = (torch.randn(tokens, hidden, generator=generator) / 10).bfloat16()
        logits = torch.randn(tokens, experts, generator=generator)
        top, self.ids = logits.topk(top_k, dim=1)
        self.p = top.softmax(1)
        self.offset = offset
        self.inputs = self.x, self.ids, self.p
        self.weights = hexpert.ExpertWeights.prepare(self.fc1, self.fc2)
        self.layer = hexpert.RoutedMoe.create(
            self.weights,
            max_tokens=tokens,
            top_k=top_k,
            num_experts=experts,
            local_expert_offset=offset,
            **activation
            or {"activation": hexpert.ActivationType.SWIGLU if gated else hexpert.ActivationType.SQUARED_RELU},
        )


def assert_close(out, want):
    """One flipped rounding before a quantization changes its row by some percent, and is legitimate."""
    size = want.norm(dim=1)
    relative = (out.double() - want).norm(dim=1) / size.clamp(min=1e-30)
    assert relative[size > 0].max() <= 0.12
    assert (relative <= 4e-3).float().mean() >= 0.95 or (relative > 4e-3).sum() <= 1
    assert (out[size == 0] == 0).all()


@pytest.mark.parametrize("shape", LAYERS, ids=str)
def test_layer(shape):
    case = Case(*shape)
    got = case.weights.export_canonical(like=case.x)
    for name, tensor in reference.prepare(case.fc1, case.fc2).items():
        assert same(got[name], tensor), name
    want = reference.forward(case.fc1, case.fc2, case.x, case.ids, case.p, case.offset)
    out = torch.full((case.x.shape[0], case.x.shape[1]), torch.nan)
    assert case.layer.forward(case.x, case.ids, case.p, out) is out
    assert_close(out, want)
    rounded = case.layer.forward(case.x, case.ids.int(), case.p)
    assert rounded.dtype == torch.bfloat16 and torch.equal(rounded, out.bfloat16())


@pytest.mark.parametrize(
    "kind, parameters, activation",
    [
        ("SWIGLU_OAI", dict(alpha=1.702, beta=1.0, limit=7.0), reference.swiglu_oai(1.702, 1, 7)),
        ("SWIGLU_OAI", dict(alpha=0.5, beta=-0.25, limit=0.1), reference.swiglu_oai(0.5, -0.25, 0.1)),
        ("SWIGLU_OAI", {}, reference.swiglu),
        ("GEGLU_TANH", {}, reference.geglu_tanh),
        ("SITU", dict(situ_b=1.75), reference.situ(1.75, None)),
        ("SITU", dict(situ_b=0.8, situ_c=1.5), reference.situ(0.8, 1.5)),
    ],
)
@pytest.mark.parametrize("shape", [(8, 2, 256, 512, 64, 8), (256, 2, 64, 128, 128, 256)], ids=str)
def test_activations(shape, kind, parameters, activation):
    case = Case(*shape, 0, True, activation=hexpert.ActivationType[kind], **parameters)
    out = torch.empty(case.x.shape)
    case.layer.forward(case.x, case.ids, case.p, out)
    assert_close(out, reference.forward(case.fc1, case.fc2, case.x, case.ids, case.p, activation=activation))


@pytest.mark.parametrize("valid", [1, 4, 8, 15])
def test_valid_rows(valid):
    case = Case(8, 4, 128, 128, 16, 8, 0, False)
    want = case.layer.forward(*case.inputs)
    case.x[valid:] = torch.nan
    out = torch.full_like(case.x, 3)
    case.layer.forward(*case.inputs, out, token_capacity=valid, use_bounded_rows=True)
    assert torch.equal(out[:valid], want[:valid]) and (out[valid:] == 3).all()
    case.ids[valid:] = -1  # as the dispatcher of a full buffer marks them
    out = case.layer.forward(*case.inputs)
    assert torch.equal(out[:valid], want[:valid]) and not out[valid:].any()


def test_tensors():
    case = Case(*LAYERS[4])
    want = case.layer.forward(case.x, case.ids, case.p)
    parameter = torch.nn.Parameter(case.x)
    got = case.layer.forward(parameter, case.ids, case.p)
    assert torch.equal(got, want) and not got.requires_grad, "gradients stop here"
    codes, scales, outer = hexpert.quantize_tokens(case.x)
    back = hexpert.dequantize(codes, scales.view(torch.float8_e4m3fn), outer)
    assert torch.equal(back, reference.values(codes, scales, outer).float())
    out = torch.empty_like(case.x)
    assert hexpert.dequantize(codes, scales, outer, out=out) is out
    assert torch.equal(out, back.bfloat16())
    wide = torch.randn(8, 64).bfloat16()
    assert same(hexpert.quantize_tokens(wide[:, :32])[0], hexpert.quantize_tokens(wide[:, :32].clone())[0])


def test_exports_are_made_in_host_memory():
    case = Case(*LAYERS[4])
    want = case.weights.export_projection(0, hexpert.Projection.UP, like=case.x)
    got = case.weights.export_projection(0, hexpert.Projection.UP, like=case.x.to("meta"))
    assert got[0].is_cpu and all(same(a, b) for a, b in zip(got[:2], want)) and got[2] == want[2]
    assert all(tensor.is_cpu for tensor in case.weights.export_canonical(like=case.x.to("meta")).values())


@pytest.mark.parametrize(
    "make, error, text",
    [
        (lambda x: x.float(), TypeError, "hidden_states: expected bf16, got"),
        (lambda x: x.double(), TypeError, "f64"),
        (lambda x: x.to(torch.complex64), TypeError, "complex64"),
        (lambda x: x > 0, TypeError, "bool"),
        (lambda x: x.to("meta"), ValueError, "expected memory of cpu or cuda, got meta"),
        (lambda x: x.to_sparse(), ValueError, "expected a dense tensor, got layout torch.sparse_coo"),
        (lambda x: x.t(), ValueError, "hidden_states: expected"),
        (lambda x: x[:, ::2], ValueError, "hidden_states: expected"),
        (lambda x: x[None], ValueError, "hidden_states: expected"),
        (lambda x: x.view(1, 1, 1, 1, 1, *x.shape), ValueError, "expected rank 0..6, got 7"),
    ],
)
def test_refused_tensors(make, error, text):
    case = Case(*LAYERS[4])
    for call in (lambda x: case.layer.forward(x, case.ids, case.p), hexpert.quantize_tokens):
        with pytest.raises(error, match=text.replace("[", r"\[")):
            call(make(case.x))


@pytest.mark.parametrize("case, golden", golden_cases("moe"))
def test_golden_layer(case, golden):
    stacks = GROUPS["weights"]["gated_e2_i192_h80" if case == "gated" else "relu2_e3_i96_h64"]
    num_experts, offset, _, top_k, _ = golden["config"].tolist()
    experts = hexpert.torch.RoutedExperts(
        *(torch.from_numpy(stacks[name]).view(torch.bfloat16) for name in ("fc1_weight", "fc2_weight")),
        top_k=top_k,
        max_tokens=16,
        num_experts=num_experts,
        local_expert_offset=offset,
    )
    arguments = (
        torch.from_numpy(golden["hidden_states"]).view(torch.bfloat16),
        torch.from_numpy(golden["routing_map"]),
        torch.from_numpy(golden["probabilities"]),
    )
    want = torch.from_numpy(golden["output_bf16"]).view(torch.bfloat16)
    assert torch.equal(experts(*arguments), want)
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*arguments), want), "one graph, without breaks"
    out = torch.empty_like(want)
    assert torch.equal(compiled(*arguments, out), want) and torch.equal(out, want)


def test_custom_op_is_well_formed():
    case = Case(*LAYERS[4])
    experts = hexpert.torch.RoutedExperts(case.fc1, case.fc2, top_k=4, max_tokens=16)
    for bounds in ((), (4, True), (None, False)):
        torch.library.opcheck(torch.ops.hexpert.routed_moe.default, (*case.inputs, experts._number, *bounds))
        for out in (torch.zeros_like(case.x), torch.zeros(case.x.shape)):
            torch.library.opcheck(
                torch.ops.hexpert.routed_moe_out.default, (*case.inputs, out, experts._number, *bounds)
            )
    assert "cpu" in repr(experts)


def test_bounded_rows_compiled():
    case = Case(*LAYERS[4])
    experts = hexpert.torch.RoutedExperts(case.fc1, case.fc2, top_k=4, max_tokens=16)
    full = experts(*case.inputs)
    for run in (experts, torch.compile(experts, fullgraph=True, backend="aot_eager")):
        part = run(*case.inputs, token_capacity=5, use_bounded_rows=True)
        assert torch.equal(part[:5], full[:5]) and not part[5:].any()
        out = torch.full_like(full, 3)
        assert run(*case.inputs, out, token_capacity=5, use_bounded_rows=True) is out
        assert torch.equal(out[:5], full[:5]) and (out[5:] == 3).all()


def test_module_gives_its_layer_back():
    case = Case(*LAYERS[4])
    before = len(hexpert.torch._layers)
    experts = [hexpert.torch.RoutedExperts(case.fc1, case.fc2, top_k=4, max_tokens=16) for _ in range(3)]
    assert len(hexpert.torch._layers) == before + 3
    del experts
    assert len(hexpert.torch._layers) == before


def test_copies():
    case = Case(*LAYERS[4])
    module = torch.nn.Sequential(hexpert.torch.RoutedExperts(case.fc1, case.fc2, top_k=4, max_tokens=16))
    want = module[0](*case.inputs)
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    module[0].refresh(-case.fc1, case.fc2)
    assert not torch.equal(module[0](*case.inputs), want)
    for one in copies:
        assert torch.equal(one[0](*case.inputs), want)
        assert torch.equal(torch.compile(one[0], fullgraph=True, backend="aot_eager")(*case.inputs), want)


def test_copies_of_a_compiled_module():
    case = Case(*LAYERS[4])
    experts = hexpert.torch.RoutedExperts(case.fc1, case.fc2, top_k=4, max_tokens=16)
    torch.compiler.reset()  # there is a limit to the variants of one function
    experts.compile(fullgraph=True, backend="aot_eager")
    want = experts(*case.inputs)
    copies = [copy.deepcopy(experts), pickle.loads(pickle.dumps(experts))]
    experts.refresh(-case.fc1, case.fc2)
    fresh = hexpert.torch.RoutedExperts(-case.fc1, case.fc2, top_k=4, max_tokens=16)
    assert torch.equal(experts(*case.inputs), fresh(*case.inputs))
    for one in copies:
        assert torch.equal(one(*case.inputs), want)


def test_refresh():
    case, other = Case(*LAYERS[4]), Case(*LAYERS[4])
    other.fc1, other.fc2 = other.fc1.flip(0).contiguous(), other.fc2.flip(0).contiguous()
    experts = hexpert.torch.RoutedExperts(case.fc1, case.fc2, top_k=4, max_tokens=16)
    fresh = hexpert.torch.RoutedExperts(other.fc1, other.fc2, top_k=4, max_tokens=16)
    assert not torch.equal(experts(case.x, case.ids, case.p), fresh(case.x, case.ids, case.p))
    experts.refresh(other.fc1, other.fc2)
    assert torch.equal(experts(case.x, case.ids, case.p), fresh(case.x, case.ids, case.p))
