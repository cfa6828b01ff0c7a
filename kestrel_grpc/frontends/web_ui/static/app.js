// The page: connects the form, the picture, the server and the answer.

import { Failure, Server } from "./api.js";
import {
  AnswerView,
  bringIntoView,
  clear,
  clearProblem,
  inWords,
  showFailure,
  showThumbnail,
  showUnfilled,
  summary,
} from "./answer.js";
import { Overlay } from "./drawing.js";
import {
  Unfilled,
  addNumbers,
  eye,
  further,
  places,
  read,
  setValues,
  showSkill,
  showSubject,
  skill,
  values,
} from "./form.js";
import { Camera, Picture, RemotePicture, fileOf, save } from "./picture.js";
import { sample } from "./samples.js";

const MOST_ENTRIES = 30;

const $ = (id) => document.getElementById(id);
const server = new Server();
const camera = new Camera($("video"));
const overlay = new Overlay($("overlay"), $("frame"), mark);
let facts = null;
let asksForTokens = false;
let picture = null;
/** What is being asked: `{abort, isOpening}`. */
let running = null;
/** The answers of this tab, the newest first: `{picture, held, request, answer, times}`. */
let entries = [];
/** The one of them that is shown. */
let shown = null;
/** What the marks of the request are about; an answer to another request is stale. */
let subject = "";
/** The picture of the next further question; null if it adds none. */
let added = null;
/** The conversation that is asked or shown; null once the form has changed. */
let conversation = null;
let numTaken = 0;

// The server

async function connect() {
  try {
    asksForTokens = await server.asksForTokens();
    $("token-row").hidden = !asksForTokens;
    $("token").value = server.token;
    if (asksForTokens && !server.token) {
      $("server").textContent = "This server asks for a token.";
      return;
    }
    facts = await server.describe();
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    showFailure(error, connect);
    return;
  }
  drop();
  $("server").textContent = `${facts.model}, served by Kestrel gRPC ${facts.version}`;
  for (const input of document.querySelectorAll("[name=skill]")) input.disabled = !(input.value in facts.skills);
  if (!(skill() in facts.skills)) document.querySelector("[name=skill]:enabled")?.click();
  $("address-row").hidden = !facts.fetches_images;
  for (const item of document.querySelectorAll("#adapter, [for=adapter]")) item.hidden = !facts.adapters.length;
  $("adapter").replaceChildren($("adapter").options[0], ...facts.adapters.map((name) => new Option(name, name)));
  update();
  if (picture === null && entries.length === 0) await takeExample({ isOpening: true });
}

// The picture

/** Show another picture, or none. */
function take(taken) {
  numTaken += 1;
  closeCamera();
  const before = picture;
  picture = taken;
  drop();
  if (before !== taken) closeUnused([before]);
  $("stage").classList.toggle("empty", picture === null);
  $("frame").hidden = picture?.url == null;
  if (picture?.url) $("picture").src = picture.url;
  showNotShown(picture?.address ? "The server fetches this picture. The page may not load it, so it is not shown." : "");
  showSubject(picture?.isExample);
  update();
}

/** Say why there is a picture that is not shown. */
function showNotShown(reason) {
  $("not-shown").textContent = reason;
  $("not-shown").hidden = !reason;
  $("stage").classList.toggle("empty", picture === null || Boolean(reason));
}

async function takeFile(file, fileName) {
  const number = ++numTaken;
  let taken;
  try {
    taken = await Picture.of(file, fileName || file.name || "picture.png");
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    drop();
    showFailure(error);
    return;
  }
  // Another may have been taken meanwhile.
  if (number === numTaken) take(taken);
}

function takeAddress() {
  clearProblem();
  const address = $("address").value.trim();
  if (!/^https?:/i.test(address) || !URL.canParse(address)) {
    showUnfilled(new Unfilled("address", "Write an address that begins with https://."));
    return;
  }
  take(new RemotePicture(address));
}

