"""The backend `fla`: its status, when it is chosen, what it refuses, and how it calls FLA.

No GPU and no FLA are needed: a fake package checks the arguments of each call and computes with the fp64 oracle.
"""

import importlib
import sys
from dataclasses import replace

import pytest
import torch
from helpers.fake_fla import HERE, fla_on_the_cpu, only_fla_in
from helpers.inputs import call
from helpers.support import listed, modules_after, problem_shape

import kda_core
from kda_core import chunk_kda, explain, fused_recurrent_kda, registry, use_backend
from kda_core.buffers import allocate_outputs, make_inputs
from kda_core.contract import KdaOptions, Tensors
from kda_core.errors import (
    BackendNotFoundError,
    BackendUnavailableError,
    BackendUnsupportedError,
    NoEligibleBackendError,
)
from kda_core.fla import SPEC, is_installed
from kda_core.registry import REGISTRY, record_calls
from kda_core.testing import token_oracle
from kda_core.validate import problem_shape as problem_shape_of

A100, H200, BLACKWELL_PC = (8, 0), (9, 0), (12, 0)
COMMAND = "pip install './packages/kda-core[fla]', from a checkout of the repository"


@pytest.fixture
def without_fla(monkeypatch):
    """FLA is not installed, whatever this machine has."""
    monkeypatch.setattr(registry, "fla_is_installed", lambda: False)
    kda_core.backends(refresh=True)
    yield
    monkeypatch.undo()
    kda_core.backends(refresh=True)


@pytest.fixture
def with_fla():
    """FLA is installed; the machine is as it is."""
    with only_fla_in(HERE):
        yield


@pytest.fixture
def on_the_cpu():
    """The backend serves CPU tensors."""
    with fla_on_the_cpu():
        yield


def halves(dtype=torch.float16, **changes):
    """Returns the arguments of a small call that FLA serves."""
    x = call(**{"B": 2, "T": 70, "H": 1, "HV": 2, "K": 32, "V": 48} | changes)
    return x | {name: x[name].to(dtype) for name in "qkv"}


def packed(bounds=(0, 17, 17, 70), dtype=torch.int32, **changes):
    cu_seqlens = torch.tensor(bounds, dtype=dtype)
    return halves(B=1, T=max(bounds), **changes) | {"cu_seqlens": cu_seqlens}


def ran(x, **kwargs):
    """Returns the results of a call on the backend `fla`."""
    with record_calls() as calls:
        result = chunk_kda(**x, **kwargs, backend="fla")
    assert [(c.backend, c.entry) for c in calls] == [("fla", "chunk_fwd")]
    return result


def agree(found, wanted, limit=2e-3):
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a.double(), b.double(), rtol=limit, atol=limit)


# ---- without FLA


def test_without_fla_the_lists_name_the_command_that_installs_it(without_fla):
    info = listed("fla")
    assert (info.status, info.reason, info.distribution) == ("not-installed", COMMAND, "kda-core[fla]")
    error = explain(problem_shape(A100)).error
    assert f"fla        not-installed: {COMMAND}" in error
    assert "fla        not-installed; runs on sm_80+" in explain(problem_shape((7, 5))).error
    said = f"backend 'fla' .chosen by backend=. is not installed; install it with: {COMMAND.replace('[', '.')[:20]}"
    with pytest.raises(BackendNotFoundError, match=said):
        chunk_kda(**halves(), backend="fla")
    with pytest.raises(BackendNotFoundError, match="by use_backend"), use_backend("fla"):
        pass


def test_without_fla_the_environment_may_name_it(without_fla, monkeypatch):
    monkeypatch.setenv("KDA_BACKEND", "fla,reference")
    with record_calls() as calls:
        chunk_kda(**halves())
    assert [c.backend for c in calls] == ["reference"]
    monkeypatch.setenv("KDA_BACKEND", "fla")
    with pytest.raises(NoEligibleBackendError, match="fla  not-installed: pip install"):
        chunk_kda(**halves())


def test_a_gpu_that_only_fla_drives_is_a_problem_for_doctor_until_fla_is_installed(without_fla, monkeypatch):
    from kda_core import doctor

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: A100)
    gpu = {"index": 0, "name": "A100", "arch": "sm_80", "memory_gib": 80.0}
    monkeypatch.setattr(doctor, "_gpu", lambda index: gpu)
    (problem,) = [p for p in doctor.examine()["problems"] if "standard call" in p]
    assert problem.startswith("a standard call on sm_80 fails") and COMMAND in problem
    with only_fla_in(HERE):
        monkeypatch.setattr(registry, "fla_is_installed", lambda: True)
        kda_core.backends(refresh=True)
        assert not [p for p in doctor.examine()["problems"] if "standard call" in p]


def test_listing_backends_imports_neither_fla_nor_triton():
    code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import kda_core; assert 'fla' in str(kda_core.backends())"
    assert "fla" in modules_after(f"{code}; import fla")
    if not torch.cuda.is_available():  # with a GPU, the list shows whether FLA loads
        assert not modules_after(code) & {"fla", "triton"}


