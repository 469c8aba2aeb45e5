"""The cache key changes with everything that changes machine code, and with nothing else."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, make_dataclass
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import kda_cute
from kda_core.errors import ArgumentError
from kda_cute.jit import imports, key, sources


@dataclass(frozen=True)
class Inner:
    flag: bool = True


@dataclass(frozen=True)
class Config:
    value: object = 0
    inner: Inner = Inner()


@dataclass(frozen=True)
class Other:
    value: object = 0
    inner: Inner = Inner()


@dataclass
class Thawed:
    value: int = 0


LITERALS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda items: st.lists(items, max_size=3).map(tuple),
    max_leaves=6,
)


def typed(value):
    """The value with its types: Python considers 1, True and 1.0 equal, and 0.0 and -0.0."""
    if isinstance(value, tuple):
        return tuple(map(typed, value))
    return type(value).__name__, repr(value)


@given(LITERALS, LITERALS)
@example("0", 0)
@example("None", None)
@example("(1, )", (1,))
@example("a, b", ("a", "b"))
@example(True, 1)
@example(1, 1.0)
@example(0.0, -0.0)
@example(((), 1), ((1,),))
def test_canonical_text_is_equal_only_for_the_same_literals(one, other):
    assert (key.canonical(Config(one)) == key.canonical(Config(other))) == (typed(one) == typed(other))


def test_canonical_text_contains_the_class_and_nested_fields():
    texts = {
        key.canonical(config)
        for config in (Config(), Other(), Config(inner=Inner(flag=False)), Config(Inner()))
    }
    assert len(texts) == 4


@pytest.mark.parametrize(
    "value",
    [[1], {1: 2}, {1}, object(), 1j, b"", range(3), Thawed(), Thawed, (1, [2]), lambda: 0],
    ids=lambda x: type(x).__name__,
)
def test_other_values_are_refused_by_field(value):
    with pytest.raises(ArgumentError, match=r"config\.value"):
        key.canonical(Config(value))


@pytest.mark.parametrize("config", [{"dim": 1}, (1, 2), 3, None, Thawed(), Config], ids=repr)
def test_configurations_are_frozen_dataclasses(config):
    with pytest.raises(ArgumentError, match="expected a frozen dataclass"):
        key.canonical(config)


def test_local_classes_and_names_of_no_architecture_are_refused():
    class Local:
        pass

    with pytest.raises(ArgumentError, match="top level of a module"):
        key.Variant(Local, Config(), "sm_90a")
    with pytest.raises(ArgumentError, match="expected sm_<number>"):
        key.Variant(Config, Config(), "compute_90")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with a kernel class in one module and something that it uses in another."""
    folder = tmp_path / "demo_package"
    (folder / "kernels").mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "kernels" / "one.py").write_text("class Kernel:\n    pass\n")
    (folder / "helper.py").write_text("CHUNK = 64\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    sources.forget()
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] in ("demo_package", "outside")]:
        del sys.modules[name]
    sources.forget()


@pytest.fixture
def fresh_toolchain():
    key.toolchain.cache_clear()
    yield
    key.toolchain.cache_clear()


def digest(kernel, config=Config(), arch="sm_90a"):
    key.toolchain.cache_clear()
    sources.forget()  # as in a process that starts now
    return key.digest(key.Variant(kernel, config, arch).ingredients())


def test_key_is_stable(kernels, package, fresh_toolchain):
    from demo_package.kernels.one import Kernel

    assert digest(Kernel) == digest(Kernel)
    ingredients = key.Variant(Kernel, Config(), "sm_90a").ingredients()
    assert key.digest(ingredients) == key.digest(dict(reversed(ingredients.items())))


def test_key_changes_with_the_variant(kernels, package, fresh_toolchain):
    from demo_package.kernels.one import Kernel

    other = type("Other", (Kernel,), {"__module__": Kernel.__module__})
    options = type("Kernel", (Kernel,), {"__module__": Kernel.__module__, "compile_options": "--opt-level 2"})
    digests = {
        digest(Kernel),
        digest(other),
        digest(options),
        digest(Kernel, Config(1)),
        digest(Kernel, Other()),
        digest(Kernel, arch="sm_100a"),
        digest(Kernel, arch="sm_103a"),
    }
    assert len(digests) == 7


def test_key_changes_with_the_sources(kernels, package, fresh_toolchain):
    from demo_package.kernels.one import Kernel

    digests = [digest(Kernel)]
    (package / "helper.py").write_text("CHUNK = 32\n")
    digests.append(digest(Kernel))
    (package / "helper.py").rename(package / "helpers.py")
    digests.append(digest(Kernel))
    (package / "new.py").touch()
    digests.append(digest(Kernel))
    assert len(set(digests)) == 4
    (package / "notes.txt").write_text("not a source")
    assert digest(Kernel) == digests[-1]


