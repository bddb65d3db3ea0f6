// Settings: what they are, whose they are (the server's, the person's, the conversation's), and their dialog.

import { at, el } from "./dom.js";

/**
 * What a person may set for answers; what is undefined is left to the server.
 * @typedef {object} Settings
 * @property {string} [system]
 * @property {string} [mode]  "text": completions in place of chats
 * @property {string} [thinking]  "on" or "off"
 * @property {string} [speculative]  "off", or a drafter
 * @property {number} [max_tokens]
 * @property {number} [seed]
 * @property {string} [stop]  a text on each line
 * @property {string} [schema]  JSON
 * @property {string} [tools]  JSON
 * @property {string} [salt]  of the cache, for comparisons
 * @property {any} [temperature] @property {any} [top_p] @property {any} [top_k] @property {any} [min_p]
 * @property {any} [repetition_penalty] @property {any} [presence_penalty] @property {any} [frequency_penalty]
 *
 * @typedef {object} Field
 * @property {string} name
 * @property {string} label
 * @property {string} kind  text, number, or a choice
 * @property {string} about
 * @property {number} [min]
 * @property {number} [max]
 * @property {string} [step]
 * @property {unknown} [otherwise]  what the server does without it
 */

// prettier-ignore
/** @type {Field[]} */
const FIELDS = [
  { name: "system", label: "System prompt", kind: "text", about: "Is before the conversation: who the model is, how it answers." },
  { name: "mode", label: "Mode", kind: "choice", about: "A chat has roles; a text is one that the model goes on with." },
  { name: "thinking", label: "Thinking", kind: "choice", about: "The model may think before it answers." },
  { name: "speculative", label: "Speculation", kind: "choice", about: "Changes how fast a text comes, never the text." },
  { name: "max_tokens", label: "Tokens at most", kind: "number", min: 1, step: "1", about: "Of an answer; without, the context decides." },
  { name: "temperature", label: "Temperature", kind: "number", min: 0, max: 2, step: "0.05", otherwise: 1, about: "0: always the likeliest token." },
  { name: "top_p", label: "Top p", kind: "number", min: 0, max: 1, step: "0.01", otherwise: 1, about: "Only the likeliest tokens that make this share." },
  { name: "top_k", label: "Top k", kind: "number", min: 0, step: "1", otherwise: "all", about: "Only so many of the likeliest tokens." },
  { name: "min_p", label: "Min p", kind: "number", min: 0, max: 1, step: "0.01", otherwise: 0, about: "Only tokens at least so likely beside the likeliest." },
  { name: "repetition_penalty", label: "Repetition penalty", kind: "number", min: 0.01, step: "0.01", otherwise: 1, about: "Above 1: said before is less likely." },
  { name: "presence_penalty", label: "Presence penalty", kind: "number", min: -2, max: 2, step: "0.1", otherwise: 0, about: "Once said is less likely." },
  { name: "frequency_penalty", label: "Frequency penalty", kind: "number", min: -2, max: 2, step: "0.1", otherwise: 0, about: "The oftener said, the less likely." },
  { name: "seed", label: "Seed", kind: "number", min: 0, step: "1", about: "The same seed draws the same text again." },
  { name: "stop", label: "Stop texts", kind: "text", about: "One on each line; an answer ends before them." },
  { name: "schema", label: "JSON schema", kind: "text", about: "Answers are JSON that follows it." },
  { name: "tools", label: "Tools", kind: "text", about: "A JSON list in OpenAI's form. The model calls them, you give their results." },
];

/** Return the choices of a field: value -> label. @param {string} name @param {import("./server.js").Server} server
 * @returns {Record<string, string>} */
function choices(name, { model, cannot }) {
  if (name === "mode") return "chat" in cannot ? { "": "text: the model has no chats" } : { "": "chat", text: "text" };
  if (name === "thinking") return { "": "as the model does", on: "on", off: "off" };
  const drafters = model.drafters.map((/** @type {string} */ each) => [each, each]);
  return { "": "as it pays", ...Object.fromEntries(drafters), off: "off" };
}

