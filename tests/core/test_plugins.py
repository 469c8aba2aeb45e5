"""Defective plugins: each is listed with its reason and never affects the others."""

import importlib
import re

import pytest
import torch
from helpers.inputs import call

import kda_core
from kda_core import BACKEND_ABI, chunk_kda, use_backend
from kda_core.backend import BackendSpec, PlannerSpec
from kda_core.contract import Feature
from kda_core.errors import (
    BackendContractError,
    BackendUnavailableError,
    BackendUnsupportedError,
    NoEligibleBackendError,
    PlannerError,
)
from kda_core.plugin_checks import spec_problem
from kda_core.registry import REGISTRY, record_calls

X = call()
FEATURES = frozenset(f.value for f in Feature)


def ran(**kwargs):
    """Returns the backend that served a small call; (backend, planner) if a planner executed it."""
    with record_calls() as calls:
        chunk_kda(**X, **kwargs)
    (only,) = calls
    return (only.backend, only.planner) if only.planner else only.backend


def listed(name, distribution=None):
    """Returns (status, reason) of a listed backend."""
    (found,) = (
        (i.status, i.reason)
        for i in kda_core.backends()
        if i.name == name and (distribution is None or i.distribution == distribution)
    )
    return found


# ---- fields of a spec

SPEC_MODULE = """
from enum import Enum, IntEnum
from kda_core.backend import BackendSpec, PlannerSpec

class Raises:
    def __repr__(self):
        raise RuntimeError("no repr")

fields = dict(name="bad", abi={abi}, archs=frozenset({{"cpu"}}), features=frozenset(),
              target="fake_bad_backend:Backend", install="pip install bad", priority=9)
fields[{field!r}] = {value}
SPEC = BackendSpec(**fields)
"""

BAD_FIELDS = [
    ("name", "None"),
    ("name", "b'bad'"),
    ("name", "['bad']"),
    ("name", "''"),
    ("name", "'Bad'"),
    ("name", "'a,b'"),
    ("abi", "'1.2'"),
    ("abi", "(1,)"),
    ("abi", "(1, True)"),
    ("abi", "[1, 2]"),
    ("archs", "{90}"),
    ("archs", "frozenset({90})"),
    ("archs", "[(9, 0)]"),
    ("archs", "['cpu']"),
    ("archs", "'cpu'"),
    ("archs", "None"),
    ("archs", "frozenset()"),
    ("archs", "frozenset({'sm_90'})"),
    ("archs", "frozenset({'cuda'})"),
    ("archs", "frozenset({'sm_8+'})"),
    ("archs", "frozenset({'sm_80-'})"),
    ("archs", "frozenset({(9, 0, 1)})"),
    ("archs", "frozenset({(9.0, 0)})"),
    ("archs", "frozenset({None, 'cpu'})"),
    ("features", "'varlen'"),
    ("features", "['varlen']"),
    ("features", "frozenset({1})"),
    ("features", "{'varlen': True}"),
    ("features", "None"),
    ("priority", "'high'"),
    ("priority", "True"),
    ("priority", "1.5"),
    ("priority", "float('nan')"),
    ("priority", "None"),
    ("target", "None"),
    ("target", "3"),
    ("target", "''"),
    ("target", "'fake_bad_backend'"),
    ("target", "'fake_bad_backend:'"),
    ("target", "':Backend'"),
    ("target", "'fake_bad_backend:Backend:x'"),
    ("target", "'../bad:Backend'"),
    ("install", "None"),
    ("install", "3"),
    ("unavailable", "True"),
    ("unavailable", "3"),
    ("variants", "3"),
    ("variants", "'fake_bad_backend'"),
    ("note", "3"),
    ("note", "Raises()"),
    ("archs", "Raises()"),
]


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS)
def test_a_spec_with_a_wrong_field_is_broken_and_the_reason_names_the_field(install, field, value):
    install("good", priority=5)
    install("bad", source=SPEC_MODULE.format(abi=BACKEND_ABI, field=field, value=value))
    status, reason = listed("bad", "fake-bad")
    assert status == "broken"
    assert re.match(rf"fake_bad:SPEC: {field} is .*, not ", reason), reason
    assert listed("good") == listed("reference") == ("ok", "")
    assert ran() == "good"
    with pytest.raises(BackendUnavailableError, match=f"'bad'.*broken: fake_bad:SPEC: {field} is"):
        ran(backend="bad")