/** Show the example, and ask about it. */
async function takeExample({ isOpening = false } = {}) {
  const number = ++numTaken;
  try {
    const file = await server.example();
    if (number !== numTaken) return;
    take(new Picture(file, "demo_picture.png", { isExample: true }));
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    showFailure(error, takeExample);
    return;
  }
  if (skill() !== "gaze") await ask({ isOpening });
}

/** Free pictures that neither are shown nor belong to an answer. */
function closeUnused(pictures) {
  const used = [picture, added, ...(conversation?.pictures ?? [])];
  for (const entry of entries) used.push(entry.picture, ...(entry.request.pictures ?? []));
  for (const unused of pictures) if (!used.includes(unused)) unused?.close();
}

function showPictureFacts() {
  for (const id of ["drop-hint", "remove", "forget"]) $(id).hidden = true;
  const parts = [];
  if (picture !== null && $("video").hidden) {
    const image = $("picture");
    parts.push(picture.original ? `${picture.original}, sent as JPEG` : (picture.address ?? picture.fileName));
    if (picture.url && image.naturalWidth) parts.push(`${image.naturalWidth} × ${image.naturalHeight}`);
    if (picture.stored) parts.push("kept on the server");
    else if (picture.notStored) parts.push(`sent with each request, since ${picture.notStored}`);
  }
  $("picture-facts").textContent = parts.join(" · ");
  if (!$("video").hidden) return;
  $("drop-hint").hidden = picture !== null;
  $("remove").hidden = picture === null;
  $("forget").hidden = !picture?.stored;
}

async function openCamera() {
  if (!Camera.isOffered) {
    $("capture").click();
    return;
  }
  try {
    await camera.open();
  } catch {
    closeCamera();
    showFailure(new Failure(0, { code: "CAMERA", message: "the browser does not give the camera" }));
    return;
  }
  showCamera(true);
  $("shoot").focus();
}

function closeCamera() {
  camera.close();
  showCamera(false);
}

function showCamera(isOpen) {
  $("video").hidden = $("camera-buttons").hidden = !isOpen;
  $("sources").hidden = isOpen;
  $("frame").hidden = isOpen || picture?.url == null;
  $("not-shown").hidden = isOpen || !$("not-shown").textContent;
  showPictureFacts();
}

async function forget() {
  try {
    await server.forget(picture.stored.image_id);
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    showFailure(error, forget);
    return;
  }
  picture.stored = null;
  showPictureFacts();
  updateSample();
  $("ask").focus();
}

// Places that are marked in the picture

function mark(place) {
  if (skill() === "gaze") {
    [$("eye-x").value, $("eye-y").value] = place;
  } else {
    const others = $("places").value.trim().replace(/;$/, "");
    $("places").value = others ? `${others}; ${place.join(",")}` : place.join(",");
  }
  update();
}

/** The marks of what the request itself says. */
function given() {
  if (skill() === "gaze") {
    const from = eye();
    return from === null ? [] : [{ kind: "point", at: from, label: "eye", isGiven: true }];
  }
  if (skill() === "caption") return [];
  try {
    return places().map((sides) =>
      sides.length === 2 ? { kind: "point", at: sides, isGiven: true } : { kind: "box", box: sides, isGiven: true },
    );
  } catch {
    return [];
  }
}

// The request

/** Ask what the form says. When the page opens, nothing is scrolled, and nothing is said about what is missing. */
async function ask({ isOpening = false } = {}) {
  if (running && !running.isOpening) return;
  drop();
  let request;
  try {
    request = read(facts?.model);
    requirePicture(request.skill);
  } catch (error) {
    if (!(error instanceof Unfilled)) throw error;
    if (!isOpening) showUnfilled(error);
    return;
  }
  await perform(request, { isOpening, again: ask });
}

