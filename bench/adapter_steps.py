"""What do adapters add to a step, and to each operation in it?

Full-size random weights of a Moondream 2 and random adapters of all targets. Whole decode steps and prefills are
timed without adapters and with several mixtures of them, then the operations at the sizes that they have there, in
captured graphs, over all layers in turns. `--tune` times the products of adapters over other cuts. `--experts`
takes a Moondream 3, and steps and prefills alone.

    python -m bench.adapter_steps --json adapter_steps.json
    python -m bench.adapter_steps --experts --batches 1 2 64 --prompts
    TRITON_INTERPRET=1 python -m bench.adapter_steps --tiny --batches 2 --prompts 1
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from bench.harness.decode_steps import FLOAT8, Contexts
from bench.harness.output import parser_of, write_json
from bench.harness.prefill_inputs import Prompts, new_cache, random_text, random_text_with_experts
from bench.harness.timing import attempted, time_us
from kestrel_ops import Kernels
from kestrel_ops.lora import triton_products
from kestrel_ops.lora.triton_products import Expand, Shrink
from kestrel_ops.lora.triton_rows_by_slot import rows_by_slot
from kestrel_ops.norms.reference import quantise_rows
from kestrel_runtime.models.moondream.adapters.slabs import AdapterSlabs, RowAdapters
from kestrel_runtime.models.moondream.config import MoeConfig, TextConfig
from kestrel_runtime.models.moondream.fused.decode import FusedDecoder
from kestrel_runtime.models.moondream.fused.prefill import FusedPrefill
from kestrel_runtime.models.moondream.fused.weights import fused_blocks, prompt_blocks
from kestrel_runtime.models.moondream.text.decoder import TextModel
from kestrel_runtime.models.moondream.weights.published import MOONDREAM_2, MOONDREAM_3

TINY = replace(
    MOONDREAM_2.text, dim=64, ff_dim=128, n_layers=2, n_heads=4, n_kv_heads=4, vocab_size=64, max_context=128
)
TINY_WITH_EXPERTS = replace(
    TINY, moe=MoeConfig(num_experts=4, start_layer=1, experts_per_token=2, expert_inner_dim=32), tau_attn=True
)

_OPERATIONS = (
    *("add_layer_norm", "rows_by_slot", "add_up_terms", "add_down_terms"),
    *("decode_expand", "decode_contract"),
)
"""Which apply adapters. Without a device Triton interprets them."""


def random_slabs(
    config: TextConfig, num_slots: int, max_rank: int, rank: int, device: torch.device
) -> AdapterSlabs:
    """Slots that are all filled with adapters of one rank."""
    slabs = AdapterSlabs(config, num_slots, max_rank, device, torch.bfloat16)
    for layer in slabs.layers:
        for a, b, _ in layer:
            own = max(1, rank * a.shape[-2] // max_rank)  # the experts of a token share it
            for weights, width in ((a, a.shape[-1]), (b, 10 * rank)):
                weights.normal_(0.0, width**-0.5)
                weights[..., own:, :] = 0
    slabs.ranks.fill_(rank)
    return slabs


def mixtures(count: int, num_slots: int) -> dict[str, Tensor | None]:
    """Slots of rows or prompts, by name."""
    every = torch.arange(count)
    return {
        "none": None,
        "all": 1 + every % num_slots,
        "one slot": torch.ones(count, dtype=torch.int64),
        "half without": (1 + every % num_slots) * (every % 2),
    }


class Bench:
    """One model in float8 with slots."""

    def __init__(self, config: TextConfig, device: torch.device, precision: Literal["model", "float8"]) -> None:
        self.config, self.device = config, device
        self.kernels = Kernels.select(device.type, dict.fromkeys(_OPERATIONS, "triton"))
        random_model = random_text if config.moe is None else random_text_with_experts
        self.text: TextModel = random_model(config, device)
        self.blocks = fused_blocks(self.text, precision)
        self.prompt_blocks = prompt_blocks(self.text, self.blocks)
        self.results: dict[str, float] = {}

    def note(self, name: str, us: float, base: float | None = None) -> None:
        self.results[name] = us
        print(f"  {name:<64}{us:>10.2f} us" + (f"{us / base:>8.3f}" if base else ""), flush=True)

    def steps(self, slabs: AdapterSlabs, name: str, batches: list[int]) -> None:
        """Whole decode steps without the head."""
        for batch in batches:
            contexts = Contexts(batch, 13, min(300, self.config.max_context - 1))
            cache = contexts.filled_cache(self.config, self.device, FLOAT8)
            decoder = FusedDecoder(self.text, self.blocks, self.kernels)
            workspace = decoder.workspace(batch)
            embeddings = torch.randn(batch, self.config.dim, device=self.device).bfloat16()
            positions, table = contexts.positions(self.device), contexts.page_table(self.device)
            base: float | None = None
            for mixture, slots in mixtures(batch, slabs.ranks.shape[1]).items():
                adapters = None if slots is None else slabs.for_rows(slots.to(self.device))
                call = partial(decoder.forward, embeddings, positions, table, cache, workspace, adapters)
                with attempted(f"step {batch} {mixture}"):
                    us = time_us([call], rounds=4)
                    base = base or us
                    self.note(f"decode {name} batch {batch} {mixture}", us, base)

    def prefills(self, slabs: AdapterSlabs, name: str, counts: list[int], prompts: Prompts) -> None:
        """Whole prefills."""
        for count in counts:
            own = replace(prompts, count=count)
            plan = own.plan(self.device)
            cache = new_cache(self.config, own.num_pages(), self.device, FLOAT8)
            embeddings = torch.randn(own.num_rows, self.config.dim, device=self.device).bfloat16()
            last = plan.query_starts[1:].long() - 1
            path = FusedPrefill(self.text, self.prompt_blocks, self.kernels)
            base: float | None = None
            for mixture, slots in mixtures(count, slabs.ranks.shape[1]).items():
                adapters: RowAdapters | None = None
                if slots is not None:
                    adapters = slabs.for_rows(slots.repeat_interleave(own.num_tokens).to(self.device))
                with attempted(f"prefill {count} {mixture}"):
                    us = time_us(
                        [partial(path.forward, embeddings, plan, cache, last, adapters)], replays=5, rounds=1
                    )
                    base = base or us
                    self.note(f"prefill {name} prompts {count} {mixture}", us, base)

    def operations(self, slabs: AdapterSlabs, num_rows: int, per_slot: int, *, tunes: bool) -> None:
        """The operations of a decode step, or of a prefill where rows of a slot come together."""
        config, device = self.config, self.device
        slots = (1 + torch.arange(num_rows) // per_slot % slabs.ranks.shape[1]).to(device)
        is_decode = per_slot == 1
        where = f"{'decode' if is_decode else 'prefill'} {num_rows}"
        adapters = RowAdapters(slabs, slots, self.kernels.add_low_rank)
        grouped = adapters.grouped(self.kernels, config.dim, is_decode=is_decode)
        group = partial(rows_by_slot, slots, slabs.ranks, slabs.max_rank, is_decode=is_decode, dtype=torch.bfloat16)
        self.note(f"{where} rows_by_slot", time_us([group]))
        layers, blocks = range(config.n_layers), self.blocks
        terms = [grouped.of_block(layer, block.ln) for layer, block in enumerate(self.blocks)]
        attended_dim, dtype = config.n_heads * config.head_dim, torch.float16 if is_decode else torch.bfloat16
        hidden = torch.randn(num_rows, config.dim, device=device)
        grouped.normed.normal_()
        activations, scale = torch.randn(num_rows, attended_dim + config.ff_dim, device=device).to(dtype), None
        if not is_decode and blocks[0].down.weight.dtype == FLOAT8:
            activations, scale = quantise_rows(activations)
        product = torch.empty(num_rows, config.qkv_dim + config.ff_dim, device=device, dtype=dtype)

        def shrink(side: str, cut: Shrink | None, block_rows: int | None, layer: int) -> Tensor:
            own = terms[layer]
            rows = own.rows if block_rows is None else others[block_rows]
            if side == "up":
                return triton_products.shrink((own.normed,) * 2, own.up, rows, config=cut)
            sources = activations.tensor_split((attended_dim,), dim=1)
            return triton_products.shrink(sources, own.down, rows, own, scale=scale, config=cut)

        others = {size: group(block_rows=size) for size in (16, 32, 64, 128)}
        for side in ("up", "down"):
            for block_rows, cut in _shrink_cuts(tunes, is_decode):
                with attempted(f"shrink {side} {cut}"):
                    us = time_us([partial(shrink, side, cut, block_rows, layer) for layer in layers])
                    self.note(f"{where} shrink {side} rows {block_rows} {cut and tuple(cut)}", us)
        if is_decode:
            pending = torch.randn(8, num_rows, config.dim, device=device)

            def expand(has_terms: bool, layer: int) -> object:
                up, own = blocks[layer].up, terms[layer] if has_terms else None
                args = (hidden, up.weight, up.scale, up.row_sums, up.bias, 1e-5, config.qkv_dim)
                inner_out = activations[:, attended_dim:]
                return self.kernels.decode_expand(*args, product[:, : config.qkv_dim], inner_out, pending, own)

            def contract(has_terms: bool, layer: int) -> object:
                down, own = blocks[layer].down, terms[layer] if has_terms else None
                return self.kernels.decode_contract(
                    activations, down.weight, down.scale, down.bias, hidden, True, own
                )

            product = torch.empty(num_rows, config.qkv_dim, device=device, dtype=dtype)
            both: list[tuple[str, Callable[[bool, int], object]]] = [("expand", expand), ("contract", contract)]
            for name, call in both:
                for has_terms in (False, True):
                    with attempted(f"{name} {has_terms}"):
                        us = time_us([partial(call, has_terms, layer) for layer in layers])
                        self.note(f"{where} decode_{name} {'with' if has_terms else 'without'} terms", us)
            return
        with attempted("products"):
            normed = (hidden.to(dtype), None) if scale is None else quantise_rows(hidden)
            for name, rows in (("up", normed), ("down", (activations, scale))):
                matrices = [getattr(block, name) for block in blocks]
                call = partial(self.kernels.scaled_linear, *rows)
                us = time_us([partial(call, m.weight, m.scale, m.bias.bfloat16(), dtype) for m in matrices])
                self.note(f"{where} base product {name}", us)
        out = torch.empty(num_rows, config.dim, device=device, dtype=dtype)
        for side, target in (("up", product), ("down", out)):
            for block_rows, cut in _expand_cuts(tunes):
                rows = terms[0].rows if block_rows is None else others[block_rows]
                with attempted(f"expand {side} {cut}"):
                    run = partial(triton_products.expand_add, target, shrink(side, None, None, 0))
                    more = {"adds_both": side == "down", "config": cut}
                    us = time_us([partial(run, getattr(own, side), rows, **more) for own in terms])
                    self.note(f"{where} expand {side} rows {block_rows} {cut and tuple(cut)}", us)


def _shrink_cuts(tunes: bool, is_decode: bool) -> Iterator[tuple[int | None, Shrink | None]]:
    yield None, None
    if not tunes:
        return
    if is_decode:
        cuts = ((512, 128, 32, 4, 4), (1024, 128, 16, 4, 6))
    else:
        cuts = (
            *((512, 64, 32, 4, 4), (1024, 64, 32, 4, 4), (1024, 128, 32, 4, 3)),
            *((2048, 32, 32, 4, 6), (2048, 64, 32, 4, 4), (2048, 128, 32, 4, 3)),
        )
    for block_rows in (16,) if is_decode else (32, 64):
        for cut in cuts:
            yield block_rows, Shrink(*cut)


def _expand_cuts(tunes: bool) -> Iterator[tuple[int | None, Expand | None]]:
    yield None, None
    if tunes:
        for block_rows in (32, 64, 128):
            for cut in ((64, 4), (128, 4), (128, 8), (256, 4), (256, 8)):
                yield block_rows, Expand(*cut)


def main() -> int:
    """Measure, print and write."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=["model", "float8"], default="float8")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--prompts", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--tune", action="store_true", help="time the products of adapters over other cuts")
    parser.add_argument("--experts", action="store_true", help="a Moondream 3 with experts in float8")
    parser.add_argument("--tiny", action="store_true", help="a few thousand weights, to see that it runs")
    parser.add_argument("--json", type=Path, default=Path("bench/out/adapter_steps.json"))
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    config = TINY if arguments.tiny else MOONDREAM_2.text
    if arguments.experts:
        config = TINY_WITH_EXPERTS if arguments.tiny else MOONDREAM_3.text
    prompts = Prompts(2, 40, 26) if arguments.tiny else Prompts(2, 746, 730)
    with torch.inference_mode():
        bench = Bench(config, device, arguments.precision)
        for rank, max_rank in ((32, 32), (8, 32)):
            slabs = random_slabs(config, arguments.slots, max_rank, rank, device)
            name = f"rank {rank} of {max_rank}"
            bench.steps(slabs, name, arguments.batches)
            bench.prefills(slabs, name, arguments.prompts, prompts)
            if rank == max_rank and not arguments.experts:
                for batch in arguments.batches:
                    bench.operations(slabs, batch, 1, tunes=arguments.tune and batch == arguments.batches[-1])
                for count in arguments.prompts:
                    rows = count * prompts.num_tokens
                    bench.operations(slabs, rows, prompts.num_tokens, tunes=arguments.tune)
    write_json(arguments.json, {"us": bench.results, "torch": torch.__version__})
    return 0


if __name__ == "__main__":
    sys.exit(main())
