"""Every job of this repository, each in its own virtual environment.

``python -m nox`` runs the default ones, ``python -m nox -s NAME`` one of them, ``python -m nox --list`` lists them.
Arguments after ``--`` go to the tool that the session runs, as in ``python -m nox -s test -- tests/core -k gate``.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import venv
from collections.abc import Callable
from pathlib import Path

import nox
from packaging.requirements import Requirement

ROOT = Path(__file__).parent
CONSTRAINTS = ROOT / "constraints.txt"
PACKAGES = ("kda-core", "kda-cute", "kda-sm90", "kda-sm100", "kda-cp", "ptx-emulator")
PYTHONS = ("3.10", "3.11", "3.12", "3.13")  # nox skips those that the machine lacks
SOURCES = ("packages", "examples", "benchmarks", "tools", "noxfile.py")

TEST_TOOLS = (
    "pytest",
    "pytest-xdist",
    "hypothesis",
    "numpy",
    "build",
    "hatchling",
    "matplotlib",
    "nvidia-cuda-nvcc",
    "nvidia-cuda-nvdisasm",
)

DOWNLOADS = "missing packages are downloaded now; PyPI's torch for Linux includes CUDA, several gigabytes"

# The kernels that `compile` compiles: (module:callable, the folder of the module if no package contains it, architectures).
# The callable returns (kernel class, configuration) pairs. A package with kernels has a row here.
KERNELS = (
    ("helpers.demo_kernels:sound", "tests", ("sm_90a", "sm_100a", "sm_103a")),
    ("kda_sm90.variants:kernels", "", ("sm_90a",)),
    ("kda_sm100.variants:kernels", "", ("sm_100a", "sm_103a")),
)

# The engines of the adapters in kda_core.integrations, and what their modules import. An engine requires a torch of its own and
# gigabytes of kernels, so it is installed without its requirements.
ENGINES = {
    "vllm": (
        ("compressed-tensors", "xgrammar"),
        (
            "aiohttp", "apache-tvm-ffi", "cachetools", "cbor2", "cloudpickle", "einops", "fastapi<0.137", "llguidance<1.8", "loguru",
            "msgspec", "openai", "oss-harmony", "partial-json-parser", "pillow", "prometheus-client", "psutil", "py-cpuinfo", "pybase64",
            "pydantic", "pyyaml", "pyzmq", "regex", "requests", "sentencepiece", "tqdm", "transformers>=5.16.1,<5.21", "uvloop",
        ),
    ),
    "sglang": (
        ("triton",),
        (
            "aiohttp", "ipython", "msgspec", "orjson", "pillow", "psutil", "pybase64", "pydantic", "pyyaml", "pyzmq", "regex", "requests",
            "starlette", "tqdm", "transformers>=5.16.1,<5.21",
        ),
    ),
}  # fmt: skip

nox.needs_version = ">=2025.10.14"
nox.options.sessions = ["test", "lint", "typecheck"]
nox.options.reuse_venv = "yes"
nox.options.download_python = "never"
nox.options.error_on_missing_interpreters = False  # also in CI: a machine need not have all of `PYTHONS`


# ---- environments


def requirements(package: str) -> list[Requirement]:
    """Returns the requirements of `package` in its pyproject.toml."""
    project = nox.project.load_toml(ROOT / "packages" / package / "pyproject.toml")["project"]
    return [Requirement(text) for text in project["dependencies"]]


def constraints(session: nox.Session, pins: dict[str, str | None]) -> Path:
    """Returns a copy of `CONSTRAINTS` with the versions in `pins`; None removes the constraint of a distribution."""
    kept = [line for line in CONSTRAINTS.read_text().splitlines() if line.partition("==")[0] not in pins]
    path = Path(session.create_tmp()) / "constraints.txt"
    own = (f"{name}=={version}" for name, version in pins.items() if version is not None)
    path.write_text("\n".join([*kept, *own]) + "\n")
    return path


def lowest(session: nox.Session, *packages: str) -> dict[str, str | None]:
    """Returns the low ends of the ranges of third-party distributions that `packages` require."""
    low: dict[str, str | None] = {}
    for requirement in itertools.chain.from_iterable(map(requirements, packages)):
        if requirement.name in PACKAGES:
            continue
        bound = next(s.version for s in requirement.specifier if s.operator == ">=")
        if low.setdefault(requirement.name, bound) != bound:
            session.error(f"{' and '.join(packages)} differ in the lowest {requirement.name}")
    return low


def install_all(session: nox.Session, dsl: str = "newest", pins: dict[str, str | None] | None = None) -> None:
    """Installs all packages of the repository, editable, with the test tools.

    ``dsl``: the end of the range of the CuTe DSL, "lowest" or "newest". ``pins`` replace constraints, as in `constraints`.
    """
    session.log(DOWNLOADS)
    pins = (lowest(session, "kda-cute") if dsl == "lowest" else {}) | (pins or {})
    editable = [word for package in PACKAGES for word in ("-e", f"packages/{package}")]
    session.install("-c", str(constraints(session, pins)), *editable, *TEST_TOOLS)


def install_for_this_machine(session: nox.Session) -> None:
    """Installs kda-core, and the other packages if the machine has an NVIDIA GPU."""
    session.log(DOWNLOADS)
    packages = PACKAGES if Path("/dev/nvidiactl").exists() else PACKAGES[:1]
    editable = [word for package in packages for word in ("-e", f"packages/{package}")]
    session.install("-c", str(CONSTRAINTS), *editable, "numpy")  # torch warns at import without numpy


def test_environment() -> dict[str, str | None]:
    """Returns the environment variables of tests. Their tensors are small, so more threads only wait for each other; PYTHONPATH
    could name the packages of another checkout."""
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "PYTHONPATH": None}


def pytest(session: nox.Session, *default: str) -> None:
    """Runs pytest; the arguments after ``--`` replace the default ones."""
    session.run("python", "-m", "pytest", *(session.posargs or default), env=test_environment())


def compile_kernels(session: nox.Session, *arches: str) -> None:
    """Compiles the rows of `KERNELS` for `arches`, or each row for all of its architectures, and prints the report of ptxas."""
    rows = [(name, folder, [a for a in own if a in arches or not arches]) for name, folder, own in KERNELS]
    if not any(wanted for _, _, wanted in rows):
        session.error(f"no kernel is made for {' '.join(arches)}")
    for name, folder, wanted in rows:
        path = os.pathsep.join(filter(None, (folder and str(ROOT / folder), os.environ.get("PYTHONPATH"))))
        options = [word for arch in wanted for word in ("--arch", arch)]
        if wanted:
            session.run("python", "-m", "kda_cute.jit.ptxas", name, *options, env={"PYTHONPATH": path})


def matrix(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Creates a session for each Python and for the lowest and the newest DSL that the packages accept."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        parametrized = nox.parametrize("dsl", ["lowest", "newest"], ids=["lowest", "newest"])(function)
        return nox.session(name=name, python=PYTHONS)(parametrized)

    return decorate


# ---- tests


@nox.session
def test(session: nox.Session) -> None:
    """Compiles every kernel, as `compile` does, then runs all tests that this machine can run, under the Python that runs nox, and
    counts those that it could not run. Without a GPU it runs one process per core, because emulation takes most of the time. With
    arguments it runs only the tests that they name."""
    install_all(session)
    if not session.posargs:
        compile_kernels(session)
    parallel = () if Path("/dev/nvidiactl").exists() else ("-n", "auto", "--dist", "worksteal")
    pytest(session, "tests", *parallel)


@matrix("test-core")
def test_core(session: nox.Session, dsl: str) -> None:
    """kda-core: contract, registry, operators, reference, compile cache, conformance kit."""
    install_all(session, dsl)
    pytest(session, "tests/core")


@matrix("test-cute")
def test_cute(session: nox.Session, dsl: str) -> None:
    """kda-cute: compile cache, ahead-of-time compilation, ptxas report."""
    install_all(session, dsl)
    pytest(session, "tests/cute")


@matrix("test-sm90")
def test_sm90(session: nox.Session, dsl: str) -> None:
    """kda-sm90: compiles for sm_90a, then runs the tests, some of them emulated on the CPU; counts those that need a Hopper GPU."""
    install_all(session, dsl)
    compile_kernels(session, "sm_90a")
    pytest(session, "tests/sm90")


@matrix("test-sm100")
def test_sm100(session: nox.Session, dsl: str) -> None:
    """kda-sm100: compiles for sm_100a and sm_103a, then runs the tests; counts those that need a Blackwell GPU."""
    install_all(session, dsl)
    compile_kernels(session, "sm_100a", "sm_103a")
    pytest(session, "tests/sm100")


@matrix("test-cp")
def test_cp(session: nox.Session, dsl: str) -> None:
    """kda-cp: the planner, over the backends that this machine can run."""
    install_all(session, dsl)
    pytest(session, "tests/cp")


@matrix("test-emulator")
def test_emulator(session: nox.Session, dsl: str) -> None:
    """ptx-emulator: its instructions, its strictness, and the kernel of kda-sm90 on it, on any machine."""
    install_all(session, dsl)
    pytest(session, "tests/emulator")


@nox.session(name="test-torch")
@nox.parametrize("torch", ["lowest", "newest"], ids=["lowest", "newest"])
def test_torch(session: nox.Session, torch: str) -> None:
    """kda-core, kda-cp, and the parts of ptx-emulator that use torch, with the lowest and the newest torch that they accept, under the
    Python that runs nox. It downloads gigabytes unless pip finds a CPU build of torch, such as by PIP_EXTRA_INDEX_URL."""
    version = lowest(session, "kda-core", "ptx-emulator")["torch"] if torch == "lowest" else None
    install_all(session, pins={"torch": version, "setuptools": None})  # torch requires its own setuptools
    session.run("python", "-c", "import torch; print('torch', torch.__version__)")
    emulator = (
        f"tests/emulator/test_{name}.py" for name in ("device", "instructions", "tensors", "strictness")
    )
    pytest(session, "tests/core", "tests/cp", *emulator)


@nox.session(name="test-fla")
def test_fla(session: nox.Session) -> None:
    """`kda_core.integrations.fla` with FLA and Hugging Face's transformers themselves, which take 1 GB more. Without a GPU, FLA's kernels
    run in Triton's interpreter."""
    install_all(session)
    session.install("-c", str(CONSTRAINTS), "flash-linear-attention[cuda]")
    pytest(session, "tests/integrations/fla")


