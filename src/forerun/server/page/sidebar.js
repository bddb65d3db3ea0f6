// The list of conversations: search, rename, delete with undo, export and import.

import { at, download, el, notice } from "./dom.js";
import { UNDONE_FOR } from "./store.js";
import { parse, toJSON, toMarkdown } from "./transfer.js";

/** @import {Conversations} from "./conversation.js" */

/** The list. */
export class Sidebar {
  /** @type {any} */ #timer = 0;

  /** @param {Conversations} conversations @param {(text: string) => void} complain */
  constructor(conversations, complain) {
    this.conversations = conversations;
    this.store = conversations.store;
    this.complain = complain;
    for (const name of ["list", "open"]) conversations.addEventListener(name, () => this.#soon());
    at("search").addEventListener("input", () => this.#soon());
    at("import").addEventListener("click", () => at("import-file").click());
    at("import-file").addEventListener("change", () => this.#import([...at("import-file").files]));
    at("export-all").addEventListener("click", () => this.#exportAll());
    at("rename").addEventListener("click", () => this.rename());
    at("delete").addEventListener("click", () => this.#delete());
    at("export-json").addEventListener("click", () => this.#export("json"));
    at("export-markdown").addEventListener("click", () => this.#export("md"));
  }

  #soon() {
    this.#timer ||= setTimeout(() => ((this.#timer = 0), this.show()), 100);
  }

  /** Show the list. */
  async show() {
    const wanted = at("search").value.trim();
    const [all, found] = await Promise.all([this.store.list(), wanted ? this.store.find(wanted) : null]);
    const shown = found ? all.filter((each) => found.has(each.id)) : all;
    const current = this.conversations.talk.conversation.id;
    const writing = new Set([...this.conversations.running.values()].map((each) => each.talk.conversation.id));
    const items = shown.map(({ id, title }) => {
      const link = el("a", { href: `#${id}`, "aria-current": id === current && "page" }, title || "Untitled");
      return el("li", {}, link, ...(writing.has(id) ? [el("span", { class: "state" }, "writing…")] : []));
    });
    at("list").replaceChildren(...items);
    at("nothing").hidden = items.length > 0;
    at("nothing").textContent = wanted ? "Nothing is found." : "Conversations are kept here, in this browser alone.";
  }

  /** Let the person give the shown conversation another title. */
  rename() {
    const { conversation, messages } = this.conversations.talk;
    if (!messages.length) return;
    const input = el("input", { "aria-label": "Title", value: conversation.title, maxlength: 200 });
    let isDone = false;
    const done = (/** @type {boolean} */ isKept) => {
      if (isDone) return;
      isDone = true;
      if (isKept && input.value.trim()) conversation.title = input.value.trim();
      if (isKept) this.store.change(conversation.id, { title: conversation.title });
      at("title").replaceChildren(conversation.title);
      this.#soon();
    };
    input.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
      if (event.key === "Escape") event.stopPropagation();
      if (event.key === "Enter" || event.key === "Escape") (done(event.key === "Enter"), at("input").focus());
    });
    input.addEventListener("blur", () => done(true));
    at("title").replaceChildren(input);
    input.select();
  }

  async #delete() {
    const { conversation, messages } = this.conversations.talk;
    const { id, title } = conversation;
    if (!messages.length) return;
    this.conversations.stop();
    await this.store.change(id, { deleted: Date.now() });
    location.hash = "";
    const forget = setTimeout(() => this.store.remove(id), UNDONE_FOR + 1000);
    const undo = async () => {
      clearTimeout(forget);
      await this.store.change(id, { deleted: 0 });
      location.hash = id;
    };
    notice(`Deleted: ${title}`, { label: "Undo", run: undo, seconds: UNDONE_FOR / 1000 });
  }

  /** @param {"json" | "md"} kind */
  #export(kind) {
    const { conversation, messages } = this.conversations.talk;
    const name = conversation.title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40) || "conversation";
    if (kind === "md") download(`${name}.md`, toMarkdown(conversation, messages), "text/markdown");
    else download(`${name}.json`, toJSON([{ conversation, messages }]), "application/json");
  }

  async #exportAll() {
    const all = await this.store.list();
    const whole = all.map(async (conversation) => ({
      conversation,
      messages: await this.store.messages.of(conversation.id),
    }));
    download("conversations.json", toJSON(await Promise.all(whole)), "application/json");
  }

  /** @param {File[]} files */
  async #import(files) {
    at("import-file").value = "";
    for (const file of files) {
      try {
        const all = parse(await file.text());
        for (const { conversation, messages } of all) {
          await this.store.change(conversation.id, conversation);
          for (const message of messages) await this.store.keep(message);
        }
        if (all.length) location.hash = all[0].conversation.id;
        notice(`Imported: ${all.length} from ${file.name}`);
      } catch (error) {
        this.complain(`${file.name}: ${error.message}`);
      }
    }
    this.#soon();
  }
}
