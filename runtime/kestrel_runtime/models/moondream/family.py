"""Defines the model family, which the registry imports.

Checking `config.json` needs no library; other parts are imported late.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.errors import CheckpointError
from kestrel_runtime.loading.checkpoint import Checkpoint
from kestrel_runtime.models.family import LoadedWeights, Meanwhile, ModelFamily
from kestrel_runtime.models.moondream.config import ConfigError, IncompleteConfig, MoondreamConfig, sections_of

if TYPE_CHECKING:
    import torch

    from kestrel_runtime.models.family import Verification
    from kestrel_runtime.models.moondream.model import Moondream
    from kestrel_runtime.models.moondream.prepared import PreparedMoondream
    from kestrel_runtime.models.moondream.quantisation import QuantisedFormat
    from kestrel_runtime.models.moondream.skills.base import Skill
    from kestrel_runtime.models.moondream.vision.cropping import MoondreamCropping
    from kestrel_runtime.scheduling.limits import StepBounds

_log = logging.getLogger(__name__)


class MoondreamFamily:
    """Moondream 2 and 3."""

    def check_config(self, checkpoint: Checkpoint) -> None:
        """Raises `CheckpointError` if `config.json` has values that no Moondream can have."""
        try:
            MoondreamConfig.from_dict(sections_of(checkpoint.config))
        except IncompleteConfig:
            pass  # the rest follows from the tensors
        except ConfigError as error:
            raise CheckpointError(f"{checkpoint.name}: {error}") from error

    def load(
        self,
        checkpoint: Checkpoint,
        config: EngineConfig,
        device: torch.device,
        dtype: torch.dtype,
        meanwhile: Meanwhile | None = None,
    ) -> LoadedWeights:
        """Loads a checkpoint. Experts keep their type unless `config` names another. Scales are no parameters."""
        from kestrel_runtime.models.moondream.early_kernels import EarlyKernels
        from kestrel_runtime.models.moondream.model import Moondream, quantised_to, stored_format
        from kestrel_runtime.models.moondream.weights.checkpoint import load_moondream_state

        model_config, state = load_moondream_state(checkpoint)
        num_parameters = sum(tensor.numel() for name, tensor in state.items() if not name.endswith(".scale"))
        experts = None if config.expert_dtype == "auto" else cast("QuantisedFormat", config.expert_dtype)
        early = None
        if meanwhile is not None and device.type == "cuda":
            expert_format = quantised_to(model_config, state, experts) or stored_format(state)
            num_bytes = sum(tensor.nbytes for tensor in state.values())
            early = EarlyKernels(model_config, config, dtype, expert_format, num_bytes)
            meanwhile(early.load)
        model = Moondream.from_state(model_config, state, device, dtype, experts=experts)
        model.early_kernels = early
        if model.expert_errors:
            _log.info(
                "quantised the experts to %s; relative error of their weights by layer: %s",
                experts,
                ", ".join(
                    f"{layer}: {100 * first:.2f}% and {100 * second:.2f}%"
                    for layer, (first, second) in sorted(model.expert_errors.items())
                ),
            )
        return LoadedWeights(model, num_parameters)

    def skills(self, config: MoondreamConfig) -> Mapping[str, Skill]:
        """Returns the skills for which the model has prompt templates, and those that need none."""
        from kestrel_runtime.models.moondream.skills import SKILLS

        templates = config.tokenizer.templates
        return {
            name: skill
            for name, skill in SKILLS.items()
            if skill.template is None or templates.get(skill.template or name)
        }

    def cropping(self, config: MoondreamConfig) -> MoondreamCropping:
        """Returns the division into overlapping square crops."""
        from kestrel_runtime.models.moondream.vision.cropping import MoondreamCropping

        return MoondreamCropping(config.vision)

    def prepare(
        self, model: Moondream, config: EngineConfig, bounds: StepBounds, *, owns_model: bool
    ) -> PreparedMoondream:
        """Selects the backends, once."""
        from kestrel_runtime.models.moondream.prepared import PreparedMoondream

        return PreparedMoondream(model, config, bounds, owns_model=owns_model)

    def verification(self, model: Moondream, config: EngineConfig) -> Verification:
        """Returns the comparison of crops, and of the tensors of one prompt about each image."""
        # An engine that serves requests does not need this package.
        from kestrel_runtime.models.moondream.verify.verification import verification

        return verification(model, config)


FAMILY: ModelFamily = MoondreamFamily()