def test_key_covers_the_sources_of_bases_and_of_the_configuration(kernels, package, fresh_toolchain):
    from demo_package.kernels.one import Kernel

    local = make_dataclass("PackageConfig", [], frozen=True)
    local.__module__ = "demo_package.kernels.one"
    derived = type("Derived", (Kernel,), {"__module__": __name__})
    before = digest(derived), digest(Inner, local()), digest(Inner)
    (package / "helper.py").write_text("CHUNK = 32\n")
    after = digest(derived), digest(Inner, local()), digest(Inner)
    assert [one == other for one, other in zip(before, after, strict=True)] == [False, False, True]


def test_key_changes_with_the_sources_of_this_package(
    kernels, package, fresh_toolchain, tmp_path, monkeypatch
):
    from demo_package.kernels.one import Kernel

    before = digest(Kernel)
    (tmp_path / "cute").mkdir()
    (tmp_path / "cute" / "key.py").write_text("# another version of this package")
    monkeypatch.setattr(key, "_HERE", tmp_path / "cute")
    assert digest(Kernel) != before


def test_key_covers_the_device_functions_of_this_package(kernels, package, fresh_toolchain):
    from demo_package.kernels.one import Kernel

    folder = Path(kda_cute.__file__).parent
    covered = {
        path
        for root in key.kernel_sources(Kernel, Config).roots
        for path in sources.snapshot_of(root).content
    }
    assert set(folder.rglob("*.py")) <= covered
    assert any((folder / "device").rglob("*.py"))


@pytest.mark.parametrize(
    "ingredient", ["wheels", "cuda", "python", "platform", "cpu", "environment", "format"]
)
def test_key_changes_with_the_toolchain(kernels, package, fresh_toolchain, monkeypatch, tmp_path, ingredient):
    import cutlass
    from demo_package.kernels.one import Kernel

    before = digest(Kernel)
    match ingredient:
        case "wheels":
            wheels = key.dsl_wheels()
            newer = key.dsl_wheels().__class__(
                (("apache-tvm-ffi", "99"), *wheels.versions[1:]), wheels.cuda, ()
            )
            monkeypatch.setattr(key, "dsl_wheels", lambda: newer)
        case "cuda":
            monkeypatch.setattr(cutlass, "CUDA_VERSION", "12.9")
        case "python":
            monkeypatch.setattr(sys, "version_info", (3, 99, 0, "final", 0))
        case "platform":
            monkeypatch.setattr(sys, "platform", "plan9")
        case "cpu":
            (tmp_path / "cpuinfo").write_text("model name\t: old\nflags\t\t: sse2 sse\n")
            monkeypatch.setattr(key, "_CPUINFO", tmp_path / "cpuinfo")
        case "environment":
            monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
        case "format":
            monkeypatch.setattr(key, "FORMAT", "0")
    assert digest(Kernel) != before
    assert key.toolchain()[ingredient]


CPUINFO = """processor\t: {n}
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: {model}
model name\t: {name}
stepping\t: {stepping}
microcode\t: {microcode}
cpu MHz\t\t: {mhz}
flags\t\t: {flags}
bogomips\t: {mhz}
address sizes\t: {bits} bits physical, 48 bits virtual
"""
CPU = {
    "n": 0, "model": 143, "name": "Xeon", "stepping": 8, "microcode": "0x1", "mhz": 2000, "bits": 46,
    "flags": "fpu sse sse2 avx avx2 avx512f md_clear",
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"microcode": "0x2", "flags": CPU["flags"] + " ibrs flush_l1d arch_capabilities hypervisor"}, True),
        ({"mhz": 3100.5, "stepping": 9, "bits": 52, "name": "Xeon (another)"}, True),
        ({"flags": " ".join(reversed(CPU["flags"].split()))}, True),
        ({"flags": CPU["flags"].replace(" avx512f", "")}, False),
        ({"flags": CPU["flags"] + " amx_tile"}, False),
        ({"model": 106}, False),
    ],
    ids=lambda x: str(x)[:40],
)
def test_the_cpu_ingredient_covers_what_host_code_depends_on(tmp_path, monkeypatch, change, same):
    monkeypatch.setattr(key, "_CPUINFO", tmp_path / "cpuinfo")
    found = []
    for cpu in (CPU, {**CPU, **change}):
        (tmp_path / "cpuinfo").write_text("\n".join(CPUINFO.format(**{**cpu, "n": n}) for n in range(2)))
        key.toolchain.cache_clear()
        found.append(key.toolchain()["cpu"])
    key.toolchain.cache_clear()
    assert (found[0] == found[1]) is same


# ---- helpers beside the classes' packages, and sources that change under a process


