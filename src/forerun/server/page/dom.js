// Elements, and what is said to the person: notices, and sentences for screen readers.

/** Return the element with this id. @param {string} id @returns {any} */
export const at = (id) => document.getElementById(id);

/**
 * Make an element. Properties named on... are listeners, undefined and false ones are left out, others are attributes.
 * @param {string} tag
 * @param {Record<string, any>} [properties]
 * @param {...(Node | string)} children  strings become text, never HTML
 * @returns {any}
 */
export function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

/** Show a notice, which goes after some seconds (0: stays until it is closed).
 * @param {string} text @param {{label?: string, run?: () => void, seconds?: number}} [action]
 * @returns {() => void} takes the notice away */
export function notice(text, { label = "", run = () => {}, seconds = 8 } = {}) {
  const gone = () => box.remove();
  const act = () => (gone(), run());
  const buttons = label ? [el("button", { type: "button", onclick: act }, label)] : [];
  const close = el("button", { type: "button", "aria-label": "Close", onclick: gone }, "×");
  const box = el("div", { class: "notice" }, el("span", {}, text), ...buttons, close);
  at("notices").append(box);
  if (seconds) setTimeout(gone, 1000 * seconds);
  return gone;
}

/** Let a screen reader say something. @param {string} text */
export function say(text) {
  at("spoken").append(el("p", {}, text));
  while (at("spoken").childElementCount > 5) at("spoken").firstChild.remove();
}

/** Return a function that says the complete sentences of a growing text, at most every few seconds.
 * @returns {(text: string, done: boolean) => void} */
export function sayingSentences() {
  let said = 0;
  let last = performance.now();
  return (text, done) => {
    if (!done && performance.now() - last < 3000) return;
    const rest = text.slice(said, said + 2000);
    const end = done ? rest.length : Math.max(rest.lastIndexOf(". "), rest.lastIndexOf("\n")) + 1;
    if (rest.slice(0, end).trim()) say(rest.slice(0, end));
    said += end;
    last = performance.now();
  };
}

/** @type {Map<string, string>} */ const forbidden = new Map(); // what the browser does not keep

/** Return the text that is kept under a name, in this tab or in this browser; "" for none. @param {string} name */
export function kept(name) {
  try {
    return sessionStorage.getItem(name) ?? localStorage.getItem(name) ?? forbidden.get(name) ?? "";
  } catch {
    return forbidden.get(name) ?? "";
  }
}

/** Keep a text under a name, in place of what was there; "" for none. Where the browser forbids it, the page has it
 * until it ends. @param {string} name @param {string} value @param {boolean} [forLong]  beyond this tab */
export function keep(name, value, forLong = false) {
  forbidden.delete(name);
  try {
    for (const storage of [sessionStorage, localStorage]) storage.removeItem(name);
    if (value) (forLong ? localStorage : sessionStorage).setItem(name, value);
  } catch {
    forbidden.set(name, value);
  }
}

/** Put a text into the clipboard, and say so on the button. @param {string} text @param {HTMLElement} button */
export async function copy(text, button) {
  const label = button.textContent;
  // without TLS on another machine, a browser has the old way alone
  const done = navigator.clipboard
    ? await navigator.clipboard.writeText(text).then(
        () => true,
        () => false,
      )
    : copyOld(text);
  button.textContent = done ? "Copied" : "Not allowed";
  setTimeout(() => (button.textContent = label), 1500);
}

/** @param {string} text @returns {boolean} */
function copyOld(text) {
  const box = el("textarea", { class: "unseen" });
  box.value = text;
  document.body.append(box);
  box.select();
  const done = document.execCommand("copy");
  box.remove();
  return done;
}

/** Hand a file to the person. @param {string} name @param {string} text @param {string} type */
export function download(name, text, type) {
  const link = el("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
