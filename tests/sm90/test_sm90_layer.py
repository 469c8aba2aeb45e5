"""`kda_core.nn.KimiDeltaAttention` on a Hopper GPU with kda-sm90, and against FLA's layer with FLA's kernels where FLA is installed."""

import importlib
import sys
import types
from pathlib import Path

import pytest
import torch

from kda_core.nn import Cache, KimiDeltaAttention
from kda_core.registry import record_calls

pytestmark = pytest.mark.arch((9, 0))

SIZES = {"hidden_size": 256, "head_dim": 128, "num_heads": 2, "layer_idx": 0}
OPTIONS = {
    "default": {},
    "value heads, biased convolution": {"num_v_heads": 4, "conv_bias": True},
    "bounded gate": {"safe_gate": True, "lower_bound": -5.0},
    "negative eigenvalues, no convolution": {"allow_neg_eigval": True, "use_short_conv": False},
}
ALL = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
LENGTHS = (37, 0, 100, 63)


def layer(**options):
    """Returns a layer in bf16 on the GPU, with a gate that is not in its initial state."""
    torch.manual_seed(0)
    made = KimiDeltaAttention(**SIZES | options).cuda()
    with torch.no_grad():
        made.A_log.uniform_(-1, 1)
        made.o_norm.weight.uniform_(0.5, 2)
    return made.bfloat16()


def exact(module, options):
    """Returns the layer with the same weights in fp64, computed by the reference."""
    made = KimiDeltaAttention(**SIZES | options, backend="reference").cuda().double()
    made.load_state_dict({name: x.double() for name, x in module.state_dict().items()})
    return made


def tokens(B=2, T=200):
    rng = torch.Generator().manual_seed(B + T)
    return torch.randn(B, T, SIZES["hidden_size"], generator=rng).cuda().bfloat16()


def trained(module, x, **more):
    """Returns the output and the gradients of the input and of every parameter by name."""
    x = x.clone().requires_grad_()
    names, parameters = zip(*module.named_parameters(), strict=True)
    y = module(x, **more)[0]
    seed = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    return {"output": y.detach()} | dict(
        zip(("input", *names), torch.autograd.grad((y * seed).sum(), (x, *parameters)), strict=True)
    )


def errors(got, want):
    """Returns relative errors in the Frobenius norm, by name."""
    return {name: ((got[name].double() - y).norm() / y.norm()).item() for name, y in want.items()}


def ran(calls):
    return [(c.backend, c.entry) for c in calls]


def fla_layer():
    """Returns FLA's class. Skips the test where FLA's layers are not installed.

    It is imported without `fla.layers` itself, which imports all layers and needs transformers for some of them.
    """
    fla = pytest.importorskip("fla", reason="needs fla-core and flash-linear-attention")
    folders = [Path(path) / "layers" for path in fla.__path__]
    folder = next((str(path) for path in folders if (path / "kda.py").exists()), None)
    if folder is None:
        pytest.skip("needs flash-linear-attention: fla-core has no layers")
    if "fla.layers" not in sys.modules:
        package = types.ModuleType("fla.layers")
        package.__path__ = [folder]
        sys.modules["fla.layers"] = package
    return importlib.import_module("fla.layers.kda").KimiDeltaAttention


@ALL
def test_the_layer_and_its_gradients_are_close_to_fp64(options):
    module, x = layer(**options), tokens()
    with record_calls() as calls:
        got = trained(module, x)
    assert ran(calls) == [("sm90", "chunk_fwd"), ("sm90", "chunk_bwd")]
    found = errors(got, trained(exact(module, options), x.double()))
    assert max(found.values()) < 5e-2, found


def test_decoding_on_a_gpu_continues_a_prefill():
    module, x = layer(), tokens()
    cache = Cache()
    with torch.inference_mode(), record_calls() as calls:
        parts = [
            module(p, past_key_values=cache, use_cache=True)[0] for p in x.split([190] + [1] * 10, dim=1)
        ]
    assert ran(calls) == [("sm90", "chunk_fwd"), *[("sm90", "recurrent_fwd")] * 10]
    with torch.inference_mode():
        want = exact(module, {})(x.double())[0]
    assert errors({"y": torch.cat(parts, dim=1)}, {"y": want})["y"] < 2e-2


def test_autocast_trains_weights_in_fp32():
    module, x = layer().float(), tokens().float()
    with record_calls() as calls, torch.autocast("cuda", torch.bfloat16):
        got = trained(module, x)
    assert ran(calls) == [("sm90", "chunk_fwd"), ("sm90", "chunk_bwd")]
    assert all(got[name].dtype == torch.float32 for name, _ in module.named_parameters())
    found = errors(got, trained(exact(module, {}), x.double()))
    assert max(found.values()) < 5e-2, found


@pytest.mark.parametrize("form", ["batch", "packed", "padded"])
@ALL
def test_flas_weights_load_and_the_errors_are_not_larger_than_flas(options, form):
    theirs = fla_layer()(**SIZES | options).cuda().bfloat16()
    ours = KimiDeltaAttention(**SIZES | options).cuda().bfloat16()
    theirs.load_state_dict(layer(**options).state_dict(), strict=True)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x, more = tokens(), {}
    if form == "packed":
        x, more = x[:1], {"cu_seqlens": torch.tensor([0, *LENGTHS], device="cuda").cumsum(0)}
    if form == "padded":
        mask = torch.ones(2, 200, device="cuda", dtype=torch.long)
        mask[0, :70] = mask[1, 150:] = 0
        more = {"attention_mask": mask}
    want = trained(exact(ours, options), x.double(), **more)
    with record_calls() as calls:
        found = errors(trained(ours, x, **more), want)
    assert ran(calls) == [("sm90", "chunk_fwd"), ("sm90", "chunk_bwd")]
    peer = errors(trained(theirs, x, **more), want)
    for name, error in found.items():  # gradients of a few numbers, such as A_log's, are noisy in both layers
        limit = 1.2 * peer[name] + 1e-3 if name in ("output", "input") else 1.5 * peer[name] + 2e-2
        assert error <= limit, (name, error, peer[name])


@ALL
def test_flas_layer_and_ours_continue_each_others_prefill(options):
    theirs = fla_layer()(**SIZES | options).cuda().bfloat16().eval()
    ours = layer(**options)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    x = tokens()
    with torch.inference_mode():
        want = exact(ours, options)(x.double())[0][:, 190:]
        for first, second in ((ours, theirs), (theirs, ours)):
            cache = Cache()
            first(x[:, :190], past_key_values=cache, use_cache=True)
            parts = [
                second(x[:, t : t + 1], past_key_values=cache, use_cache=True)[0] for t in range(190, 200)
            ]
            assert errors({"y": torch.cat(parts, dim=1)}, {"y": want})["y"] < 2e-2
