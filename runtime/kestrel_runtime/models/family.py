"""Defines the interface between a model family and generic code.

Prompts and crops need no torch, so that a process without a device can prepare requests. `load` and `prepare`
import what they need. A family also compares its tensors with those of a reference fixture, for `kestrel-grpc
verify`. A fixture is a folder with a small checkpoint, images, and the answers and tensors of a reference.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.engine import MemoryPlan, SkillDefaults
from kestrel_runtime.api.requests import Chat, ChatMessage, Query, Request, Role, SamplingParams
from kestrel_runtime.loading.checkpoint import Checkpoint

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kestrel_runtime.adapters.store import AdapterTarget
    from kestrel_runtime.execution.step_runner import StepRunner
    from kestrel_runtime.imaging.crops import Cropping
    from kestrel_runtime.imaging.device_crops import DeviceOperations
    from kestrel_runtime.output.output_parser import OutputParser, Token
    from kestrel_runtime.scheduling.limits import StepBounds
    from kestrel_runtime.scheduling.sequence import TokenSequence


_LEAST_TOLERANCE = 2.0**-126
"""The smallest normal float32: errors are divided by no less."""

Prepare = Callable[[Request], "TokenSequence"]
"""Decodes an image, makes its crops and tokenises a request, as the engine does before it is scheduled."""


Meanwhile = Callable[[Callable[[threading.Event], object]], None]
"""Takes a function for another thread to call. What it raises, the start raises.

It is given an event that is set when no other thread has tensors of its own on the device any more: a process that
is forked before would free them, and end.
"""


class ModelConfig(Protocol):
    """Everything about one model that is not a weight."""

    @property
    def architecture(self) -> str:
        """Returns the family and its generation, as clients see them."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_context(self) -> int:
        """Returns the most positions of a sequence."""
        ...

    @property
    def bos_id(self) -> int:
        """Returns the token that begins every prompt."""
        ...

    @property
    def positions_per_image(self) -> int:
        """Returns the positions of an image, which follow the first token."""
        ...


class Prompt(NamedTuple):
    """The prompt of a request, behind the first token: its tokens, and what stands between them."""

    tokens: Sequence[Token]
    """All tokens that are not of images."""
    image_places: tuple[int, ...] = (0,)
    """The number of these tokens before each image, if the request has it."""
    answer_ends: tuple[int, ...] = ()
    """The number of these tokens up to the end of each earlier answer of a conversation."""


class Skill(Protocol):
    """One task of the model: its prompt, its output parser, its limits and defaults. Stateless; any thread.

    `request`: the skill's type in `api.requests`; `tokenizer`: a `loading.tokenizer.Tokenizer`; `config`: the
    family's own configuration.
    """

    @property
    def name(self) -> str: ...

    @property
    def text_field(self) -> str:
        """Returns the request's field with free text, which is named where the prompt is too long."""
        ...

    @property
    def defaults(self) -> SkillDefaults: ...

    def prompt(self, request: Any, tokenizer: Any, config: Any) -> Prompt:
        """Returns the prompt behind the first token. Raises `InvalidRequest`."""
        ...

    def message_tokens(self, request: Any, tokenizer: Any, config: Any) -> list[int]:
        """Returns the tokens of the prompt for each message of a conversation, with the first token and without
        images. Asked of the skill `chat` alone."""
        ...

    def new_parser(self, request: Any, tokenizer: Any, config: Any) -> OutputParser:
        """Returns the output parser of one sequence."""
        ...


class LoadedWeights(NamedTuple):
    """A model in memory."""

    model: Any
    """The family's own object, with the attributes `config`, `device` and `dtype`."""
    num_parameters: int


class PreparedModel(Protocol):
    """A model prepared to run with one configuration."""

    def crop_on_device(self) -> DeviceOperations | None:
        """Returns operations on images for one thread. None where crops are made on the host."""
        ...

    def plan_cache(self, host_image_bytes: int) -> tuple[int, MemoryPlan]:
        """Returns the number of pages of the key-value cache, and the plan of all memory.

        `host_image_bytes`: limit of decoded images on the host. Raises `CheckpointError` if memory is too small for
        the fewest pages.
        """
        ...

    def adapter_target(self) -> AdapterTarget | None:
        """Returns the target of adapters; None if `EngineConfig` asks for none.

        `new_step_runner` takes their memory.
        """
        ...

    def new_step_runner(
        self, num_pages: int, graph_bytes: int, image_cache_bytes: int = 0, crop_cache_bytes: int = 0
    ) -> StepRunner:
        """Returns a step runner with a cache of `num_pages`; captured graphs may take `graph_bytes` of device
        memory, image embeddings `image_cache_bytes` in addition to what running sequences need, and encoded crops
        `crop_cache_bytes`.

        Raises `CheckpointError` if there is no memory for the cache.
        """
        ...