def test_every_field_of_a_spec_is_checked():
    for kind in (BackendSpec, PlannerSpec):
        wrong = object()
        for name in kind.__dataclass_fields__:
            good = {
                "name": "good", "abi": BACKEND_ABI, "archs": frozenset({"cpu"}), "features": frozenset(),
                "target": "module:Class", "install": "",
            }  # fmt: skip
            fields = {n: x for n, x in good.items() if n in kind.__dataclass_fields__}
            assert spec_problem(kind(**fields)) is None
            assert spec_problem(kind(**fields | {name: wrong})).startswith(f"{name} is <object object")


def test_unknown_features_and_sets_in_place_of_frozensets_are_accepted(install):
    install("newer", features=FEATURES | {"of_a_later_minor"}, priority=5)
    value = "set(fields['archs'])"
    install("bad", source=SPEC_MODULE.format(abi=BACKEND_ABI, field="archs", value=value))
    assert listed("newer") == listed("bad") == ("ok", "")
    assert ran() == "newer"


ODD_SPECS = {
    "a property that raises": (
        "class Odd(BackendSpec):\n    name = property(lambda self: 1 / 0)\nSPEC = object.__new__(Odd)\n",
        "AttributeError: name cannot be read: ZeroDivisionError: division by zero",
    ),
    "a __class__ that raises": (
        "class Odd:\n    __class__ = property(lambda self: 1 / 0)\nSPEC = Odd()\n",
        "ZeroDivisionError",
    ),
    "the class, not an object": ("SPEC = BackendSpec\n", "not a BackendSpec"),
    "a planner's spec": (
        "from kda_core import backend\nSPEC = backend.PlannerSpec('odd', (1, 0), 'a:B', '')\n",
        "of type PlannerSpec, not a BackendSpec",
    ),
    "sys.exit": ("import sys\nsys.exit('go away')\n", "SystemExit: go away"),
    "exit without a text": ("raise SystemExit\n", "SystemExit"),
    "GeneratorExit": ("raise GeneratorExit('no')\n", "GeneratorExit: no"),
    "MemoryError": ("raise MemoryError('no')\n", "MemoryError: no"),
    "an error without a text": (
        "class Odd(Exception):\n    def __str__(self):\n        return 1 / 0\nraise Odd\n",
        "Odd: an error without a text",
    ),
    "endless recursion": ("def f():\n    f()\nf()\n", "RecursionError"),
    "a syntax error": ("SPEC = (\n", "SyntaxError"),
    "no such name": ("OTHER = 1\n", "AttributeError"),
}


@pytest.mark.parametrize("case", ODD_SPECS)
def test_an_error_of_a_spec_affects_only_its_plugin(install, case):
    source, words = ODD_SPECS[case]
    install("good", priority=5)
    install("odd", source=f"from kda_core.backend import BackendSpec\n{source}")
    status, reason = listed("odd")
    assert status == "broken" and words in reason
    assert listed("good") == ("ok", "") and ran() == "good"


def test_an_interrupt_propagates_and_the_plugin_is_read_again(install, tmp_path):
    install("good", priority=5)
    with pytest.raises(KeyboardInterrupt):
        install("slow", source="raise KeyboardInterrupt")
        ran()
    (tmp_path / "fake_slow.py").write_text("raise ValueError('now broken for another reason')")
    importlib.invalidate_caches()
    assert "now broken" in listed("slow")[1]
    assert ran() == "good"


def test_a_subclass_cannot_change_the_meaning_of_a_spec(install):
    source = """
from dataclasses import dataclass
from kda_core.backend import BackendSpec

class Name(str):
    def __eq__(self, other):
        return True
    __hash__ = str.__hash__

class Odd(BackendSpec):
    reads = 0
    def __eq__(self, other):
        raise RuntimeError("compared")
    def __hash__(self):
        raise RuntimeError("hashed")
    @property
    def archs(self):
        Odd.reads += 1
        if Odd.reads > 1:
            raise RuntimeError("read again")
        return frozenset({"cpu"})

SPEC = object.__new__(Odd)
vars(SPEC).update(name=Name("odd"), abi=(2, 0), features=frozenset({Name("unbounded_gate")}),
                  target="fake_odd_backend:Backend", install="", priority=9, unavailable=None,
                  variants=None, note=None, dtypes=None, head_dims=None)
"""
    install("good", priority=5)
    install("odd", source=source)
    assert listed("odd") == listed("good") == ("ok", "")
    assert ran(backend="good") == "good" and ran(backend="odd") == ran() == "odd"
    assert type(REGISTRY.find("odd").spec) is BackendSpec


