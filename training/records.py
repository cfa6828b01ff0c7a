"""Answers in JSON: a question, the form that is asked for, and the one true answer of that form.

A form is given in words, as a JSON schema, or not at all: servers bind the answer to a schema that the model does
not see. Then what precedes the first value is given, and only the values are learnt.
"""

import json
import random
from dataclasses import dataclass
from typing import Any

from training.captions import place_words
from training.palette import COLORS
from training.phrases import groups, meant_by, unique
from training.questions import ask
from training.scenes import Scene, Thing
from training.shapes import SHAPES

_MAX_GROUPS = 5
_TYPES = {str: "string", int: "integer", bool: "boolean"}


@dataclass(frozen=True, slots=True)
class Record:
    """A question, the form of its answer and the answer, as JSON on one line."""

    question: str
    system: str
    """A message of the system; empty for none."""
    answer: str
    schema: dict[str, Any]
    """A JSON schema under which the answer is valid."""
    is_hidden: bool
    """True if neither message says that the answer is JSON."""
    needs_image: bool = True


def record(scene: Scene, rng: random.Random) -> Record | None:
    """Returns a question whose answer is JSON; None where this draw found none."""
    draw = rng.random()
    if draw < 0.34:
        return _of_question(scene, rng)
    if draw < 0.56:
        return _of_thing(scene, rng)
    if draw < 0.76:
        return _of_scene(scene, rng)
    if draw < 0.88:
        return _of_groups(scene, rng)
    return _of_text(rng)


# What is asked ---------------------------------------------------------------------------------------

_KEYS = {
    "count": ("count", "number", "total", "answer", "n", "how_many"),
    "color": ("color", "color", "colour", "answer", "colour_name"),
    "shape": ("shape", "shape", "name", "kind", "answer", "object"),
    "reading": ("text", "word", "content", "answer", "label"),
    "presence": ("answer", "present", "found", "is_there", "visible", "exists"),
    "place": ("place", "position", "location", "answer", "where"),
    "size": ("size", "answer"),
}


def _of_question(scene: Scene, rng: random.Random) -> Record | None:
    """A plain question whose answer is the one value of an object."""
    kind = rng.choice(tuple(_KEYS))
    exchange = ask(scene, kind, rng)
    if exchange is None or " no " in exchange.answer:
        return None
    value: Any = exchange.answer
    key = rng.choice(_KEYS[kind])
    schema: dict[str, Any] = {"type": "string"}
    if kind == "count":
        value, schema = int(value), {"type": "integer"}
    elif value in ("Yes", "No"):
        draw = rng.random()
        if draw < 0.6:
            value, schema = value == "Yes", {"type": "boolean"}
        else:
            value = value.lower() if draw < 0.8 else value
            schema = {"type": "string", "enum": rng.choice((["yes", "no"], ["no", "yes"]))}
            if value[0].isupper():
                schema["enum"] = [word.capitalize() for word in schema["enum"]]
    elif kind in ("color", "shape") and value in COLORS + SHAPES and rng.random() < 0.4:
        others = [word for word in (COLORS if value in COLORS else SHAPES) if word != value]
        words = [value, *rng.sample(others, rng.randint(1, 4))]
        rng.shuffle(words)
        schema = {"type": "string", "enum": words}
    return _asked(exchange.question, {key: value}, {key: schema}, rng)


def _of_thing(scene: Scene, rng: random.Random) -> Record | None:
    """Several facts about one shape."""
    thing = rng.choice(scene.shapes) if scene.shapes else None
    name = None if thing is None else unique(scene, thing, rng)
    if thing is None or name is None:
        return None
    facts = _thing_facts(thing, rng)
    if len(facts) < 2:
        return None
    words = [key for key in facts if facts[key] is not thing.name or thing.name not in name]
    keys = rng.sample(words, min(len(words), rng.choice((1, 2, 2, 3))))
    if not keys:
        return None
    templates = (
        "Describe the {one}.",
        "Describe the {one}: {keys}.",
        "Give the {keys} of the {one}.",
        "What are the {keys} of the {one}?",
        "Extract the {keys} of the {one}.",
        "What is the {one} like?",
    )
    listed = " and ".join((", ".join(keys[:-1]), keys[-1])) if len(keys) > 1 else keys[0]
    question = rng.choice(templates).format(one=name, keys=listed)
    return _asked(question, {key: facts[key] for key in keys}, _schemas(facts, keys, rng), rng)