/** Return which settings this server does not have. @param {import("./server.js").Server} server
 * @returns {Record<string, boolean>} */
const hiddenBy = ({ template, cannot, model }) => ({
  thinking: !template.includes("enable_thinking"),
  speculative: !model.drafters.length,
  schema: "response_format" in cannot,
  tools: "tools" in cannot,
});

/** Return the fields that this server has. @param {import("./server.js").Server} server */
function fieldsOf(server) {
  const hidden = hiddenBy(server);
  return FIELDS.filter(({ name }) => !hidden[name]);
}

/** Return the settings that this server has. @param {import("./server.js").Server} server @param {Settings} settings
 * @returns {Settings} */
export function usable(server, settings) {
  const hidden = hiddenBy(server);
  return Object.fromEntries(Object.entries(settings).filter(([name]) => !hidden[name]));
}

/** @param {Field} field @param {string} text @returns {any} */
const value = (field, text) => (text.trim() === "" ? undefined : field.kind === "number" ? Number(text) : text);

/**
 * Make the elements of the fields.
 * @param {import("./server.js").Server} server @param {Settings} own @param {Settings} defaults
 * @returns {HTMLElement[]}
 */
function rows(server, own, defaults) {
  const { default_sampling_params: recommended, default_sampling_source: source } = server.model;
  return fieldsOf(server).map((field) => {
    const { name, kind, min, max, step } = field;
    const id = `set-${name}`;
    const given = own[name] ?? "";
    let input;
    if (kind === "choice") {
      const options = Object.entries(choices(name, server)).map(([each, label]) => new Option(label, each));
      input = el("select", { id }, ...options);
    } else if (kind === "text") input = el("textarea", { id, rows: 2, spellcheck: "false" });
    else input = el("input", { id, type: "number", min, max, step });
    input.value = given;
    let reason = "";
    if (defaults[name] !== undefined) {
      reason = `Your default: ${String(defaults[name]).slice(0, 60)}. `;
      input.placeholder = defaults[name];
    } else if (name in recommended) {
      reason = `${recommended[name]} by ${source}. `;
      input.placeholder = recommended[name];
    } else if (field.otherwise !== undefined) {
      reason = `${field.otherwise} otherwise. `;
      input.placeholder = field.otherwise;
    }
    input.setAttribute("aria-describedby", `${id}-about`);
    const about = el("small", { id: `${id}-about` }, reason + field.about);
    return el("div", { class: "field" }, el("label", { for: id }, field.label), input, about);
  });
}

/** Show other settings in the fields; what the person has written stays. @param {import("./server.js").Server} server
 * @param {Settings} before @param {Settings} after */
function exchange(server, before, after) {
  for (const { name } of fieldsOf(server)) {
    const field = at(`set-${name}`);
    if (field.value === String(before[name] ?? "")) field.value = after[name] ?? "";
  }
}

/** Read the fields. @param {import("./server.js").Server} server @returns {Settings} */
function readRows(server) {
  const found = {};
  for (const field of fieldsOf(server)) {
    const given = value(field, at(`set-${field.name}`).value);
    if (given !== undefined) found[field.name] = given;
  }
  return found;
}

/**
 * Let the person set what differs from their defaults, or the defaults themselves.
 * @param {import("./server.js").Server} server
 * @param {Settings} own  of the conversation
 * @param {Settings} defaults  of the person
 * @returns {Promise<{settings: Settings, asDefault: boolean} | null>} all of either; null: they changed nothing
 */
export function ask(server, own, defaults) {
  const dialog = at("settings");
  at("fields").replaceChildren(...rows(server, own, defaults));
  at("as-default").checked = false;
  at("as-default").onchange = () =>
    at("as-default").checked ? exchange(server, own, defaults) : exchange(server, defaults, own);
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    const closed = () => {
      const isSet = dialog.returnValue === "save";
      resolve(isSet ? { settings: readRows(server), asDefault: at("as-default").checked } : null);
    };
    dialog.addEventListener("close", closed, { once: true });
  });
}
