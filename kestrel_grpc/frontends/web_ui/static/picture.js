// The picture that is asked about: where it comes from, and how requests name it.

import { Failure } from "./api.js";

/** An image file. `fileName` is what samples of code call it. */
export class Picture {
  #dataUrl = null;

  constructor(blob, fileName) {
    this.blob = blob;
    this.fileName = fileName;
    this.url = URL.createObjectURL(blob);
    /** What the server tells about it once it is stored there. */
    this.stored = null;
    /** Why the server does not store it; empty if it may. */
    this.notStored = "";
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

function asDataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Failure(0, { code: "FILE", message: "the file cannot be read" }));
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
    return new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", 0.92));
  }

  close() {
    for (const track of this.#stream?.getTracks() ?? []) track.stop();
    this.#stream = null;
    this.video.srcObject = null;
  }
}
