"""Calls like an earlier one take a prepared launch, with the results and the errors of all others."""

import gc
import threading
import weakref

import pytest
import torch
from helpers.bad_arguments import NESTED
from helpers.fake_plugins import install_planner
from helpers.inputs import call, replaced
from helpers.prepared_backend import prepared
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import kda_core
from kda_core import chunk_kda, known, torch_private, use_backend
from kda_core.errors import ArgumentError, DtypeError, KdaError, ShapeError
from kda_core.recent import Recent
from kda_core.registry import record_calls
from kda_core.serving import bind

X = call()
GATE = {"use_gate_in_kernel": True, "A_log": torch.zeros(2), "dt_bias": torch.zeros(16)}
STATE = {"initial_state": torch.ones(1, 2, 8, 8), "output_final_state": True}
PER_TOKEN = ("q", "k", "v", "g", "beta")


@pytest.fixture
def backend():
    with prepared() as found:
        yield found


def through_the_dispatcher(**arguments):
    """The call without any short cut."""
    with FlopCounterMode(display=False):
        return chunk_kda(**arguments)


def same(a, b):
    return len(a) == len(b) and all(x is y is None or torch.equal(x, y) for x, y in zip(a, b))


def make_known(backend, **arguments):
    """Makes a call until it is known, and asserts that it is."""
    for _ in range(3):
        chunk_kda(**arguments)
    assert backend.launched[-1] == 1, "the third call of a kind is known"


@pytest.mark.parametrize("more", [{}, GATE, STATE, GATE | STATE], ids=["plain", "gate", "state", "all"])
def test_known_calls_return_the_results_of_others(backend, more):
    make_known(backend, **X, **more)
    assert len(backend.prepared) == 1
    for seed in range(1, 4):
        x = call(seed=seed)
        with record_calls() as calls:
            got = chunk_kda(**x, **more)
        assert same(got, through_the_dispatcher(**x, **more))
        assert [(c.backend, c.entry, c.device_type, c.planner) for c in calls] == [
            ("reference", "chunk_fwd", "cpu", None)
        ]
    assert backend.launched == [4] and len(backend.prepared) == 1


def test_parameters_are_known_where_grad_mode_is_off(backend):
    gate = GATE | {"A_log": torch.nn.Parameter(torch.zeros(2))}
    with torch.no_grad():
        make_known(backend, **X, **gate)
    o, _ = chunk_kda(**X, **gate)
    assert o.requires_grad and backend.launched == [1]
    with torch.no_grad():
        assert not chunk_kda(**X, **gate)[0].requires_grad and backend.launched == [2]


def shifted(x):
    return torch.empty(x.numel() + 1)[1:].view_as(x).copy_(x)


def strided(x):
    return torch.empty(*x.shape, 2)[..., 0].copy_(x)


class Subclass(torch.Tensor):
    pass


OTHER_TENSORS = {
    "not aligned": shifted,
    "strided": strided,
    "negated": lambda x: torch.complex(torch.zeros_like(x), -x).conj().imag,
    "a subclass": lambda x: x.clone().as_subclass(Subclass),
    "requires grad": lambda x: x.clone().requires_grad_(),
}


@pytest.mark.parametrize("change", OTHER_TENSORS)
def test_other_tensors_take_the_ordinary_way(backend, change):
    make_known(backend, **X)
    other = replaced(X, v=OTHER_TENSORS[change](X["v"]))
    for _ in range(3):
        assert torch.equal(chunk_kda(**other)[0].detach(), through_the_dispatcher(**X)[0])
    assert backend.launched[0] == 1