def _thing_facts(thing: Thing, rng: random.Random) -> dict[str, Any]:
    facts: dict[str, Any] = {
        rng.choice(("color", "color", "colour")): thing.color,
        rng.choice(("shape", "name", "kind", "type")): thing.name,
    }
    if thing.size:
        facts["size"] = thing.size
    if not any(abs(value - line) < 0.035 for value in thing.center for line in (1 / 3, 2 / 3)):
        facts[rng.choice(("position", "place", "location"))] = place_words(thing)
    return facts


def _of_scene(scene: Scene, rng: random.Random) -> Record | None:
    """Several facts about the whole picture."""
    ordered = sorted(scene.shapes, key=lambda thing: thing.center[0])
    facts: dict[str, Any] = {
        rng.choice(("count", "num_shapes", "number_of_shapes", "shape_count")): len(scene.shapes),
        rng.choice(("has_text", "contains_text")): bool(scene.texts),
    }
    if len(ordered) <= 6:
        facts[rng.choice(("shapes", "kinds"))] = list(dict.fromkeys(thing.name for thing in ordered))
        if not scene.texts:
            facts["colors"] = list(dict.fromkeys(thing.color for thing in ordered))
    if len(scene.texts) == 1:
        facts[rng.choice(("text", "word", "printed_text"))] = scene.texts[0].text
    if scene.background.name:
        facts[rng.choice(("background", "background_color"))] = scene.background.name
    for _ in range(2):
        name = rng.choice(SHAPES)
        there = meant_by(scene, name=name)
        facts[f"has_{name}"] = bool(there)
        facts[f"num_{name}s" if name != "cross" else "num_crosses"] = len(there)
    keys = rng.sample(tuple(facts), min(len(facts), rng.choice((1, 2, 2, 3, 3, 4))))
    templates = (
        "Describe the image.",
        "What is in this image?",
        "Describe this picture.",
        "Extract the data.",
        "Analyze the image.",
        "What do you see?",
        "Fill in the form about the picture.",
        "Extract {keys} from the image.",
        "Give {keys} of the picture.",
        "What does the picture show: {keys}?",
    )
    question = rng.choice(templates).format(keys=", ".join(keys))
    return _asked(question, {key: facts[key] for key in keys}, _schemas(facts, keys, rng), rng)


def _of_groups(scene: Scene, rng: random.Random) -> Record | None:
    """All shapes as a list, those of one colour and kind together with their number."""
    found = groups(scene.shapes)
    if not 1 <= len(found) <= _MAX_GROUPS:
        return None
    color = rng.choice(("color", "color", "colour"))
    name = rng.choice(("name", "shape", "kind", "type"))
    count = rng.choice(("count", "count", "number"))
    keys = [color, name, count]
    if rng.random() < 0.4:
        rng.shuffle(keys)
    if all(number == 1 for number, _ in found) and rng.random() < 0.5:
        keys.remove(count)
    entries = [
        {key: {color: thing.color, name: thing.name, count: number}[key] for key in keys} for number, thing in found
    ]
    item = _object({key: {"type": "integer" if key == count else "string"} for key in keys})
    templates = (
        "List the shapes: {keys} of each.",
        "List all shapes with {keys}.",
        "List the shapes.",
        "What shapes are in the image?",
        "What is in this image?",
        "Extract all objects with their {keys}.",
        "Find all shapes and give {keys}.",
    )
    question = rng.choice(templates).format(keys=", ".join(keys[:-1]) + " and " + keys[-1])
    if rng.random() < 0.35:
        return _worded(question, entries, {"type": "array", "items": item}, rng, keys)
    outer = rng.choice(("shapes", "shapes", "objects", "items"))
    return _asked(question, {outer: entries}, {outer: {"type": "array", "items": item}}, rng)


