// Answers that are being written, each in its conversation, whichever is shown.

import { joined } from "./figures.js";
import { request } from "./request.js";

/** @import {Message} from "./store.js" @import {Server, Progress} from "./server.js" @import {Settings} from "./settings.js" */

/**
 * Add the pieces of a chunk to those of an answer, neighbours of one drafter joined.
 * @param {[string, string | null][]} drafts @param {[string, string | null][]} more
 */
function addDrafts(drafts, more) {
  for (const [text, drafter] of more) {
    const last = drafts.at(-1);
    if (last && last[1] === drafter) last[0] += text;
    else drafts.push([text, drafter]);
  }
}

/** @param {Message} message @param {any[]} pieces  of calls, in OpenAI's form of chunks */
function addCalls(message, pieces) {
  message.calls ??= [];
  for (const {
    index,
    id,
    function: { name, arguments: text = "" },
  } of pieces) {
    const call = (message.calls[index] ??= { id, type: "function", function: { name, arguments: "" } });
    call.function.arguments += text;
  }
}

/** An answer that is being written into its message. */
export class Answer {
  #controller = new AbortController();
  /** @type {Progress | null} */ progress = null;
  /** @type {import("./figures.js").Figures} */ figures = { seconds: 0, tokens: 0 };
  begun = performance.now();

  /** @param {Message} message  empty, or an answer that goes on */
  constructor(message) {
    this.message = message;
    delete message.end;
    delete message.error;
  }

  /** End it here. */
  stop = () => this.#controller.abort();

  /**
   * Write it to its end, which `message.end` tells; never throws.
   * @param {Server} server
   * @param {Settings} settings
   * @param {Message[]} messages  what is answered, or with the answer at the end, which goes on
   * @param {() => void} changed  is called for each piece
   * @returns {Promise<Error | null>} why it failed
   */
  async write(server, settings, messages, changed) {
    const { message, figures } = this;
    const continues = messages.at(-1) === message;
    /** @type {any} */ let failure = null;
    try {
      const [path, body] = request(server, settings, messages, continues);
      for await (const { progress, chunk } of server.stream(path, body, this.#controller.signal)) {
        if (progress) this.progress = progress;
        else this.#take(chunk);
        changed();
      }
    } catch (error) {
      failure = error.name === "AbortError" ? null : error;
      message.end = failure ? "error" : "stopped";
      if (failure) message.error = failure.message;
    }
    message.end ??= "error";
    figures.seconds = (performance.now() - this.begun) / 1000;
    if (figures.tokens) message.figures = joined(continues ? message.figures : undefined, figures);
    return failure;
  }

  /** @param {any} chunk */
  #take(chunk) {
    const { message, figures } = this;
    const now = (performance.now() - this.begun) / 1000;
    for (const { delta, text, drafts = [], finish_reason } of chunk.choices) {
      if (drafts.length) figures.first ??= now;
      figures.tokens += drafts.length;
      addDrafts((message.drafts ??= []), drafts);
      message.content += (delta ? delta.content : text) ?? "";
      if (delta?.reasoning_content) {
        message.thinking = (message.thinking ?? "") + delta.reasoning_content;
        message.thought = now - (figures.first ?? 0);
      }
      if (delta?.tool_calls) addCalls(message, delta.tool_calls);
      if (finish_reason) message.end = finish_reason;
    }
    if (chunk.usage) {
      figures.tokens = chunk.usage.completion_tokens;
      figures.prompt = chunk.usage.prompt_tokens;
      figures.cached = chunk.usage.prompt_tokens_details?.cached_tokens ?? 0;
    }
    if (chunk.metrics) figures.decoding = chunk.metrics.speculative_decoding;
  }
}