/** Ask a further question about the answer that is shown. */
async function askFurther() {
  if (running && !running.isOpening) return;
  let request;
  try {
    request = further(shown.request, shown.answer, picture, added);
    requireSize(added, "add-picture");
  } catch (error) {
    if (!(error instanceof Unfilled)) throw error;
    showUnfilled(error);
    return;
  }
  const again = async () => {
    drop();
    conversation = request;
    updateSample();
    await perform(request, { again });
  };
  await again();
}

/** Send a request and show its answer. `again` is offered where it fails. */
async function perform(request, { isOpening = false, again }) {
  const run = { abort: new AbortController(), isOpening };
  const entry = { picture, held: values(), request };
  running = run;
  showRunning();
  const view = new AnswerView(request, overlay, given());
  if (!isOpening) {
    // The keyboard of a phone would cover the answer.
    if (matchMedia("(pointer: coarse)").matches) document.activeElement.blur();
    bringIntoView();
  }
  try {
    const answer = await sendWithPicture(request, view, run);
    // The answer to what is no longer asked is not shown.
    if (running !== run) return;
    remember({ ...entry, answer, times: view.complete(answer) });
    if (!isOpening) bringIntoView();
  } catch (error) {
    if (running !== run) return;
    if (error.name === "AbortError") {
      view.end("Stopped.");
    } else if (error instanceof Failure) {
      view.end("Failed.");
      showFailure(error, again);
      if (error.status === 401) $("token").focus();
    } else {
      throw error;
    }
  } finally {
    if (running === run) {
      running = null;
      showRunning();
      showPictureFacts();
      updateSample();
    }
  }
}

/** End what is being asked, and remove the answer that is shown. */
function drop() {
  running?.abort.abort();
  running = null;
  shown = null;
  conversation = null;
  clear();
  overlay.show(given());
  showRunning();
  showEntries();
}

function showRunning() {
  const isAsked = running !== null && !running.isOpening;
  $("ask").disabled = isAsked;
  if (!isAsked && document.activeElement === $("stop")) $("ask").focus();
  $("stop").hidden = !isAsked;
}

/** Raises `Unfilled` where the skill needs a picture, or another one. */
function requirePicture(asked) {
  if (picture === null && asked !== "query") throw new Unfilled("choose", "Choose a picture first.");
  requireSize(picture, "choose");
}

/** Raises `Unfilled`, for the control with this id, where the server takes no picture of this size. */
function requireSize(taken, id) {
  const most = facts?.max_image_bytes ?? Infinity;
  if (taken?.blob?.size > most) throw new Unfilled(id, `The picture may have at most ${most} bytes.`);
}

/** Send the request, and once more if the server has dropped a stored picture. */
async function sendWithPicture(request, view, run) {
  const { signal } = run.abort;
  const pictures = request.pictures ?? [picture];
  const say = (status) => {
    if (running === run) $("status").textContent = status;
  };
  const send = async () => {
    const body = { ...request.body };
    // What nobody chose to send is not stored.
    const mayStore = facts?.stores_images && $("store").checked && !run.isOpening;
    for (const [index, asked] of pictures.entries()) {
      if (asked === null) continue;
      say("Sending the picture …");
      const reference = await asked.reference(server, mayStore, signal);
      if (body.messages) body.messages = body.messages.with(index, { ...body.messages[index], image_urls: [reference] });
      else body.image_url = reference;
    }
    say("Working …");
    const onEvent = (event) => {
      if (running === run) view.add(event);
    };
    return server.ask(request.skill, body, { signal, timeoutS: request.timeoutS, onEvent });
  };
  try {
    return await send();
  } catch (error) {
    const stored = pictures.filter((asked) => asked?.stored);
    if (error.code !== "IMAGE_NOT_FOUND" || stored.length === 0) throw error;
    for (const asked of stored) asked.stored = null;
    return send();
  }
}

// The answers of this tab

