// Shows what the server answers: text as it comes, reasoning, marks over the picture, confidence, timings, failures.

import { controlOf } from "./form.js";
import { wholeCommands } from "./drawing.js";

const $ = (id) => document.getElementById(id);
const UNSURE = 0.5;
/** As many colours of marks as the style has. */
const COLOURS = 8;

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
    $("result").classList.remove("blank");
    $("asked").textContent = inWords(request);
    showThumbnail($("asked-picture"), addedPicture(request, (request.body.messages?.length ?? 0) - 1));
    showTurns(request);
    $("answer").setAttribute("aria-busy", "true");
    overlay.show(given);
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

  /** The whole answer, which has just come. Returns the times that `show` takes. */
  complete(answer) {
    const wholeMs = performance.now() - this.#started;
    const times = { firstMs: this.#firstMs ?? wholeMs, wholeMs };
    this.show(answer, times);
    return times;
  }

  /** The whole answer. */
  show(answer, times) {
    const { skill } = this.request;
    if (answer.reasoning) this.#showReasoning(answer.reasoning);
    if (isText(skill)) this.#showText(answer);
    else this.#showPlaces(answer);
    showTimings(answer, times);
    $("keep").hidden = false;
    const endings = {
      stop: "Complete.",
      length: "Cut short: it is as long as the settings allow.",
      max_objects: "There may be more: as many are shown as the settings allow.",
      stop_sequence: `Ended by “${answer.stop_sequence}”.`,
    };
    this.end(endings[answer.finish_reason]);
  }

  /** Nothing more comes. */
  end(status) {
    $("status").textContent = status;
    $("answer").setAttribute("aria-busy", "false");
  }

  #showOutline() {
    const path = wholeCommands(this.#path);
    this.overlay.show([...this.given, { kind: "outline", box: this.#box, path }]);
  }

  #showText(answer) {
    const text = textOf(answer);
    $("answer").replaceChildren(...spans(answer.logprobs, text));
    showConfidence(answer.logprobs);
    const others = answer.alternatives ?? [];
    if (others.length === 0) return;
    const list = document.createElement("ol");
    list.append(...[text, ...others.map(textOf)].map(item));
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
    if (answer.groups) {
      $("answer").replaceChildren(this.#legend(answer.groups, marks));
    } else if (marks.length === 0) {
      $("answer").textContent = "Nothing was found.";
    } else {
      $("answer").replaceChildren(this.#list(marks));
    }
  }

  /** A list of what was found; a row lights up its mark. */
  #list(marks) {
    const list = document.createElement("ol");
    for (const mark of marks) {
      const row = item(describe(mark));
      row.addEventListener("pointerenter", () => this.overlay.light(mark.label));
      row.addEventListener("pointerleave", () => this.overlay.light(null));
      list.append(row);
    }
    return list;
  }

  /** Each object that was looked for, with its colour and what was found. */
  #legend(groups, marks) {
    const legend = document.createElement("ul");
    legend.className = "legend";
    for (const [index, group] of groups.entries()) {
      const [row, swatch, name] = ["li", "span", "span"].map((tag) => document.createElement(tag));
      swatch.className = `swatch colour-${index % COLOURS}`;
      name.textContent = group.object;
      row.append(swatch, name);
      const found = marks.filter((mark) => mark.group === index);
      if (group.error) row.append(`: ${sentence(group.error.message)}`);
      else if (found.length === 0) row.append(": nothing was found");
      else row.append(this.#list(found));
      legend.append(row);
    }
    return legend;
  }
}

/** What is asked, in a line. */
export function inWords({ skill, body }) {
  const object = (body.objects ?? [body.object]).map((name) => `“${name}”`).join(", ");
  return {
    query: body.question,
    chat: body.messages?.at(-1).content,
    caption: body.length ? `A ${body.length} description` : "A description",
    point: `Points at ${object}`,
    detect: `Boxes around ${object}`,
    segment: `The outline of ${object}`,
    gaze: "Where this eye looks",
  }[skill];
}

/** The answer in a line. */
export function summary(request, answer) {
  if (isText(request.skill)) return textOf(answer);
  const count = marksOf(request, answer).length;
  return count === 0 ? "nothing was found" : count === 1 ? "one was found" : `${count} were found`;
}

/** Remove the answer before. */
export function clear() {
  for (const id of ["status", "asked", "error", "reasoning-text", "answer", "confidence", "timings"])
    $(id).replaceChildren();
  for (const id of ["thoughts", "keep", "turns", "follow", "asked-picture"]) $(id).hidden = true;
  $("result").classList.add("blank");
  clearProblem();
  for (const control of document.querySelectorAll("[aria-invalid]")) markValid(control);
}

/** On a phone the form may be on the screen, and the answer above it. */
export function bringIntoView() {
  const shown = $($("error").hasChildNodes() ? "error" : "answer");
  const top = $("stage").getBoundingClientRect().top;
  const bottom = shown.getBoundingClientRect().bottom;
  if (top >= 0 && bottom <= innerHeight) return;
  if (bottom - top <= innerHeight) $("stage").scrollIntoView({ block: "start" });
  else $("result").scrollIntoView({ block: "start" });
}

/** Show a failure, and mark the controls that it is about. `again` is offered where a retry may help. */
export function showFailure(failure, again) {
  $("result").classList.remove("blank");
  const hasFields = failure.violations.length > 0;
  const lines = [paragraph(hasFields ? "The server does not accept this:" : sentence(failure.message))];
  const facts = [["Reason", failure.code]];
  if (hasFields) {
    const list = document.createElement("ul");
    for (const { field, description } of failure.violations) {
      const control = field ? controlOf(field) : null;
      const name = control === null ? PARTS[field.replace(/[[.].*$/, "")] : nameOf(control);
      list.append(item(name ? `${name}: ${description}` : `${field} ${description}`.trim()));
      if (field) facts.push(["Field", field]);
      markInvalid(control, "error");
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
  if (failure.requestId) facts.push(["Request", failure.requestId]);
  const [folded, name, list] = ["details", "summary", "dl"].map((tag) => document.createElement(tag));
  name.textContent = "For a report";
  list.append(...rows(facts));
  folded.append(name, list);
  $("error").replaceChildren(...lines, folded);
  bringIntoView();
}

/** Show that the form lacks something, where it lacks it, and go there. */
export function showUnfilled(unfilled) {
  clearProblem();
  const control = $(unfilled.id);
  const problem = paragraph(unfilled.message);
  problem.id = "problem";
  problem.setAttribute("role", "alert");
  (control.closest(".buttons, .pair, .line") ?? control).after(problem);
  markInvalid(control, "problem");
  control.focus();
  control.scrollIntoView({ block: "nearest" });
}

/** Remove what `showUnfilled` has shown. */
export function clearProblem() {
  $("problem")?.remove();
  for (const control of document.querySelectorAll("[aria-errormessage=problem]")) markValid(control);
}

/** What fields without a control are called. */
const PARTS = { image: "Picture", image_url: "Picture" };

/** The questions and answers before the last question of a conversation. */
function showTurns(request) {
  const messages = request.body.messages ?? [];
  const rows = [];
  for (let index = 0; index + 1 < messages.length; index += 2) {
    const [row, turn, question, picture, answer] = ["li", "div", "div", "img", "span"].map((tag) =>
      document.createElement(tag),
    );
    turn.className = "turn";
    question.textContent = messages[index].content;
    turn.append(question, picture);
    showThumbnail(picture, addedPicture(request, index));
    answer.textContent = messages[index + 1].content.trim();
    row.append(turn, answer);
    rows.push(row);
  }
  $("turns").replaceChildren(...rows);
  $("turns").hidden = rows.length === 0;
}

/** The picture of a message; null for the first one, whose picture is the large one. */
function addedPicture({ pictures }, index) {
  return index > 0 ? (pictures?.[index] ?? null) : null;
}

/** Show a picture in a small image; null shows none. */
export function showThumbnail(image, picture) {
  image.hidden = picture === null;
  if (picture === null) return;
  image.src = picture.url;
  image.alt = `The added picture, ${picture.fileName}`;
}

function isText(skill) {
  return ["query", "caption", "chat"].includes(skill);
}

function nameOf(control) {
  const label = control.labels?.[0];
  return (label?.textContent ?? control.ariaLabel).trim();
}

function markInvalid(control, message) {
  if (control === null || control.tagName === "BUTTON") return;
  control.setAttribute("aria-invalid", "true");
  control.setAttribute("aria-errormessage", message);
  const folded = control.closest("details");
  if (folded) folded.open = true;
}

function markValid(control) {
  control.removeAttribute("aria-invalid");
  control.removeAttribute("aria-errormessage");
}

function textOf(answer) {
  return answer.answer ?? answer.caption;
}

function marksOf({ skill, body }, answer) {
  if (skill === "point" || skill === "detect") {
    const found = (part) => (part.points ?? part.objects ?? []).map(markOf);
    if (!answer.groups) return found(answer).map((mark, index) => ({ ...mark, label: String(index + 1) }));
    return answer.groups.flatMap((group, index) =>
      found(group).map((mark, place) => ({
        ...mark,
        label: `${group.object} ${place + 1}`,
        group: index,
        colour: index % COLOURS,
      })),
    );
  }
  if (skill === "gaze")
    return answer.points.map(({ x, y }) => ({ kind: "look", from: body.eye, at: [x, y], label: "1" }));
  if (!answer.bbox) return [];
  return [{ kind: "outline", box: sides(answer.bbox), path: answer.path, isPartial: answer.partial, label: "1" }];
}

/** The mark of a point or a box, without its label. */
function markOf(found) {
  const { x, y, score } = found;
  return x === undefined ? { kind: "box", box: sides(found), score } : { kind: "point", at: [x, y], score };
}

function describe({ score, ...mark }) {
  return score === undefined ? place(mark) : `${place(mark)}; score ${score.toFixed(2)}`;
}

function place({ kind, at, box, isPartial }) {
  const part = (value) => (100 * value).toFixed(1);
  if (kind === "point" || kind === "look") return `${part(at[0])} % from the left, ${part(at[1])} % from the top`;
  const [left, top, right, bottom] = box;
  const area = `${part(left)}–${part(right)} % across, ${part(top)}–${part(bottom)} % down`;
  return `${area}${isPartial ? "; the outline lacks something" : ""}`;
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
  const piece = least.text.trim();
  $("confidence").textContent =
    `Confidence: ${percent(Math.exp(mean))}` +
    (piece && logprobs.length > 1 ? `; lowest at “${piece}”: ${percent(Math.exp(least.logprob))}` : "");
}

function showTimings({ metrics, model, request_id: id }, { firstMs, wholeMs }) {
  const ms = (value) => `${value < 10 ? value.toFixed(1) : Math.round(value)} ms`;
  $("timings").replaceChildren(
    ...rows([
      ["Until the first event", ms(firstMs)],
      ["Whole answer", ms(wholeMs)],
      ["First token, in the server", ms(metrics.ttft_ms)],
      ["Prefill", ms(metrics.prefill_time_ms)],
      ["Decoding", ms(metrics.decode_time_ms)],
      ["Tokens of the prompt", `${metrics.input_tokens}, of which ${metrics.cached_tokens} from the cache`],
      ["Tokens of the answer", String(metrics.output_tokens)],
      ["Model", model],
      ["Request", id],
    ]),
  );
}

/** Names and values as the children of a list of descriptions. */
function rows(pairs) {
  return pairs.flatMap(([name, value]) => {
    const [term, detail] = [document.createElement("dt"), document.createElement("dd")];
    term.textContent = name;
    detail.textContent = value;
    return [term, detail];
  });
}

function sentence(text) {
  const begun = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?…]$/.test(begun) ? begun : `${begun}.`;
}

function sides({ x_min, y_min, x_max, y_max }) {
  return [x_min, y_min, x_max, y_max];
}

function percent(share) {
  return `${Math.round(100 * share)} %`;
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
