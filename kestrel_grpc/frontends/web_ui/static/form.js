// Reads the form: what is asked, as the body of a request of the REST API without its picture.

const $ = (id) => document.getElementById(id);

/** The numbers of `settings`: label, range, and the skills that have them; no skills means all. */
const NUMBERS = [
  ["temperature", "Temperature", 0, 100],
  ["top_p", "top_p", 0, 1],
  ["max_tokens", "Longest answer, in tokens", 1, 32768],
  ["max_objects", "Most objects", 1, 1000, "point detect"],
  ["min_score", "Least score", 0, 1, "point detect"],
  ["seed", "Seed", null, null],
  ["top_k", "top_k", 1, 100000, "query caption"],
  ["min_p", "min_p", 0, 1, "query caption"],
  ["repetition_penalty", "Repetition penalty", 0.1, 10, "query caption"],
  ["presence_penalty", "Presence penalty", -2, 2, "query caption"],
  ["frequency_penalty", "Frequency penalty", -2, 2, "query caption"],
  ["n", "Number of answers", 1, 16, "query caption"],
];
const WHOLE = ["max_tokens", "max_objects", "seed", "top_k", "n"];
const TEXT_SKILLS = ["query", "caption"];
const STREAMED = ["query", "caption", "segment"];

/** What is asked of the example, by the ids of controls. */
const EXAMPLE = { question: "What color is the star?", object: "star" };

/** What the form has no valid value for. `id` is that of the control. */
export class Unfilled extends Error {
  constructor(id, message) {
    super(message);
    this.id = id;
  }
}

