// Conversations as files: JSON has all of them, Markdown what is shown of one.

import { newMessage, path } from "./tree.js";

/** @import {Conversation, Message} from "./store.js" */

const FORMAT = "forerun-conversations";
const VERSION = 1;
const MARK = /^<!-- (user|assistant|tool) -->$/m;
const ROLES = ["user", "assistant", "tool"];

// What a file may hold: each a function that tells whether a value is that
/** @typedef {(value: any) => boolean} Check */
const isString = (/** @type {any} */ value) => typeof value === "string";
const isNumber = (/** @type {any} */ value) => typeof value === "number";
const isObject = (/** @type {any} */ value) => value !== null && typeof value === "object" && !Array.isArray(value);
/** @param {Check} check @returns {Check} */
const maybe = (check) => (value) => value === undefined || check(value);
/** @param {Check} check @returns {Check} */
const listOf = (check) => (value) => Array.isArray(value) && value.every(check);
/** @param {Check} check @returns {Check} */
const tableOf = (check) => (value) => isObject(value) && Object.values(value).every(check);
/** @param {Record<string, Check>} fields @returns {Check} */
const withFields = (fields) => (value) =>
  isObject(value) && Object.entries(fields).every(([name, check]) => check(value[name]));

const isSource = withFields({ num_draft_tokens: isNumber, num_accepted_tokens: isNumber });
const isDecoding = withFields({ sources: tableOf(isSource), decisions: tableOf(isNumber) });
const isFigures = withFields({
  first: maybe(isNumber),
  seconds: isNumber,
  tokens: isNumber,
  prompt: maybe(isNumber),
  cached: maybe(isNumber),
  decoding: (value) => value === null || maybe(isDecoding)(value), // null: of a server that tells none
});
const isCall = withFields({ id: isString, function: withFields({ name: isString, arguments: isString }) });
const isPiece = (/** @type {any} */ value) =>
  Array.isArray(value) && isString(value[0]) && (value[1] === null || isString(value[1]));
const isConversation = withFields({
  title: isString,
  settings: maybe(tableOf((value) => isString(value) || isNumber(value))),
  chosen: maybe(tableOf(isString)),
});
const isMessage = withFields({
  id: isString,
  parent: isString,
  role: (value) => ROLES.includes(value),
  content: isString,
  created: maybe(isNumber),
  files: maybe(listOf(withFields({ name: isString, text: isString }))),
  thinking: maybe(isString),
  thought: maybe(isNumber),
  calls: maybe(listOf(isCall)),
  call: maybe(isString),
  end: maybe(isString),
  error: maybe(isString),
  drafts: maybe(listOf(isPiece)),
  figures: maybe(isFigures),
  comparison: maybe(withFields({ plain: isNumber, speculative: isNumber, tokens: isNumber })),
});

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
  const isWhole = isConversation(conversation) && listOf(isMessage)(messages);
  if (!isWhole || new Set(messages.map((/** @type {Message} */ each) => each.id)).size < messages.length) {
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
