// A message as it is shown: text, thinking, calls, files, figures, and what can be done with it.

import { colourOf, paint, unpaint } from "./colours.js";
import { told } from "./compare.js";
import { copy, el } from "./dom.js";
import { counted, details, ending, line } from "./figures.js";
import { Rendered } from "./render.js";

/** @import {Message} from "./store.js" @import {Answer} from "./answers.js" */

/**
 * What can be done with a message; `conversation.js` does it.
 * @typedef {object} Actions
 * @property {(message: Message, text: string) => void} edit
 * @property {(message: Message) => void} again
 * @property {(message: Message) => void} go  on with it
 * @property {(message: Message) => void} compare
 * @property {(message: Message, step: number) => void} turn  to a sibling
 * @property {(message: Message, call: any, text: string) => void} result  of a call
 *
 * What is known of its surroundings.
 * @typedef {object} State
 * @property {Answer} [answer]  that is writing it
 * @property {string} comparing  what a comparison has come to
 * @property {Message[]} siblings
 * @property {boolean} isText
 * @property {boolean} canCompare
 * @property {boolean} isColoured
 * @property {boolean} isElsewhere  it is being written by another tab
 * @property {string[]} lacking  ids of its calls without a result
 */

const WHO = { user: "You", assistant: "Answer", tool: "Result of a tool" };

/** @param {string} text @param {(event: any) => void} onclick @param {Record<string, any>} [more] */
const button = (text, onclick, more = {}) => el("button", { type: "button", onclick, ...more }, text);

/** The elements of a message. */
export class MessageView {
  #text = el("div", { class: "text" });
  #thinking = el("details", { class: "thinking", hidden: true });
  #thoughts = el("div", { class: "thoughts" });
  #calls = el("div", { class: "calls" });
  #below = el("div", { class: "below" });
  #actions = el("div", { class: "actions" });
  #editing = false;
  #paintedAt = 0;
  #isColoured = false;

  /** @param {Message} message @param {Actions} actions */
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    const files = (message.files ?? []).map((file) => fileView(file));
    this.element = el(
      "article",
      { class: `message ${message.role}`, "data-id": message.id },
      el("h2", {}, WHO[message.role]),
      this.#thinking,
      this.#text,
      ...files,
      this.#calls,
      this.#below,
      this.#actions,
    );
    this.#thinking.append(el("summary"), this.#thoughts);
    this.rendered = new Rendered(this.#text, () => this.#colour());
  }