_NAMES = (
    "John", "Jason", "Alice", "Bob", "Mary", "Anna", "Peter", "Paul", "Emma", "Liam", "Noah", "Olivia",
    "Sophia", "Lucas", "Mia", "Leo", "Eva", "Max", "Tom", "Kim", "Sara", "David", "Maria", "James", "Robert",
    "Linda", "Susan", "Karen", "Lisa", "Mark", "Steven", "Brian", "Laura", "Kevin", "Julia", "Frank", "Henry",
    "Grace", "Ruth", "Diana", "Carl",
)  # fmt: skip
_SURNAMES = (
    "Doe", "Smith", "Jones", "Brown", "Miller", "Davis", "Wilson", "Moore", "Taylor", "Lee", "Young", "King",
    "Hill", "Green", "Baker", "Carter",
)  # fmt: skip
_DAYS = (
    "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday",
)  # fmt: skip
_EVENTS = ("science fair", "party", "concert", "picnic", "meeting", "book club", "game night", "birthday party")
_CITIES = (
    "Paris", "London", "Berlin", "Rome", "Madrid", "Tokyo", "Boston", "Chicago", "Vienna", "Oslo", "Dublin",
    "Lisbon",
)  # fmt: skip


def _name(rng: random.Random) -> str:
    if rng.random() < 0.25:  # a name of no list, so that copying is copying
        letters = ("bcdfghjklmnprstvwz", "aeiou")
        return "".join(rng.choice(letters[index % 2]) for index in range(rng.randint(3, 7))).capitalize()
    return rng.choice(_NAMES)


def _of_text(rng: random.Random) -> Record | None:
    """Facts that the question itself has, as first examples of libraries ask for."""
    draw = rng.random()
    if draw < 0.2:
        pairs = [(rng.choice(COLORS), rng.choice(SHAPES)) for _ in range(rng.choice((1, 2, 2, 3)))]
        said = [f"a {color} {shape}" for color, shape in pairs]
        listed = said[0] if len(said) == 1 else ", ".join(said[:-1]) + " and " + said[-1]
        entries = [{"color": color, "name": shape, "count": 1} for color, shape in pairs]
        item = _object({"color": {"type": "string"}, "name": {"type": "string"}, "count": {"type": "integer"}})
        schema = _object({"shapes": {"type": "array", "items": item}})
        return Record(f"Name {listed} as JSON.", "", _json({"shapes": entries}), schema, True, False)
    if draw < 0.35:
        first, second, event, day = _name(rng), _name(rng), rng.choice(_EVENTS), rng.choice(_DAYS)
        question = f"{first} and {second} are going to a {event} on {day}."
        value = {"name": event.capitalize(), "date": day, "participants": [first, second]}
        texts = {key: {"type": "string"} for key in ("name", "date")}
        people = {"type": "array", "items": {"type": "string"}}
        record = _asked(question, value, texts | {"participants": people}, rng)
        return Record(record.question, record.system, record.answer, record.schema, record.is_hidden, False)
    name, age = _name(rng), rng.randint(1, 99)
    if rng.random() < 0.6:
        name = f"{name} {rng.choice(_SURNAMES)}"
    facts: dict[str, Any] = {"name": name, "age": age}
    sentence = rng.choice(("{} is {} years old", "{} is {} years old", "{} is {}", "{}, {} years old"))
    sentence = sentence.format(name, age)
    if rng.random() < 0.3:
        facts["city"] = rng.choice(_CITIES)
        sentence += f" and lives in {facts['city']}"
    question = rng.choice(("Extract: {}.", "Extract: {}", "Extract {}.", "{}.", "Extract the user: {}.",
                           "Extract the information from this text: {}.")).format(sentence)  # fmt: skip
    record = _asked(question, facts, _schemas(facts, list(facts), rng), rng)
    return Record(record.question, record.system, record.answer, record.schema, record.is_hidden, False)


# How the form is given -------------------------------------------------------------------------------


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _schemas(facts: dict[str, Any], keys: list[str], rng: random.Random) -> dict[str, Any]:
    schemas: dict[str, Any] = {}
    for key in keys:
        value = facts[key]
        if isinstance(value, list):
            schemas[key] = {"type": "array", "items": {"type": "string"}}
        else:
            schemas[key] = {"type": _TYPES[type(value)]}
            if value in COLORS and rng.random() < 0.2:
                words = list({value: 0, rng.choice(COLORS): 0, rng.choice(COLORS): 0})
                rng.shuffle(words)
                schemas[key]["enum"] = words
    return schemas


def _asked(question: str, value: dict[str, Any], schemas: dict[str, Any], rng: random.Random) -> Record:
    return _worded(question, value, _object(schemas), rng, list(value))


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


