"""Discovery, statuses, the order of choice. A broken plugin never affects the others."""

import re
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.fake_plugins import HALVES, install_planner
from helpers.inputs import call

import kda_core.call
from kda_core import BACKEND_ABI, chunk_kda, discovery, explain, registry, use_backend
from kda_core.abi import compatible
from kda_core.errors import (
    ArgumentError,
    BackendContractError,
    BackendNotFoundError,
    BackendUnavailableError,
    BackendUnsupportedError,
    NoEligibleBackendError,
    PlannerError,
)
from kda_core.registry import REGISTRY, record_calls

X = call()


def ran(**kwargs):
    """Returns the backend that served a small call."""
    with record_calls() as calls:
        chunk_kda(**X, **kwargs)
    (only,) = calls
    return only.backend


@contextmanager
def without(*names):
    """Within the block, the backends `names` of this project are not installed."""
    found = registry.entry_points
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "entry_points", lambda **kw: [p for p in found(**kw) if p.name not in names])
        kda_core.backends(refresh=True)
        try:
            yield
        finally:
            patch.undo()
            kda_core.backends(refresh=True)


def status(name):
    return next((i.status, i.reason) for i in kda_core.backends() if i.name == name)


@pytest.mark.parametrize(
    ("plugin", "core", "fits"),
    [
        ((1, 0), (1, 0), True),
        ((1, 0), (1, 3), True),
        ((1, 4), (1, 3), False),
        ((0, 9), (1, 3), False),
        ((2, 0), (1, 3), False),
    ],
)
def test_abi_rule(plugin, core, fits):
    assert compatible(plugin, core) is fits


def test_the_reference_serves_cpu_calls():
    assert status("reference") == ("ok", "")
    assert ran() == "reference"


def test_every_status_is_listed_and_affects_no_other_backend(install):
    install("good", priority=5)
    install("broken-import", source="import a_module_that_is_not_there")
    install("broken-object", source="SPEC = 3")
    install("broken-target", target="a_module_that_is_not_there:Backend")
    install("outdated", abi=(0, 9))
    install("too-new", abi=(BACKEND_ABI[0], BACKEND_ABI[1] + 1))
    install("foreign", archs={(10, 0), (10, 3)})
    install("empty", unavailable="no kernel yet")
    assert status("good") == ("ok", "")
    for name, want, words in (
        ("broken-import", "broken", "ModuleNotFoundError"),
        ("broken-object", "broken", "int, not a BackendSpec"),
        ("broken-target", "broken", "a_module_that_is_not_there"),
        ("outdated", "abi-mismatch", "install a newer fake-outdated: pip install outdated"),
        ("too-new", "abi-mismatch", "install a newer kda-core: pip install ./packages/kda-core"),
        ("foreign", "wrong-arch", "sm_100, sm_103"),
        ("empty", "unsupported", "no kernel yet"),
    ):
        got, reason = status(name)
        assert got == want and words in reason, (name, got, reason)
    assert ran() == "good"
    table = str(kda_core.backends())
    assert all(i.name in table and i.reason in table for i in kda_core.backends())


def test_a_note_is_listed_with_every_status(install):
    install("good", note="slow on Mondays")
    install("foreign", archs={(10, 0)}, note="run on no GPU yet")
    install("wrong", note=3)
    infos = {i.name: i for i in kda_core.backends()}
    assert (infos["good"].reason, infos["good"].note) == ("", "slow on Mondays")
    assert infos["reference"].note == "" and infos["wrong"].note == ""
    assert infos["wrong"].status == "broken" and "note is 3, not a text" in infos["wrong"].reason
    lines = {line.split()[0]: line for line in str(kda_core.backends()).splitlines()}
    assert lines["good"].endswith("slow on Mondays")
    assert lines["foreign"].endswith("run on no GPU yet")


def test_the_second_backend_of_a_name_is_broken(install):
    install("reference", priority=1000)
    duplicates = [i for i in kda_core.backends() if i.name == "reference"]
    assert [i.status for i in duplicates] == ["ok", "broken"]
    assert duplicates[1].reason == "fake-reference uses the name reference, which belongs to kda-core"
    assert ran() == "reference"


def test_order_of_choice(install, monkeypatch):
    install("alpha", priority=1)
    install("beta", priority=1)
    install("gamma", priority=0)
    assert ran() == "alpha"  # priority, then name
    monkeypatch.setenv("KDA_BACKEND", "gamma, beta")
    assert ran() == "gamma"
    with use_backend("beta"):
        assert ran() == "beta"
        assert ran(backend="reference") == "reference"
    assert ran() == "gamma"