# ---- the choice


def test_fla_never_serves_a_call_on_the_cpu(with_fla):
    x = halves()
    with record_calls() as calls:
        chunk_kda(**x)
    assert [c.backend for c in calls] == ["reference"]
    with pytest.raises(BackendUnavailableError, match=r"wrong-arch: runs on sm_80\+, the inputs are on cpu"):
        chunk_kda(**x, backend="fla")


@pytest.mark.parametrize("arch", [A100, (8, 9), BLACKWELL_PC])
def test_fla_serves_gpus_that_no_other_backend_drives(with_fla, arch):
    for changes in ({}, {"K": 64, "V": 64}, {"K": 256}, {"dtype": torch.float16}, {"needs_backward": True}):
        assert explain(problem_shape(arch, **changes)).backend == "fla"
    assert explain(problem_shape((7, 5))).backend is None


def test_fla_serves_what_the_backend_of_a_gpu_does_not(with_fla, install):
    install("narrow", archs={H200}, dtypes=frozenset({"bfloat16"}), head_dims=frozenset({(128, 128)}))
    with use_backend("narrow"):
        assert explain(problem_shape(H200)).backend == "narrow"
    assert REGISTRY.resolve(problem_shape(H200)).spec.name in ("narrow", "sm90")
    for changes in ({"K": 64, "V": 64}, {"K": 96, "V": 96}, {"dtype": torch.float16}):
        assert REGISTRY.resolve(problem_shape(H200, **changes)).spec.name == "fla"


def test_a_call_that_another_backend_serves_does_not_import_fla(with_fla, install):
    install("narrow", archs={A100})
    assert REGISTRY.resolve(problem_shape(A100)).spec.name == "narrow"
    assert "fla" not in sys.modules
    assert listed("fla").status in ("wrong-arch", "ok")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"K": 8}, "unsupported: head dimension K=8; FLA serves K from 16 to 256"),
        ({"K": 512}, "unsupported: head dimension K=512; FLA serves K from 16 to 256"),
        ({"B": 1024, "HV": 64, "H": 64}, "unsupported: B.HV=65536; FLA serves at most 65535"),
        ({"index": torch.int32, "use_graph": True, "needs_backward": True}, "gradients with use_graph"),
        ({"dtype": torch.float32}, "unsupported: dtype float32; serves bfloat16, float16"),
        ({"pin": True}, "unsupported: pin"),
    ],
)
def test_refusals(with_fla, changes, words):
    with pytest.raises(BackendUnsupportedError, match=words):
        REGISTRY.resolve(problem_shape(A100, **changes), "fla")


def test_an_old_fla_is_refused(tmp_path):
    """It would ignore arguments that it does not know."""
    folder = tmp_path / "fla" / "ops" / "kda"
    folder.mkdir(parents=True)
    (tmp_path / "fla" / "__init__.py").write_text("__version__ = '0.4.2'\n")
    (folder / "chunk.py").write_text("def chunk_kda(q, k, v, g, beta, scale=None, **kwargs): pass\n")
    with only_fla_in(tmp_path):
        error = explain(problem_shape(A100)).error
    words = "expected version 0.6, got 0.4.2, whose chunk_kda has no parameter use_beta_sigmoid_in_kernel, use_graph"
    assert "fla        broken: fla: kda_core.fla:FlaBackend failed to load: ImportError: " in error
    assert words in error


def test_a_folder_without_code_is_not_an_installed_fla(tmp_path, monkeypatch):
    (tmp_path / "fla").mkdir()
    with only_fla_in(tmp_path):
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
        assert not is_installed()
        (tmp_path / "fla" / "__init__.py").touch()
        importlib.invalidate_caches()
        assert is_installed()
        monkeypatch.undo()


# ---- calls; test_fla_kit.py compares many more with the oracle


def test_cu_seqlens_that_change_in_place_count(on_the_cpu):
    """FLA caches the chunks of packed sequences by the identity of cu_seqlens."""
    x = packed()
    x["v"].requires_grad_()
    for bounds in ((0, 17, 17, 70), (0, 40, 60, 70)):
        x["cu_seqlens"].copy_(torch.tensor(bounds))
        o, state = chunk_kda(**x, output_final_state=True, backend="fla")
        wanted = token_oracle(**x)
        agree((o, state), wanted)
        seed = torch.ones_like(o)
        (found,) = torch.autograd.grad(o, x["v"], seed)
        (exact,) = torch.autograd.grad(wanted[0], x["v"], seed.double())
        agree([found], [exact])


@pytest.mark.parametrize(
    "bounds", [(0, 70, 10**9), (-(10**9), 40, 70), (30, 70, 70), (0, 60, 50), (70, 0, 70)]
)
@pytest.mark.parametrize("graph", [False, True])
def test_fla_gets_valid_offsets_for_invalid_ones_on_a_device(on_the_cpu, bounds, graph):
    """The host does not know the contents of offsets on a device. FLA's kernels would access other memory."""
    x = halves(B=1) | {"cu_seqlens": torch.tensor(bounds)}
    tensors = [x.get(name) for name in Tensors._fields]
    shape = problem_shape_of(*tensors, options=KdaOptions(use_graph=graph, output_final_state=True))
    inputs = make_inputs(tensors, shape)
    outputs = allocate_outputs(inputs)
    backend = REGISTRY.load(REGISTRY.find("fla").spec)
    assert backend.chunk_fwd(inputs, outputs) is outputs  # the fake FLA checks the offsets


