"""Loads a model in a thread while the process imports the engine's libraries, of which torch takes seconds.

The work needs little of the interpreter: it asks the hub, has the system read the files of weights,
creates the context of the device, uses libraries there for the first time, and copies weights to it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import runpy
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from ctypes import byref, c_int, c_void_p
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from kestrel_runtime.api.config import EngineConfig

if TYPE_CHECKING:
    from kestrel_runtime.models.loaded_model import LoadedModel

_DRIVER = "libcuda.so.1"


class BackgroundLoad:
    """Loads the model of a configuration from its construction on. Its threads do not keep the process alive."""

    def __init__(
        self,
        config: EngineConfig,
        torch_libraries: threading.Thread | None = None,
        *,
        binds_near_device: bool = False,
    ) -> None:
        """Starts the load, which imports torch once the thread `torch_libraries` has ended.

        `binds_near_device` binds all threads of the process to the processors near its GPU.
        """
        self._config = config
        self._torch_libraries = torch_libraries
        self._binds_near_device = binds_near_device
        self._loaded: Future[LoadedModel] = Future()
        self._meanwhile: SimpleQueue[Callable[[threading.Event], object] | None] = SimpleQueue()
        """The functions that `result` calls before the model is loaded; None ends them."""
        self._may_fork = threading.Event()
        """Set when the threads have no tensors of their own on the device any more."""
        self._using = threading.Thread(target=self._use_device, name="kestrel-device", daemon=True)
        self._hashing = threading.Thread(target=_hash_compiler, name="kestrel-compiler", daemon=True)
        if config.device != "cpu":
            self._using.start()
            self._hashing.start()
        threading.Thread(target=self._run, name="kestrel-load", daemon=True).start()

    def result(self) -> LoadedModel:
        """Waits for the model, and prepares meanwhile what does not need its weights. Raises `CheckpointError`."""
        while not self._loaded.done() and (prepare := self._meanwhile.get()) is not None:
            if self._hashing.is_alive():
                self._hashing.join()
            prepare(self._may_fork)
        loaded = self._loaded.result()
        if self._using.is_alive():  # the memory in use is measured next
            self._using.join()
        return loaded

    def _run(self) -> None:
        try:
            from kestrel_runtime.loading.checkpoint import find_checkpoint
            from kestrel_runtime.loading.tokenizer import Tokenizer

            checkpoint = find_checkpoint(self._config.model, self._config.revision)
            read_ahead(checkpoint.weight_files)
            # Torch is not needed here, and its libraries are being loaded.
            tokenizer = Tokenizer.from_file(checkpoint.tokenizer_file)
            self._await_libraries()
            from kestrel_runtime.memory.processor_affinity import bind_near
            from kestrel_runtime.models.loaded_model import LoadedModel, pci_address

            if self._binds_near_device:
                bind_near(pci_address(self._config))
            loaded = LoadedModel.load(self._config, checkpoint, tokenizer, self._meanwhile.put)
            self._loaded.set_result(loaded)
        except BaseException as error:  # whatever it is, `result` raises it
            self._loaded.set_exception(error)
        finally:
            self._meanwhile.put(None)
            if self._using.is_alive():
                self._using.join()
            self._may_fork.set()

    def _use_device(self) -> None:
        """Creates the context of the GPU, then has torch's libraries load what they need there."""
        if not torch_has_cuda() or not _create_context():
            return
        self._await_libraries()
        import torch

        from kestrel_ops import use_libraries

        with suppress(RuntimeError):  # the load reports why the GPU cannot be used
            if torch.cuda.is_available():
                use_libraries(torch.device("cuda"))

    def _await_libraries(self) -> None:
        if self._torch_libraries is not None:
            self._torch_libraries.join()


def read_ahead(files: Iterable[Path]) -> None:
    """Has the system read files into its cache, as far as it likes, without waiting for them."""
    if not hasattr(os, "posix_fadvise"):
        return
    for file in files:
        with suppress(OSError), file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def torch_has_cuda() -> bool:
    """Returns whether the installed torch was built for CUDA. Does not import it."""
    found = importlib.util.find_spec("torch")
    folders = () if found is None else found.submodule_search_locations or ()
    return any(next(Path(folder, "lib").glob("*torch_cuda*"), None) for folder in folders)


def _hash_compiler() -> None:
    """Has the compiler of kernels prepare itself, as a script: the package of kernels imports torch."""
    found = importlib.util.find_spec("kestrel_ops") if torch_has_cuda() else None
    for folder in () if found is None else found.submodule_search_locations or ():
        runpy.run_path(str(Path(folder, "compilation", "triton_key.py")), run_name="__main__")


def _create_context() -> bool:
    """Creates the primary context of the first GPU, which torch will use. Returns whether there is one."""
    with suppress(OSError, AttributeError):
        driver = ctypes.CDLL(_DRIVER)  # its functions release the interpreter's lock
        device, context = c_int(), c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(byref(device), 0) == 0:
            return driver.cuDevicePrimaryCtxRetain(byref(context), device) == 0
    return False