def test_the_environment_names_backends_in_order_of_preference(install, monkeypatch):
    install("picky", refuses="T is odd", priority=9)
    install("good", priority=1)
    monkeypatch.setenv("KDA_BACKEND", "picky,good")
    assert ran() == "good"
    monkeypatch.setenv("KDA_BACKEND", "picky")
    with pytest.raises(NoEligibleBackendError, match="picky *unsupported: T is odd"):
        ran()


def test_a_backend_in_the_environment_that_cannot_serve_is_skipped(install, monkeypatch):
    install("failing", target="a_module_that_is_not_there:Backend")
    install("foreign", archs={(9, 0)})
    with without("sm90"):
        monkeypatch.setenv("KDA_BACKEND", "sm90,failing,foreign,reference")
        assert ran() == "reference"
        monkeypatch.setenv("KDA_BACKEND", "sm90,failing,foreign,sm90")
        with pytest.raises(NoEligibleBackendError) as caught:
            ran()
    head, *rows = str(caught.value).splitlines()
    assert head.endswith("on cpu (choice: KDA_BACKEND='sm90,failing,foreign')")
    for row, words in zip(
        rows, ("not-installed: pip install", "broken: ", "wrong-arch: runs on sm_90"), strict=True
    ):
        assert words in row


@pytest.mark.parametrize("order", ["sm9,reference", "reference,sm9", "SM90,reference"])
def test_an_unknown_name_in_the_environment_is_an_error(monkeypatch, order):
    monkeypatch.setenv("KDA_BACKEND", order)
    with pytest.raises(BackendNotFoundError) as caught:
        ran()
    assert f"(chosen by KDA_BACKEND='{order}') is not installed; did you mean 'sm90'?" in str(caught.value)


def test_a_misspelled_backend_gets_a_hint(install):
    install("tokenwise")
    for name, meant in (("refrence", "reference"), ("Tokenwise", "tokenwise"), ("sm_100", "sm100")):
        with pytest.raises(
            BackendNotFoundError, match=f"{name!r} .chosen by backend=.*did you mean {meant!r}"
        ):
            ran(backend=name)
        with (
            pytest.raises(BackendNotFoundError, match=f"by use_backend.*did you mean {meant!r}"),
            use_backend(name),
        ):
            pass
    with pytest.raises(BackendNotFoundError) as caught:
        ran(backend="something-else")
    assert "did you mean" not in str(caught.value)


def test_messages_do_not_name_packages_that_no_index_has(monkeypatch):
    with without("sm90", "sm100"):
        texts = [str(kda_core.backends())]
        with pytest.raises(BackendNotFoundError) as caught:
            ran(backend="sm90")
        texts.append(str(caught.value))
        texts.append(explain(replace(explain(**X).shape, device_type="cuda", arch=(9, 0))).error)
        with monkeypatch.context() as published:
            published.setattr("kda_core.install.SOURCE", "")
            assert status("sm90") == ("not-installed", "pip install kda-core kda-sm90")
    for text in texts:
        assert (
            "pip install ./packages/kda-core ./packages/kda-sm90, from a checkout of the repository" in text
        )
    ours = [i.spec for i in kda_core.backends() if i.distribution.startswith("kda-")]
    commands = [spec.install for spec in ours if spec is not None]
    for text in (*texts, *commands):
        assert all(word.strip("'")[0] in ".-" for word in re.findall(r"pip install (\S+)", text)), text


def test_no_text_of_the_repository_installs_our_packages_by_name():
    root = Path(__file__).parents[2]
    texts = [*root.glob("*.md"), *(root / "docs").rglob("*.md")]
    texts += [
        p
        for folder in ("packages", "examples")
        for p in (root / folder).rglob("*")
        if p.suffix in (".py", ".md")
    ]
    by_name = re.compile(r"""pip install (?:-\S+ )*['"]?(?:kda|ptx)[-_]""")
    assert len(texts) > 100
    assert [str(p.relative_to(root)) for p in texts if by_name.search(p.read_text())] == []


def test_an_explicit_choice_never_falls_back(install):
    install("picky", refuses="K=8; only K=128")
    install("narrow", features={"unbounded_gate"})
    install("empty", unavailable="no kernel yet")
    install("foreign", archs={(9, 0)})
    with pytest.raises(
        BackendUnsupportedError, match="'picky'.*only K=128; these could serve it: .*reference"
    ):
        ran(backend="picky")
    with pytest.raises(BackendUnsupportedError, match="final_state"):
        ran(backend="narrow", output_final_state=True)
    assert ran(backend="narrow") == "narrow"
    with pytest.raises(BackendUnsupportedError, match="no kernel yet"):
        ran(backend="empty")
    with pytest.raises(BackendUnavailableError, match="wrong-arch: runs on sm_90, the inputs are on cpu"):
        ran(backend="foreign")
    with pytest.raises(BackendNotFoundError, match="is not installed"):
        ran(backend="no-such-backend")
    with pytest.raises(BackendNotFoundError), use_backend("no-such-backend"):
        pass


