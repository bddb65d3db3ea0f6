// Conversations as files: JSON has all of them, Markdown what is shown of one.

import { newMessage, path } from "./tree.js";

/** @import {Conversation, Message} from "./store.js" */

const FORMAT = "forerun-conversations";
const VERSION = 1;
const MARK = /^<!-- (user|assistant|tool) -->$/m;
const ROLES = ["user", "assistant", "tool"];

/** Return conversations as JSON. @param {{conversation: Conversation, messages: Message[]}[]} all */
export const toJSON = (all) => JSON.stringify({ format: FORMAT, version: VERSION, conversations: all }, null, 1);

/** Return the shown messages as Markdown, which `parse` reads. @param {Conversation} conversation
 * @param {Message[]} messages */
export function toMarkdown(conversation, messages) {
  const guarded = (/** @type {string} */ text) => text.replace(/^(\\*<!-- (?:user|assistant|tool) -->)$/gm, "\\$1");
  const system = conversation.settings.system ? `<!-- system\n${conversation.settings.system}\n-->\n\n` : "";
  const parts = path(messages, conversation.chosen).map((each) => {
    const files = (each.files ?? []).map((file) => `\n\n<!-- file ${file.name} -->\n\n${file.text}`).join("");
    return `<!-- ${each.role} -->\n\n${guarded(each.content + files)}`;
  });
  return `# ${conversation.title}\n\n${system}${parts.join("\n\n")}\n\n`;
}

/** @param {string} title @param {Partial<Conversation>} [more] @returns {Conversation} */
export function newConversation(title, more = {}) {
  const id = crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`;
  return { title, settings: {}, chosen: {}, created: Date.now(), updated: Date.now(), ...more, id };
}

/**
 * Read a file of conversations, which get ids of their own, so that nothing is overwritten.
 * @param {string} text
 * @returns {{conversation: Conversation, messages: Message[]}[]} Throws Error with a sentence
 */
export function parse(text) {
  if (!text.trimStart().startsWith("{")) return [fromMarkdown(text)];
  let given;
  try {
    given = JSON.parse(text);
  } catch (error) {
    throw new Error(`The file is damaged: ${error.message}. Nothing was imported.`);
  }
  if (given.format !== FORMAT) throw new Error("The file holds no conversations of this page. Nothing was imported.");
  if (given.version !== VERSION) {
    throw new Error(`The file is of version ${given.version}, and this page reads ${VERSION}. Nothing was imported.`);
  }
  if (!Array.isArray(given.conversations)) throw new Error("The file is damaged: it has no list of conversations.");
  return given.conversations.map(renamed);
}

/** @param {any} given @param {number} place @returns {{conversation: Conversation, messages: Message[]}} */
function renamed(given, place) {
  const { conversation, messages } = given ?? {};
  const isMessage = (/** @type {any} */ each) =>
    typeof each?.content === "string" &&
    typeof each.id === "string" &&
    typeof each.parent === "string" &&
    ROLES.includes(each.role);
  if (typeof conversation?.title !== "string" || !Array.isArray(messages) || !messages.every(isMessage)) {
    throw new Error(`The file is damaged: conversation ${place + 1} is not complete. Nothing was imported.`);
  }
  const made = newConversation(conversation.title, { settings: conversation.settings ?? {} });
  const ids = new Map([["", ""]]);
  for (const each of messages) ids.set(each.id, newMessage(made, "", each.role).id);
  const named = (/** @type {string} */ id) => ids.get(id) ?? "";
  for (const [id, child] of Object.entries(conversation.chosen ?? {})) made.chosen[named(id)] = named(child);
  const own = (/** @type {Message} */ each) => ({
    id: named(each.id),
    parent: named(each.parent),
    conversation: made.id,
  });
  return { conversation: made, messages: messages.map((each) => ({ ...each, ...own(each) })) };
}

/** @param {string} text @returns {{conversation: Conversation, messages: Message[]}} */
function fromMarkdown(text) {
  const [head, ...parts] = text.split(MARK);
  if (!parts.length)
    throw new Error("The file has no lines like <!-- user -->, with which this page exports Markdown.");
  const conversation = newConversation(/^# (.*)$/m.exec(head)?.[1] ?? "Imported");
  const system = /<!-- system\n([^]*?)\n-->/.exec(head)?.[1];
  if (system) conversation.settings.system = system;
  /** @type {Message[]} */ const messages = [];
  for (let place = 0; place < parts.length; place += 2) {
    const whole = parts[place + 1].replace(/^\n\n|\n\n$/g, ""); // what is between two marks
    const content = whole.replace(/^\\(\\*<!-- (?:user|assistant|tool) -->)$/gm, "$1");
    const role = /** @type {Message["role"]} */ (parts[place]);
    const more = { content, created: Date.now() + place, ...(role === "assistant" ? { end: "stop" } : {}) };
    messages.push(newMessage(conversation, messages.at(-1)?.id ?? "", role, more));
  }
  return { conversation, messages };
}