@dataclass(frozen=True, slots=True)
class Comparison:
    """One measure of an error and its bound."""

    measure: str
    error: float
    tolerance: float

    @property
    def holds(self) -> bool:
        """Returns True if the error is within its bound and not NaN."""
        return self.error <= self.tolerance

    @property
    def share(self) -> float:
        """Returns the error divided by its bound; infinite for NaN."""
        if math.isnan(self.error):
            return math.inf
        return self.error / max(self.tolerance, _LEAST_TOLERANCE)

    def __str__(self) -> str:
        return f"{self.measure} {self.error:.2e}, tolerance {self.tolerance:.2e}"


@dataclass(frozen=True, slots=True)
class Case:
    """The result of one case."""

    name: str
    complaint: str | None
    """The reason why the case fails; None if it passes."""
    comparison: Comparison | None = None
    """The errors of a tensor of numbers."""
    digest: str = ""
    """Equal for two runs with the same bits or the same answer."""

    def __str__(self) -> str:
        if self.complaint is not None:
            return f"FAILED  {self.name}: {self.complaint}"
        return f"ok      {self.name}" + ("" if self.comparison is None else f": {self.comparison}")


@dataclass(frozen=True, slots=True)
class Fixture:
    """Answers and tensors of the reference."""

    folder: Path
    expected: Mapping[str, Any]
    """`expected.json`. `images` has for each image its file name, and `calls` with their answers."""
    tensors: Mapping[str, Tensor]
    """`expected.safetensors`; the names are the family's own."""
    conversations: Sequence[Mapping[str, Any]] = ()
    """The entries of `conversations.json`, each with its `max_tokens`; empty where the folder has none."""
    conversation_tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """`conversations.safetensors`; the names are the family's own."""

    def data(self, image: str) -> bytes:
        """Returns the bytes of an image."""
        return (self.folder / image).read_bytes()

    def chat(self, conversation: Mapping[str, Any]) -> Chat:
        """Returns the greedy request of one of the conversations."""
        messages = tuple(
            ChatMessage(Role(message["role"]), message["text"], tuple(map(self.data, message.get("images", ()))))
            for message in conversation["messages"]
        )
        sampling = SamplingParams(temperature=0.0, max_tokens=conversation["max_tokens"])
        return Chat(messages, reasoning=conversation["reasoning"], sampling=sampling)


class PromptRecord(NamedTuple):
    """The facts and tensors that a family records of one prompt about one image."""

    facts: Mapping[str, Any]
    """Added to the image's entry of `expected.json`."""
    tensors: Mapping[str, Tensor]


def _nothing_recorded(request: Query, prepare: Prepare) -> PromptRecord:
    return PromptRecord({}, {})


class Verification(NamedTuple):
    """The comparisons of one model under one configuration, by its family."""

    is_exact: bool
    """True if everything is computed in float32. Greedy answers must then be equal, too."""
    tensor_cases: Callable[[Fixture, Prepare], Iterator[Case]]
    record_prompt: Callable[[Query, Prepare], PromptRecord] = _nothing_recorded
    """Compute what `tensor_cases` compares, to write it to a fixture."""


class ModelFamily(Protocol):
    """One architecture: how its checkpoints are read, and which skills its models have."""

    def check_config(self, checkpoint: Checkpoint) -> None:
        """Raises `CheckpointError` if the checkpoint's configuration cannot be served.

        Needs neither the weights nor torch, so that a start can fail before they are loaded.
        """
        ...

    def load(
        self,
        checkpoint: Checkpoint,
        config: EngineConfig,
        device: torch.device,
        dtype: torch.dtype,
        meanwhile: Meanwhile | None = None,
    ) -> LoadedWeights:
        """Reads the weights, checks them and places them on the device. Raises `CheckpointError`.

        `device` and `dtype` are the resolved values of those fields of `config`. `meanwhile` may be given what
        another thread can do for `prepare` while the weights are copied.
        """
        ...

    def skills(self, config: Any) -> Mapping[str, Skill]:
        """Returns the skills of a model of this configuration by name, in the order in which clients see them."""
        ...

    def cropping(self, config: Any) -> Cropping:
        """Returns how a model of this configuration divides images."""
        ...

    def prepare(self, model: Any, config: EngineConfig, bounds: StepBounds, *, owns_model: bool) -> PreparedModel:
        """Prepares a loaded model to run with `config`, in steps within `bounds`.

        With `owns_model` the model has no other user, so weights may be freed once the prepared model has copied
        them. Raises `CheckpointError` if the model cannot run with `config`. A family without backends of its own
        for `EngineConfig.deterministic` must refuse it here: nothing else does.
        """
        ...

    def verification(self, model: Any, config: EngineConfig) -> Verification:
        """Returns the comparison of a loaded model, run with `config`, with a reference fixture."""
        ...


def config_of(model: Any) -> ModelConfig:
    """Returns the configuration of a model that a family has loaded, as generic code sees it."""
    return model.config


def plain_float32(config: EngineConfig) -> EngineConfig:
    """Returns the same model and device on the plain backend in float32, which defines the correct results."""
    return replace(
        config,
        dtype="float32",
        text_backend="plain",
        vision_backend="plain",
        kv_dtype="auto",
        expert_dtype="auto",
        cuda_graphs=None,
        kernels=(),
        deterministic=False,
    )
