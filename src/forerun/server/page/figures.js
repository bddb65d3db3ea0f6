// The figures of an answer: measured here, and told by the server.

/**
 * @typedef {object} Figures
 * @property {number} [first]  seconds from sending to the first token
 * @property {number} seconds  from sending to the end
 * @property {number} tokens
 * @property {number} [prompt]  tokens
 * @property {number} [cached]  tokens of the prompt that were not computed anew
 * @property {any} [decoding]  `metrics.speculative_decoding` of the server
 */

/** Return tokens per second after the first one. @param {Figures} figures */
export const rate = ({ tokens, seconds, first = 0 }) =>
  tokens > 1 && seconds > first ? (tokens - 1) / (seconds - first) : tokens / Math.max(seconds, 1e-9);

/** Return a number with a word, in the plural where it is not 1. @param {number} count @param {string} word */
export const counted = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

/** Return the figures of an answer that was gone on with: of both parts. @param {Figures | undefined} before
 * @param {Figures} after @returns {Figures} */
export function joined(before, after) {
  if (!before) return after;
  const waited = after.first ?? 0; // of the second part, which is no time of writing
  return {
    ...after,
    first: before.first,
    seconds: before.seconds + after.seconds - waited,
    tokens: before.tokens + after.tokens,
    prompt: before.prompt, // that of the second part has the first one in it
    cached: before.cached,
    decoding: undefined, // of the last part alone, so not of the answer
  };
}

/** Return why an answer ended. @param {import("./store.js").Message} message */
export function ending({ end, error, figures }) {
  if (end === "length") return `cut at ${counted(figures?.tokens ?? 0, "token")}`;
  if (end === "error") return `error: ${error}`;
  return { stop: "complete", tool_calls: "calls tools", stopped: "stopped by you" }[end ?? ""] ?? "not finished";
}

/** Return the line below an answer. @param {Figures} figures */
export function line(figures) {
  const steps = figures.decoding?.num_forwards;
  return [
    ...(figures.first === undefined ? [] : [`first token ${figures.first.toFixed(2)} s`]),
    `${rate(figures).toFixed(1)} tokens/s`,
    ...(steps ? [`${(figures.tokens / steps).toFixed(2)} tokens a step`] : []),
    counted(figures.tokens, "token"),
  ];
}

const DECISIONS = {
  "on: fixed": "drafting, as set",
  "on: gain": "drafting: it saves time",
  "on: probe": "drafting, to learn whether it pays",
  "off: full batch": "no drafts: the batch is full",
  "off: measuring": "no drafts: costs are being measured",
  "off: no drafter": "no drafts: there is no drafter",
  "off: no gain": "no drafts: they cost more than they save",
  "off: no room": "no drafts: the answer is about to end",
  "off: nothing found": "no drafts: nothing alike was found",
  "off: prompts": "no drafts: prompts are computed",
  "off: request": "no drafts: switched off",
};

/** Return names and values of all that is known of an answer, those of drafters with their names once more.
 * @param {Figures} figures @returns {[string, string, string?][]} */
export function details(figures) {
  const { prompt, cached, decoding } = figures;
  /** @type {[string, string, string?][]} */ const found = [];
  if (prompt !== undefined) found.push(["Prompt", `${counted(prompt, "token")}, ${cached} of them computed before`]);
  found.push(["Whole answer", `${figures.seconds.toFixed(2)} s`]);
  if (!decoding) return found;
  const { num_draft_tokens: drafted, num_accepted_draft_tokens: accepted } = decoding;
  const share = drafted ? ` (${Math.round((100 * accepted) / drafted)} %)` : "";
  found.push(["Accepted drafts", drafted ? `${accepted} of ${counted(drafted, "token")}${share}` : "none drafted"]);
  for (const [name, each] of Object.entries(decoding.sources)) {
    found.push([`Drafter ${name}`, `${each.num_accepted_tokens} of ${counted(each.num_draft_tokens, "token")}`, name]);
  }
  for (const [name, count] of Object.entries(decoding.decisions).sort((one, other) => other[1] - one[1])) {
    found.push([DECISIONS[name] ?? name, counted(count, "step")]);
  }
  return found;
}
