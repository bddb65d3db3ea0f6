// The same answer with and without speculation, on equal terms.

import { Answer } from "./answers.js";
import { rate } from "./figures.js";
import { newMessage } from "./tree.js";

/**
 * @typedef {object} Comparison
 * @property {string} order  which was first
 * @property {boolean} same  the texts are equal
 * @property {number} plain  tokens/s
 * @property {number} speculative  tokens/s
 * @property {number} tokens
 */

/**
 * Answer messages twice, in drawn order, each with a cache and drafters that know nothing of the other.
 * @param {import("./server.js").Server} server
 * @param {import("./settings.js").Settings} settings
 * @param {import("./store.js").Conversation} conversation
 * @param {import("./store.js").Message[]} messages
 * @param {(answer: Answer, way: string) => void} changed  is called for each piece of either
 * @returns {Promise<Comparison | null>} null: it was stopped. Throws Error
 */
export async function compare(server, settings, conversation, messages, changed) {
  const ways = Math.random() < 0.5 ? ["plain", "speculative"] : ["speculative", "plain"];
  const seed = settings.seed ?? Math.floor(Math.random() * 2 ** 31); // the same text both times
  /** @type {Record<string, Answer>} */ const answers = {};
  for (const way of ways) {
    const speculative = way === "plain" ? "off" : settings.speculative === "off" ? undefined : settings.speculative;
    const answer = (answers[way] = new Answer(newMessage(conversation, "", "assistant")));
    const salt = `compare ${Date.now()} ${Math.random()}`; // of its own: nothing is computed or known before
    const failure = await answer.write(server, { ...settings, seed, speculative, salt }, messages, () =>
      changed(answer, way),
    );
    if (failure) throw failure;
    if (answer.message.end === "stopped") return null;
  }
  const { plain, speculative } = answers;
  const same = plain.message.content === speculative.message.content;
  const [one, other] = [rate(plain.figures), rate(speculative.figures)];
  return { order: ways[0], same, plain: one, speculative: other, tokens: speculative.figures.tokens };
}

/** Return a comparison as sentences. @param {Comparison} comparison */
export const told = ({ order, same, plain, speculative, tokens }) =>
  `${(speculative / plain).toFixed(2)} times: ${speculative.toFixed(1)} tokens/s with speculation, ` +
  `${plain.toFixed(1)} without, over ${tokens} tokens. Both computed the prompt anew; ${order} was first. ` +
  `The texts are ${same ? "the same" : "not the same"}.`;
