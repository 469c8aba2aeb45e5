"""Machine code of forms: built when a program first needs it, and kept for the life of the process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from ptx_emulator.compiled import dispatch
from ptx_emulator.compiled.emit import Operation
from ptx_emulator.compiled.forms import Form

Build = Callable[[Any], None]


class Engine:
    """Compiles functions for this machine. Their addresses are valid as long as the engine lives."""

    def __init__(self) -> None:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        target = llvm.Target.from_default_triple()
        self._machine = target.create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=2, reloc="pic"
        )
        #: Whether this machine converts fp16 in hardware. Otherwise LLVM would call functions that the process may lack.
        self.converts_f16 = bool(llvm.get_host_cpu_features().get("f16c"))
        self._jit = llvm.create_lljit_compiler(use_jit_link=True)
        self._lock = threading.RLock()  # a form may need another function while it is built
        self._modules = 0
        self._libraries: list[Any] = []
        self._addresses: dict[str, int] = {}

    def addresses(self, forms: Iterable[Form]) -> dict[str, int]:
        """Return the address of the function of each form, and of the loop that executes them."""
        with self._lock:
            missing = {form.name: form for form in forms if form.name not in self._addresses}
            builds: dict[str, Build] = {}
            if dispatch.NAME not in self._addresses:
                builds[dispatch.NAME] = dispatch.build
            for name, form in missing.items():
                builds[name] = lambda module, form=form: form.build(Operation(module, form.name))  # type: ignore[misc]
            if builds:
                self._compile(builds)
            return dict(self._addresses)

    def function(self, name: str, build: Build) -> int:
        """Return the address of a function that is no form. ``build`` adds it, under this name, to a module."""
        with self._lock:
            if name not in self._addresses:
                self._compile({name: build})
            return self._addresses[name]

    def _compile(self, builds: dict[str, Build]) -> None:
        self._modules += 1
        module = ir.Module(f"ptx_emulator_{self._modules}")
        module.triple = self._machine.triple
        module.data_layout = str(self._machine.target_data)
        for build in builds.values():
            build(module)
        parsed = llvm.parse_assembly(str(module))
        options = llvm.create_pipeline_tuning_options(speed_level=2)
        passes = llvm.create_pass_builder(self._machine, options)
        passes.getModulePassManager().run(parsed, passes)
        library = llvm.JITLibraryBuilder().add_object_img(self._machine.emit_object(parsed))
        for name in ("fmaf", "fma"):  # of the C library, for processors without this instruction
            library.import_symbol(name, llvm.address_of_symbol(name) or 0)
        for name in builds:
            library.export_symbol(name)
        linked = library.link(self._jit, module.name)
        self._libraries.append(linked)
        self._addresses |= {name: linked[name] for name in builds}


_engine: Engine | None = None
_creation = threading.Lock()


def engine() -> Engine:
    """Return the engine of this process."""
    global _engine
    with _creation:
        if _engine is None:
            _engine = Engine()
        return _engine
