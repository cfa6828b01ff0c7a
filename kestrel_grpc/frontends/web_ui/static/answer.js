// Shows what the server answers: text as it comes, reasoning, marks over the picture, confidence, timings, failures.

import { controlOf } from "./form.js";
import { wholeCommands } from "./drawing.js";

const $ = (id) => document.getElementById(id);
const UNSURE = 0.5;

/** The answer to one request. `overlay` draws marks, after those that are `given` with the request. */
export class AnswerView {
  #text = "";
  #path = "";
  #box = null;
  #started = performance.now();
  #firstMs = null;

  constructor(request, overlay, given) {
    this.request = request;
    this.overlay = overlay;
    this.given = given;
    clear();
    $("answer").setAttribute("aria-busy", "true");
    overlay.show(given);
    this.#bringIntoView($("result"));
  }

  /** An event of a stream. */
  add(event) {
    this.#firstMs ??= performance.now() - this.#started;
    if (event.chunk !== undefined && event.type !== "path_delta") {
      this.#text += event.chunk;
      $("answer").textContent = this.#text;
    } else if (event.reasoning_chunk !== undefined) {
      $("thoughts").hidden = false;
      $("reasoning-text").append(event.reasoning_chunk);
    } else if (event.type === "bbox") {
      this.#box = sides(event.bbox);
      this.#showOutline();
    } else if (event.type === "path_delta") {
      this.#path += event.chunk;
      this.#showOutline();
    }
  }

  /** The whole answer. */
  complete(answer) {
    const wholeMs = performance.now() - this.#started;
    const { skill } = this.request;
    if (answer.reasoning) this.#showReasoning(answer.reasoning);
    if (skill === "query" || skill === "caption") this.#showText(answer);
    else this.#showPlaces(answer);
    showTimings(answer, this.#firstMs ?? wholeMs, wholeMs);
    const endings = {
      stop: "Complete.",
      length: "Cut short: it has as many tokens as the request allows.",
      max_objects: "There may be more: it has as many objects as the request allows.",
      stop_sequence: `Ended by “${answer.stop_sequence}”.`,
    };
    this.end(endings[answer.finish_reason]);
    this.#bringIntoView($("answer"));
  }

  /** Nothing more comes. */
  end(status) {
    $("status").textContent = status;
    $("answer").setAttribute("aria-busy", "false");
  }

  /** On a phone the answer may be below the screen, or the picture above it. */
  #bringIntoView(answer) {
    const isText = ["query", "caption"].includes(this.request.skill);
    (isText ? answer : $("stage")).scrollIntoView({ block: "nearest" });
  }

  #showOutline() {
    const path = wholeCommands(this.#path);
    this.overlay.show([...this.given, { kind: "outline", box: this.#box, path }]);
  }

  #showText(answer) {
    const text = answer.answer ?? answer.caption;
    $("answer").replaceChildren(...spans(answer.logprobs, text));
    showConfidence(answer.logprobs);
    const others = answer.alternatives ?? [];
    if (others.length === 0) return;
    const list = document.createElement("ol");
    list.append(...[text, ...others.map((other) => other.answer ?? other.caption)].map(item));
    $("answer").replaceChildren(list);
  }

  #showReasoning({ text, grounding }) {
    $("thoughts").hidden = false;
    const parts = [];
    const marks = [];
    let end = 0;
    // The server counts characters, JavaScript halves of surrogate pairs.
    const characters = [...text];
    for (const { start_idx: from, end_idx: to, points } of grounding) {
      if (from < end) continue;
      const label = String(marks.length + 1);
      const mark = document.createElement("mark");
      mark.textContent = characters.slice(from, to).join("");
      parts.push(characters.slice(end, from).join(""), mark, ` [${label}]`);
      marks.push(...points.map((at) => ({ kind: "point", at, label })));
      end = to;
    }
    parts.push(characters.slice(end).join(""));
    $("reasoning-text").replaceChildren(...parts);
    this.overlay.show([...this.given, ...marks]);
  }

  #showPlaces(answer) {
    const marks = marksOf(this.request, answer);
    this.overlay.show([...this.given, ...marks]);
    if (marks.length === 0) {
      $("answer").textContent = "Nothing was found.";
      return;
    }
    const list = document.createElement("ol");
    for (const mark of marks) {
      const row = item(describe(mark));
      row.addEventListener("pointerenter", () => this.overlay.light(mark.label));
      row.addEventListener("pointerleave", () => this.overlay.light(null));
      list.append(row);
    }
    $("answer").replaceChildren(list);
  }
}

/** Remove the answer before. */
export function clear() {
  for (const id of ["status", "error", "reasoning-text", "answer", "confidence", "timings"])
    $(id).replaceChildren();
  $("thoughts").hidden = true;
  for (const control of document.querySelectorAll("[aria-invalid]")) {
    control.removeAttribute("aria-invalid");
    control.removeAttribute("aria-errormessage");
  }
}

