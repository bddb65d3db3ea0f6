// Markdown that a model wrote, as elements. It is never HTML: tags are shown as text, images as links.

import createDOMPurify from "./vendor/purify.js";
import hljs from "./vendor/highlight.js";
import { Marked } from "./vendor/marked.js";
import { Blocks } from "./blocks.js";
import { copy, el } from "./dom.js";

/** @import {Block} from "./blocks.js" */

const BUDGET = 8; // milliseconds of a frame
const TAGS = ["p", "br", "hr", "h3", "strong", "em", "del", "code", "pre", "blockquote", "ul", "ol", "li", "a"].concat([
  "table",
  "thead",
  "tbody",
  "tr",
  "th",
  "td",
  "span",
]);
const OPTIONS = { ALLOWED_TAGS: TAGS, ALLOWED_ATTR: ["href", "class", "align", "start"], RETURN_DOM_FRAGMENT: true };
const ALLOWED_LINK = /^(https?:|mailto:)/i;
// they reorder what is shown, so that code reads other than it runs
const OVERRIDES = /[\u202A-\u202E\u2066-\u2069]/g;
const shown = (/** @type {string} */ text) =>
  text.replace(OVERRIDES, (sign) => `[U+${sign.codePointAt(0)?.toString(16).toUpperCase()}]`);
const escape = (/** @type {string} */ text) => text.replace(/[&<>"']/g, (sign) => `&#${sign.codePointAt(0)};`);

const marked = new Marked({
  gfm: true,
  renderer: {
    html: ({ text }) => escape(text),
    image: ({ href, text }) => `<a href="${escape(href)}">${escape(`image: ${text || href}`)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    heading({ tokens, depth }) {
      return `<h3 class="depth-${depth}">${this.parser.parseInline(tokens)}</h3>`; // h1 and h2 are the page's
    },
  },
});

createDOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.nodeName !== "A") return;
  const href = node.getAttribute("href") ?? "";
  if (!ALLOWED_LINK.test(href)) return node.removeAttribute("href");
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer nofollow");
  node.setAttribute("title", href);
});

/** @param {string} html @returns {DocumentFragment} */
const clean = (html) => /** @type {any} */ (createDOMPurify.sanitize(html, OPTIONS));

/**
 * Return code as an element, with its language and buttons.
 * @param {string} text @param {string} language @param {{isHead?: boolean, whole?: () => string}} [of]  the first of
 *   several blocks of one fence; all of its code
 */
function codeBlock(text, language, { isHead = true, whole = () => text } = {}) {
  const code = el("code");
  if (hljs.getLanguage(language)) code.append(clean(hljs.highlight(shown(text), { language }).value));
  else code.textContent = shown(text);
  const pre = el("pre", { tabindex: 0, dir: "ltr" }, code);
  const box = el("div", { class: isHead ? "code" : "code continued" }, pre);
  if (isHead) {
    const wraps = (/** @type {any} */ event) => {
      const is = box.parentElement.parentElement.classList.toggle("wrapped");
      event.target.setAttribute("aria-pressed", is);
    };
    const buttons = [
      el("button", { type: "button", "aria-pressed": "false", onclick: wraps }, "Wrap"),
      el("button", { type: "button", onclick: (/** @type {any} */ event) => copy(whole(), event.target) }, "Copy"),
    ];
    box.prepend(el("div", { class: "bar" }, el("span", {}, language || "code"), ...buttons));
  }
  return box;
}

/** Return Markdown as elements. @param {string} text */
function markdown(text) {
  const fragment = clean(/** @type {string} */ (marked.parse(shown(text), { async: false })));
  for (const code of fragment.querySelectorAll("pre > code")) {
    const language = /language-(\S+)/.exec(code.className)?.[1] ?? "";
    code.parentElement?.replaceWith(codeBlock(code.textContent ?? "", language));
  }
  for (const table of fragment.querySelectorAll("table")) {
    const wide = el("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Table" });
    table.replaceWith(wide);
    wide.append(table);
  }
  return fragment;
}

/** A text that is shown as Markdown, and may grow. It is rendered in steps, so that no frame takes long. */
export class Rendered {
  #blocks = new Blocks();
  /** @type {any[]} */ #elements = [];
  #next = 0; // the first block that is not rendered as it is now
  #isWaiting = false;

  /** @param {HTMLElement} place  gets an element for each block @param {() => void} [changed]  called when all is shown */
  constructor(place, changed = () => {}) {
    this.place = place;
    this.changed = changed;
  }

  /** Show this text. @param {string} text */
  show(text) {
    this.#next = Math.min(this.#next, this.#blocks.read(text));
    if (!this.#isWaiting) this.#work();
  }

  #work() {
    const end = performance.now() + BUDGET;
    const { all } = this.#blocks;
    do {
      if (this.#next < all.length) this.#render(this.#next++);
    } while (this.#next < all.length && performance.now() < end);
    this.#isWaiting = this.#next < all.length;
    if (this.#isWaiting) return void requestAnimationFrame(() => this.#work());
    for (const old of this.#elements.splice(all.length)) old.remove();
    this.changed();
  }

  /** @param {number} place */
  #render(place) {
    const block = this.#blocks.all[place];
    const old = this.#elements[place];
    if (old?.block.text === block.text && old.block.start === block.start && old.block.fence === block.fence) return;
    const made = Object.assign(el("div", { class: "block", dir: "auto" }), { block });
    if (block.isPlain) made.textContent = shown(block.text);
    else if (block.language === null) made.append(markdown(block.text));
    else made.append(this.#code(block));
    if (old) old.replaceWith(made);
    else this.place.append(made);
    this.#elements[place] = made;
  }

  /** @param {Block} block */
  #code(block) {
    const own = () => this.#blocks.all.filter((each) => each.fence === block.fence);
    const whole = () =>
      own()
        .map((each) => each.text)
        .join("");
    return codeBlock(block.text, block.language ?? "", { isHead: block.start === block.fence, whole });
  }
}
