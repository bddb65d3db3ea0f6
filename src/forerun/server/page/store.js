// Conversations, kept by the browser in IndexedDB; where that is forbidden, in memory.
//
// Messages are records of their own, so that two tabs that write in one conversation add to it, and neither overwrites
// what the other has added. Each write is told to the other tabs.

/**
 * @typedef {object} Conversation
 * @property {string} id
 * @property {string} title
 * @property {number} created  milliseconds since 1970
 * @property {number} updated
 * @property {import("./settings.js").Settings} settings  what differs from the person's defaults
 * @property {Record<string, string>} chosen  id of a message ("" for none) -> id of the shown one of those after it
 * @property {number} [deleted]  milliseconds since 1970; it may still be undone for UNDONE_FOR. 0: it is not
 *
 * @typedef {object} Message
 * @property {string} id
 * @property {string} conversation  its id
 * @property {string} parent  id of the message before, "" for none
 * @property {"user" | "assistant" | "tool"} role
 * @property {string} content
 * @property {number} created
 * @property {{name: string, text: string}[]} [files]
 * @property {string} [thinking]
 * @property {number} [thought]  seconds
 * @property {any[]} [calls]  of tools, in OpenAI's form
 * @property {string} [call]  of a tool's result: the id of the call
 * @property {number} [kept]  when it was last kept while it was being written
 * @property {string} [end]  why an answer ended: stop, length, tool_calls, stopped or error; without, it has not
 * @property {string} [error]
 * @property {[string, string | null][]} [drafts]  pieces of the answer, each with the drafter that proposed it
 * @property {import("./figures.js").Figures} [figures]
 * @property {import("./compare.js").Comparison} [comparison]
 */

const NAME = "forerun";
export const UNDONE_FOR = 10_000; // milliseconds
const TABLES = { conversations: undefined, messages: "conversation", kept: undefined };

/** @param {IDBRequest} request @returns {Promise<any>} */
const result = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

/** @returns {Promise<IDBDatabase>} */
function open() {
  const request = indexedDB.open(NAME, 1);
  request.onupgradeneeded = () => {
    for (const [name, index] of Object.entries(TABLES)) {
      const table = request.result.createObjectStore(name, { keyPath: "id" });
      if (index) table.createIndex(index, index);
    }
  };
  return result(request);
}

/** Return whether changes make a record, where there was none or another tab removed it. @param {any} changes */
const isWhole = (changes) => "created" in changes;

/** A table of the database. */
class Table {
  /** @param {IDBDatabase} database @param {string} name */
  constructor(database, name) {
    this.begin = (/** @type {IDBTransactionMode} */ mode) => database.transaction(name, mode).objectStore(name);
  }
  all = () => result(this.begin("readonly").getAll());
  get = (/** @type {string} */ id) => result(this.begin("readonly").get(id));
  of = (/** @type {string} */ conversation) =>
    result(this.begin("readonly").index("conversation").getAll(conversation));
  put = (/** @type {any} */ value) => this.#write((table) => table.put(value));
  delete = (/** @type {string} */ id) => this.#write((table) => table.delete(id));
  update = (/** @type {string} */ id, /** @type {any} */ changes) =>
    this.#write(async (table) => {
      const old = await result(table.get(id));
      if (old || isWhole(changes)) table.put({ ...old, ...changes, id });
    });

  /** Write in one transaction, so that no tab writes between, until it is kept: a full storage ends the transaction, not
   * the request. @param {(table: IDBObjectStore) => any} work */
  async #write(work) {
    const table = this.begin("readwrite");
    const { transaction } = table;
    const ended = new Promise((resolve, reject) => {
      transaction.oncomplete = resolve;
      transaction.onabort = () => reject(transaction.error);
    });
    await Promise.all([ended, work(table)]);
  }
}

