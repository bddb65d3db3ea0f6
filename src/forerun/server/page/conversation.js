// The conversation that is shown, and what is done with its messages.

import { Answer } from "./answers.js";
import { compare } from "./compare.js";
import { at, say, sayingSentences } from "./dom.js";
import { Follow } from "./follow.js";
import { MessageView } from "./message.js";
import { isText } from "./request.js";
import { newConversation } from "./transfer.js";
import { following, lacking, newMessage, path, upTo } from "./tree.js";

/**
 * @import {Conversation, Message, Store} from "./store.js"
 * @import {Server} from "./server.js"
 * @import {Settings} from "./settings.js"
 * @typedef {{conversation: Conversation, messages: Message[]}} Talk
 */

const SHOWN_EVERY = 60; // milliseconds between two looks at an answer that is being written
const KEPT_EVERY = 1500;
const MOST_TITLE = 60;

/**
 * Emits "open" when another conversation is shown, "show" when it is shown anew, "list" when what the list of them says
 * has changed, "begin" when an answer begins, and "failed" (detail: {text, files, error}) with what could not be sent.
 */
export class Conversations extends EventTarget {
  /** @type {Talk} */ talk = { conversation: newConversation(""), messages: [] };
  /** @type {Settings} */ defaults = {};
  isColoured = true;
  /** @type {Map<string, {answer: Answer, talk: Talk}>} */ running = new Map(); // by id of the message
  /** @type {Map<string, {talk: Talk, stop: () => void, said: string}>} */ #comparing = new Map();
  /** @type {Map<string, MessageView>} */ #views = new Map();
  #turn = 0; // counts the conversations that were opened
  #follow = new Follow(at("scroll"), at("to-end"));