# ---- the object behind the target

TARGETS = {
    "sys.exit at import": ("import sys\nsys.exit(3)\n", "SystemExit: 3"),
    "sys.exit in the constructor": (
        "import sys\nclass Backend:\n    def __init__(self):\n        sys.exit('bye')\n",
        "SystemExit: bye",
    ),
    "a constructor with arguments": (
        "class Backend:\n    def __init__(self, x):\n        pass\n",
        "TypeError",
    ),
    "no class": ("Backend = 3\n", "TypeError"),
    "no methods": (
        "class Backend:\n    pass\n",
        "Backend has no can_run, workspace_bytes, compile, chunk_fwd, chunk_bwd, recurrent_fwd, journal_decode, journal_fold",
    ),
    "no can_run": (
        "from kda_core import reference\nclass Backend(reference.ReferenceBackend):\n    can_run = None\n",
        "Backend has no can_run",
    ),
    "attributes that raise": (
        "class Backend:\n    def __getattr__(self, name):\n        raise ValueError(name)\n",
        "ValueError: can_run",
    ),
    "None": ("def Backend():\n    return None\n", "NoneType has no can_run"),
}


@pytest.mark.parametrize("case", TARGETS)
@pytest.mark.parametrize("priority", [-1000, 1000])
def test_a_target_that_cannot_be_used_is_broken(install, case, priority):
    module, words = TARGETS[case]
    install("good", priority=5)
    install("bad", backend=module, priority=priority)
    status, reason = listed("bad")
    assert status == "broken" and words in reason and "fake_bad_backend:Backend failed to load" in reason
    assert listed("good") == ("ok", "") and ran() == "good"
    with pytest.raises(BackendUnavailableError, match=f"'bad'.*broken: .*{re.escape(words)}"):
        ran(backend="bad")


def test_methods_of_undeclared_features_may_be_missing(install):
    module = """
from kda_core.reference import ReferenceBackend

class Backend:
    def __init__(self):
        whole = ReferenceBackend()
        self.can_run, self.workspace_bytes = whole.can_run, whole.workspace_bytes
        self.compile, self.chunk_fwd = whole.compile, whole.chunk_fwd
"""
    install("small", backend=module, features=FEATURES - {"backward", "recurrent", "journal"}, priority=5)
    assert listed("small") == ("ok", "") and ran() == "small"


METHOD = """
from kda_core.reference import ReferenceBackend

class Backend(ReferenceBackend):
    def {method}(self, shape):
        {body}
"""

CAN_RUN = {
    "raise ValueError('no idea')": "can_run raised ValueError: no idea",
    "import sys; sys.exit(4)": "can_run raised SystemExit: 4",
    "raise NotImplementedError": "can_run raised NotImplementedError",
    "return False": "can_run returned False, not None or a text",
    "return 3": "can_run returned 3, not None or a text",
    "return ['K=64']": "can_run returned ['K=64'], not None or a text",
}


@pytest.mark.parametrize("body", CAN_RUN)
@pytest.mark.parametrize("priority", [-1000, 1000])
def test_a_can_run_that_fails_is_a_refusal(install, monkeypatch, body, priority):
    install("good", priority=5)
    install("bad", backend=METHOD.format(method="can_run", body=body), priority=priority)
    words = f"broken: bad.{CAN_RUN[body]}"
    assert ran() == "good"
    with pytest.raises(BackendUnavailableError, match=re.escape(words)):
        ran(backend="bad")
    with use_backend("bad"), pytest.raises(BackendUnavailableError, match="chosen by use_backend"):
        ran()
    refused = {r.name: r.reason for r in kda_core.explain(**X).refusals}
    assert refused["bad"] == words
    monkeypatch.setenv("KDA_BACKEND", "bad,good")
    assert ran() == "good"
    monkeypatch.setenv("KDA_BACKEND", "bad")
    with pytest.raises(NoEligibleBackendError, match=re.escape(words)):
        ran()