def test_engine(session: nox.Session, name: str) -> None:
    """Installs the version of an engine that its record names, and runs the tests of its adapter."""
    record = ROOT / "tests" / "integrations" / "signatures" / f"{name}.json"
    version = json.loads(record.read_text())["version"]
    alone, imported = ENGINES[name]
    session.install(
        "-c", str(CONSTRAINTS), "-e", "packages/kda-core", "pytest", "hypothesis", "numpy", *imported
    )
    session.install("--no-deps", f"{name}=={version}", *alone)
    tests = (f"tests/integrations/test_{part}.py" for part in ("signatures", name))
    pytest(session, *tests)


@nox.session(name="test-vllm")
def test_vllm(session: nox.Session) -> None:
    """The adapter for vLLM over vLLM's own classes, without a GPU; compares the record of signatures. It downloads 336 MB."""
    test_engine(session, "vllm")


@nox.session(name="test-sglang")
def test_sglang(session: nox.Session) -> None:
    """The adapter for SGLang over SGLang's own base class, without a GPU; compares the record of signatures. It downloads 40 MB, and
    Triton."""
    test_engine(session, "sglang")


@nox.session(name="test-packaging")
def test_packaging(session: nox.Session) -> None:
    """Wheels: their contents, and their installation in clean environments, from wheels and from a checkout."""
    install_all(session)
    pytest(session, "tests/packaging")


