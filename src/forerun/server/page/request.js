// From the messages of a conversation and its settings to the body of a request.

import { usable } from "./settings.js";

/** @import {Message} from "./store.js" @import {Settings} from "./settings.js" @import {Server} from "./server.js" */

const SAMPLING = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"].concat([
  "frequency_penalty",
  "seed",
  "max_tokens",
]);

/** Return a text as a fenced block, under its name. @param {{name: string, text: string}} file */
export function fenced({ name, text }) {
  const longest = Math.max(2, ...(text.match(/^\s*`{3,}/gm) ?? []).map((each) => each.trim().length));
  const fence = "`".repeat(longest + 1);
  const kind = /\.(\w+)$/.exec(name)?.[1] ?? "";
  return `File ${name}:\n\n${fence}${kind}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
}

/** Return what a message says to the model: its text and its files. @param {Message} message */
export const content = ({ content, files }) => [content, ...(files ?? []).map(fenced)].filter(Boolean).join("\n\n");

/** @param {Message} message */
function wire(message) {
  const { role, thinking, calls, call } = message;
  return {
    role,
    content: content(message),
    ...(thinking ? { reasoning_content: thinking } : {}),
    ...(calls?.length ? { tool_calls: calls } : {}),
    ...(call ? { tool_call_id: call } : {}),
  };
}

/** Read JSON that the person gave. Throws Error, which names it. @param {string} name @param {string} text */
function json(name, text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name} in the settings is not JSON: ${error.message}. Correct it.`);
  }
}

/**
 * Return the path and the body of the request that answers messages. Throws Error for settings that cannot be sent.
 * @param {Server} server
 * @param {Settings} given  what the server does not have of it is left out
 * @param {Message[]} messages
 * @param {boolean} [continues]  the last message is an answer, which goes on
 * @returns {[string, any]}
 */
export function request(server, given, messages, continues = false) {
  const settings = usable(server, given);
  /** @type {any} */
  const body = { stream: true, stream_options: { include_usage: true, include_drafts: true } };
  for (const name of SAMPLING) if (settings[name] !== undefined) body[name] = settings[name];
  if (settings.stop) body.stop = settings.stop.split("\n").filter(Boolean);
  if (settings.speculative) body.speculative = settings.speculative === "off" ? false : settings.speculative;
  if (settings.salt) body.cache_salt = settings.salt;
  if (settings.schema) {
    const schema = json("The schema", settings.schema);
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  if (isText(server, settings)) {
    body.max_tokens ??= server.model.max_model_len; // else OpenAI's 16
    return ["/v1/completions", { ...body, prompt: messages.map(content).join("") }];
  }
  if (settings.tools) body.tools = json("The list of tools", settings.tools);
  if (settings.thinking) body.chat_template_kwargs = { enable_thinking: settings.thinking === "on" };
  if (continues) body.continue_final_message = true;
  const system = settings.system ? [{ role: "system", content: settings.system }] : [];
  return ["/v1/chat/completions", { ...body, messages: [...system, ...messages.map(wire)] }];
}

/** Return whether texts are completed: where it is set so, and where the model has no chats.
 * @param {Server} server @param {Settings} settings */
export const isText = (server, settings) => settings.mode === "text" || "chat" in server.cannot;