function remember(entry) {
  const left = entries.splice(MOST_ENTRIES - 1);
  entries.unshift(entry);
  shown = entry;
  closeUnused(left.flatMap((old) => [old.picture, ...(old.request.pictures ?? [])]));
  showEntries();
  showSave();
  showFollow();
}

/** Offer a further question where the answer is one text. */
function showFollow() {
  const { request, answer } = shown;
  const isAsked = request.skill === "query" || request.skill === "chat";
  $("follow").hidden = !(isAsked && facts?.skills.chat && !answer.alternatives);
  addPicture(null);
  if (request.skill === "chat") $("further").value = "";
}

async function addFile(file) {
  try {
    addPicture(await Picture.of(file, file.name || "picture.png"));
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    showFailure(error);
  }
}

/** Have the next further question add a picture, or none. */
function addPicture(taken) {
  clearProblem();
  const before = added;
  added = taken;
  closeUnused([before]);
  showThumbnail($("added-picture"), added);
  $("added-name").textContent = added?.fileName ?? "";
  $("drop-picture").hidden = added === null;
}

function showEntries() {
  $("history").hidden = entries.length === 0;
  const rows = entries.map((entry) => {
    const [row, button, asked, answer] = ["li", "button", "span", "span"].map((tag) => document.createElement(tag));
    button.type = "button";
    if (entry === shown) button.setAttribute("aria-current", "true");
    asked.textContent = inWords(entry.request);
    answer.textContent = summary(entry.request, entry.answer);
    button.append(asked, answer);
    button.addEventListener("click", () => showEntry(entry));
    row.append(button);
    return row;
  });
  $("entries").replaceChildren(...rows);
}

/** Show an earlier answer again, with its picture and what was asked. */
function showEntry(entry) {
  take(entry.picture);
  setValues(entry.held);
  update();
  new AnswerView(entry.request, overlay, given()).show(entry.answer, entry.times);
  shown = entry;
  conversation = entry.request.pictures ? entry.request : null;
  showEntries();
  showSave();
  showFollow();
  $("entries").querySelector("[aria-current]").focus({ preventScroll: true });
  bringIntoView();
  updateSample();
}

/** Offer the picture where something is drawn over it. */
function showSave() {
  $("save-picture").hidden = overlay.isEmpty || !picture?.url || !$("picture").naturalWidth;
  $("save-mask").hidden = !overlay.hasOutline || $("save-picture").hidden;
}

async function savePicture() {
  save(await fileOf(overlay.drawnOver($("picture")), "image/png"), `${stem()}-${skill()}.png`);
}

async function saveMask() {
  save(await fileOf(overlay.maskOf($("picture")), "image/png"), `${stem()}-mask.png`);
}

function saveJson() {
  const text = JSON.stringify(shown.answer, null, 2);
  save(new Blob([`${text}\n`], { type: "application/json" }), `${stem()}-${skill()}.json`);
}

function stem() {
  return picture === null ? "answer" : picture.fileName.replace(/\.[^.]*$/, "");
}

// What the page shows

function update() {
  const asked = skill();
  showSkill(asked, facts?.skills[asked]);
  if (asked === "caption" || asked === "gaze") $("mark").setAttribute("aria-pressed", "false");
  const marksPlaces = $("mark").getAttribute("aria-pressed") === "true";
  overlay.marking = picture === null ? "" : asked === "gaze" ? "point" : marksPlaces ? "place" : "";
  $("frame").classList.toggle("marking", overlay.marking !== "");
  $("mark-hint").hidden = overlay.marking === "";
  $("mark-hint").textContent =
    overlay.marking === "point" ? "Click the eye whose gaze you want." : "Click a point, or draw a box.";
  const now = JSON.stringify([asked, given()]);
  if (now !== subject) {
    subject = now;
    drop();
  }
  showPictureFacts();
  showSave();
  updateSample();
}