@nox.session
def kernels(session: nox.Session) -> None:
    """Exports the kernels of kda-sm90 and builds the wheel of kda-sm90-kernels into dist/. Compiles all variants, which takes hours of
    CPU time but no GPU; arguments go to `precompile`, such as ``-- --only MergeKernel``."""
    session.log(DOWNLOADS)
    editable = [word for package in PACKAGES[:3] for word in ("-e", f"packages/{package}")]
    session.install("-c", str(CONSTRAINTS), *editable, "build", "hatchling")
    project = ROOT / "packages" / "kda-sm90-kernels"
    folder = project / "src" / "kda_sm90_kernels"
    shutil.rmtree(folder / "sm_90a", ignore_errors=True)
    command = ("precompile", "--arch", "sm_90a", "--backend", "sm90", "--export", str(folder))
    session.run("python", "-m", "kda_core", *command, *session.posargs)
    build = ("--wheel", "--no-isolation", "--outdir", str(ROOT / "dist"), str(project))
    session.run("python", "-m", "build", *build)


@nox.session
def compile(session: nox.Session) -> None:
    """Compiles every kernel for each of its architectures, without a GPU; a spill or an advisory of ptxas is a failure."""
    install_all(session)
    compile_kernels(session, *session.posargs)


@nox.session
def nightly(session: nox.Session) -> None:
    """The full conformance kit on the emulated kernels of kda-sm90 and kda-sm100, and the emulated tests that are marked `nightly`,
    which takes hours. ``-- tests/nightly -k TestSm100`` selects the kit on one backend."""
    install_all(session)
    folders = ("tests/nightly", "tests/emulator", "tests/sm90", "tests/sm100")
    chosen = session.posargs or (*folders, "-n", "auto", "--dist", "worksteal")
    session.run("python", "-m", "pytest", "--nightly", *chosen, env=test_environment())


