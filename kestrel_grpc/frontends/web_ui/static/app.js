// The page: connects the form, the picture, the server and the answer.

import { Failure, Server } from "./api.js";
import { AnswerView, clear, showFailure, showUnfilled } from "./answer.js";
import { Overlay } from "./drawing.js";
import { Unfilled, addNumbers, eye, places, read, showSkill, skill } from "./form.js";
import { Camera, Picture } from "./picture.js";
import { sample } from "./samples.js";

const $ = (id) => document.getElementById(id);
const server = new Server();
const camera = new Camera($("video"));
const overlay = new Overlay($("overlay"), $("frame"), mark);
let facts = null;
let asksForTokens = false;
let picture = null;
let running = null;

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
  clear();
  $("server").textContent = `${facts.model}, served by Kestrel gRPC ${facts.version}`;
  for (const input of document.querySelectorAll("[name=skill]")) input.disabled = !(input.value in facts.skills);
  for (const item of document.querySelectorAll("#adapter, [for=adapter]")) item.hidden = !facts.adapters.length;
  $("adapter").replaceChildren($("adapter").options[0], ...facts.adapters.map((name) => new Option(name, name)));
  update();
}

// The picture

function take(file, fileName) {
  closeCamera();
  picture?.close();
  picture = file && new Picture(file, fileName || file.name || "picture.png");
  clear();
  overlay.show([]);
  $("stage").classList.toggle("empty", picture === null);
  $("drop-hint").hidden = picture !== null;
  $("frame").hidden = $("remove").hidden = picture === null;
  $("picture-facts").textContent = picture === null ? "" : picture.fileName;
  $("forget").hidden = true;
  if (picture !== null) $("picture").src = picture.url;
  update();
}

async function takeExample() {
  try {
    take(await server.example(), "demo_picture.png");
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    showFailure(error, takeExample);
  }
}

function showPictureFacts() {
  if (picture === null) return;
  const image = $("picture");
  const facts = [picture.fileName, `${image.naturalWidth} × ${image.naturalHeight}`];
  if (picture.stored) facts.push("stored on the server: further requests name it and do not send it again");
  else if (picture.notStored) facts.push(`sent with each request, since ${picture.notStored}`);
  $("picture-facts").textContent = facts.join(" · ");
  $("forget").hidden = picture.stored === null;
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
  for (const id of ["video", "shoot", "camera-off"]) $(id).hidden = !isOpen;
  for (const id of ["choose", "camera", "example"]) $(id).hidden = isOpen;
  $("frame").hidden = isOpen || picture === null;
  $("remove").hidden = isOpen || picture === null;
  $("drop-hint").hidden = isOpen || picture !== null;
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

async function ask(event) {
  event?.preventDefault();
  if (running) return;
  let request;
  clear();
  try {
    request = read(facts?.model);
    requirePicture(request.skill);
  } catch (error) {
    if (!(error instanceof Unfilled)) throw error;
    showUnfilled(error);
    return;
  }
  running = new AbortController();
  $("ask").disabled = true;
  $("stop").hidden = false;
  const view = new AnswerView(request, overlay, given());
  try {
    view.complete(await sendWithPicture(request, view, running.signal));
  } catch (error) {
    if (error.name === "AbortError") {
      view.end("Stopped.");
    } else if (error instanceof Failure) {
      view.end("Failed.");
      if (error.status === 401) $("token").focus();
      showFailure(error, ask);
    } else {
      throw error;
    }
  } finally {
    running = null;
    $("ask").disabled = false;
    if (document.activeElement === $("stop")) $("ask").focus();
    $("stop").hidden = true;
    showPictureFacts();
    updateSample();
  }
}

/** Raises `Unfilled` where the skill needs a picture, or another one. */
function requirePicture(asked) {
  if (picture === null && asked !== "query") throw new Unfilled("choose", "a picture is needed");
  const most = facts?.max_image_bytes ?? Infinity;
  if (picture?.blob.size > most) throw new Unfilled("choose", `the picture may have at most ${most} bytes`);
}

/** Send the request, and once more if the server has dropped the stored picture. */
async function sendWithPicture(request, view, signal) {
  const send = async () => {
    const body = { ...request.body };
    const mayStore = facts?.stores_images && $("store").checked;
    if (picture !== null) {
      $("status").textContent = "The picture is sent.";
      body.image_url = await picture.reference(server, mayStore, signal);
    }
    $("status").textContent = "The server works.";
    const onEvent = (event) => view.add(event);
    return server.ask(request.skill, body, { signal, timeoutS: request.timeoutS, onEvent });
  };
  try {
    return await send();
  } catch (error) {
    if (error.code !== "IMAGE_NOT_FOUND" || !picture?.stored) throw error;
    picture.stored = null;
    return send();
  }
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
    overlay.marking === "point" ? "Click an eye of the one who looks." : "Click a point, or draw a box.";
  if (!running) overlay.show(given());
  showPictureFacts();
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
    text = sample(language, read(facts?.model), imageOfSample(), place);
  } catch (error) {
    if (!(error instanceof Unfilled)) throw error;
    text = `# ${error.message}\n`;
  }
  $("sample-text").textContent = text;
  $("copied").textContent = "";
}

function imageOfSample() {
  if (picture === null) return null;
  if (picture.stored) return { id: picture.stored.image_id };
  return { file: picture.fileName, type: picture.blob.type || "image/png" };
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
$("form").addEventListener("submit", ask);
$("form").addEventListener("input", (event) => {
  if (event.target.id !== "token") update();
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
$("stop").addEventListener("click", () => running?.abort());
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
  take(await camera.shoot(), "camera.jpg");
  $("question").focus();
});
$("example").addEventListener("click", takeExample);
$("remove").addEventListener("click", () => {
  take(null);
  $("choose").focus();
});
$("forget").addEventListener("click", forget);
$("picture").addEventListener("load", showPictureFacts);
for (const input of [$("file"), $("capture")]) {
  input.addEventListener("change", () => {
    if (input.files.length) take(input.files[0]);
    input.value = "";
  });
}
addEventListener("paste", (event) => {
  const [file] = [...(event.clipboardData?.files ?? [])].filter((item) => item.type.startsWith("image/"));
  if (file) take(file);
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
  if (file) take(file);
});

update();
connect();
