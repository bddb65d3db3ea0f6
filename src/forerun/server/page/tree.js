// A conversation's messages are a tree: what was edited or answered again stays beside its successor.

/** @import {Conversation, Message} from "./store.js" */

/** Return the messages that follow another one, oldest first. @param {Message[]} messages @param {string} parent
 * @returns {Message[]} */
export const following = (messages, parent) =>
  messages.filter((each) => each.parent === parent).sort((one, other) => one.created - other.created);

/** Return the shown messages, first to last: of several that follow one, that which was chosen, else the last.
 * @param {Message[]} messages @param {Conversation["chosen"]} chosen @returns {Message[]} */
export function path(messages, chosen) {
  const found = [];
  for (let parent = ""; ; parent = found.at(-1).id) {
    const next = following(messages, parent);
    if (!next.length) return found;
    found.push(next.find((each) => each.id === chosen[parent]) ?? next.at(-1));
  }
}

/** Return the messages up to one, which is the last of them. @param {Message[]} messages @param {string} id
 * @returns {Message[]} */
export function upTo(messages, id) {
  const byId = new Map(messages.map((each) => [each.id, each]));
  const found = [];
  for (let each = byId.get(id); each; each = byId.get(each.parent)) found.unshift(each);
  return found;
}

/** Return the ids of an answer's calls that lack a result; none once something other than results is after them.
 * @param {Message[]} shown @param {Message} answer @returns {string[]} */
export function lacking(shown, answer) {
  const after = shown.slice(shown.indexOf(answer) + 1);
  if (after.some((each) => each.role !== "tool")) return [];
  return (answer.calls ?? []).map(({ id }) => id).filter((id) => !after.some((each) => each.call === id));
}

/** Make a message. @param {Conversation} conversation @param {string} parent  id of the one before, "" for none
 * @param {Message["role"]} role @param {Partial<Message>} [more] @returns {Message} */
export function newMessage(conversation, parent, role, more = {}) {
  const id = crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`; // there only with TLS or on this machine
  return { id, conversation: conversation.id, parent, role, content: "", created: Date.now(), ...more };
}