def first_light(session: nox.Session, arch: str) -> None:
    """Runs tools/first_light.py; the arguments after ``--`` go to it."""
    install_all(session)
    session.run("python", "tools/first_light.py", "--arch", arch, *session.posargs)


@nox.session(name="first-light-sm90")
def first_light_sm90(session: nox.Session) -> None:
    """A Hopper GPU: unit kernels beside the emulator, conformance, tests, sanitizer, times and constants, with a report."""
    first_light(session, "sm_90a")


@nox.session(name="first-light-sm100")
def first_light_sm100(session: nox.Session) -> None:
    """A Blackwell GPU: unit kernels beside the emulator, conformance, tests, sanitizer, times and constants, with a report."""
    first_light(session, "sm_100a")


# ---- releases


def version() -> str:
    """Returns the version of all packages, from pyproject.toml."""
    return nox.project.load_toml(ROOT / "pyproject.toml")["tool"]["bumpversion"]["current_version"]


def build_archives(session: nox.Session, folder: Path) -> list[Path]:
    """Builds the source archive and the wheel of each package into an empty `folder`. A wheel is built from its source archive,
    outside the checkout. The bytes do not depend on the caller's SOURCE_DATE_EPOCH."""
    shutil.rmtree(folder, ignore_errors=True)
    for package in PACKAGES:
        command = ("python", "-m", "build", "--no-isolation", "--outdir", str(folder), f"packages/{package}")
        session.run(*command, env={"SOURCE_DATE_EPOCH": None}, silent=True)
    return sorted(folder.iterdir())


def clean_environment(session: nox.Session, folder: Path, archives: Path, *words: str) -> str:
    """Creates a virtual environment in `folder`, installs into it from the folder `archives` without a network, and returns its
    Python. pip's configuration is ignored."""
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, symlinks=True)
    python = str(folder / "bin" / "python")
    pip = ("python", "-m", "pip", "--isolated", "--python", python)
    session.run(*pip, "install", "--quiet", "--no-index", "--find-links", str(archives), *words)
    session.run(*pip, "check")
    return python


def download(session: nox.Session, archives: list[Path], folder: Path) -> None:
    """Downloads into an empty `folder` what the wheels of `archives` require and what builds source archives, and copies `archives`
    there. The wheels are named by path, because an index may have other packages of their names."""
    shutil.rmtree(folder, ignore_errors=True)
    wheels = [str(path) for path in archives if path.suffix == ".whl"]
    wheels = [f"{wheel}[testing]" if "kda_core-" in wheel else wheel for wheel in wheels]
    pip = ("python", "-m", "pip", "download", "--quiet", "--dest", str(folder), "-c", str(CONSTRAINTS))
    session.run(*pip, *wheels, "hatchling")
    for path in archives:
        shutil.copy(path, folder)


@nox.session
def bump(session: nox.Session) -> None:
    """Writes the version of all packages to every place that states it: ``python -m nox -s bump -- 0.2.0``."""
    if len(session.posargs) != 1:
        session.error("name the new version: python -m nox -s bump -- 0.2.0")
    session.install("-c", str(CONSTRAINTS), "bump-my-version")
    session.run("bump-my-version", "bump", "--allow-dirty", "--new-version", *session.posargs)