/** The control that a field of the body comes from, for violations that the server reports. */
export function controlOf(field) {
  const name = field.replace(/^settings\./, "").replace(/[[.].*$/, "");
  const others = {
    objects: "object",
    eye: "eye-x",
    constraint: "constraint-text",
    spatial_refs: "places",
    stop: "stop-strings",
    logit_bias: "logit-bias",
    max_queue_seconds: "max-queue",
    "x-request-timeout": "timeout",
    messages: "further",
    model: "adapter",
  };
  return $(others[name] ?? name);
}

export function addNumbers() {
  for (const [name, label, least, most, skills] of NUMBERS) {
    const row = document.createElement("label");
    row.htmlFor = name;
    row.textContent = label;
    const input = document.createElement("input");
    input.type = "number";
    input.id = name;
    input.step = WHOLE.includes(name) ? "1" : "any";
    if (least !== null) input.min = least;
    if (most !== null) input.max = most;
    if (skills) row.dataset.skills = input.dataset.skills = skills;
    $("sampling").append(row, input);
  }
}

/** Show the controls of a skill and the defaults of its settings. */
export function showSkill(skill, defaults) {
  for (const item of document.querySelectorAll("[data-skills]")) {
    item.hidden = !item.dataset.skills.split(" ").includes(skill);
  }
  for (const [name] of NUMBERS) $(name).placeholder = defaults?.[name] ?? "";
  $("constraint-text").hidden = !$("constraint").value;
}

/** Fill in what is asked of the example where nothing is written; of other pictures it is not asked. */
export function showSubject(isExample) {
  for (const [id, text] of Object.entries(EXAMPLE)) {
    if (isExample) $(id).value ||= text;
    else if ($(id).value === text) $(id).value = "";
  }
}

/**
 * What a further question about an answer asks: the conversation so far and the question, with the settings of the
 * request before. Places and constraints were those of that request alone. `first` is the picture that the first
 * question was about, `added` the one of this question; either may be null. `pictures` of what is returned has the
 * picture of each message. Raises `Unfilled`.
 */
export function further({ body: before, pictures, ...others }, { answer }, first, added) {
  const text = required("further", "Write a question.");
  const { question, constraint, spatial_refs, messages, ...body } = before;
  const turns = messages ?? [{ role: "user", content: question }];
  const next = [
    { role: "assistant", content: answer },
    { role: "user", content: text },
  ];
  return {
    ...others,
    skill: "chat",
    body: { ...body, messages: [...turns, ...next] },
    pictures: [...(pictures ?? [first]), null, added],
  };
}

/** What the controls hold, but for the token. */
export function values() {
  return controls().map((control) => (isChecked(control) ? control.checked : control.value));
}

/** Give the controls what they held before. */
export function setValues(held) {
  for (const [index, control] of controls().entries()) {
    control[isChecked(control) ? "checked" : "value"] = held[index];
  }
}

function controls() {
  const named = (control) => control.id !== "token" && ["INPUT", "TEXTAREA", "SELECT"].includes(control.tagName);
  return [...$("form").elements].filter(named);
}

function isChecked(control) {
  return control.type === "checkbox" || control.type === "radio";
}

export function skill() {
  return document.querySelector("[name=skill]:checked").value;
}

/** The places in a text such as `0.2,0.7; 0.1,0.6,0.3,0.9`. Raises `Unfilled`. */
export function places() {
  const parts = $("places")
    .value.split(";")
    .map((part) => part.trim())
    .filter(Boolean);
  return parts.map((part) => {
    const numbers = part.split(",").map(Number);
    if (![2, 4].includes(numbers.length) || numbers.some((side) => !(side >= 0 && side <= 1))) {
      throw new Unfilled("places", `“${part}” must be two or four numbers from 0 to 1.`);
    }
    return numbers;
  });
}

/** The eye that is looked from; null while it is not known. */
export function eye() {
  const sides = [$("eye-x"), $("eye-y")].map((input) => (input.value === "" ? NaN : Number(input.value)));
  return sides.some(Number.isNaN) ? null : sides;
}

/**
 * What the form asks: `{skill, body, adapter, timeoutS}`. Raises `Unfilled` where the server could not understand it;
 * ranges are left to the server.
 */
export function read(model) {
  const asked = skill();
  const body = { ...subject(asked) };
  const { min_score, ...settings } = readSettings(asked);
  if (min_score !== undefined) body.min_score = min_score;
  if (Object.keys(settings).length) body.settings = settings;
  const adapter = $("adapter").value;
  if (adapter) body.model = `${model}/${adapter}`;
  if ($("priority").value !== "normal") body.priority = $("priority").value;
  if ($("cache").value !== "use") body.cache = $("cache").value;
  const maxQueueS = number("max-queue");
  if (maxQueueS !== null) body.max_queue_seconds = maxQueueS;
  const isStreamed = asked === "segment" || ($("stream").checked && !(settings.n > 1));
  if (STREAMED.includes(asked) && isStreamed) body.stream = true;
  return { skill: asked, body, adapter, timeoutS: number("timeout") };
}

function subject(asked) {
  const refs = ["query", "point", "detect", "segment"].includes(asked) ? places() : [];
  const spatial = refs.length ? { spatial_refs: refs } : {};
  if (asked === "query") {
    const question = required("question", "Write a question.");
    const reasoning = $("reasoning").checked ? { reasoning: true } : {};
    return { question, ...reasoning, ...constraint(), ...spatial };
  }
  if (asked === "caption") return $("length").value === "normal" ? {} : { length: $("length").value };
  if (asked === "gaze") {
    const from = eye();
    if (from === null) throw new Unfilled("eye-x", "Click an eye in the picture, or write where it is.");
    return { eye: from };
  }
  const text = required("object", "Write what to look for.");
  const names = text
    .split(";")
    .map((name) => name.trim())
    .filter(Boolean);
  return { ...(names.length > 1 && asked !== "segment" ? { objects: names } : { object: text }), ...spatial };
}

function constraint() {
  const kind = $("constraint").value;
  if (!kind) return {};
  const text = $("constraint-text").value;
  if (kind === "choices") return { constraint: { choices: lines(text) } };
  if (kind === "regex") return { constraint: { regex: text } };
  return { constraint: { json_schema: parsed("constraint-text", "The schema is not JSON.") } };
}

function readSettings(asked) {
  const settings = {};
  for (const [name, , , , skills] of NUMBERS) {
    const value = !skills || skills.split(" ").includes(asked) ? number(name) : null;
    if (value !== null) settings[name] = value;
  }
  if (!TEXT_SKILLS.includes(asked)) return settings;
  const stop = lines($("stop-strings").value);
  if (stop.length) settings.stop = stop;
  if (stop.length && $("include-stop").checked) settings.include_stop = true;
  if ($("logit-bias").value.trim()) settings.logit_bias = parsed("logit-bias", "This is not JSON.");
  if ($("logprobs").checked) settings.logprobs = 0;
  return settings;
}

function required(id, message) {
  const text = $(id).value.trim();
  if (!text) throw new Unfilled(id, message);
  return text;
}

function number(id) {
  const input = $(id);
  if (input.validity.badInput) throw new Unfilled(id, "This is not a number.");
  return input.value === "" ? null : Number(input.value);
}

function lines(text) {
  return text.split("\n").filter(Boolean);
}

function parsed(id, message) {
  try {
    return JSON.parse($(id).value);
  } catch {
    throw new Unfilled(id, message);
  }
}
