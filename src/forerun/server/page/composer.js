// The box in which a message is written, with its files and their tokens.

import { at, el, keep, kept } from "./dom.js";
import { read } from "./files.js";
import { counted } from "./figures.js";
import { fenced } from "./request.js";

/** @import {TextFile} from "./files.js" */

const LONG = 4000; // characters; a longer text is counted, and a longer paste becomes a file
const CALM = 500; // milliseconds without typing before it is counted

/** The box. */
export class Composer {
  /** @type {(TextFile & {tokens?: number, problem?: string})[]} */ files = [];
  #textTokens = 0;
  /** @type {any} */ #timer = 0;

  /**
   * @param {import("./server.js").Server} server
   * @param {{send: (text: string, files: TextFile[]) => void, editLast: () => void, complain: (text: string) => void,
   *   used: () => number}} owner  used: tokens of the conversation before
   */
  constructor(server, owner) {
    this.server = server;
    this.owner = owner;
    this.input = at("input");
    this.input.value = kept("draft");
    this.input.addEventListener("input", () => this.#typed());
    this.input.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => this.#pressed(event));
    this.input.addEventListener("paste", (/** @type {ClipboardEvent} */ event) => this.#pasted(event));
    at("form").addEventListener("submit", (/** @type {Event} */ event) => (event.preventDefault(), this.submit()));
    at("attach").addEventListener("click", () => at("file").click());
    at("file").addEventListener("change", () => (this.add([...at("file").files]), (at("file").value = "")));
    document.addEventListener("dragover", (event) => event.preventDefault());
    document.addEventListener(
      "drop",
      (event) => (event.preventDefault(), this.add([...(event.dataTransfer?.files ?? [])])),
    );
    this.#typed();
  }

  /** Send what is in the box. */
  submit() {
    const text = this.input.value;
    if (at("send").disabled || (!text.trim() && !this.files.length)) return;
    const files = this.files.map(({ name, text }) => ({ name, text }));
    this.give("", []);
    this.owner.send(text, files);
  }

  /** Put a message into the box; what is in it stays after it. @param {string} text @param {TextFile[]} files */
  give(text, files) {
    this.input.value = text;
    this.files = [];
    this.#typed();
    this.#showFiles();
    for (const file of files) this.#attach(file);
  }

  /** Give back a message that was not sent. @param {string} text @param {TextFile[]} files */
  restore(text, files) {
    const own = this.input.value;
    this.give(own ? `${text}\n${own}` : text, [...files, ...this.files]);
  }

  /** Attach files, or say why not. @param {File[]} files */
  async add(files) {
    for (const file of files) {
      try {
        this.#attach(await read(file));
      } catch (error) {
        this.owner.complain(error.message);
      }
    }
  }

  /** @param {TextFile} file */
  async #attach(file) {
    /** @type {TextFile & {tokens?: number, problem?: string}} */ const made = { ...file };
    this.files.push(made);
    this.#showFiles();
    try {
      made.tokens = await this.server.count({ prompt: fenced(file) });
    } catch (error) {
      made.problem = error.message;
    }
    this.#showFiles();
  }

  #showFiles() {
    const chips = this.files.map((file) => {
      const remove = () => (
        (this.files = this.files.filter((each) => each !== file)),
        this.#showFiles(),
        this.input.focus()
      );
      const state = file.problem ?? (file.tokens === undefined ? "counting…" : counted(file.tokens, "token"));
      const close = el("button", { type: "button", "aria-label": `Remove ${file.name}`, onclick: remove }, "×");
      return el(
        "li",
        { class: file.problem ? "chip wrong" : "chip" },
        el("span", {}, `${file.name} · ${state}`),
        close,
      );
    });
    at("files").replaceChildren(...chips);
    this.count();
  }

  #typed() {
    keep("draft", this.input.value.slice(0, 2 ** 20));
    clearTimeout(this.#timer);
    const text = this.input.value;
    this.#textTokens = Math.ceil(text.length / 4);
    if (text.length > LONG) {
      this.#timer = setTimeout(async () => {
        const count = await this.server.count({ prompt: text }).catch(() => this.#textTokens);
        if (text === this.input.value) ((this.#textTokens = count), this.count());
      }, CALM);
    }
    this.count();
  }

  /** Show how much of the context is taken. */
  count() {
    const most = this.server.model?.max_model_len;
    const used = this.owner.used();
    const total = used + this.#textTokens + this.files.reduce((sum, each) => sum + (each.tokens ?? 0), 0);
    const isNear = most && total > most;
    at("count").textContent = most && total ? `about ${total.toLocaleString("en")} of ${counted(most, "token")}` : "";
    at("count").classList.toggle("wrong", Boolean(isNear));
  }

  /** @param {KeyboardEvent} event */
  #pressed(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      this.submit();
    } else if (event.key === "ArrowUp" && !this.input.value) {
      event.preventDefault();
      this.owner.editLast();
    }
  }

  /** @param {ClipboardEvent} event */
  #pasted(event) {
    const files = [...(event.clipboardData?.files ?? [])];
    const text = event.clipboardData?.getData("text/plain") ?? "";
    if (!files.length && text.length <= 5 * LONG) return;
    event.preventDefault();
    if (files.length) this.add(files);
    else this.#attach({ name: `pasted-${this.files.length + 1}.txt`, text });
  }
}