  /** Show the message as it is now. @param {State} state */
  show(state) {
    const { message } = this;
    this.#isColoured = state.isColoured && message.role === "assistant";
    this.element.setAttribute("aria-busy", String(Boolean(state.answer)));
    if (!this.#editing) this.#showText(state);
    this.#thinking.hidden = !message.thinking;
    if (message.thinking) {
      this.#thinking.firstChild.textContent =
        state.answer && !message.content ? "Thinking…" : `Thought for ${(message.thought ?? 0).toFixed(1)} s`;
      this.#thoughts.textContent = message.thinking;
    }
    if (message.calls) this.#showCalls(state);
    this.#showBelow(state);
    this.#showActions(state);
  }

  /** Take what it has put outside of its elements away. */
  close = () => unpaint(this.element);

  /** @param {State} state */
  #showText({ isText, answer }) {
    const { message } = this;
    this.#text.classList.toggle("plain", isText || message.role !== "assistant");
    if (!isText && message.role === "assistant") return this.rendered.show(message.content);
    if (this.#text.textContent !== message.content) this.#text.textContent = message.content;
    this.#colour(!answer);
  }

  #colour(isDone = this.message.end !== undefined) {
    const { drafts } = this.message;
    if (!this.#isColoured) return this.close();
    const now = performance.now();
    if (!drafts || (!isDone && now - this.#paintedAt < 400)) return;
    paint(this.element, [this.#thoughts, this.#text], drafts);
    this.#paintedAt = now + 3 * (performance.now() - now); // long answers less often
  }

  /** @param {State} state */
  #showCalls({ answer, lacking }) {
    if (this.#calls.querySelector("textarea:focus")) return; // a result is being written
    const written = new Map([...this.#calls.querySelectorAll("textarea")].map((each) => [each.name, each.value]));
    const shown = (this.message.calls ?? []).map((call) => {
      const given = el("textarea", { rows: 2, "aria-label": `Result of ${call.function.name}`, name: call.id });
      given.value = written.get(call.id) ?? "";
      const give = button("Give the result", () => this.actions.result(this.message, call, given.value));
      const row = answer || !lacking.includes(call.id) ? [] : [el("div", { class: "row" }, given, give)];
      const name = el("strong", {}, call.function.name);
      return el("div", { class: "call" }, "Calls ", name, el("pre", { tabindex: 0 }, call.function.arguments), ...row);
    });
    this.#calls.replaceChildren(...shown);
  }

  /** @param {State} state */
  #showBelow(state) {
    const { message } = this;
    if (message.role !== "assistant") return;
    const { answer, comparing } = state;
    const parts = [];
    if (answer) parts.push(el("span", { class: "state" }, waiting(answer)));
    else if (state.isElsewhere) parts.push(el("span", { class: "state" }, "being written in another tab…"));
    else parts.push(el("span", { class: `state ${message.end}` }, ending(message)));
    const figures = answer?.figures.tokens ? now(answer) : !answer && message.figures;
    if (figures) parts.push(...line(figures).map((each) => el("span", {}, each)));
    const head = el("div", { class: "line" }, ...parts);
    const below = [head];
    if (!answer && message.figures) {
      const list = details(message.figures).flatMap(([name, value, drafter]) => {
        const mark = drafter && state.isColoured ? `d${colourOf(drafter)}` : false;
        return [el("dt", {}, el("span", { class: mark }, name)), el("dd", {}, value)];
      });
      const wasOpen = this.#below.querySelector("details")?.open;
      const more = el(
        "details",
        { class: "more", open: Boolean(wasOpen) },
        el("summary", {}, "Figures"),
        el("dl", {}, ...list),
      );
      below.push(more);
    }
    if (comparing) below.push(el("p", { class: "comparison" }, comparing));
    else if (message.comparison) below.push(el("p", { class: "comparison" }, told(message.comparison)));
    this.#below.replaceChildren(...below);
  }

  /** @param {State} state */
  #showActions({ answer, siblings, canCompare, isText, isElsewhere }) {
    const { message, actions } = this;
    const made = [];
    const place = siblings.indexOf(message);
    if (siblings.length > 1) {
      made.push(
        button("‹", () => actions.turn(message, -1), { "aria-label": "Version before", disabled: !place }),
        el("span", {}, `${place + 1} of ${siblings.length}`),
        button("›", () => actions.turn(message, 1), {
          "aria-label": "Next version",
          disabled: place === siblings.length - 1,
        }),
      );
    }
    if (!answer && message.content) made.push(button("Copy", (event) => copy(message.content, event.target)));
    const isFixed = answer || isElsewhere;
    if (!isFixed && !this.#editing) made.push(button("Edit", () => this.edit()));
    if (!isFixed && message.role === "assistant") {
      made.push(button("Again", () => actions.again(message), { title: "Answer again; this answer stays beside it" }));
      if (message.end !== "tool_calls" && (message.end !== "stop" || isText))
        made.push(button("Continue", () => actions.go(message)));
      if (canCompare)
        made.push(button("Compare", () => actions.compare(message), { title: "With and without speculation" }));
    }
    const focused = this.#actions.contains(document.activeElement) ? document.activeElement?.textContent : null;
    this.#actions.replaceChildren(...made);
    if (focused) made.find((each) => each.textContent === focused)?.focus();
  }

  /** Let the person write another version of it. */
  edit() {
    const { message, actions } = this;
    const input = el("textarea", { "aria-label": "Another version of this message", rows: 4 });
    input.value = message.content;
    const end = () => {
      this.#editing = false;
      this.rendered = new Rendered(this.#text, () => this.#colour());
      this.#text.replaceChildren();
      actions.turn(message, 0); // shows it again
    };
    const done = () => (end(), actions.edit(message, input.value));
    input.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
      if (event.key === "Escape") (event.stopPropagation(), end());
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) (event.preventDefault(), done());
    });
    const label = message.role === "assistant" ? "Keep" : "Send";
    this.#editing = true;
    this.#text.replaceChildren(input, el("div", { class: "row" }, button(label, done), button("Cancel", end)));
    input.focus();
  }
}

/** @param {{name: string, text: string}} file */
function fileView({ name, text }) {
  const summary = el("summary", {}, `${name} · ${counted(text.length, "character")}`);
  const details = el("details", { class: "file" }, summary);
  const open = () =>
    details.childElementCount === 1 && details.append(el("pre", { tabindex: 0 }, text.slice(0, 20000)));
  details.addEventListener("toggle", open);
  return details;
}

/** Return the figures of an answer that is being written. @param {Answer} answer */
const now = ({ figures, begun }) => ({ ...figures, seconds: (performance.now() - begun) / 1000 });

/** @param {Answer} answer */
function waiting({ progress, figures }) {
  if (figures.tokens) return "writing…";
  if (progress?.waiting) return `waiting: ${counted(progress.waiting, "request")} before this one`;
  if (!progress) return "sent…";
  const { computed, prompt } = progress;
  return `reading the prompt: ${computed.toLocaleString("en")} of ${counted(prompt, "token")}, ${(prompt - computed).toLocaleString("en")} left`;
}