def test_an_interrupt_in_can_run_propagates(install):
    install("bad", backend=METHOD.format(method="can_run", body="raise KeyboardInterrupt"), priority=9)
    with pytest.raises(KeyboardInterrupt):
        ran()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return None", "returned None, not an int"),
        ("return -1", "returned -1, not an int"),
        ("return 1.5", "returned 1.5, not an int"),
        ("return 256.0", "returned 256.0, not an int"),
        ("return True", "returned True, not an int"),
        ("return '256'", "returned '256', not an int"),
        ("return 2**70", "returned 1180591620717411303424, not an int from 0 to 2**63 - 1"),
        ("raise ValueError('which shape?')", "raised ValueError: which shape?"),
        ("import sys; sys.exit(5)", "raised SystemExit: 5"),
    ],
)
def test_the_error_for_a_wrong_workspace_size_names_the_backend(install, body, words):
    install("bad", backend=METHOD.format(method="workspace_bytes", body=body), priority=9)
    for backend in (None, "bad"):
        with pytest.raises(BackendContractError, match=re.escape(f"bad.workspace_bytes {words}")):
            ran(backend=backend)
    assert ran(backend="reference") == "reference"


@pytest.mark.parametrize(
    "raised", ["MemoryError()", "torch.OutOfMemoryError('of 80 GiB')", "CompileError('spills')"]
)
def test_intended_errors_of_a_backend_reach_the_caller_unchanged(install, raised):
    body = f"import torch; from kda_core.errors import CompileError; raise {raised}"
    install("bad", backend=METHOD.format(method="workspace_bytes", body=body), priority=9)
    with pytest.raises((MemoryError, torch.OutOfMemoryError, kda_core.errors.CompileError)) as caught:
        ran()
    assert type(caught.value).__name__ == raised.partition("(")[0].rpartition(".")[2]


# ---- names


def spec_module(name, target, priority=0):
    fields = {"name": name, "target": target, "priority": priority}
    return (
        "from kda_core.backend import BackendSpec\nfrom kda_core.contract import Feature\n"
        f"SPEC = BackendSpec(abi=(2, 0), archs=frozenset({{'cpu'}}), features=frozenset(f.value for f in Feature),"
        f" install='', **{fields})\n"
    )


@pytest.mark.parametrize(("name", "owner"), [("sm90", "kda-sm90"), ("sm100", "kda-sm100")])
def test_a_reserved_name_belongs_to_our_distribution(install, name, owner):
    """The third party may register the name as the entry point, in the spec or as both, with a working or a broken plugin."""
    ours = listed(name, owner)
    found = REGISTRY.find(name).spec
    install("aaa", source=spec_module(name, "fake_aaa_backend:Backend", priority=1000))
    install(name, priority=1000)
    install(f"{name}-too", source="raise ValueError", version="0.0")
    reason = f"the name {name} is reserved for {owner}"
    for distribution in ("fake-aaa", f"fake-{name}"):
        assert listed(name, distribution) == ("broken", reason)
    assert listed(name, owner) == ours
    assert REGISTRY.find(name).spec == found and REGISTRY.find(name).distribution == owner
    assert ran() == "reference"
    with pytest.raises(BackendUnavailableError, match=f"'{name}'.*wrong-arch"):
        ran(backend=name)


def test_a_reserved_name_without_its_distribution_is_not_installed(install, monkeypatch):
    from kda_core import registry

    found = registry.entry_points
    kept = lambda **kw: [p for p in found(**kw) if p.module != "kda_sm90.plugin"]
    monkeypatch.setattr(registry, "entry_points", kept)
    install("sm90", priority=1000, source="raise ValueError('broken too')")
    status, reason = listed("sm90", "fake-sm90")
    assert status == "broken" and "broken too" in reason and "reserved for kda-sm90" in reason
    assert listed("sm90", "kda-sm90")[0] == "not-installed"
    with pytest.raises(kda_core.errors.BackendNotFoundError, match=r"install it with: .*packages/kda-sm90"):
        ran(backend="sm90")


@pytest.mark.parametrize("spelling", ["kda_sm90", "KDA.sm90"])
def test_names_of_distributions_are_normalised_as_by_a_package_index(
    install, tmp_path, monkeypatch, spelling
):
    from kda_core import registry

    found = registry.entry_points
    kept = lambda **kw: [p for p in found(**kw) if p.module != "kda_sm90.plugin"]
    monkeypatch.setattr(registry, "entry_points", kept)
    install("sm90", priority=9)
    metadata = next(tmp_path.glob("fake_sm90*.dist-info")) / "METADATA"
    metadata.write_text(f"Metadata-Version: 2.1\nName: {spelling}\nVersion: 1.0\n")
    kda_core.backends(refresh=True)
    assert listed("sm90") == ("ok", "") and ran() == "sm90"


