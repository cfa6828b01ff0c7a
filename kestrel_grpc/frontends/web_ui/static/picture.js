// The picture that is asked about: where it comes from, and how requests name it.

import { Failure } from "./api.js";

const JPEG_QUALITY = 0.95;

/** The first bytes of the files that the server reads, one character for each. */
const FORMATS = ["\xff\xd8\xff", "\x89PNG\r\n\x1a\n", "RIFF", "GIF87a", "GIF89a", "BM", "II*\0", "MM\0*"];

/** An image file that the server reads. */
export class Picture {
  #dataUrl = null;

  /** `fileName` is what samples of code call it; `original` is the name of the file that it was made of, if any. */
  constructor(blob, fileName, { original = null, isExample = false } = {}) {
    this.blob = blob;
    this.fileName = fileName;
    this.original = original;
    this.isExample = isExample;
    this.url = URL.createObjectURL(blob);
    /** What the server says about it once it is stored there. */
    this.stored = null;
    /** Why the server does not store it; empty if it may. */
    this.notStored = "";
  }

  /** The picture of any file that the browser reads: what the server does not read becomes a JPEG. Raises `Failure`. */
  static async of(file, fileName) {
    const begin = String.fromCharCode(...new Uint8Array(await file.slice(0, 8).arrayBuffer()));
    const isRead = FORMATS.some((first) => begin.startsWith(first));
    if (isRead) return new Picture(file, fileName);
    const jpeg = await asJpeg(file, fileName);
    return new Picture(jpeg, `${fileName.replace(/\.[^.]*$/, "")}.jpg`, { original: fileName });
  }

  /** The `image_url` of a request: a handle of a stored image, else the file itself. */
  async reference(server, mayStore, signal) {
    if (mayStore && !this.notStored) {
      try {
        if (this.stored === null || Date.parse(this.stored.expires_at) < Date.now()) {
          this.stored = null;
          this.stored = await server.store(this.blob, signal);
        }
        return this.stored.image_id;
      } catch (error) {
        // Another token may store images, and a later picture may fit.
        if (!(error instanceof Failure) || ![403, 404, 429, 507].includes(error.status)) throw error;
        this.notStored = error.message;
      }
    }
    this.#dataUrl ??= await asDataUrl(this.blob);
    return this.#dataUrl;
  }

  close() {
    URL.revokeObjectURL(this.url);
  }
}

/** A picture that the server fetches. The page may not load it, so it is not shown. */
export class RemotePicture {
  blob = null;
  url = null;
  stored = null;
  notStored = "";

  constructor(address) {
    this.address = address;
    this.fileName = new URL(address).pathname.split("/").pop() || "picture";
  }

  async reference() {
    return this.address;
  }

  close() {}
}

/** Offers something as a file to keep. */
export function save(blob, fileName) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = fileName;
  link.click();
  // The browser reads it after this event.
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

/** A canvas as a file. */
export function fileOf(canvas, type, quality) {
  return new Promise((resolve, reject) => {
    const made = (blob) => (blob ? resolve(blob) : reject(unreadable("the picture is too large for this browser")));
    canvas.toBlob(made, type, quality);
  });
}

async function asJpeg(file, fileName) {
  const image = new Image();
  image.src = URL.createObjectURL(file);
  try {
    await image.decode();
  } catch {
    const kind = /\.(heic|heif|avif|jxl|svg)$/i.exec(fileName)?.[1].toUpperCase();
    const what = kind ? `this browser cannot read ${kind} files` : `this browser cannot read “${fileName}” as a picture`;
    throw unreadable(`${what}; save it as JPEG or PNG and choose that`);
  } finally {
    URL.revokeObjectURL(image.src);
  }
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
  const context = canvas.getContext("2d");
  // A JPEG is opaque: what can be seen through is white.
  context.fillStyle = "#fff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(image, 0, 0);
  return fileOf(canvas, "image/jpeg", JPEG_QUALITY);
}

function unreadable(message) {
  return new Failure(0, { code: "FILE_UNREADABLE", message });
}

function asDataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(unreadable("the file cannot be read"));
    reader.readAsDataURL(blob);
  });
}

/** The camera of the machine, shown in a `video` element. */
export class Camera {
  #stream = null;

  constructor(video) {
    this.video = video;
  }

  /** Browsers give the camera only to pages of this machine and to pages over HTTPS. */
  static get isOffered() {
    return Boolean(navigator.mediaDevices?.getUserMedia);
  }

  async open() {
    this.#stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
    this.video.srcObject = this.#stream;
    await this.video.play();
  }

  /** What the camera sees now, as a file. */
  async shoot() {
    const canvas = document.createElement("canvas");
    canvas.width = this.video.videoWidth;
    canvas.height = this.video.videoHeight;
    canvas.getContext("2d").drawImage(this.video, 0, 0);
    return fileOf(canvas, "image/jpeg", JPEG_QUALITY);
  }

  close() {
    for (const track of this.#stream?.getTracks() ?? []) track.stop();
    this.#stream = null;
    this.video.srcObject = null;
  }
}
