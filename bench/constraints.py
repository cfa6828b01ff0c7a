"""What do constrained answers cost, are they valid, and who waits for hostile ones? The engine, without gRPC.

Three parts, all on the built-in model and a CPU unless `--model` and `--device` say otherwise:

  schemas  asks with random JSON schemas, and checks each complete answer with the package jsonschema.
  hostile  sends constraints that are made to cost time: what checking and compiling each takes, how long until it
           is refused or answered, and how long a question with a constraint and one without take meanwhile.
  masks    what the masks of a step take of a processor, for a vocabulary as large as the published models'.
  cost     milliseconds per token of a batch: without a constraint, with one of all answers having one, and with all
           of them. `--endless` names a model that never ends an answer (`bench.random_weights`); by default it is a
           copy of the built-in model that does not.
"""

import asyncio
import contextlib
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, cast

import jsonschema
import numpy as np
from numpy.typing import NDArray

from bench.harness.checkpoints import write_endless
from bench.harness.output import parser_of, write_json
from bench.harness.random_schemas import random_schema
from bench.harness.serving import machine_facts
from kestrel_runtime.api.config import BUILT_IN_MODEL, EngineConfig
from kestrel_runtime.api.constraints import Constraint
from kestrel_runtime.api.errors import ConstraintFailed, InvalidRequest, Overloaded
from kestrel_runtime.api.events import Finished, FinishReason, QueryOutput
from kestrel_runtime.api.requests import Query, SamplingParams
from kestrel_runtime.constraints.compiler import ConstraintCompiler, new_vocabulary
from kestrel_runtime.constraints.masks import AnswerMatcher, LibraryMasks, MaskRequest
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.loading.checkpoint import find_checkpoint
from kestrel_runtime.loading.tokenizer import Tokenizer
from kestrel_runtime.memory.host_limits import available_processors
from kestrel_runtime.output.output_parser import Token

PARTS = ("schemas", "hostile", "masks", "cost")
LIMIT_S = 0.1
"""Of a processor, within which a hostile constraint must be refused or compiled."""


def schema_constraint(schema: Any) -> Constraint:
    """Of a schema as a value, or as a text."""
    return Constraint(json_schema=schema if isinstance(schema, str) else json.dumps(schema))


def _levels(count: int, alternatives: int) -> dict[str, Any]:
    """Definitions, each of which has the next one twice, or so many alternatives beside it."""
    defs: dict[str, Any] = {}
    for level in range(count):
        next_one = {"$ref": f"#/$defs/a{level + 1}"}
        if alternatives:
            choices = [{"properties": {f"p{level}_{k}": {"const": k}}} for k in range(alternatives)]
            defs[f"a{level}"] = {"allOf": [{"anyOf": choices}, next_one]}
        else:
            defs[f"a{level}"] = {"type": "array", "prefixItems": [next_one] * 2, "items": False, "minItems": 2}
    return {"$defs": {**defs, f"a{count}": {"type": "null"}}, "$ref": "#/$defs/a0"}


def _lists(depth: int, count: int) -> dict[str, Any]:
    inner = _lists(depth - 1, count) if depth > 1 else {"const": 0}
    return {"type": "array", "minItems": count, "items": inner}