def test_two_third_parties_with_one_name(install):
    """The name belongs to the entry point that sorts first. The reason of the other one names both distributions."""
    install("twin-a", source=spec_module("twin", "fake_twin_a_backend:Backend", priority=1))
    install("twin-b", source=spec_module("twin", "fake_twin_b_backend:Backend", priority=2))
    assert listed("twin", "fake-twin-a") == ("ok", "")
    reason = "fake-twin-b uses the name twin, which belongs to fake-twin-a"
    assert listed("twin", "fake-twin-b") == ("broken", reason)
    assert ran() == ran(backend="twin") == "twin"
    assert type(REGISTRY.load(REGISTRY.find("twin").spec)).__module__ == "fake_twin_a_backend"


@pytest.mark.parametrize("wrong", ["raise ValueError", "outdated"])
def test_a_broken_plugin_does_not_keep_a_name_from_a_working_one(install, wrong):
    if wrong == "outdated":
        wrong = spec_module("twin", "nowhere:Backend").replace("abi=(2, 0)", "abi=(0, 1)")
    install("twin", source=wrong)
    install("z-twin", source=spec_module("twin", "fake_z_twin_backend:Backend", priority=1))
    assert listed("twin", "fake-z-twin") == ("ok", "") and ran() == ran(backend="twin") == "twin"
    assert listed("twin", "fake-twin")[0] == "broken"


# ---- metadata


def test_a_distribution_without_a_name_is_listed(install, tmp_path):
    install("good", priority=5)
    next(tmp_path.glob("fake_good*.dist-info/METADATA")).unlink()
    kda_core.backends(refresh=True)
    assert [(i.name, i.status, i.distribution) for i in kda_core.backends() if i.name == "good"] == [
        ("good", "ok", "unknown")
    ]
    assert ran() == "good"


@pytest.mark.parametrize("lines", ["no equals sign", "= no name", "[kda_core.backends]\nwords and no value"])
def test_damaged_metadata_of_one_distribution_hides_no_other(install, tmp_path, lines):
    install("good", priority=5)
    damaged = tmp_path / "damaged-1.0.dist-info"
    damaged.mkdir()
    (damaged / "METADATA").write_text("Metadata-Version: 2.1\nName: damaged\nVersion: 1.0\n")
    (damaged / "entry_points.txt").write_text(f"[other]\n{lines}\n")
    kda_core.backends(refresh=True)
    assert listed("good") == ("ok", "") and ran(context_parallel="off") == "good"
    mine = [i for i in kda_core.backends() if i.distribution == "damaged"]
    if "kda_core" in lines:
        assert [i.status for i in mine] == ["broken"] and "cannot be read" in mine[0].reason
    else:
        assert mine == []


def test_metadata_in_another_encoding_hides_no_other(install, tmp_path):
    install("good", priority=5)
    damaged = tmp_path / "damaged-1.0.dist-info"
    damaged.mkdir()
    (damaged / "entry_points.txt").write_bytes(b"[kda_core.backends]\nn\xff = a:b\n")
    kda_core.backends(refresh=True)
    assert listed("good") == ("ok", "") and ran(context_parallel="off") == "good"


# ---- planners

PLANNER_SPEC = """
from kda_core.backend import PlannerSpec
SPEC = PlannerSpec(name={name!r}, abi={abi!r}, target="fake_{module}_backend:Planner", install="")
"""

PLANNER = """
import sys
import torch
from kda_core.errors import ArgumentError

class Plan:
    def to_json(self):
        return "{{}}"

class Planner:
    def plan(self, inputs, spec, backend):
        {plan}

    def plan_from_json(self, text):
        {from_json}

    def execute(self, plan, inputs, outputs, backend):
        {execute}
"""


def install_planner(
    install,
    name="mine",
    plan="return Plan()",
    from_json="return Plan()",
    execute="return backend.chunk_fwd(inputs, outputs)",
    backend=None,
    abi=BACKEND_ABI,
    called=None,
):
    source = PLANNER_SPEC.format(name=called or name, module=name.replace("-", "_"), abi=abi)
    made = PLANNER.format(plan=plan, from_json=from_json, execute=execute) if backend is None else backend
    install(name, group="kda_core.planners", source=source, backend=made)


