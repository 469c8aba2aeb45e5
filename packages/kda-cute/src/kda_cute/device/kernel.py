"""The base of a kernel class whose arguments are one struct (`kda_cute.arguments`)."""

from cutlass import BFloat16, cute

from kda_cute import arguments


class Kernel:
    """A kernel with a `kda_cute.interface.KernelInterface`. It takes a tensor, which determines the device and the stream, and the values
    of the struct.

    A class sets ``interface`` and these attributes, and defines ``kernel(self, values)``:

    =============== ==========================================================================================
    `config`        the configuration
    `threads`       of a CTA
    `shared_bytes`  dynamic shared memory of a CTA
    `ctas_per_sm`   CTAs of an SM for which ptxas limits the registers
    `carveout`      percent of an SM's memory that is shared memory; without it the DSL queries a device at compile time
    `leading`       dtype of the tensor
    =============== ==========================================================================================
    """

    ctas_per_sm = 1
    carveout = 100
    leading = BFloat16

    def wait_for_stream(self):
        """Waits until all kernels ahead in the stream have ended, and lets the next one begin, which waits in turn. A kernel whose
        interface ``overlaps`` calls it before it accesses global memory."""
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

    def fake_args(self) -> tuple:
        return arguments.fake_args(self.interface.arguments(self.config), self.leading)

    @cute.jit
    def __call__(self, tensor: cute.Tensor, *values_and_stream):
        *values, stream = values_and_stream
        x, ctas = self.interface.arguments(self.config)(*values), self.interface.cluster(self.config)
        self.kernel(tuple(values)).launch(
            grid=self.interface.grid(self.config, x),
            block=(self.threads, 1, 1),
            smem=self.shared_bytes,
            stream=stream,
            cluster=(ctas, 1, 1) if ctas > 1 else None,
            cooperative=self.interface.cooperative,
            use_pdl=self.interface.overlaps,
            min_blocks_per_mp=self.ctas_per_sm,
            preferred_smem_carveout=self.carveout,
        )
