"""Launches of threads that have called nothing of the CUDA runtime, such as torch's threads for backwards."""

import subprocess
import sys
import textwrap

import pytest

#: The first launches of a process. All memory comes from torch's cache, so the thread has no CUDA context when it loads a kernel.
SCRIPT = textwrap.dedent(
    """
    import ctypes, threading, torch
    from kda_core import chunk_kda
    from kda_core.registry import record_calls
    from kda_core.testing import make_inputs

    def context():
        found = ctypes.c_void_p()
        ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(found))
        return found.value

    x = make_inputs("slow", 200, H=2, device="cuda").arguments
    memory = torch.empty(1 << 28, device="cuda", dtype=torch.uint8)
    del memory
    found = []

    def run():
        assert context() is None
        with record_calls() as calls:
            found.append(chunk_kda(**x)[0])
        assert [(c.backend, c.entry) for c in calls] == [("sm90", "chunk_fwd")]

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert torch.equal(*found, chunk_kda(**x)[0])
    """
)


@pytest.mark.arch((9, 0))
def test_a_thread_without_a_cuda_context_loads_and_launches_a_kernel():
    for _ in range(2):  # the first process compiles the kernel, the second finds it in the cache
        done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