def hostile_constraints() -> dict[str, Constraint]:
    """By name. Some are legal, and cost as much as a legal one can."""
    properties = {f"p{number}": {"type": "string"} for number in range(500)}
    kinds = [{"properties": {"kind": {"const": f"k{number}"}}, "required": ["kind"]} for number in range(250)]
    schemas: dict[str, Any] = {
        "a schema of 1 MB": {"description": "x" * 1_000_000},
        "60,000 brackets": "[" * 60_000,
        "100 levels deep": '{"items":' * 100 + "{}" + "}" * 100,
        "an enum of 5,000": {"enum": [f"v{number}" for number in range(5_000)]},
        "an enum of 1,000 long texts": {"enum": [f"{'x' * 50}{number}" for number in range(1_000)]},
        "refers to itself": {"$ref": "#"},
        "refers to itself in a circle": {
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            "$ref": "#/$defs/a",
        },
        "allOf of itself": {"allOf": [{"$ref": "#"}, {"$ref": "#"}]},
        "2^20 leaves by references": _levels(20, 0),
        "2^20 combinations by references": _levels(20, 2),
        "4^12 combinations": {"allOf": [{"anyOf": kinds[4 * k : 4 * k + 4]} for k in range(12)]},
        "64 combinations": {"allOf": [{"anyOf": kinds[4 * k : 4 * k + 4]} for k in range(3)]},
        "500 optional properties": {"type": "object", "properties": properties},
        "250 alternatives": {"anyOf": kinds},
        "multiples of 99,991": {"type": "integer", "multipleOf": 99_991},
        "multiples of 997": {"type": "integer", "multipleOf": 997},
        "a million items": {"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000},
        "a billion items": {
            "minItems": 1000,
            "items": {"minItems": 1000, "items": {"minItems": 1000, "items": {"const": 0}}},
        },
        "a text of a million": {"type": "string", "minLength": 1_000_000},
        "16 patterns at once": {
            "type": "string",
            "allOf": [{"pattern": f"(a|b)*a(a|b){{{k}}}"} for k in range(16)],
        },
        "8 patterns at once": {"allOf": [{"pattern": f"(a|b)*a(a|b){{{k}}}"} for k in range(8)]},
        **{
            f"8 patterns of .{{{least}}} at once": {
                "allOf": [
                    {"type": "string", "pattern": f"^(.*[{letter}].{{{least + index}}})*$"}
                    for index, letter in enumerate("abcdefgh")
                ]
            }
            for least in (30, 400)
        },
        "a value of 60,000": {"const": "x" * 60_000},
        "30 values of 2,000": {"type": "array", "prefixItems": [{"const": "x" * 2_000}] * 30, "minItems": 30},
        "lists of lists of one value": _lists(3, 100),
        "overlapping patterns": {"patternProperties": {f"^a{{0,{k}}}b.*": {} for k in range(60)}},
    }
    patterns = {
        "a{1000} within itself": "(((a{1000}){1000}){1000})",
        "(a?){n}a{n}": "(a?){300}a{300}",
        "(a?){5000}a{5000}": "(a?){5000}a{5000}",
        ".* 500 times": ".*" * 500,
        ".* 300 times": ".*" * 300,
        "(.*a.*){50}": "(.*a.*){50}",
        "(.{0,150}a){6}": "(.{0,150}a){6}",
        "2,000 brackets": "(" * 2_000,
        "any letter, 100 times": r"\p{L}{1,100}",
        "(a|b)*a(a|b){30}": "(a|b)*a(a|b){30}",
        "a look-ahead": "(?=a)b",
    }
    return {
        **{name: schema_constraint(schema) for name, schema in schemas.items()},
        **{name: Constraint(regex=pattern) for name, pattern in patterns.items()},
        "10,000 choices": Constraint(choices=tuple(f"choice {number}" for number in range(10_000))),
        "250 choices": Constraint(choices=tuple(f"choice {number} {'x' * 50}" for number in range(250))),
    }


async def ask(engine: LocalEngine, constraint: Constraint | None, sampling: SamplingParams) -> Finished:
    """One answer. Raises what the request and the stream raise."""
    return await engine.submit(Query("what is it?", sampling=sampling, constraint=constraint)).result()


async def check_schemas(
    engine: LocalEngine, count: int, at_once: int = 64, max_tokens: int = 160
) -> dict[str, Any]:
    """Ask with random schemas. Raises jsonschema's error for a complete answer that is not valid."""
    outcomes: Counter[str] = Counter()
    seeds = iter(range(count))

    async def caller() -> None:
        for seed in seeds:
            schema = random_schema(random.Random(seed))
            sampling = SamplingParams(temperature=1.0, max_tokens=max_tokens, seed=seed)
            try:
                finished = await ask(engine, schema_constraint(schema), sampling)
            except (InvalidRequest, ConstraintFailed) as error:
                outcomes[type(error).__name__] += 1
                continue
            assert isinstance(finished.output, QueryOutput)
            if finished.finish_reason is FinishReason.STOP:
                jsonschema.validate(json.loads(finished.output.answer), schema)
            outcomes[finished.finish_reason.name] += 1
            if not outcomes.total() % 100:
                print(f"after {outcomes.total()} schemas: {dict(outcomes)}", flush=True)

    await asyncio.gather(*(caller() for _ in range(at_once)))
    return dict(outcomes)


def processor_ms(compiler: ConstraintCompiler) -> dict[str, float]:
    """Milliseconds of a processor that checking and compiling each constraint takes, on a busy machine too."""
    found: dict[str, float] = {}
    for name, constraint in hostile_constraints().items():
        started = time.process_time()
        if not any(constraint.violations()):
            with contextlib.suppress(InvalidRequest, Overloaded):
                compiler.compiled(constraint, end_id=0)
        found[name] = 1e3 * (time.process_time() - started)
    return found


async def attack(engine: LocalEngine, compile_ms: dict[str, float]) -> dict[str, Any]:
    """Send each hostile constraint, and ask others meanwhile."""
    sampling = SamplingParams(temperature=0.0, max_tokens=8)
    rows: dict[str, Any] = {}
    waits: dict[str, list[float]] = {"bound": [], "free": []}
    is_over = asyncio.Event()

    async def bystander(name: str, constraint: Constraint | None) -> None:
        while not is_over.is_set():
            started = time.perf_counter()
            await ask(engine, constraint, sampling)
            waits[name].append(time.perf_counter() - started)

    others = [("bound", Constraint(choices=("yes", "no"))), ("free", None)]
    tasks = [asyncio.ensure_future(bystander(name, constraint)) for name, constraint in others]
    await asyncio.sleep(2.0)
    quiet = {name: _spread(found) for name, found in waits.items()}
    for found in waits.values():
        found.clear()
    for name, constraint in hostile_constraints().items():
        started = time.perf_counter()
        try:
            finished = await ask(engine, constraint, sampling)
            outcome = finished.finish_reason.name
        except (InvalidRequest, ConstraintFailed, Overloaded) as error:
            outcome = f"{type(error).__name__}: {error}"[:100]
        elapsed_s = time.perf_counter() - started
        rows[name] = {"processor ms": compile_ms[name], "ms": 1e3 * elapsed_s, "outcome": outcome}
        await asyncio.sleep(0.05)
    loaded = {name: _spread(found) for name, found in waits.items()}
    is_over.set()
    await asyncio.gather(*tasks)
    return {"rows": rows, "others, ms": {"before": quiet, "meanwhile": loaded}}


def _spread(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {"count": len(ordered), "p50": 1e3 * statistics.median(ordered), "most": 1e3 * ordered[-1]}


_VOCAB_SIZE = 51_200
WORDS, COUNTED_WORDS = "[a-zA-Z ,.]*", "[a-zA-Z ,.]{900}"
RECORDS = {
    "type": "array",
    "minItems": 500,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "count": {"type": "integer"}, "open": {"type": "boolean"}},
        "required": ["name", "count", "open"],
        "additionalProperties": False,
    },
}