def test_a_backend_never_receives_a_call_that_needs_an_undeclared_feature(install):
    from kda_core.contract import Feature

    install("no-backward", features={f.value for f in Feature} - {"backward"}, priority=50)
    assert ran() == "no-backward"
    x = call()
    x["q"].requires_grad_()
    with record_calls() as calls:
        chunk_kda(**x)[0].sum().backward()
    assert [(c.backend, c.entry) for c in calls] == [("no-backward", "chunk_fwd"), ("reference", "chunk_bwd")]
    with pytest.raises(BackendUnsupportedError, match="backward.*reference"):
        chunk_kda(**x, backend="no-backward")


def test_a_backend_that_returns_no_outputs_violates_the_contract(install):
    install(
        "liar",
        backend="from kda_core.reference import ReferenceBackend\n"
        "class Backend(ReferenceBackend):\n    def chunk_fwd(self, inputs, outputs):\n        return None\n",
    )
    with pytest.raises(BackendContractError, match="liar.chunk_fwd returned NoneType"):
        ran(backend="liar")


def test_use_backend_applies_to_its_own_thread(install):
    install("alpha", priority=1)
    seen = {}

    def other():
        seen["thread"] = ran()

    with use_backend("reference"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert ran() == "reference"
    assert seen["thread"] == "alpha"
    with pytest.raises(ArgumentError, match="name of a backend"), use_backend(None):
        pass


def test_discovery_is_cached_until_refresh_and_thread_safe(install, monkeypatch):
    install(
        "slow",
        backend="import time\ntime.sleep(0.2)\nfrom kda_core.reference import ReferenceBackend as Backend\n",
        priority=3,
    )
    reads = []
    original = registry.entry_points
    monkeypatch.setattr(registry, "entry_points", lambda **kw: reads.append(kw) or original(**kw))
    kda_core.backends(refresh=True)
    threads = [threading.Thread(target=lambda: chunk_kda(**X)) for _ in range(8)]
    with record_calls() as calls:
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert [c.backend for c in calls] == ["slow"] * 8
    assert len([r for r in reads if r["group"] == "kda_core.backends"]) == 1
    kda_core.backends(refresh=True)
    assert len([r for r in reads if r["group"] == "kda_core.backends"]) == 2


def test_all_groups_of_entry_points_are_read_at_once(monkeypatch):
    original, reads = discovery.metadata.entry_points, []
    monkeypatch.setattr(discovery.metadata, "entry_points", lambda **kw: reads.append(kw) or original(**kw))
    kda_core.backends(refresh=True)
    REGISTRY.planners()
    assert reads == [{}]
    monkeypatch.setattr(sys, "path", [*sys.path, "another"])
    assert discovery.entry_points(group="kda_core.backends")
    assert reads == [{}, {}]


def test_a_backend_can_be_replaced_within_a_block(install):
    install("far", archs={(9, 9)})
    assert status("far")[0] == "wrong-arch"
    found = REGISTRY.find("far").spec
    here = replace(found, archs=frozenset({"cpu"}))
    with REGISTRY.replaced(here, REGISTRY.load(found), "replaced"):
        assert status("far") == ("ok", "replaced")
        assert ran(backend="far") == "far"
    assert status("far")[0] == "wrong-arch"
    with pytest.raises(BackendUnavailableError, match="wrong-arch"):
        ran(backend="far")
    with (
        pytest.raises(BackendNotFoundError),
        REGISTRY.replaced(replace(here, name="none"), object(), ""),
    ):
        pass


def test_a_backend_may_run_on_all_gpus_from_a_compute_capability_on(install):
    install("near", archs={"sm_89+"}, priority=5)
    shape = replace(explain(**X).shape, device_type="cuda")
    for arch in ((8, 9), (9, 0), (10, 0), (12, 1)):
        assert explain(replace(shape, arch=arch)).backend == "near"
    for arch in ((7, 5), (8, 6)):
        assert "near       wrong-arch: runs on sm_89+, the inputs" in explain(replace(shape, arch=arch)).error
    assert ran() == "reference"


def test_no_backend_for_a_gpu_is_a_table_of_reasons():
    shape = replace(explain(**X).shape, device_type="cuda", arch=(12, 0))
    e = explain(shape)
    assert e.backend is None and "no backend serves this call on cuda (sm_120)" in e.error
    assert "backend='reference' runs on every device" in e.error
    named = explain(shape, backend="reference")
    assert (named.backend, named.rule) == ("reference", "backend=")


def test_a_planner_is_asked_and_can_be_turned_off(install, monkeypatch):
    install_planner(install)
    direct = chunk_kda(**X, output_final_state=True, context_parallel="off")
    with record_calls() as calls:
        planned = chunk_kda(**X, output_final_state=True)
        chunk_kda(**X, context_parallel="off")
        chunk_kda(**X, pin=True)
        chunk_kda(**call(T=8))
        monkeypatch.setenv("KDA_CP", "0")
        chunk_kda(**X)
    assert [c.planner for c in calls] == ["halves", None, None, None, None]
    for a, b in zip(planned, direct):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_plans_are_cached_until_the_planner_discards_them(install, monkeypatch):
    install_planner(install)
    from fake_halves_backend import Halves

    asked = []

    def plan(self, inputs, spec, backend):
        asked.append(inputs.sequence_lengths())

    monkeypatch.setattr(Halves, "plan", plan)
    packed = [X | {"cu_seqlens": torch.tensor([0, n, 20])} for n in (5, 9)]
    for _ in range(3):
        chunk_kda(**X)
        for x in packed:
            chunk_kda(**x)
    assert asked == [(20,), (5, 15), (9, 11)]
    REGISTRY.forget_plans()
    chunk_kda(**X)
    assert asked[3:] == [(20,)]

    monkeypatch.setattr(kda_core.call.ANSWERS, "limit", 1)
    REGISTRY.forget_plans()
    for _ in range(2):
        for x in packed:
            chunk_kda(**x)
    assert asked[4:] == [(5, 15), (9, 11)] * 2


def test_a_planner_that_fails_is_asked_again(install, monkeypatch):
    install_planner(install)
    from fake_halves_backend import Halves

    def fail(*_):
        raise PlannerError("not today")

    with monkeypatch.context() as m:
        m.setattr(Halves, "plan", fail)
        for _ in range(2):
            with pytest.raises(PlannerError, match="not today"):
                chunk_kda(**X)
    with record_calls() as calls:
        chunk_kda(**X)
    assert [c.planner for c in calls] == ["halves"]


def test_a_plan_can_be_forced(install):
    install_planner(install)
    from fake_halves_backend import Plan

    with record_calls() as calls:
        chunk_kda(**X, context_parallel=Plan(3))
    assert [c.planner for c in calls] == ["halves"]
    assert "halves: Plan(cut=10)" in str(explain(**X))
    with pytest.raises(PlannerError, match="cut 99"):
        chunk_kda(**X, context_parallel=Plan(99))


def test_a_planner_may_refuse_plans_and_explain_itself(install):
    """Both methods are optional. The planner of the tests above has neither."""
    speaking = HALVES.replace(
        "    def plan_from_json",
        """    def refusal(self, plan, inputs, spec, backend):
        return f"{spec.name} takes even cuts" if plan.cut % 2 else None

    def explain(self, plan, inputs, spec, backend):
        return "too short" if plan is None else f"a cut at {plan.cut}"

    def plan_from_json""",
    )
    install_planner(install, backend=speaking)
    from fake_halves_backend import Plan

    with record_calls() as calls:
        chunk_kda(**X, context_parallel=Plan(4))
    assert [c.planner for c in calls] == ["halves"]
    with pytest.raises(
        PlannerError, match="context_parallel: halves cannot run this plan: reference takes even"
    ):
        chunk_kda(**X, context_parallel=Plan(5))
    refused = explain(**X, context_parallel=Plan(5))
    assert refused.plan == "none" and "reference takes even cuts" in refused.error
    assert explain(**X).plan == "halves: a cut at 10"
    assert explain(**call(T=8)).plan == "direct (halves: too short)"
    assert explain(**X, context_parallel="off").plan == explain(**X, pin=True).plan == "direct"


def test_a_broken_planner_is_an_error_and_not_a_direct_call(install, monkeypatch):
    install_planner(install, abi=(0, 1))
    with pytest.raises(PlannerError, match="abi-mismatch.*KDA_CP=0 turns it off"):
        chunk_kda(**X)
    assert "abi-mismatch" in explain(**X).error
    monkeypatch.setenv("KDA_CP", "0")
    assert ran() == "reference"


def test_an_unavailable_planner_is_not_asked(install):
    install_planner(install, unavailable="no planner yet")
    assert ran() == "reference"

    class Plan:
        def to_json(self):
            return "{}"

    with pytest.raises(PlannerError, match="no planner is active"):
        chunk_kda(**X, context_parallel=Plan())