@pytest.mark.parametrize(
    ("statement", "helper"),
    [
        ("from outside import CHUNK", "outside.py"),
        ("import outside", "outside.py"),
        ("from outside.inner import CHUNK", "outside/inner.py"),
        ("from outside import inner", "outside/inner.py"),
        ("from ..helper import chunk", "outside.py"),
        ("def chunk():\n    from outside import CHUNK\n    return CHUNK", "outside.py"),
        ("import typing\nif typing.TYPE_CHECKING:\n    pass\nelse:\n    import outside", "outside.py"),
        ("try:\n    import nothing.such\nexcept ImportError:\n    import outside", "outside.py"),
    ],
)
def test_key_covers_imported_modules_outside_the_package(
    kernels, package, fresh_toolchain, statement, helper
):
    path = package.parent / helper
    path.parent.mkdir(exist_ok=True)
    if path.parent.name == "outside":
        (path.parent / "__init__.py").touch()
    path.write_text("CHUNK = 64\n")
    (package / "helper.py").write_text("def chunk():\n    import outside\n    return outside.CHUNK\n")
    (package / "kernels" / "one.py").write_text(f"{statement}\nclass Kernel:\n    pass\n")
    from demo_package.kernels.one import Kernel

    before = digest(Kernel)
    assert digest(Kernel) == before
    (package.parent / "unrelated.py").write_text("CHUNK = 64\n")
    path.write_text("CHUNK = 32\n")
    assert digest(Kernel) != before
    path.write_text("CHUNK = 64\n")
    (package.parent / "unrelated.py").write_text("CHUNK = 32\n")
    assert digest(Kernel) == before


def test_installed_packages_enter_the_key_by_their_version(kernels, package, fresh_toolchain, monkeypatch):
    (package / "kernels" / "one.py").write_text("import numpy\nclass Kernel:\n    pass\n")
    from demo_package.kernels.one import Kernel

    before = digest(Kernel)
    monkeypatch.setattr("numpy.__version__", "0")  # an attribute of the module does not count
    assert digest(Kernel) == before
    monkeypatch.setattr(imports, "_release", lambda top: f"{top} 99")
    assert digest(Kernel) != before


def rewrite(path, text):
    """Writes a file with a later time of change than all files so far. The file system's clock may tick every 10 ms."""
    now, probe = time.time_ns(), path.with_name("probe")
    probe.touch()
    while probe.stat().st_ctime_ns <= now:
        probe.touch()
    path.write_text(text)


def test_an_upgrade_makes_a_running_process_outdated(kernels, package, fresh_toolchain):
    from demo_package.kernels.one import Kernel

    variant = key.Variant(Kernel, Config(), "sm_90a")
    sources.forget()  # the files count as written before this process began
    before = variant.ingredients()["sources"]
    assert variant.outdated() is None
    text = (package / "helper.py").read_text()
    rewrite(package / "helper.py", "CHUNK = 32\n")
    assert variant.outdated() == f"{package / 'helper.py'} changed while this process ran"
    assert variant.ingredients()["sources"] == before  # the text that was imported
    rewrite(package / "helper.py", text)
    assert variant.outdated() is None  # the same content again, under another stamp
    (package / ".#helper.py").symlink_to("user@host.1234:5678")  # an editor's lock
    assert variant.outdated() is None and variant.ingredients()["sources"] == before
    (package / "new.py").touch()
    assert variant.outdated() == f"{package / 'new.py'} changed while this process ran"
    (package / "new.py").unlink()
    (package / "helper.py").unlink()
    assert variant.outdated() == f"{package / 'helper.py'} changed while this process ran"


def test_an_upgrade_between_the_import_and_the_first_kernel_makes_a_process_outdated(
    kernels, package, fresh_toolchain
):
    """Which text was imported is unknown, so neither is used."""
    from demo_package.kernels.one import Kernel

    variant = key.Variant(Kernel, Config(), "sm_90a")
    sources.forget()
    rewrite(package / "kernels" / "one.py", "class Kernel:\n    chunk = 32\n")
    assert "one.py changed after this process began" in variant.outdated()
    os.utime(package / "kernels" / "one.py", (time.time() + 10**6,) * 2)  # as from an archive
    sources.forget()
    assert variant.outdated() is None


def test_newer_wheels_of_the_dsl_make_a_process_outdated(kernels, package, fresh_toolchain, monkeypatch):
    from demo_package.kernels.one import Kernel

    variant = key.Variant(Kernel, Config(), "sm_90a")
    sources.forget()
    key.toolchain()
    assert variant.outdated(thorough=True) is None
    monkeypatch.setattr(key, "_wheels", lambda: "nvidia-cutlass-dsl 99")
    assert "nvidia-cutlass-dsl 99 were installed while this process ran" in variant.outdated(thorough=True)


def test_other_variables_do_not_change_the_key(kernels, package, fresh_toolchain, monkeypatch):
    from demo_package.kernels.one import Kernel

    before = digest(Kernel)
    monkeypatch.setenv("KDA_DISABLE_JIT", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert digest(Kernel) == before
