// The server: what it is, whether it is there, its key, and streams of events.

import { kept } from "./dom.js";

/** An answer of the server that is an error. */
export class ServerError extends Error {
  /** @param {string} message  with reason and remedy @param {number} status  of HTTP; 0: the server was not reached */
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

const GONE = "The server does not answer. It may have ended: start it again, and this page finds it by itself.";
const EVERY = 10_000; // milliseconds between two looks whether it is there

/**
 * Emits "change" when it was reached, lost or restarted.
 * @typedef {{computed: number, prompt: number, waiting: number}} Progress  tokens, tokens, requests
 */
export class Server extends EventTarget {
  /** @type {any} */ model = null; // of /v1/models
  /** @type {Record<string, string>} */ cannot = {}; // what it does not support -> why
  /** @type {string} */ template = "";
  version = "";
  problem = "connecting"; // empty while it is there
  /** Asks the person for the key; null: they gave none. @type {(reason: string) => Promise<string | null>} */
  askForKey = async () => null;
  /** @type {Promise<string | null> | null} */ #asking = null;
  #mayAsk = true; // not after the person gave none, until they do something that needs it

  /** Send a request, asking for a key where one is missing. Throws ServerError, or AbortError.
   * @param {string} path @param {any} [body] @param {AbortSignal} [signal] @returns {Promise<Response>} */
  async fetch(path, body, signal) {
    for (let hasAsked = false; ; hasAsked = true) {
      const key = kept("key");
      const headers = { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
      const sent = { headers, signal, ...(body ? { method: "POST", body: JSON.stringify(body) } : {}) };
      const response = await fetch(path, sent).catch((error) => {
        if (error.name === "AbortError") throw error;
        this.#lost(GONE);
        throw new ServerError(GONE, 0);
      });
      if (response.ok) return response;
      const error = await response.json().then(
        (told) => told.error,
        () => null,
      );
      const message = error?.message ?? `The server answered with ${response.status}, and no reason.`;
      if (response.status === 401 && !hasAsked && this.#mayAsk) {
        this.#asking ??= this.askForKey(key ? message : "").finally(() => (this.#asking = null));
        this.#mayAsk = (await this.#asking) !== null;
        if (this.#mayAsk) continue;
      }
      const isRefused = response.status === 401 && !this.#mayAsk;
      const remedy = isRefused ? " The button with the server's state, above, asks for it again." : "";
      throw new ServerError(message + remedy, response.status);
    }
  }

  /** Return the JSON of an answer. @param {string} path @param {any} [body] @param {AbortSignal} [signal]
   * @returns {Promise<any>} */
  json = async (path, body, signal) => (await this.fetch(path, body, signal)).json();

  /** Count the tokens of a text or chat. @param {object} of  a body of /tokenize @returns {Promise<number>} */
  count = async (of) => (await this.json("/tokenize", of)).count;

  /** Learn what it serves, and look from now on whether it is there. */
  async connect() {
    setInterval(() => document.hidden || this.look(), EVERY);
    addEventListener("focus", () => this.look());
    await this.look();
  }

  /** Look whether it is there. @param {boolean} [isWanted]  by the person, who may be asked for the key */
  async look(isWanted = false) {
    this.#mayAsk ||= isWanted;
    try {
      const health = await fetch("/health").then((response) => response.json());
      if (health.status !== "ok") return this.#lost(health.reason ?? "The server is shutting down.");
      if (!this.problem) return;
      this.cannot = health.cannot;
      const [models, version, tokenizer] = await Promise.all(
        ["/v1/models", "/version", "/tokenizer_info"].map((path) => this.json(path)),
      );
      if (this.version && this.version !== version.version) this.dispatchEvent(new Event("update"));
      this.version = version.version;
      this.model = models.data[0];
      this.template = String(tokenizer.chat_template ?? "");
      this.problem = "";
      this.dispatchEvent(new Event("change"));
    } catch (error) {
      this.#lost(error instanceof ServerError ? error.message : GONE);
    }
  }

  /** @param {string} problem */
  #lost(problem) {
    if (this.problem === problem) return; // told once
    this.problem = problem;
    this.dispatchEvent(new Event("change"));
  }

  /**
   * Yield the events of a stream, and its progress while the prompt is computed. Throws ServerError, or AbortError.
   * @param {string} path @param {any} body @param {AbortSignal} signal
   * @returns {AsyncGenerator<{progress?: Progress, chunk?: any}>}
   */
  async *stream(path, body, signal) {
    this.#mayAsk = true;
    const response = await this.fetch(path, body, signal);
    try {
      for await (const event of parsed(/** @type {any} */ (response.body))) {
        if (event.chunk?.error) throw new ServerError(event.chunk.error.message, 200);
        if (event.isEnd) return;
        yield event;
      }
    } catch (error) {
      if (error instanceof ServerError || error.name === "AbortError") throw error;
    }
    if (signal.aborted) throw new DOMException("", "AbortError");
    this.look();
    throw new ServerError("The connection ended before the answer was complete.", 0);
  }
}

/** Parse server-sent events. @param {ReadableStream<Uint8Array>} stream
 * @returns {AsyncGenerator<{progress?: Progress, chunk?: any, isEnd?: boolean}>} */
async function* parsed(stream) {
  const reader = stream.pipeThrough(/** @type {any} */ (new TextDecoderStream())).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = value.split("\n");
    lines[0] = rest + lines[0]; // only what is new is looked through, however long a line is
    rest = lines.pop() ?? "";
    for (const line of lines) {
      if (line === "data: [DONE]") yield { isEnd: true };
      else if (line.startsWith("data: ")) yield { chunk: JSON.parse(line.slice(6)) };
      else if (line.startsWith(": progress ")) yield { progress: JSON.parse(line.slice(11)) };
    }
  }
}
