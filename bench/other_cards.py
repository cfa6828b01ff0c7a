"""Does everything run, and how fast, as it would be compiled for another card? On a Hopper GPU.

    python -m bench.other_cards 8.0 bench.correctness.kernels --processes 1 --seeds 2
    python -m bench.other_cards 8.6 kestrel_grpc verify tests/golden/md2-small --dtype bfloat16
    python -m bench.other_cards 8.9 bench.decode_step --precision float8 --batches 1 64

The rest of the line is a module and its arguments, which run in this process. Implementations and plans are chosen
for the named card. Triton compiles for it down to PTX, which ptxas assembles for the GPU that is here: the
instructions are those that the other card has. A kernel that needs more shared memory than a program has there ends
the run. What torch's libraries compute (cuBLAS, cuDNN, attention within image crops) is computed as this GPU does,
with its clocks, caches and memory: times say what the plans are worth, not how fast the other card is.
"""

import atexit
import importlib
import runpy
import sys
from typing import Any

from kestrel_ops.device_limits import DeviceLimits

CARDS = {
    "8.0": DeviceLimits.of_card((8, 0)),  # A100, A30
    "8.6": DeviceLimits.of_card((8, 6)),  # A10, A40, RTX 30
    "8.9": DeviceLimits.of_card((8, 9)),  # L4, L40S, RTX 40
    "9.0": DeviceLimits.of_card((9, 0)),  # H100, H200: what is here, as it is
}


def assume(card: str) -> None:
    """Choose and compile for a card, in this process, until it ends."""
    import torch
    from triton.backends.compiler import GPUTarget

    backend: Any = importlib.import_module("triton.backends.nvidia.compiler").CUDABackend
    driver: Any = importlib.import_module("triton.runtime").driver.active
    limits = CARDS[card]
    assert limits.capability is not None
    major, minor = limits.capability
    number, own_major, own_minor = 10 * major + minor, *torch.cuda.get_device_capability()
    here, assemble = DeviceLimits.of(torch.device("cpu")), backend.make_cubin
    shared_bytes: dict[str, int] = {}

    def assemble_for_this_gpu(self: Any, ptx: str, metadata: Any, options: Any, _: int) -> bytes:
        assert f".target sm_{number}\n" in ptx or f".target sm_{number}," in ptx, ptx[:300]
        return assemble(self, ptx, metadata, options, 10 * own_major + own_minor)

    def note(*, metadata: dict[str, Any], **_: Any) -> None:
        # Of what was compiled now, and of what was found where Triton keeps it by target.
        if metadata["shared"] > limits.shared_bytes:
            raise RuntimeError(f"{metadata['name']} needs {metadata['shared']} bytes of shared memory")
        shared_bytes[metadata["hash"]] = metadata["shared"]

    def say_what_ran() -> None:
        most = max(shared_bytes.values(), default=0)
        print(f"{len(shared_bytes)} kernels of sm_{number}; at most {most} bytes of shared memory", flush=True)

    DeviceLimits.of = staticmethod(lambda device: here if device.type == "cpu" else limits)
    if (major, minor) != (own_major, own_minor):
        driver.get_current_target = lambda: GPUTarget("cuda", number, 32)
        backend.make_cubin = assemble_for_this_gpu
        importlib.import_module("triton.knobs").compilation.listener = note
        atexit.register(say_what_ran)


def main() -> None:
    """Run a module as if this GPU were another one."""
    if len(sys.argv) < 3 or sys.argv[1] not in CARDS:
        sys.exit(f"usage: python -m bench.other_cards {{{','.join(CARDS)}}} MODULE [ARGUMENT ...]")
    _, card, module, *arguments = sys.argv
    assume(card)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