function updateSample() {
  let text;
  try {
    const address = `${location.hostname}:${facts?.grpc_port ?? 50051}`;
    const place = {
      origin: location.origin,
      grpcAddress: address,
      isEncrypted: facts?.is_encrypted ?? false,
      asksForTokens,
      model: facts?.model ?? "",
    };
    const language = document.querySelector("[name=language]:checked").value;
    const images = (conversation?.pictures ?? [picture]).map(imageOfSample);
    text = sample(language, conversation ?? read(facts?.model), images, place);
  } catch (error) {
    if (!(error instanceof Unfilled)) throw error;
    text = `# ${error.message}\n`;
  }
  $("sample-text").textContent = text;
  $("copied").textContent = "";
}

function imageOfSample(named) {
  if (named === null) return null;
  if (named.address) return { address: named.address };
  return { file: named.fileName, type: named.blob.type || "image/png", original: named.original };
}

async function copy() {
  const text = $("sample-text").textContent;
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
    $("copied").textContent = "Copied.";
    return;
  }
  // Pages that come neither from this machine nor over HTTPS have no clipboard.
  getSelection().selectAllChildren($("sample-text"));
  $("copied").textContent = "Selected: copy it with the keyboard or the menu.";
}

// Events

addNumbers();
$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
$("follow").addEventListener("submit", (event) => {
  event.preventDefault();
  askFurther();
});
$("form").addEventListener("input", (event) => {
  if (event.target.id === "token") return;
  conversation = null;
  clearProblem();
  if (event.target.name === "skill") showSubject(picture?.isExample);
  update();
});
$("token").addEventListener("change", () => {
  server.token = $("token").value.trim();
  connect();
});
$("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  ask();
});
$("stop").addEventListener("click", () => running?.abort.abort());
$("mark").addEventListener("click", () => {
  const isOn = $("mark").getAttribute("aria-pressed") !== "true";
  $("mark").setAttribute("aria-pressed", String(isOn));
  update();
});
$("languages").addEventListener("input", updateSample);
$("copy").addEventListener("click", copy);

$("choose").addEventListener("click", () => $("file").click());
$("camera").addEventListener("click", openCamera);
$("camera-off").addEventListener("click", () => {
  closeCamera();
  $("camera").focus();
});
$("shoot").addEventListener("click", async () => {
  take(new Picture(await camera.shoot(), "camera.jpg"));
  $("question").focus();
});
$("example").addEventListener("click", () => takeExample());
$("use-address").addEventListener("click", takeAddress);
$("address").addEventListener("keydown", (event) => {
  if (event.key === "Enter") takeAddress();
});
$("save-picture").addEventListener("click", savePicture);
$("save-mask").addEventListener("click", saveMask);
$("save-json").addEventListener("click", saveJson);
$("remove").addEventListener("click", () => {
  take(null);
  $("choose").focus();
});
$("forget").addEventListener("click", forget);
$("picture").addEventListener("load", update);
$("picture").addEventListener("error", () => {
  $("frame").hidden = true;
  showNotShown("This browser cannot show the picture. The server may still read it.");
});
for (const [id, receive] of [["file", takeFile], ["capture", takeFile], ["further-file", addFile]]) {
  const input = $(id);
  input.addEventListener("change", () => {
    if (input.files.length) receive(input.files[0]);
    input.value = "";
  });
}
$("add-picture").addEventListener("click", () => $("further-file").click());
$("drop-picture").addEventListener("click", () => {
  addPicture(null);
  $("add-picture").focus();
});
addEventListener("paste", (event) => {
  const [file] = [...(event.clipboardData?.files ?? [])].filter((item) => item.type.startsWith("image/"));
  if (file) takeFile(file);
});
addEventListener("dragover", (event) => {
  event.preventDefault();
  $("stage").classList.add("over");
});
addEventListener("dragleave", () => $("stage").classList.remove("over"));
addEventListener("drop", (event) => {
  event.preventDefault();
  $("stage").classList.remove("over");
  const [file] = event.dataTransfer.files;
  if (file) takeFile(file);
});

update();
connect();
