"""Chooses the launch configurations of the products of experts, by type and number of tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kestrel_ops.device_limits import DeviceLimits
from kestrel_ops.experts.reference_int4 import INT4_GROUP
from kestrel_ops.shapes import FLOAT8


@dataclass(frozen=True, slots=True)
class ProductConfig:
    """Divides one product of an item's tokens into programs."""

    rows: int
    """Rows of the weight per program; of each half in the first product. Also the columns that share a scale."""
    columns: int
    """Columns of the weight per iteration; in the second product in float8 at most those that share a scale."""
    num_warps: int
    num_stages: int
    """Iterations whose loads run concurrently, plus one."""
    is_read_once: bool = True
    """True if the weight is read once, so that it need not stay in the cache."""
    prefetched_bytes: int = 0
    """Bytes of each row of the second weight that a program prefetches into the cache while it waits for the first
    product; a multiple of 16."""
    turns: int = 1
    """Blocks of columns per iteration of the second product, if they divide the columns."""


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Divides a mixture of experts into programs."""

    block_tokens: int
    """The most tokens of an expert in one item; tensor cores need 16."""
    expand: ProductConfig
    contract: ProductConfig
    quantises_rows: bool = False
    """True if a separate kernel quantises the rows between the products to float8, with one scale for each row,
    which makes the second product faster; else each program of the first product quantises its columns."""


@dataclass(frozen=True, slots=True)
class OneTokenConfig:
    """Divides a mixture of experts for one token into programs."""

    expand_bytes: int
    """Bytes of the first weight that a program loads, a power of two; at least a row of each half is loaded."""
    contract_bytes: int
    """The same of the second weight; at least a row of each chosen expert is loaded."""
    num_warps: int


_FEW_TOKENS = 32

ONE_TOKEN = OneTokenConfig(expand_bytes=32_768, contract_bytes=32_768, num_warps=4)


def config_for(
    num_tokens: int,
    num_experts: int,
    choices: int,
    operand: torch.dtype,
    limits: DeviceLimits,
) -> ExpertsConfig:
    """Returns the launch configuration for so many tokens, the type that tensor cores multiply and the device.

    With less shared memory than Hopper has, fewer loads run concurrently. Without its products of warp groups,
    large tiles are divided among other numbers of warps.
    """
    config = _measured(num_tokens, num_experts, choices, operand)
    if not limits.is_hopper and config.block_tokens > _FEW_TOKENS and operand != torch.float32:
        if operand == torch.float8_e4m3fn:
            config = replace(config, expand=replace(config.expand, num_warps=8))
        else:
            config = replace(config, contract=replace(config.contract, num_warps=4))
    shared_bytes = limits.shared_bytes
    block, expand, contract = config.block_tokens, config.expand, config.contract
    return replace(
        config,
        expand=_fitting(expand, (2 * expand.rows + block) * expand.columns * operand.itemsize, shared_bytes),
        contract=_fitting(contract, (contract.rows + block) * contract.columns * operand.itemsize, shared_bytes),
    )


def _fitting(config: ProductConfig, stage_bytes: int, shared_bytes: int) -> ProductConfig:
    return replace(config, num_stages=min(config.num_stages, max(shared_bytes // stage_bytes, 2)))


def _measured(num_tokens: int, num_experts: int, choices: int, operand: torch.dtype) -> ExpertsConfig:
    """Returns the fastest launch configurations on one H200 (`bench.experts --tune`)."""
    if operand == torch.float32:
        return ExpertsConfig(16, ProductConfig(64, 32, 4, 2), ProductConfig(64, 32, 4, 2))
    per_expert = num_tokens * choices / num_experts
    if operand == torch.float8_e4m3fn:
        if per_expert <= 16:
            return ExpertsConfig(
                16,
                ProductConfig(64, 256, 4, 3),
                ProductConfig(64, 64, 4, 3, turns=2),
            )
        if per_expert <= 48:
            return ExpertsConfig(
                32,
                ProductConfig(64, 128, 4, 4),
                ProductConfig(64, 64, 4, 5, prefetched_bytes=256),
            )
        return ExpertsConfig(
            128,
            ProductConfig(64, 128, 4, 3, is_read_once=False),
            ProductConfig(128, 128, 8, 3, is_read_once=False),
            quantises_rows=True,
        )
    if per_expert <= 16:
        return ExpertsConfig(16, ProductConfig(64, 64, 4, 4), ProductConfig(64, 64, 4, 5))
    if per_expert <= 48:
        return ExpertsConfig(32, ProductConfig(64, 64, 4, 4), ProductConfig(64, 64, 4, 5))
    return ExpertsConfig(
        128,
        ProductConfig(64, 64, 4, 3, is_read_once=False),
        ProductConfig(128, 64, 8, 3, is_read_once=False),
    )


_PAIR = 2 * INT4_GROUP

ONE_TOKEN_INT4 = OneTokenConfig(expand_bytes=16_384, contract_bytes=32_768, num_warps=4)


def int4_config_for(
    num_tokens: int, num_experts: int, choices: int, operand: torch.dtype, limits: DeviceLimits
) -> ExpertsConfig:
    """Returns the launch configuration for so many tokens, the type that tensor cores multiply and the device.

    Those in float8 are the fastest that were tried on one H200 (`bench.experts --tune`). Operands of 16 bits take
    more registers and shared memory.
    """
    per_expert = num_tokens * choices / num_experts
    if operand == torch.float32:
        return ExpertsConfig(16, ProductConfig(64, _PAIR, 4, 2), ProductConfig(64, _PAIR, 4, 2))
    if operand != FLOAT8:
        block, warps = (16, 4) if per_expert <= 16 else (32, 8) if per_expert <= 48 else (64, 8)
        return ExpertsConfig(block, ProductConfig(64, _PAIR, warps, 3), ProductConfig(64, _PAIR, warps, 3))
    if per_expert <= 12:
        warps = 4 if per_expert <= 4 else 8
        return ExpertsConfig(16, ProductConfig(64, _PAIR, warps, 3), ProductConfig(128, _PAIR, 4, 3))
    if per_expert <= 48:
        block = 32 if per_expert <= 32 else 64
        return ExpertsConfig(
            block, ProductConfig(64, _PAIR, 4, 4), ProductConfig(64, _PAIR, 4, 5), quantises_rows=True
        )
    is_small = limits.shared_bytes < 128 * 1024
    return ExpertsConfig(
        128,
        ProductConfig(64, _PAIR, 8, 3, is_read_once=False),
        ProductConfig(64, _PAIR, 4, 2 if is_small else 3, is_read_once=False),
        quantises_rows=True,
    )