class Words:
    """Takes the place of a tokenizer of so many tokens: bytes, then random words, numbers and marks."""

    def __init__(self, num_tokens: int) -> None:
        chance = random.Random(1)
        syllables = [f"{a}{b}{c}" for a in "bcdfghlmnprst" for b in "aeiou" for c in ("", "n", "r", "s", "ng")]
        tokens = [b"", *(bytes([byte]) for byte in range(256))]
        known = set(tokens)
        while len(tokens) < num_tokens:
            word = "".join(chance.choices(syllables, k=chance.randint(1, 3)))
            kind = chance.random()
            if kind < 0.05:
                word = "".join(chance.choices(' {}[]":,.;/\\_-=\n', k=chance.randint(2, 4)))
            elif kind < 0.1:
                word = str(chance.randrange(10_000))
            spelled = (chance.choice(("", " ")) + word).encode()
            if spelled not in known:
                known.add(spelled)
                tokens.append(spelled)
        self._tokens = tokens

    def token_bytes(self, token_id: int) -> bytes:
        """Empty for the end of an answer, and for ids that are not used."""
        return self._tokens[token_id] if token_id < len(self._tokens) else b""

    def encode(self, text: str) -> list[int]:
        """One token for each byte."""
        return [1 + byte for byte in text.encode()]


def mask_costs(batches: list[int], num_steps: int = 200) -> list[dict[str, Any]]:
    """Microseconds per step: of processors, for following each answer's last token and making all masks."""
    vocabulary = new_vocabulary(cast(Any, Words(50_257)), _VOCAB_SIZE, 0)
    compiler = ConstraintCompiler(lambda _: vocabulary, available_processors())
    kinds = {
        "a regex": Constraint(regex=WORDS),
        "a regex that counts": Constraint(regex=COUNTED_WORDS),
        "a schema": schema_constraint(RECORDS),
        "any object": Constraint(json_schema='{"type": "object"}'),
    }
    rows: list[dict[str, Any]] = []
    for batch in batches:
        row: dict[str, Any] = {"batch": batch}
        for kind, constraint in kinds.items():
            compiled, maker = compiler.compiled(constraint, 0), LibraryMasks(_VOCAB_SIZE, available_processors())
            chance = random.Random(2)
            generated: list[list[Token]] = [[] for _ in range(batch)]
            matchers = [AnswerMatcher(compiled, None, 100_000) for _ in generated]
            answers = [MaskRequest(*pair) for pair in zip(matchers, generated, strict=True)]
            spent: list[float] = []
            for _ in range(num_steps):
                started = time.process_time()
                masks = cast("list[NDArray[np.int32]]", maker.masks(answers))
                spent.append(1e6 * (time.process_time() - started))
                for tokens, mask in zip(generated, masks, strict=True):
                    bits = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[mask[0] & 1 :]
                    if len(bits):
                        tokens.append(Token(int(chance.choice(bits))))
                    else:  # only the end may come: the answer begins anew
                        tokens.clear()
            row[kind] = {"mean": statistics.fmean(spent), "p99": sorted(spent)[int(0.99 * num_steps)]}
        rows.append(row)
        print(f"masks of {batch}: {row}", flush=True)
    return rows