OFF = "; KDA_CP=0 turns it off"


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        ({"plan": "raise ValueError('which?')"}, "plan raised ValueError: which?"),
        ({"plan": "return 1 / 0"}, "plan raised ZeroDivisionError: division by zero"),
        ({"plan": "return 3"}, "plan returned 3, not a plan with to_json"),
        ({"plan": "return False"}, "plan returned False, not a plan with to_json"),
        ({"plan": "return ()"}, "plan returned (), not a plan with to_json"),
        ({"plan": "return '{}'"}, "plan returned '{}', not a plan with to_json"),
        ({"execute": "raise KeyError('x')"}, "execute raised KeyError: 'x'"),
        (
            {"plan": "return type('P', (), {'to_json': property(lambda self: 1 / 0), '__repr__': None})()"},
            "plan returned a P, not a plan with to_json",
        ),
        ({"execute": "pass"}, "execute returned NoneType, not the outputs"),
        ({"execute": "return plan"}, "execute returned Plan, not the outputs"),
    ],
)
def test_a_planner_that_fails_is_named_with_the_way_to_turn_it_off(install, monkeypatch, methods, words):
    install_planner(install, **methods)
    for _ in range(2):
        with pytest.raises(PlannerError) as caught:
            ran()
        assert str(caught.value).startswith(f"planner 'mine' (fake-mine): {words}")
        assert str(caught.value).endswith(OFF)
    assert ran(context_parallel="off") == "reference"
    monkeypatch.setenv("KDA_CP", "0")
    assert ran() == "reference"


@pytest.mark.parametrize(
    ("from_json", "words"),
    [
        ("raise ValueError('no JSON')", "plan_from_json raised ValueError: no JSON"),
        ("return None", "plan_from_json returned None, not a plan with to_json"),
    ],
)
def test_a_planner_that_cannot_read_a_plan_is_named(install, from_json, words):
    install_planner(install, from_json=from_json)
    from fake_mine_backend import Plan

    with pytest.raises(PlannerError, match=re.escape(f"planner 'mine' (fake-mine): {words}")):
        ran(context_parallel=Plan())


@pytest.mark.parametrize("method", ["plan", "execute"])
@pytest.mark.parametrize(
    "raised", ["ArgumentError('a', 'b', 'c')", "torch.OutOfMemoryError('x')", "KeyboardInterrupt"]
)
def test_intended_errors_of_a_planner_reach_the_caller(install, method, raised):
    install_planner(install, **{method: f"raise {raised}"})
    with pytest.raises((kda_core.errors.ArgumentError, torch.OutOfMemoryError, KeyboardInterrupt)):
        ran()


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("import sys\nsys.exit(2)\n", "SystemExit: 2"),
        ("class Planner:\n    pass\n", "Planner has no plan, plan_from_json, execute"),
        ("class Planner:\n    def __init__(self):\n        raise OSError('no file')\n", "OSError: no file"),
    ],
)
def test_a_planner_that_does_not_load_is_named(install, monkeypatch, backend, words):
    install_planner(install, backend=backend)
    with pytest.raises(PlannerError) as caught:
        ran()
    assert str(caught.value).startswith("planner 'mine' (fake-mine): broken: ")
    assert words in str(caught.value) and str(caught.value).endswith(OFF)
    monkeypatch.setenv("KDA_CP", "0")
    assert ran() == "reference"


@pytest.mark.parametrize("place", ["a-broken", "z-broken"])
@pytest.mark.parametrize(
    "wrong", [{"backend": "raise ValueError"}, {"abi": (0, 1)}, {"called": "Upper Case"}, {"called": "cp"}]
)
def test_a_broken_planner_does_not_affect_a_working_one(install, place, wrong):
    install_planner(install, "mine")
    install_planner(install, place, **wrong)
    assert ran() == ("reference", "mine")


def test_the_name_of_our_planner_is_reserved(install):
    install_planner(install, "mine", called="cp")
    (found,) = REGISTRY.planners()
    assert (found.status, found.reason) == ("broken", "the name cp is reserved for kda-cp")
    with pytest.raises(PlannerError, match=r"'cp' \(fake-mine\): broken: the name cp is reserved.*KDA_CP=0"):
        ran()


def test_a_refusal_of_can_run_is_reported_as_unsupported(install):
    install("picky", refuses="T is odd", priority=9)
    with pytest.raises(BackendUnsupportedError, match="unsupported: T is odd"):
        ran(backend="picky")