BAD = {
    "dtype": ({"v": X["v"].double()}, DtypeError),
    "shape": ({"v": X["v"][:, :, :1]}, ShapeError),
    "no tensor": ({"v": [1.0]}, DtypeError),
    "no tensor at all": ({"q": None}, DtypeError),
    "an int for a bool": ({"output_final_state": 0}, DtypeError),
    "a float for an int": ({"chunk_size": 64.0}, DtypeError),
    "a list for an option": ({"scale": [1.0]}, DtypeError),
    "an unknown backend": ({"backend": "absent"}, KdaError),
    "no plan": ({"context_parallel": 3}, DtypeError),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_refused_after_a_known_call(backend, case):
    change, error = BAD[case]
    make_known(backend, **X)
    for _ in range(2):
        with pytest.raises(error) as caught:
            chunk_kda(**(X | change))
        assert next(iter(change)) in str(caught.value)
    assert backend.launched == [1]


@pytest.mark.parametrize("name", ("g", "v", "beta"))
def test_nested_tensors_are_refused_after_a_known_call(backend, name):
    make_known(backend, **X)
    step = bind(chunk_kda, **X)
    step(**X)
    before = sum(backend.launched)
    for function in (chunk_kda, step):
        with pytest.raises(ArgumentError, match=f"{name}: expected a dense tensor, got a nested tensor"):
            function(**X | {name: NESTED})
    assert sum(backend.launched) == before


class Passes(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Sees(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


OBSERVED = {
    "a dispatch mode": Passes,
    "a function mode": Sees,
    "fake tensors": lambda: FakeTensorMode(allow_non_fake_inputs=True),
    "forward-mode AD": forward_ad.dual_level,
}


@pytest.mark.parametrize("mode", OBSERVED)
@pytest.mark.parametrize("form", ("call", "bound"))
def test_what_observes_operators_sees_calls_that_were_known(backend, mode, form):
    make_known(backend, **X)
    function = bind(chunk_kda, **X) if form == "bound" else chunk_kda
    function(**X)
    before = list(backend.launched)
    with OBSERVED[mode]():
        function(**X)
    assert backend.launched == before
    function(**X)
    assert sum(backend.launched) == sum(before) + 1


@pytest.mark.filterwarnings("ignore:.torch.jit.trace")  # a DeprecationWarning, of torch 2.15 a FutureWarning
def test_transforms_and_traces_see_calls_that_were_known(backend):
    make_known(backend, **X)
    results = torch.func.vmap(lambda x: chunk_kda(**X)[0] + x)(torch.zeros(3))
    assert backend.launched == [1] and torch.equal(results[2], chunk_kda(**X)[0])
    traced = torch.jit.trace(lambda *x: chunk_kda(*x)[0], tuple(X.values()), check_trace=False)
    assert backend.launched == [2] and "kda_core::chunk_fwd" in str(traced.graph)
    chunk_kda(**X)
    assert backend.launched == [3]


def test_other_options_are_other_calls(backend):
    for n, more in enumerate(
        ({}, {"scale": 0.5}, {"output_final_state": True}, {"safe_gate": True}), start=1
    ):
        make_known(backend, **X, **more)
        assert len(backend.prepared) == n
    half = 1 / 2  # not the object of the call before
    got = chunk_kda(**X, scale=float(str(half)))
    assert same(got, through_the_dispatcher(**X, scale=0.5)) and backend.launched == [1, 2, 1, 1]


def test_the_environment_decides_anew(monkeypatch, install):
    install("other", priority=1)
    with prepared() as backend, record_calls() as calls:
        with use_backend("reference"):
            make_known(backend, **X)
        chunk_kda(**X)
        monkeypatch.setenv("KDA_BACKEND", "reference")
        chunk_kda(**X)
        assert [c.backend for c in calls[3:]] == ["other", "reference"] and backend.launched == [1]
        monkeypatch.setenv("KDA_CHECK", "1")
        with pytest.raises(ArgumentError, match="beta"):
            chunk_kda(**X | {"beta": torch.full_like(X["beta"], torch.nan)})


@pytest.mark.parametrize("name", ("cu_seqlens", "cu_seqlens_cpu"))
def test_lengths_that_the_host_knows_are_read_in_every_call(backend, name):
    x = X | {"cu_seqlens": torch.tensor([0, 5, 20]), name: torch.tensor([0, 5, 20])}
    make_known(backend, **x)
    for bounds in ([0, 12, 20], [0, 5, 20], [0, 0, 20]):
        for offsets in {x["cu_seqlens"], x[name]}:
            offsets.copy_(torch.tensor(bounds))
        for _ in range(3):
            assert same(chunk_kda(**x), through_the_dispatcher(**x))
    assert backend.launched == [4, 2, 2]
    x[name][1] = 30
    with pytest.raises(ArgumentError, match="30 before 20"):
        chunk_kda(**x)


def test_calls_that_a_planner_splits_are_not_known(install):
    install_planner(install)
    with prepared() as backend:
        for _ in range(3):
            with record_calls() as calls:
                chunk_kda(**X)
            assert [c.planner for c in calls] == ["halves"]
        assert not backend.prepared
        make_known(backend, **X, context_parallel="off")


@pytest.mark.parametrize("fields", [{"abi": (2, 7)}], ids=["an older ABI"])
def test_a_backend_of_an_older_abi_is_not_asked(fields):
    with prepared(**fields) as backend:
        for _ in range(4):
            chunk_kda(**X)
    assert not backend.prepared


def test_without_torchs_guards_no_call_is_known(backend, monkeypatch):
    monkeypatch.setattr(torch_private, "GUARDS", None)
    for _ in range(4):
        chunk_kda(**X)
    assert not any(backend.launched)


@pytest.fixture
def deterministic():
    """Where torch fills the memory that it allocates."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_without_the_allocators_of_inductor_calls_are_known(backend, monkeypatch):
    monkeypatch.setattr(torch_private, "ALLOCATORS", {})
    make_known(backend, **X, **STATE)
    assert same(chunk_kda(**X, **STATE), through_the_dispatcher(**X, **STATE))
    assert same(bind(chunk_kda, **X, **STATE)(**X), through_the_dispatcher(**X, **STATE))
    assert backend.launched == [2, 1]


def test_where_torch_fills_memory_no_call_is_known(backend, deterministic):
    step = bind(chunk_kda, **X)
    for _ in range(4):
        assert same(chunk_kda(**X), step(**X))
    assert not any(backend.launched)
    torch.use_deterministic_algorithms(False)
    assert same(chunk_kda(**X), step(**X)) and sum(backend.launched) == 2


def test_known_calls_allocate_contiguous_outputs_of_their_own(backend):
    x = X | {
        "v": torch.stack([X["v"]] * 2, 1)[:, 0]
    }  # a batch of another stride, which is contiguous for B = 1
    make_known(backend, **x, **STATE)
    found = [chunk_kda(**x, **STATE) for _ in range(2)]
    for o, state in found:
        assert o.is_contiguous() and o.shape == x["v"].shape and o.dtype == x["v"].dtype
        assert (
            state.is_contiguous()
            and state.shape == STATE["initial_state"].shape
            and state.dtype == torch.float32
        )
        assert not o.requires_grad and not o.is_inference()
    assert len({y.data_ptr() for pair in found for y in pair}) == 4
    with torch.inference_mode():
        for _ in range(3):
            o, state = chunk_kda(**x, **STATE)
            assert o.is_inference() and state.is_inference()


def test_threads_make_known_calls(backend):
    inputs = [call(seed=seed) for seed in range(4)]
    wanted = [through_the_dispatcher(**x, **STATE) for x in inputs]
    failed = []

    def run(x, want):
        for _ in range(20):
            if not same(chunk_kda(**x, **STATE), want):
                failed.append(want)

    threads = [threading.Thread(target=run, args=pair) for pair in zip(inputs, wanted)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and sum(backend.launched) > 40


def test_a_tensor_may_be_passed_twice(backend):
    x = X | {"k": X["q"]}
    for _ in range(4):
        assert same(chunk_kda(**x), through_the_dispatcher(**x))
    step = bind(chunk_kda, **x)
    assert same(step(**x), through_the_dispatcher(**x)) and same(step(**X), through_the_dispatcher(**X))


def test_few_calls_of_equal_sizes_are_kept(backend, monkeypatch):
    monkeypatch.setattr(known, "KNOWN", Recent(100, lambda key, found: len(found)))
    scales = [n / 8 for n in range(2 * known.MOST_ALIKE)]
    for scale in scales:
        make_known(backend, **X, scale=scale)
    chunk_kda(**X, scale=scales[-known.MOST_ALIKE])
    assert backend.launched[-known.MOST_ALIKE] == 2
    chunk_kda(**X, scale=scales[0])
    assert backend.launched[0] == 1 and len(known.KNOWN) == 1


def test_known_calls_are_bounded_and_hold_no_tensor(backend, monkeypatch):
    monkeypatch.setattr(known, "KNOWN", Recent(4, lambda key, found: len(found)))
    for T in range(1, 12):
        x = call(T=T)
        make_known(backend, **x)
        assert 1 <= len(known.KNOWN) <= 4
    alive = [weakref.ref(t) for t in x.values()]
    del x
    gc.collect()
    assert not any(ref() is not None for ref in alive)


# ---- bound prefills


@pytest.mark.parametrize("is_prepared", (True, False), ids=("prepared", "not prepared"))
@pytest.mark.parametrize("more", [{}, GATE, STATE, GATE | STATE], ids=["plain", "gate", "state", "all"])
def test_a_bound_prefill_returns_what_the_function_returns(more, is_prepared):
    with prepared(**{} if is_prepared else {"abi": (2, 7)}) as backend:
        with record_calls() as calls:
            step = bind(chunk_kda, **X, **more)
        assert not calls and step.backend == "reference"
        for seed in range(1, 4):
            x = call(seed=seed)
            want = through_the_dispatcher(**x, **more)
            assert same(step(**x), want)
            out = torch.empty_like(x["v"])
            got = step(*x.values(), out=out)
            assert got[0] is out and same(got, want)
        assert backend.launched == ([6] if is_prepared else [])


def test_a_bound_prefill_uses_the_workspace_that_is_bound(backend):
    size = kda_core.explain(**X).workspace_bytes
    workspace = torch.zeros(size, dtype=torch.uint8)
    step = bind(chunk_kda, **X, workspace=workspace)
    assert same(step(**X), through_the_dispatcher(**X))
    with pytest.raises(ShapeError, match=f"workspace: expected at least {size} bytes, got {size - 1} bytes"):
        bind(chunk_kda, **X, workspace=workspace[: size - 1])
    with pytest.raises(ArgumentError, match="workspace: expected a contiguous 1-D uint8 tensor"):
        bind(chunk_kda, **X, workspace=workspace.float())


def test_a_bound_prefill_follows_the_plan_of_the_planner(install):
    install_planner(install)
    with prepared() as backend, record_calls() as calls:
        got = bind(chunk_kda, **X, output_final_state=True)(**X)
        bind(chunk_kda, **X, context_parallel="off")(**X)
        assert [c.planner for c in calls] == ["halves", None] and backend.launched == [1]
        assert same(got, through_the_dispatcher(**X, output_final_state=True))


def test_a_bound_prefill_over_a_pool_writes_its_slots(backend):
    def pool():
        return torch.randn(4, 2, 8, 8, generator=torch.Generator().manual_seed(0))

    a, b = pool(), pool()
    given = {"ssm_state_indices": torch.tensor([2]), "output_final_state": True}
    step = bind(chunk_kda, **X, **given, initial_state=a)
    for slot in (2, 0, -1):
        given["ssm_state_indices"].fill_(slot)
        o, states = step(**X)
        want, _ = through_the_dispatcher(**X, **given, initial_state=b)
        assert states is a and torch.equal(o, want) and torch.equal(a, b)


def test_bind_refuses_prefills_that_it_cannot_serve(backend):
    with pytest.raises(ArgumentError, match=r"return_intermediate_states: expected False \(a bound call"):
        bind(chunk_kda, **X, return_intermediate_states=True)
    with pytest.raises(ArgumentError, match="v: expected a tensor that requires no grad"):
        bind(chunk_kda, **replaced(X, v=X["v"].clone().requires_grad_()))
    with pytest.raises(ArgumentError, match="q: expected a tensor that reference reads in place"):
        bind(chunk_kda, **replaced(X, q=shifted(X["q"])))
    with pytest.raises(TypeError, match="unexpected keyword argument 'offsets'"):
        bind(chunk_kda, **X, offsets=None)
    step = bind(chunk_kda, **X)
    with pytest.raises(ShapeError, match=r"q: expected \[1, 20, 2, 8\], as bound"):
        step(**call(T=21))
    with pytest.raises(ArgumentError, match="beta: expected memory that starts at a multiple of 16 bytes"):
        step(**replaced(X, beta=shifted(X["beta"])))
    assert backend.launched == [0]