/** The same in memory. */
class MemoryTable {
  values = new Map();
  all = async () => structuredClone([...this.values.values()]);
  get = async (/** @type {string} */ id) => structuredClone(this.values.get(id));
  of = async (/** @type {string} */ id) => (await this.all()).filter((each) => each.conversation === id);
  put = async (/** @type {any} */ value) => void this.values.set(value.id, structuredClone(value));
  delete = async (/** @type {string} */ id) => void this.values.delete(id);
  update = async (/** @type {string} */ id, /** @type {any} */ changes) => {
    const old = this.values.get(id);
    if (old || isWhole(changes)) await this.put({ ...old, ...changes, id });
  };
}

/** Emits "change" (detail: the conversation's id) when another tab wrote, and "problem" (detail: a sentence). */
export class Store extends EventTarget {
  /** @type {any} */ conversations = new MemoryTable();
  /** @type {any} */ messages = new MemoryTable();
  /** @type {any} */ kept = new MemoryTable();
  #channel = new BroadcastChannel(NAME);
  #isFull = false;

  /** Open the database. */
  async open() {
    this.#channel.onmessage = (event) => this.dispatchEvent(new CustomEvent("change", { detail: event.data }));
    try {
      const database = await open();
      database.onversionchange = () => database.close(); // a newer page in another tab
      for (const name of Object.keys(TABLES)) this[name] = new Table(database, name);
    } catch (error) {
      this.#tell(`This browser keeps nothing here (${error.message}). Conversations end with the page: export them.`);
    }
    const isGone = (/** @type {Conversation} */ { deleted }) => deleted && Date.now() - deleted > UNDONE_FOR;
    for (const each of (await this.conversations.all()).filter(isGone)) await this.remove(each.id);
  }

  /** Return all conversations, last used first. @returns {Promise<Conversation[]>} */
  async list() {
    const all = await this.conversations.all();
    return all.filter((each) => !each.deleted).sort((one, other) => other.updated - one.updated);
  }

  /** Keep some fields of a conversation. @param {string} id @param {Partial<Conversation>} changes */
  change = (id, changes) => this.#write(id, () => this.conversations.update(id, changes));

  /** Keep a message as it is now. @param {Message} message */
  keep = (message) => this.#write(message.conversation, () => this.messages.put(message));

  /** Keep the person's defaults. @param {import("./settings.js").Settings} settings */
  keepDefaults = (settings) => this.#write("", () => this.kept.put({ id: "defaults", settings }));

  /** Forget a message. @param {Message} message */
  drop = (message) => this.#write(message.conversation, () => this.messages.delete(message.id));

  /** Forget a conversation for good. @param {string} id */
  remove = (id) =>
    this.#write(id, async () => {
      for (const each of await this.messages.of(id)) await this.messages.delete(each.id);
      await this.conversations.delete(id);
    });

  /** Return the ids of the conversations in which a text occurs. @param {string} text @returns {Promise<Set<string>>} */
  async find(text) {
    const wanted = text.toLowerCase();
    const has = (/** @type {string} */ found) => found.toLowerCase().includes(wanted);
    const titled = (await this.conversations.all()).filter((each) => has(each.title));
    const said = (await this.messages.all()).filter((each) => has(each.content));
    return new Set([...titled.map((each) => each.id), ...said.map((each) => each.conversation)]);
  }

  /** @param {string} conversation  "": none @param {() => Promise<void>} work */
  async #write(conversation, work) {
    try {
      await work();
      this.#isFull = false;
      this.#channel.postMessage(conversation);
    } catch (error) {
      if (this.#isFull) return; // said once
      this.#isFull = true;
      const reason = error.name === "QuotaExceededError" ? "its storage is full" : error.message;
      this.#tell(`The browser could not keep this: ${reason}. Export what you need, and delete old conversations.`);
    }
  }

  /** @param {string} detail */
  #tell(detail) {
    this.dispatchEvent(new CustomEvent("problem", { detail }));
  }
}
