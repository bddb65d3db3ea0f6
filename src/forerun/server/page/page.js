// The page: its parts are made here, and joined.

import { Composer } from "./composer.js";
import { Conversations } from "./conversation.js";
import { at, el, keep, kept, notice } from "./dom.js";
import { isText } from "./request.js";
import { Server } from "./server.js";
import { ask } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { Store } from "./store.js";
import { path } from "./tree.js";

const store = new Store();
const server = new Server();
const conversations = new Conversations(store, server);
const sidebar = new Sidebar(conversations, complain);
const composer = new Composer(server, {
  send: (text, files) => conversations.send(text, files),
  editLast: () => editLast(),
  complain,
  used: () => used(),
});

/** Say what went wrong, until something else is done. @param {string} text */
function complain(text) {
  at("problem").hidden = !text;
  at("problem").textContent = text;
}

/** Return the tokens of the shown conversation. */
function used() {
  const { figures } =
    path(conversations.talk.messages, conversations.talk.conversation.chosen).findLast((each) => each.figures) ?? {};
  return figures ? (figures.prompt ?? 0) + figures.tokens : 0;
}

function editLast() {
  const last = [...document.querySelectorAll(".message.user .actions")].at(-1);
  const edit = [...(last?.querySelectorAll("button") ?? [])].find((each) => each.textContent === "Edit");
  edit?.click();
}

/** Show what is there of the server. */
function showServer() {
  const { model, problem } = server;
  at("model").textContent = model?.id.split(/[\\/]/).pop() ?? ""; // a file's name is enough of its path
  at("connection").textContent = problem ? (problem === "connecting" ? "connecting…" : "not connected") : "";
  at("connection").title = problem;
  if (problem && problem !== "connecting") complain(problem);
  else if (at("problem").textContent.startsWith("The server does not answer")) complain("");
  showWriting();
  composer.count();
  if (model) conversations.show();
}

/** Show whether an answer is being written. */
function showWriting() {
  const isWriting = conversations.isBusy;
  const isNone = !server.model || "text" in server.cannot;
  at("send").hidden = isWriting;
  at("send").disabled = isWriting || isNone;
  at("stop").hidden = !isWriting;
  const isTexts = server.model && isText(server, conversations.settings);
  at("input-label").textContent = isTexts ? "Text to go on with" : "Your message";
}

function showTitle() {
  const { conversation, messages } = conversations.talk;
  const title = messages.length ? conversation.title : "New conversation";
  at("title").replaceChildren(title);
  document.title = messages.length ? `${title} · forerun` : "forerun";
  at("menu").hidden = !messages.length;
  if (messages.length && location.hash.slice(1) !== conversation.id)
    history.replaceState(null, "", `#${conversation.id}`);
}

/** Begin a new conversation; what is being written goes on in its own. */
function begin() {
  complain("");
  if (location.hash) location.hash = "";
  else conversations.open(null);
  at("input").focus();
}

/** Show the conversation that the address names, or none. */
async function openNamed() {
  try {
    await conversations.open(location.hash.slice(1) || null);
  } catch (error) {
    await conversations.open(null);
    complain(`The conversation cannot be shown, for it is damaged (${error.message}). “Export all” has it as it is.`);
  }
}

async function askForSettings() {
  if (!server.model) return;
  const given = await ask(server, conversations.talk.conversation.settings, conversations.defaults);
  if (!given) return;
  if (given.asDefault) {
    conversations.defaults = given.settings;
    await store.keepDefaults(given.settings);
    conversations.show();
  } else await conversations.set(given.settings);
}

/** Ask for the server's key. @param {string} reason  why the last one does not do @returns {Promise<string | null>} */
server.askForKey = (reason) => {
  const dialog = at("key-dialog");
  at("key-reason").textContent = reason || "This server wants a key.";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    const closed = () => {
      const key = dialog.returnValue === "save" ? at("key").value : null;
      at("key").value = "";
      if (key !== null) keep("key", key, at("key-long").checked);
      resolve(key);
    };
    dialog.addEventListener("close", closed, { once: true });
  });
};

/** Say what the drafter has learnt. @param {Record<string, number>} of */
function learning({ tokens, steps, swaps, swaps_back: back, before, after }) {
  const gain = swaps ? `; tokens a draft ${before.toFixed(2)} before, ${after.toFixed(2)} after` : "";
  return `${tokens} tokens, ${steps} steps, ${swaps} swaps, ${back} back${gain}`;
}