@nox.session
def release(session: nox.Session) -> None:
    """Builds the archives of all packages into dist/, twice and compared, checks them with twine, installs them into clean
    environments without a network, runs the quick conformance kit there, and writes an SBOM and checksums. Nothing is published.
    ``-- v0.2.0`` also checks that the tag is that of the version."""
    if session.posargs and session.posargs != [f"v{version()}"]:
        session.error(f"the tag of version {version()} is v{version()}, got {' '.join(session.posargs)}")
    if session.posargs and f"\n## [{version()}] - " not in (ROOT / "CHANGELOG.md").read_text():
        session.error(f"CHANGELOG.md has no section for {version()}: rename Unreleased")
    session.install("-c", str(CONSTRAINTS), "build", "hatchling", "twine", "cyclonedx-bom")
    temporary, dist = Path(session.create_tmp()).resolve(), ROOT / "dist"
    archives, again = (build_archives(session, folder) for folder in (dist, temporary / "again"))
    if [path.read_bytes() for path in archives] != [path.read_bytes() for path in again]:
        session.error(f"two builds differ: compare {dist} with {temporary / 'again'}")
    session.run("twine", "check", "--strict", *map(str, archives))

    session.log(DOWNLOADS)
    downloads = temporary / "downloads"
    download(session, archives, downloads)
    from_source = ("--no-binary", ",".join(PACKAGES), *PACKAGES)
    python = clean_environment(session, temporary / "from-source", downloads, *from_source)
    with session.chdir(temporary):  # outside the checkout, whose configuration pytest would find
        session.run(python, "-m", "kda_core", "demo", external=True, env=test_environment())
    shutil.rmtree(temporary / "from-source")
    python = clean_environment(session, temporary / "from-wheels", downloads, *PACKAGES, "kda-core[testing]")
    kit = (python, "-m", "kda_core", "conformance", "reference", "--kda-quick")
    with session.chdir(temporary):
        session.run(*kit, external=True, env=test_environment())

    sbom = str(dist / f"kda-{version()}.cdx.json")
    project = ("--pyproject", "packages/kda-core/pyproject.toml", "--mc-type", "library")
    session.run(
        "cyclonedx-py", "environment", "--output-reproducible", *project, "--output-file", sbom, python
    )
    sums = (
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(dist.iterdir())
    )
    (dist / "SHA256SUMS").write_text("".join(sums))


# ---- checks


@nox.session
def lint(session: nox.Session) -> None:
    """ruff: rules and formatting. ``python -m nox -s lint -- --fix`` fixes what it can."""
    session.install("-c", str(CONSTRAINTS), "ruff")
    session.run("ruff", "check", *session.posargs, ".")
    session.run("ruff", "format", *([] if "--fix" in session.posargs else ["--check"]), ".")


@nox.session
def typecheck(session: nox.Session) -> None:
    """mypy over the packages, the example, the benchmarks, the tools and this file, for Python 3.10."""
    session.install(
        "-c", str(CONSTRAINTS), "mypy", "pytest", "hypothesis", "nox", "numpy", "-e", "packages/kda-core"
    )
    session.run("mypy", *(session.posargs or SOURCES))


@nox.session
def docs(session: nox.Session) -> None:
    """Builds the documentation into ``site/``; every warning is an error. ``python -m nox -s docs -- serve`` shows it in a browser
    and rebuilds a page when its file changes."""
    session.install("-c", str(CONSTRAINTS), "mkdocs-material", "mkdocstrings[python]", "ruff")
    command = session.posargs or ("build", "--strict")
    session.run("mkdocs", *command, env={"NO_MKDOCS_2_WARNING": "1"})


# ---- the main job


@nox.session
def demo(session: nox.Session) -> None:
    """The main job, KDA prefill of a real text: prints the backend, the time and the errors against fp64."""
    install_for_this_machine(session)
    session.run("python", "-m", "kda_core", "demo", *session.posargs)


@nox.session
def train(session: nox.Session) -> None:
    """Trains a small language model of bytes with the layer of kda-core (examples/train_bytes_lm.py), and draws its loss curve into
    runs/."""
    install_for_this_machine(session)
    session.install("-c", str(CONSTRAINTS), "matplotlib")
    session.run("python", "examples/train_bytes_lm.py", *session.posargs)


@nox.session(name="public-kernels")
def public_kernels(session: nox.Session) -> None:
    """Runs kernels of CUTLASS, quack and FlashAttention on ptx-emulator: ``-- FOLDER``, with checkouts named cutlass, quack and
    flash-attention. It downloads what quack imports, einops and Triton, several hundred megabytes."""
    install_all(session)
    session.install("-c", str(CONSTRAINTS), "einops", "triton")
    session.run("python", "tools/public_kernels.py", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Measures prefill on every backend that this machine can run, and writes benchmarks/results/."""
    install_for_this_machine(session)
    session.run("python", "benchmarks/run.py", *session.posargs)