async def cost(engine: LocalEngine, batches: list[int], num_tokens: int) -> list[dict[str, Any]]:
    """Milliseconds per token of batches, from the first token of an answer to its last; medians of five."""
    rows: list[dict[str, Any]] = []
    kinds = {
        "none": lambda number: None,
        "one, a regex": lambda number: Constraint(regex=WORDS) if number == 0 else None,
        "all, a regex": lambda number: Constraint(regex=WORDS),
        "all, a schema": lambda number: schema_constraint(RECORDS),
    }
    for batch in batches:
        row: dict[str, Any] = {"batch": batch}
        for kind, constraint_of in kinds.items():
            times: list[float] = []
            for repetition in range(6):  # the first one warms up
                asked = (
                    ask(
                        engine,
                        constraint_of(number),
                        SamplingParams(temperature=1.0, max_tokens=num_tokens, seed=64 * repetition + number),
                    )
                    for number in range(batch)
                )
                answers = await asyncio.gather(*asked)
                assert all(answer.usage.num_output_tokens == num_tokens for answer in answers), "an answer ended"
                times.append(max(answer.timing.decode_s for answer in answers) / (num_tokens - 1))
            row[kind] = 1e3 * statistics.median(times[1:])
        rows.append(row)
        print("  ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
    return rows


def main(argv: list[str] | None = None) -> int:
    """Measure, print and write. 1 where a hostile constraint took longer than the limit."""
    parser = parser_of(__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--model", default=BUILT_IN_MODEL)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--schemas", type=int, default=1000, help="random schemas (%(default)s)")
    parser.add_argument("--endless", help="a model that never ends an answer, for the cost per token")
    parser.add_argument("--batches", default="1,8,32", help="answers at once (%(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer (%(default)s)")
    parser.add_argument("--json", type=Path, default=Path("bench/out/constraints.json"))
    arguments = parser.parse_args(argv)
    parts = arguments.parts or PARTS
    found: dict[str, Any] = {"machine": machine_facts()}
    batches = [int(batch) for batch in arguments.batches.split(",")]
    if {"schemas", "hostile"} & {*parts}:
        tokenizer = Tokenizer.from_file(find_checkpoint(arguments.model, None).tokenizer_file)
        compiler = ConstraintCompiler(
            partial(new_vocabulary, tokenizer, tokenizer.vocab_size), available_processors()
        )
        compiler.compiled(Constraint(choices=("a",)), end_id=0)  # the vocabulary is made once
        compile_ms = processor_ms(compiler)
        engine = LocalEngine.start(EngineConfig(model=arguments.model, device=arguments.device, max_batch_size=64))
        try:
            if "schemas" in parts:
                started = time.perf_counter()
                found["schemas"] = asyncio.run(check_schemas(engine, arguments.schemas))
                print(f"schemas: {found['schemas']} in {time.perf_counter() - started:.0f} s")
            if "hostile" in parts:
                found["hostile"] = asyncio.run(attack(engine, compile_ms))
                for name, row in found["hostile"]["rows"].items():
                    print(f"{name:34} {row['processor ms']:6.1f} {row['ms']:8.1f} ms  {row['outcome']}")
                for when, spreads in found["hostile"]["others, ms"].items():
                    print(f"others {when}: {spreads}")
        finally:
            engine.close()
    if "masks" in parts:
        found["masks, us of processors per step"] = mask_costs(batches)
    if "cost" in parts:
        with tempfile.TemporaryDirectory() as folder:
            endless = arguments.endless
            if endless is None:
                endless = str(Path(folder) / "endless")
                write_endless(find_checkpoint(BUILT_IN_MODEL, None).tokenizer_file.parent, Path(endless))
            config = EngineConfig(model=endless, device=arguments.device, max_batch_size=max(batches))
            engine = LocalEngine.start(config)
            try:
                found["cost, ms per token"] = asyncio.run(cost(engine, batches, arguments.tokens))
            finally:
                engine.close()
    write_json(arguments.json, found)
    rows = found.get("hostile", {}).get("rows", {})
    slow = [name for name, row in rows.items() if row["processor ms"] > 1e3 * LIMIT_S]
    print(f"take more than {1e3 * LIMIT_S:g} ms of a processor: {', '.join(slow) or 'none'}")
    return int(bool(slow))


if __name__ == "__main__":
    raise SystemExit(main())