  /** @param {Store} store @param {Server} server */
  constructor(store, server) {
    super();
    this.store = store;
    this.server = server;
    store.addEventListener("change", (/** @type {any} */ event) => this.#reload(event.detail));
  }

  /** Settings of the shown conversation, with the person's defaults. @returns {Settings} */
  get settings() {
    return { ...this.defaults, ...this.talk.conversation.settings };
  }

  /** What is written or compared in the shown conversation. @returns {{stop: () => void}[]} */
  get #busy() {
    const isShown = (/** @type {{talk: Talk}} */ { talk }) => talk === this.talk;
    const written = [...this.running.values()].filter(isShown).map(({ answer }) => answer);
    return [...written, ...[...this.#comparing.values()].filter(isShown)];
  }

  get isBusy() {
    return this.#busy.length > 0;
  }

  /** Show a conversation; null: a new one. @param {string | null} id */
  async open(id) {
    const turn = ++this.#turn;
    const isBusy = [...this.running.values(), ...this.#comparing.values()].find(
      (each) => each.talk.conversation.id === id,
    );
    const talk = isBusy?.talk ?? (await this.#read(id));
    if (turn !== this.#turn) return; // another one was opened meanwhile
    this.talk = talk;
    for (const view of this.#views.values()) view.close();
    this.#views.clear();
    this.show();
    this.#follow.toEnd();
    this.dispatchEvent(new Event("open"));
  }

  /** @param {string | null} id @returns {Promise<Talk>} */
  async #read(id) {
    const conversation = id && (await this.store.conversations.get(id));
    if (!id || !conversation || conversation.deleted) return { conversation: newConversation(""), messages: [] };
    return { conversation, messages: await this.store.messages.of(id) };
  }

  /** @param {string} id  of a conversation in which another tab wrote; "": it wrote the defaults */
  async #reload(id) {
    if (!id) this.defaults = (await this.store.kept.get("defaults")).settings;
    this.dispatchEvent(new Event("list"));
    const { talk } = this;
    if (id !== talk.conversation.id) return;
    const [conversation, messages] = await Promise.all([this.store.conversations.get(id), this.store.messages.of(id)]);
    if (!conversation || conversation.deleted) return talk === this.talk && this.open(null);
    Object.assign(talk.conversation, conversation);
    const own = new Map(talk.messages.map((each) => [each.id, each]));
    talk.messages = messages.map((each) => {
      const old = own.get(each.id);
      return old && !this.running.has(each.id) ? Object.assign(old, each) : (old ?? each);
    });
    if (talk === this.talk) this.show();
  }

  /** Show the messages as they are now. */
  show() {
    const shown = path(this.talk.messages, this.talk.conversation.chosen);
    const views = shown.map((message) => {
      const view = this.#views.get(message.id) ?? new MessageView(message, this);
      this.#views.set(message.id, view);
      view.show(this.#state(message, shown));
      return view;
    });
    const elements = views.map((each) => each.element);
    const place = at("messages");
    for (const old of [...place.children]) if (!elements.includes(old)) this.#forget(old);
    elements.forEach(
      (each, index) => place.children[index] !== each && place.insertBefore(each, place.children[index]),
    );
    at("greeting").hidden = shown.length > 0;
    this.#follow.grown();
    this.dispatchEvent(new Event("show"));
  }

  /** @param {Element} element */
  #forget(element) {
    const id = element.getAttribute("data-id") ?? "";
    this.#views.get(id)?.close();
    this.#views.delete(id);
    element.remove();
  }

  /** @param {Message} message @param {Message[]} shown @returns {import("./message.js").State} */
  #state(message, shown) {
    const { server, settings } = this;
    return {
      answer: this.running.get(message.id)?.answer,
      comparing: this.#comparing.get(message.id)?.said ?? "",
      siblings: following(this.talk.messages, message.parent),
      isText: Boolean(server.model) && isText(server, settings),
      canCompare: Boolean(server.model?.drafters.length),
      isColoured: this.isColoured,
      isElsewhere: !message.end && Date.now() - (message.kept ?? 0) < 3 * KEPT_EVERY,
      lacking: lacking(shown, message),
    };
  }

  /** Send a message after the shown ones. @param {string} text @param {import("./files.js").TextFile[]} files */
  async send(text, files) {
    const { talk } = this;
    const parent = path(talk.messages, talk.conversation.chosen).at(-1)?.id ?? "";
    await this.#ask(
      talk,
      newMessage(talk.conversation, parent, "user", { content: text, ...(files.length ? { files } : {}) }),
    );
  }

  /** Add a message, and let it be answered. @param {Talk} talk @param {Message} message */
  async #ask(talk, message) {
    const { conversation } = talk;
    const isNew = !talk.messages.length;
    if (isNew) {
      conversation.title = (message.content.trim() || (message.files?.[0].name ?? ""))
        .split("\n")[0]
        .slice(0, MOST_TITLE);
    }
    this.#add(talk, message);
    const answer = newMessage(conversation, message.id, "assistant", { created: message.created + 1 });
    this.#add(talk, answer);
    const writing = this.#write(talk, answer, upTo(talk.messages, message.id)); // shows it before it is kept
    if (isNew && talk === this.talk) this.dispatchEvent(new Event("open"));
    await this.store.change(conversation.id, { ...conversation, updated: Date.now() });
    await this.store.keep(message);
    this.dispatchEvent(new Event("list"));
    const failure = await writing;
    if (!failure || answer.figures) return;
    for (const each of [answer, message]) this.#remove(talk, each);
    const text = message.role === "user" ? message.content : "";
    this.dispatchEvent(new CustomEvent("failed", { detail: { text, files: message.files ?? [], error: failure } }));
    if (isNew) await this.store.remove(conversation.id);
    this.show();
    this.dispatchEvent(new Event("list"));
  }

