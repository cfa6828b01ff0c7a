// Calls the server: requests, streams of events, stored images. Every failure becomes a `Failure`.

const TOKEN_KEY = "kestrel-token";

/** A request that failed. `status` is 0 where no server answered; `retryAfterS` is null unless a retry may help. */
export class Failure extends Error {
  constructor(status, { code, message, violations = [], retry_after_seconds = null, request_id = "" }) {
    super(message);
    this.status = status;
    this.code = code;
    this.violations = violations;
    this.retryAfterS = retry_after_seconds;
    this.requestId = request_id;
  }
}

export class Server {
  /** Kept for this tab only. */
  get token() {
    return sessionStorage.getItem(TOKEN_KEY) ?? "";
  }

  set token(value) {
    if (value) sessionStorage.setItem(TOKEN_KEY, value);
    else sessionStorage.removeItem(TOKEN_KEY);
  }

  /** Whether callers need a token. */
  async asksForTokens() {
    return (await json(await this.#fetch("/page/access.json"))).asks_for_tokens;
  }

  /** The model, its skills, and what else the server offers. */
  async describe() {
    return json(await this.#fetch("/page/server.json"));
  }

  /** A picture to try the page with. */
  async example() {
    return (await this.#fetch("/page/example.png")).blob();
  }

  /** Ask for a skill. Calls `onEvent` with each event of a stream. Returns the whole answer. */
  async ask(skill, body, { signal, timeoutS, onEvent }) {
    const headers = { "content-type": "application/json" };
    if (timeoutS) headers["x-request-timeout"] = String(timeoutS);
    const response = await this.#fetch(`/v1/${skill}`, {
      method: "POST",
      headers,
      body: JSON.stringify(body),
      signal,
    });
    if (!body.stream) return json(response);
    for await (const event of events(response)) {
      if (event.error) throw new Failure(event.error.status, event.error);
      if (event.completed) return event;
      onEvent(event);
    }
    throw new Failure(0, { code: "STREAM_ENDED", message: "the stream ended before the answer was complete" });
  }

  /** Store a picture. Returns what the server says about it. */
  async store(blob, signal) {
    const type = blob.type.startsWith("image/") ? blob.type : "application/octet-stream";
    const response = await this.#fetch("/v1/images", {
      method: "PUT",
      headers: { "content-type": type },
      body: blob,
      signal,
    });
    return json(response);
  }

  /** Delete a stored picture. */
  async forget(imageId) {
    await this.#fetch(`/v1/images/${imageId}`, { method: "DELETE" });
  }

  async #fetch(path, options = {}) {
    const headers = { ...options.headers };
    if (this.token) headers.authorization = `Bearer ${this.token}`;
    let response;
    try {
      response = await fetch(path, { ...options, headers, redirect: "error" });
    } catch (error) {
      throw asFailure(error);
    }
    if (response.ok) return response;
    const { error } = await response.json().catch(() => ({}));
    const unknown = { code: `HTTP ${response.status}`, message: "the server refused the request" };
    throw new Failure(response.status, error ?? unknown);
  }
}

/** The body of a response. */
async function json(response) {
  try {
    return await response.json();
  } catch (error) {
    throw asFailure(error);
  }
}

/** The events of a response, as objects. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (part.startsWith("data: ")) yield JSON.parse(part.slice("data: ".length));
      }
    }
  } catch (error) {
    throw asFailure(error);
  }
}

/** What `fetch` throws, unless the caller has aborted the request. */
function asFailure(error) {
  if (error.name === "AbortError") return error;
  return new Failure(0, { code: "SERVER_UNREACHABLE", message: "no server answers, or the connection broke" });
}