def test_tokens_after_the_last_sequence_keep_their_outputs(on_the_cpu):
    x = halves(B=1)
    bounds = torch.tensor([0, 17, 40, 40])
    o = torch.full_like(x["v"], 7.0)
    chunk_kda(**x, cu_seqlens=bounds, use_graph=True, out=o, backend="fla")
    assert (o[:, 40:] == 7).all()
    agree([o[:, :40]], [token_oracle(**x, cu_seqlens=bounds)[0][:, :40]])


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("bounds", [(0, 0), (0, 0, 0, 0)])
def test_calls_without_tokens(on_the_cpu, bounds, v_first):
    """FLA does not serve them, so the backend returns the initial states itself."""
    N = len(bounds) - 1
    x = packed(bounds)
    given = torch.randn(N, 2, *((48, 32) if v_first else (32, 48)))
    options = {"state_v_first": v_first, "output_final_state": True}
    assert torch.equal(ran(x, initial_state=given, **options)[1], given)
    assert not ran(x, **options)[1].any()
    leaves = [given.clone().requires_grad_(), x["q"].clone().requires_grad_()]
    o, state = chunk_kda(**x | {"q": leaves[1]}, initial_state=leaves[0], **options, backend="fla")
    seed = torch.randn_like(state)
    found = torch.autograd.grad([o, state], leaves, [torch.zeros_like(o), seed])
    assert torch.equal(found[0], seed) and not found[1].any()


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("index", [torch.int32, torch.int64, None])
def test_gradients_of_every_input(on_the_cpu, index, v_first, host):
    """Every gradient has the shape and dtype of its input and the value of autograd through the oracle."""
    if host and index is None:
        pytest.skip("fixed lengths have no host copy")
    x = halves(torch.bfloat16, T=40) if index is None else packed((0, 17, 17, 40), index)
    N = 2 if index is None else 3
    rng = torch.Generator().manual_seed(1)
    x |= {
        "g": torch.randn(x["g"].shape, generator=rng).bfloat16(),
        "beta": torch.randn(x["beta"].shape, generator=rng),
        "A_log": torch.rand(1, 2, 1, generator=rng).bfloat16(),
        "dt_bias": torch.randn(2 * 32, generator=rng),
        "initial_state": torch.randn(N, 2, *((48, 32) if v_first else (32, 48)), generator=rng),
    }
    options = {
        "state_v_first": v_first, "output_final_state": True, "use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True, "scale": 0.3,
    }  # fmt: skip
    names = [n for n in x if n != "cu_seqlens"]
    leaves = {n: x[n].clone().requires_grad_() for n in names}
    extra = {"cu_seqlens_cpu": x["cu_seqlens"].clone()} if host else {}
    with record_calls() as calls:
        found = chunk_kda(**x | leaves | extra, **options, backend="fla")
        seeds = [torch.randn(y.shape, generator=rng).to(y.dtype) for y in found]
        gradients = torch.autograd.grad(found, list(leaves.values()), seeds)
    assert [(c.backend, c.entry) for c in calls] == [("fla", "chunk_fwd"), ("fla", "chunk_bwd")]
    exact = {n: x[n].double().requires_grad_() for n in names}
    wanted = token_oracle(**x | exact, **options)
    want = torch.autograd.grad(wanted, list(exact.values()), [y.double() for y in seeds])
    for name, a, b in zip(names, gradients, want):
        assert (a.shape, a.dtype) == (x[name].shape, x[name].dtype), name
        assert (a.double() - b).norm() <= 2**-8 * b.norm(), name


def test_without_a_gradient_of_the_final_states_fla_computes_none(on_the_cpu):
    x = packed()
    k = x["k"].clone().requires_grad_()
    o, state = chunk_kda(**x | {"k": k}, output_final_state=True, backend="fla")
    (found,) = torch.autograd.grad(o.sum(), k)
    exact = x["k"].double().requires_grad_()
    (want,) = torch.autograd.grad(token_oracle(**x | {"k": exact})[0].sum(), exact)
    assert state.requires_grad and (found.double() - want).norm() <= 2**-9 * want.norm()


def test_decoding_writes_to_the_given_outputs(on_the_cpu):
    x = halves(T=3)
    with record_calls() as calls:
        found = fused_recurrent_kda(**x, output_final_state=True, backend="fla")
    assert [(c.backend, c.entry) for c in calls] == [("fla", "recurrent_fwd")]
    agree(found, token_oracle(**x))


def test_the_spec_is_below_every_backend_with_a_default_priority():
    assert REGISTRY.find("reference").spec.priority < SPEC.priority < 0
    assert replace(SPEC, priority=0).archs == frozenset({"sm_80+"})