  /** @param {Talk} talk @param {Message} message */
  #add({ messages, conversation }, message) {
    messages.push(message);
    conversation.chosen[message.parent] = message.id;
    this.#follow.toEnd();
  }

  /** @param {Talk} talk @param {Message} message */
  #remove(talk, message) {
    talk.messages = talk.messages.filter((each) => each !== message);
    delete talk.conversation.chosen[message.parent];
    this.store.drop(message);
  }

  /** Write an answer, show and keep it as it grows. @param {Talk} talk @param {Message} message @param {Message[]} asked */
  async #write(talk, message, asked) {
    const answer = new Answer(message);
    const settings = { ...this.defaults, ...talk.conversation.settings };
    const speak = sayingSentences();
    this.running.set(message.id, { answer, talk });
    this.dispatchEvent(new Event("begin"));
    if (talk === this.talk) this.show();
    this.dispatchEvent(new Event("list"));
    const keep = () => this.store.keep(Object.assign(message, { kept: Date.now() }));
    const keeping = setInterval(keep, KEPT_EVERY);
    keep();
    let isDue = true;
    const failure = await answer.write(this.server, settings, asked, () => {
      if (!isDue || document.hidden) return;
      isDue = false;
      setTimeout(() => {
        isDue = true;
        if (talk !== this.talk || !this.running.has(message.id)) return;
        this.#grow(message);
        speak(message.content, false);
      }, SHOWN_EVERY);
    });
    clearInterval(keeping);
    delete message.kept;
    this.running.delete(message.id);
    if (talk === this.talk) {
      speak(message.content, true);
      this.show();
    }
    if (message.figures || !failure) await this.store.keep(message);
    this.dispatchEvent(new Event("list"));
    return failure;
  }

  /** @param {Message} message */
  #grow(message) {
    const shown = path(this.talk.messages, this.talk.conversation.chosen);
    this.#views.get(message.id)?.show(this.#state(message, shown));
    this.#follow.grown();
  }

  /** Stop what is written, or compared, in the shown conversation. */
  stop() {
    for (const each of this.#busy) each.stop();
  }

  // What can be done with a message (`Actions` in message.js)

  /** @param {Message} message @param {string} text */
  edit(message, text) {
    const { talk } = this;
    const more = message.role === "assistant" ? { end: "stop" } : { files: message.files, call: message.call };
    const made = newMessage(talk.conversation, message.parent, message.role, { ...more, content: text });
    if (message.role !== "assistant") return this.#give(talk, made);
    this.#put(talk, made);
  }

  /** Add a message that nothing answers. @param {Talk} talk @param {Message} made */
  #put(talk, made) {
    this.#add(talk, made);
    this.store.keep(made);
    this.store.change(talk.conversation.id, { chosen: talk.conversation.chosen });
    this.show();
  }

  /** @param {Message} message */
  async again(message) {
    const { talk } = this;
    const made = newMessage(talk.conversation, message.parent, "assistant");
    this.#add(talk, made);
    this.store.change(talk.conversation.id, { chosen: talk.conversation.chosen });
    const failure = await this.#write(talk, made, upTo(talk.messages, message.parent));
    if (failure && !made.figures) this.#undo(talk, made, message, failure);
  }

  /** @param {Talk} talk @param {Message} made @param {Message} before @param {Error} failure */
  #undo(talk, made, before, failure) {
    this.#remove(talk, made);
    talk.conversation.chosen[before.parent] = before.id;
    this.show();
    this.dispatchEvent(new CustomEvent("failed", { detail: { text: "", files: [], error: failure } }));
  }

  /** @param {Message} message */
  async go(message) {
    const { talk } = this;
    const failure = await this.#write(talk, message, upTo(talk.messages, message.id));
    if (failure) this.dispatchEvent(new CustomEvent("failed", { detail: { text: "", files: [], error: failure } }));
  }

  /** @param {Message} message @param {number} step */
  turn(message, step) {
    const { talk } = this;
    const siblings = following(talk.messages, message.parent);
    const other = siblings[siblings.indexOf(message) + step];
    if (!other) return;
    talk.conversation.chosen[message.parent] = other.id;
    this.store.change(talk.conversation.id, { chosen: talk.conversation.chosen });
    this.show();
  }

  /** @param {Message} message @param {any} call @param {string} text */
  result(message, call, text) {
    const { talk } = this;
    const last = path(talk.messages, talk.conversation.chosen).at(-1);
    this.#give(talk, newMessage(talk.conversation, last?.id ?? message.id, "tool", { content: text, call: call.id }));
  }

  /** Add a message, and let it be answered where it is no result beside which others are lacking.
   * @param {Talk} talk @param {Message} made */
  #give(talk, made) {
    const before = upTo(talk.messages, made.parent);
    const answer = before.findLast((each) => each.role === "assistant");
    const isLast = made.role !== "tool" || !answer || lacking(before, answer).every((id) => id === made.call);
    if (isLast) this.#ask(talk, made);
    else this.#put(talk, made);
  }

  /** @param {Message} message */
  async compare(message) {
    const { talk } = this;
    let current = /** @type {Answer | null} */ (null);
    const state = { talk, stop: () => current?.stop(), said: "comparing…" };
    this.#comparing.set(message.id, state);
    this.show();
    try {
      const asked = upTo(talk.messages, message.parent);
      const settings = { ...this.defaults, ...talk.conversation.settings };
      const found = await compare(this.server, settings, talk.conversation, asked, (answer, way) => {
        current = answer;
        const said = `comparing: ${way}, ${answer.figures.tokens} tokens`;
        if (said === state.said) return;
        state.said = said;
        if (talk === this.talk) this.#grow(message);
      });
      if (found) message.comparison = found;
      if (found) await this.store.keep(message);
    } catch (error) {
      this.dispatchEvent(new CustomEvent("failed", { detail: { text: "", files: [], error } }));
    }
    this.#comparing.delete(message.id);
    if (talk === this.talk) this.show();
    if (message.comparison) say("The comparison is there.");
  }

  /** Keep settings of the shown conversation. @param {Settings} settings */
  async set(settings) {
    const { conversation, messages } = this.talk;
    conversation.settings = settings;
    if (messages.length) await this.store.change(conversation.id, { settings });
    this.show();
  }
}
