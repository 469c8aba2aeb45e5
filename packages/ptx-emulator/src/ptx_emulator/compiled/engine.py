"""Machine code of forms: built when a program first needs it, and kept for the life of the process and in `objects`."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import llvmlite
import llvmlite.binding as llvm

from ptx_emulator.compiled import dispatch, objects
from ptx_emulator.compiled.emit import Build, Module, Operation
from ptx_emulator.compiled.forms import Form


class Engine:
    """Compiles functions for this machine. Their addresses are valid as long as the engine lives."""

    def __init__(self) -> None:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        target = llvm.Target.from_default_triple()
        processor, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
        self._machine = target.create_target_machine(cpu=processor, features=features, opt=2, reloc="pic")
        #: Whether this machine converts fp16 in hardware. Otherwise LLVM would call functions that the process may lack.
        self.converts_f16 = bool(llvm.get_host_cpu_features().get("f16c"))
        version = f"llvmlite {llvmlite.__version__} with LLVM {llvm.llvm_version_info}"
        self._folder = objects.folder_of((version, target.triple, processor, features))
        self._jit = llvm.create_lljit_compiler(use_jit_link=True)
        self.lock = threading.RLock()  # held while functions are compiled and linked
        self._links = 0
        self._libraries: list[Any] = []
        self._addresses: dict[str, int] = {}

    def addresses(self, forms: Iterable[Form]) -> dict[str, int]:
        """Return the address of the function of each form, and of the loop that executes them."""
        with self.lock:
            missing = {form.name: form for form in forms if form.name not in self._addresses}
            builds: dict[str, Build] = {name: partial(_build_form, form) for name, form in missing.items()}
            self._add({dispatch.NAME: dispatch.build, **builds})
            return dict(self._addresses)

    def function(self, name: str, build: Build) -> int:
        """Return the address of a function that is no form. ``build`` adds it, under this name, to a module."""
        with self.lock:
            self._add({name: build})
            return self._addresses[name]

    def _add(self, builds: dict[str, Build]) -> None:
        """Link functions, and those that they call, into the process."""
        found: dict[str, objects.Compiled] = {}
        for name, build in builds.items():
            self._find(name, build, found)
        if not found:
            return
        library = llvm.JITLibraryBuilder()
        for name, compiled in found.items():
            library.add_object_img(compiled.image).export_symbol(name)
        for name in {name for compiled in found.values() for name in compiled.needs} - found.keys():
            library.import_symbol(name, self._addresses[name])
        for name in ("fmaf", "fma"):  # of the C library, for processors without this instruction
            library.import_symbol(name, llvm.address_of_symbol(name) or 0)
        self._links += 1
        linked = library.link(self._jit, f"ptx_emulator_{self._links}")
        self._libraries.append(linked)
        self._addresses |= {name: linked[name] for name in found}

    def _find(self, name: str, build: Build | None, found: dict[str, objects.Compiled]) -> bool:
        """Add a function, and those that it calls, to ``found`` unless it is linked. False: it must be built, and ``build`` is None."""
        if name in self._addresses or name in found:
            return True
        compiled = objects.read(self._folder, name)
        if compiled is None or not all(self._find(other, None, found) for other in compiled.needs):
            if build is None:
                return False
            module = self._module(name, build)
            for other, build_other in module.needs.items():
                self._find(other, build_other, found)
            compiled = objects.Compiled(tuple(module.needs), self._object(module))
            objects.write(self._folder, name, compiled)
        found[name] = compiled
        return True

    def _module(self, name: str, build: Build) -> Module:
        module = Module(name)
        module.triple = self._machine.triple
        module.data_layout = str(self._machine.target_data)
        build(module)
        return module

    def _object(self, module: Module) -> bytes:
        parsed = llvm.parse_assembly(str(module))
        options = llvm.create_pipeline_tuning_options(speed_level=2)
        passes = llvm.create_pass_builder(self._machine, options)
        passes.getModulePassManager().run(parsed, passes)
        image: bytes = self._machine.emit_object(parsed)
        return image


def _build_form(form: Form, module: Module) -> None:
    form.build(Operation(module, form.name))


_engine: Engine | None = None
_creation = threading.Lock()


def engine_lock() -> AbstractContextManager[Any]:
    """Return the lock of the engine, if there is one, for a fork: no other thread holds it then."""
    return nullcontext() if _engine is None else _engine.lock


def engine() -> Engine:
    """Return the engine of this process."""
    global _engine
    with _creation:
        if _engine is None:
            _engine = Engine()
        return _engine