async function showAbout() {
  await server.look(true);
  if (!server.model) return complain(server.problem);
  const live = await server.json("/live").catch((error) => ({ problem: error.message }));
  const { model, cannot, version } = server;
  const facts = [
    ["Version", version],
    ["Model", model?.id],
    ["Context", `${model?.max_model_len} tokens`],
    ["Drafters", model?.drafters.join(", ") || "none"],
    ["Sampling", `defaults of ${model?.default_sampling_source}`],
    ["Now", live.problem ?? `${live.running} of ${live.max_batch} running, ${live.waiting} waiting`],
    ["Prompts", live.problem ?? `${live.prompt_tokens_waiting} tokens are still to be computed`],
    ...(live.adaptation ? [["Learning", learning(live.adaptation)]] : []),
    ...Object.entries(cannot).map(([name, why]) => [`No ${name}`, why]),
  ];
  at("facts").replaceChildren(...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, String(value))]));
  at("forget-key").hidden = !kept("key");
  at("about").showModal();
}

/** Colour by theme and drafts as the person chose; kept in this browser. */
function applyLook() {
  const theme = kept("theme");
  const isColoured = kept("colours") !== "off";
  document.documentElement.dataset.theme = theme;
  at("theme").value = theme;
  at("colours").checked = conversations.isColoured = isColoured;
}

/** Open or close the list, which lies over the page on a phone. @param {boolean} isOpen */
function showList(isOpen) {
  document.body.classList.toggle("listing", isOpen);
  at("menu-list").setAttribute("aria-expanded", String(isOpen));
  if (isOpen) at("search").focus();
}

const KEYS = {
  Escape: () => {
    if (document.body.classList.contains("listing")) showList(false);
    else conversations.stop();
  },
  "Ctrl+k": begin,
  "Ctrl+/": () => at("keys").showModal(),
};

function listen() {
  document.addEventListener("keydown", (event) => {
    if (document.querySelector("dialog[open]")) return; // which has keys of its own
    const run = KEYS[`${event.ctrlKey || event.metaKey ? "Ctrl+" : ""}${event.key}`];
    if (!run) return;
    event.preventDefault();
    run();
  });
  // Safari lays its keyboard over the page, and does not make it smaller
  visualViewport?.addEventListener("resize", () => {
    const { height, scale } = /** @type {VisualViewport} */ (visualViewport);
    if (scale === 1) document.body.style.height = `${height}px`;
  });
  at("stop").addEventListener("click", () => (conversations.stop(), at("input").focus()));
  for (const id of ["new", "new-phone"]) at(id).addEventListener("click", () => (showList(false), begin()));
  at("set").addEventListener("click", askForSettings);
  at("tell").addEventListener("click", showAbout);
  at("forget-key").addEventListener("click", () => (keep("key", ""), at("about").close()));
  at("keys-button").addEventListener("click", () => at("keys").showModal());
  at("menu-list").addEventListener("click", () => showList(!document.body.classList.contains("listing")));
  at("shade").addEventListener("click", () => showList(false));
  at("theme").addEventListener("change", () => (keep("theme", at("theme").value, true), applyLook()));
  at("colours").addEventListener("change", () => {
    keep("colours", at("colours").checked ? "on" : "off", true);
    applyLook();
    conversations.show();
  });
  for (const button of document.querySelectorAll("dialog [data-close]")) {
    button.addEventListener("click", () => button.closest("dialog")?.close());
  }
  for (const example of document.querySelectorAll("#greeting button")) {
    example.addEventListener("click", () => (composer.give(example.textContent ?? "", []), composer.submit()));
  }
  at("menu").addEventListener("click", (event) => event.target.closest("button") && at("menu").removeAttribute("open"));
  addEventListener("hashchange", () => (showList(false), complain(""), openNamed()));
  for (const name of ["show", "open"])
    conversations.addEventListener(name, () => (showWriting(), showTitle(), composer.count()));
  conversations.addEventListener("begin", () => complain(""));
  conversations.addEventListener("failed", (/** @type {any} */ event) => {
    const { text, files, error } = event.detail;
    if (text || files.length) composer.restore(text, files);
    complain(error.message);
  });
  store.addEventListener("problem", (/** @type {any} */ event) => notice(event.detail, { seconds: 0 }));
  server.addEventListener("change", showServer);
  server.addEventListener("update", () =>
    notice("The server has another version than this page.", {
      label: "Load it anew",
      run: () => location.reload(),
      seconds: 0,
    }),
  );
}

listen();
applyLook();
await store.open();
conversations.defaults = (await store.kept.get("defaults"))?.settings ?? {};
const connected = server.connect(); // whatever comes of what was kept
await openNamed();
sidebar.show();
await connected;