_TITLES = ("Shape", "Answer", "Result", "Response", "Item", "Picture", "UserInfo", "Output", "Data")
_GENIUS = """As a genius expert, your task is to understand the content and provide
the parsed objects in json that match the following json_schema:

{schema}

Make sure to return an instance of the JSON, not the schema itself"""


def _worded(question: str, value: Any, schema: dict[str, Any], rng: random.Random, keys: list[str]) -> Record:
    """Returns the question with its form in words, as a schema, or not at all."""
    answer = _json(value)
    draw = rng.random()
    if draw < 0.42:
        return Record(question, "", answer, schema, True)
    listed = ", ".join(keys[:-1]) + " and " + keys[-1] if len(keys) > 1 else keys[0]
    entries = value if isinstance(value, list) else next(iter(value.values()))
    # Words do not say of what the answer is chosen, such as "yes" and "no" rather than true and false.
    has_choices = '"enum"' in json.dumps(schema)
    has_entries = isinstance(entries, list) and bool(entries) and isinstance(entries[0], dict)
    if draw < 0.7 and has_entries:
        inner = ", ".join(entries[0])
        if isinstance(value, list):
            wish = rng.choice(("Answer with a JSON list of objects with {}.", "Return a JSON list: {} of each."))
            wish = wish.format(inner)
        else:
            wish = rng.choice(
                ("Answer in JSON: a list {} of objects with {}.", 'Return JSON with the key "{}", a list of {}.')
            ).format(keys[0], inner)
    elif draw < 0.7 and not has_choices:
        noun = rng.choice(("fields", "keys")) if len(keys) > 1 else rng.choice(("field", "key"))
        wish = rng.choice(
            (
                "Answer in JSON with the {noun} {listed}.",
                "Answer as JSON with the {noun} {listed}.",
                "Return JSON with the {noun} {listed}.",
                "Respond with a JSON object with the {noun} {listed}.",
                "Reply in JSON: {listed}.",
                "Give the answer as JSON ({listed}).",
                "Output JSON with {listed}.",
                "Answer with JSON only. Use the {noun} {listed}.",
            )
        ).format(noun=noun, listed=listed)
        if isinstance(value, dict) and rng.random() < 0.3:
            hint = ", ".join(f'"{key}": {_hint(value[key])}' for key in value)
            wish = rng.choice(("Answer in JSON like {}.", "Return JSON of the form {}.", "JSON: {}")).format(
                f"{{{hint}}}"
            )
    else:
        shown = _dressed(schema, rng) if rng.random() < 0.6 else schema
        text = json.dumps(shown, indent=rng.choice((None, None, 2)))
        if rng.random() < 0.35:
            return Record(question, _GENIUS.format(schema=text), answer, schema, False)
        wish = rng.choice(
            (
                "Answer in JSON that matches this schema: {}",
                "Respond with JSON of this schema: {}",
                "Return a JSON object that is valid under this JSON schema:\n{}",
                "The answer must be JSON of this schema:\n{}",
                "Use this JSON schema: {}",
            )
        ).format(text)
    if rng.random() < 0.3:
        return Record(question, wish, answer, schema, False)
    joint = rng.choice((" ", "\n", "\n\n"))
    return Record(f"{question}{joint}{wish}", "", answer, schema, False)


def _hint(value: Any) -> str:
    if isinstance(value, bool):
        return "true"
    if isinstance(value, int):
        return "0"
    return "[...]" if isinstance(value, list) else '"..."'


def _dressed(schema: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Returns a schema with the titles and the order of keys that pydantic writes."""
    properties = schema.get("properties")
    if properties is None:
        return schema
    titled = {}
    for key, part in properties.items():
        title = key.replace("_", " ").title()
        titled[key] = (
            {name: part[name] for name in ("enum",) if name in part}
            | {"title": title}
            | {name: part[name] for name in ("type", "items") if name in part}
        )
    return {"properties": titled, "required": schema["required"], "title": rng.choice(_TITLES), "type": "object"}


def is_true(answer: str, truth: str) -> bool:
    """Returns whether an answer is JSON with the values of the truth; items of lists may come in any order."""
    try:
        found = json.loads(answer)
    except ValueError:
        return False
    return _json(_sorted(found)) == _json(_sorted(json.loads(truth)))


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted(part) for key, part in sorted(value.items())}
    if isinstance(value, list):
        return sorted((_sorted(part) for part in value), key=_json)
    return value.lower().replace("grey", "gray") if isinstance(value, str) else value