/** Show a failure of the server, and mark the controls that it is about. `again` is offered where a retry may help. */
export function showFailure(failure, again) {
  const hasFields = failure.violations.length > 0;
  const lines = [paragraph(hasFields ? `${failure.code}:` : `${failure.code}: ${failure.message}`)];
  if (hasFields) {
    const list = document.createElement("ul");
    for (const { field, description } of failure.violations) {
      list.append(item(field ? `${field} ${description}` : description));
      if (field) markInvalid(controlOf(field));
    }
    lines.push(list);
  }
  if (failure.retryAfterS !== null) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Try again";
    button.addEventListener("click", again);
    lines.push(
      paragraph(`A new attempt may succeed in ${Math.max(1, Math.ceil(failure.retryAfterS))} s. `),
      button,
    );
  }
  if (failure.requestId) {
    const id = paragraph(`Request ${failure.requestId}`);
    id.className = "soft";
    lines.push(id);
  }
  $("error").replaceChildren(...lines);
}

/** Show that the form lacks something, and go there. */
export function showUnfilled(unfilled) {
  $("error").replaceChildren(paragraph(unfilled.message));
  const control = $(unfilled.id);
  markInvalid(control);
  control.focus();
}

function markInvalid(control) {
  if (control === null || control.tagName === "BUTTON") return;
  control.setAttribute("aria-invalid", "true");
  control.setAttribute("aria-errormessage", "error");
  const folded = control.closest("details");
  if (folded) folded.open = true;
}

function marksOf({ skill, body }, answer) {
  const label = (index) => String(index + 1);
  if (skill === "point")
    return answer.points.map(({ x, y }, index) => ({ kind: "point", at: [x, y], label: label(index) }));
  if (skill === "detect")
    return answer.objects.map((box, index) => ({ kind: "box", box: sides(box), label: label(index) }));
  if (skill === "gaze")
    return answer.points.map(({ x, y }) => ({ kind: "look", from: body.eye, at: [x, y], label: "1" }));
  if (!answer.bbox) return [];
  return [{ kind: "outline", box: sides(answer.bbox), path: answer.path, isPartial: answer.partial, label: "1" }];
}

function describe({ kind, at, box, isPartial }) {
  const number = (value) => value.toFixed(3);
  if (kind === "point" || kind === "look")
    return `at ${number(at[0])} from the left, ${number(at[1])} from the top`;
  const [left, top, right, bottom] = box.map(number);
  return `from ${left}, ${top} to ${right}, ${bottom}${isPartial ? "; the outline lacks something" : ""}`;
}

/** The text in pieces, of which those that the model was unsure of are marked. */
function spans(logprobs, text) {
  if (!logprobs || logprobs.map((token) => token.text).join("") !== text) return [text];
  return logprobs.map(({ text: piece, logprob }) => {
    const probability = Math.exp(logprob);
    if (probability >= UNSURE) return piece;
    const span = document.createElement("span");
    span.className = "unsure";
    span.title = percent(probability);
    span.textContent = piece;
    return span;
  });
}

function showConfidence(logprobs) {
  if (!logprobs?.length) return;
  const mean = logprobs.reduce((sum, { logprob }) => sum + logprob, 0) / logprobs.length;
  const least = logprobs.reduce((found, token) => (token.logprob < found.logprob ? token : found));
  $("confidence").textContent =
    `Confidence: ${percent(Math.exp(mean))} for each token (geometric mean); ` +
    `least for “${least.text.trim()}”: ${percent(Math.exp(least.logprob))}.`;
}

function showTimings({ metrics, model, request_id: id }, firstMs, wholeMs) {
  const ms = (value) => `${value < 10 ? value.toFixed(1) : Math.round(value)} ms`;
  const rows = [
    ["Until something came", ms(firstMs)],
    ["Whole answer", ms(wholeMs)],
    ["First token, in the server", ms(metrics.ttft_ms)],
    ["Prefill", ms(metrics.prefill_time_ms)],
    ["Decoding", ms(metrics.decode_time_ms)],
    ["Tokens of the prompt", `${metrics.input_tokens}, of which ${metrics.cached_tokens} from the cache`],
    ["Tokens of the answer", String(metrics.output_tokens)],
    ["Model", model],
    ["Request", id],
  ];
  $("timings").replaceChildren(
    ...rows.flatMap(([name, value]) => {
      const [term, detail] = [document.createElement("dt"), document.createElement("dd")];
      term.textContent = name;
      detail.textContent = value;
      return [term, detail];
    }),
  );
}

function sides({ x_min, y_min, x_max, y_max }) {
  return [x_min, y_min, x_max, y_max];
}

function percent(share) {
  return `${(100 * share).toFixed(1)} %`;
}

function item(text) {
  const row = document.createElement("li");
  row.textContent = text;
  return row;
}

function paragraph(text) {
  const made = document.createElement("p");
  made.textContent = text;
  return made;
}
