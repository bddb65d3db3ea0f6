// The playground: one request at a time, its stream shown token by token, and figures of the answer and the server.

const at = (id) => document.getElementById(id);
const chatMode = () => document.querySelector("input[name=mode]:checked").value === "chat";
const messages = [];
const places = new Map(); // drafter -> its colour
const decisions = {
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
let running = null;
let refused = null; // a key that does not read the server's state

const headers = () => {
  const key = at("key").value;
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
};

const counted = (count, name) => `${count} ${name}${count === 1 ? "" : "s"}`;

function decided(decision, drafted) {
  return decision.startsWith("on:") && !drafted ? decisions["off: nothing found"] : decisions[decision] || decision;
}

function busy(is) {
  at("send").disabled = is;
  at("send").textContent = is ? "Writing…" : "Send";
  at("stop").disabled = !is;
  at("output").setAttribute("aria-busy", is);
}

function prompting({ computed, prompt, waiting }) {
  at("send").textContent = waiting ? `Waiting (${waiting})` : `Prompt ${computed} of ${prompt}`;
}

function empty() {
  messages.length = 0;
  at("output").replaceChildren();
  at("greeting").hidden = false;
}

function complain(text) {
  at("problem").hidden = !text;
  at("problem").textContent = text || "";
}

async function told(path) {
  const response = await fetch(path, { headers: headers() });
  const body = await response.json();
  if (!response.ok && body.error) throw Object.assign(new Error(body.error.message), { status: response.status });
  return body;
}

async function connect() {
  try {
    const [health, models] = await Promise.all([told("/health"), told("/v1/models")]);
    const model = models.data[0];
    const limits = Object.entries(health.cannot).map(([name, why]) => `${name}: ${why}`);
    at("model").textContent = model.id;
    at("model").title = limits.join("\n");
    const choices = at("speculative");
    const chosen = choices.value;
    choices.replaceChildren(new Option("as it pays", ""));
    for (const name of model.drafters) choices.add(new Option(name, name));
    choices.add(new Option("off", "none"));
    choices.value = chosen;
    const chat = document.querySelector("input[value=chat]");
    chat.disabled = "chat" in health.cannot;
    if (chat.disabled) document.querySelector("input[value=completion]").checked = true;
    complain("");
  } catch (error) {
    at("model").textContent = "not connected";
    complain(error.message);
  }
  showMode();
}

function showMode() {
  at("input-label").textContent = chatMode() ? "Your message" : "Text to go on with";
}

function turn(who, text, kind, place = at("output")) {
  const box = document.createElement("div");
  box.className = `turn ${chatMode() ? "" : "completion"}`;
  if (chatMode() || place !== at("output")) {
    const name = document.createElement("span");
    name.className = "who";
    name.textContent = who;
    box.append(name);
  }
  if (text) {
    const said = document.createElement("span");
    said.className = kind;
    said.textContent = text;
    box.append(said);
  }
  place.append(box);
  return box;
}

function colour(drafter) {
  if (!places.has(drafter)) {
    places.set(drafter, places.size % 5);
    const entry = document.createElement("li");
    entry.className = `draft d${places.get(drafter)}`;
    entry.textContent = drafter;
    at("legend").append(entry);
  }
  return places.get(drafter);
}

function show(box, pieces) {
  const output = at("output");
  const follows = output.scrollTop + output.clientHeight > output.scrollHeight - 40;
  for (const [text, drafter] of pieces) {
    if (!text) continue;
    const piece = document.createElement("span");
    piece.textContent = text;
    if (drafter) {
      piece.className = `draft d${colour(drafter)}`;
      piece.title = `drafted by ${drafter}`;
    }
    box.append(piece);
  }
  if (follows) output.scrollTop = output.scrollHeight;
}

function figures(metrics, tokens, seconds) {
  const given = metrics.speculative_decoding;
  at("speed").textContent = (tokens / seconds).toFixed(1);
  // what as many steps without drafting as there are tokens would have taken, over what it took
  const plain = (tokens * (given.seconds.total - given.seconds.draft)) / Math.max(given.num_forwards, 1);
  at("gain").textContent = given.seconds.total ? `${(plain / given.seconds.total).toFixed(2)}×` : "–";
  at("length").textContent = given.num_spec_steps ? given.mean_acceptance_length.toFixed(2) : "–";
  const drafted = given.num_draft_tokens;
  at("accepted").textContent = drafted ? `${given.num_accepted_draft_tokens} of ${drafted}` : "–";
  const most = Object.entries(given.decisions).sort((one, other) => other[1] - one[1])[0];
  at("decided").textContent = most ? decided(most[0], drafted) : "–";
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith(": progress ")) prompting(JSON.parse(part.slice(11)));
      else if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
    }
  }
}

function request(text) {
  const chat = chatMode();
  const body = {
    stream: true,
    stream_options: { include_drafts: true },
    max_tokens: Number(at("tokens").value),
    temperature: Number(at("temperature").value),
    ...(chat ? { messages: [...messages, { role: "user", content: text }] } : { prompt: text }),
  };
  if (at("seed").value !== "") body.seed = Number(at("seed").value);
  if (at("speculative").value) body.speculative = at("speculative").value;
  return [chat ? "/v1/chat/completions" : "/v1/completions", body];
}

async function generate(path, body, box, answer) {
  const begun = performance.now();
  let tokens = 0;
  const sent = { method: "POST", headers: headers(), body: JSON.stringify(body), signal: running.signal };
  const response = await fetch(path, sent);
  if (!response.ok) throw new Error((await response.json()).error.message);
  for await (const chunk of events(response)) {
    if (chunk.error) throw new Error(chunk.error.message);
    at("send").textContent = "Writing…";
    for (const choice of chunk.choices) {
      answer.text += (choice.delta ? choice.delta.content : choice.text) || "";
      tokens += (choice.drafts || []).length;
      show(box, choice.drafts || []);
    }
    if (chunk.metrics) figures(chunk.metrics, tokens, (performance.now() - begun) / 1000);
  }
  return tokens / ((performance.now() - begun) / 1000);
}

async function generateTwice(path, body, answer) {
  body.seed ??= Math.floor(Math.random() * 2 ** 31); // the same text both times
  const pair = document.createElement("div");
  pair.className = "pair";
  at("output").append(pair);
  const ways = [
    ["plain", "none", { text: "" }],
    ["speculative", body.speculative, answer],
  ];
  for (const [name, speculative, text] of ways) {
    const box = turn(name, "", "", pair);
    const rate = await generate(path, { ...body, speculative }, box, text);
    box.querySelector(".who").textContent = `${name}: ${rate.toFixed(1)} tokens per second`;
  }
}

async function ask(text) {
  const chat = chatMode();
  const [path, body] = request(text);
  const answer = { text: "" };
  running = new AbortController();
  at("greeting").hidden = true;
  busy(true);
  complain("");
  const question = turn("you", text, chat ? "" : "prompt");
  try {
    if (at("compare").checked) await generateTwice(path, body, answer);
    else await generate(path, body, chat ? turn("model", "", "") : question, answer);
  } catch (error) {
    if (error.name !== "AbortError") complain(error.message);
  } finally {
    if (chat && answer.text) messages.push({ role: "user", content: text }, { role: "assistant", content: answer.text });
    running = null;
    busy(false);
    at("input").focus();
  }
}

async function look() {
  const key = at("key").value;
  if (document.hidden || key === refused) return;
  try {
    const now = await told("/live");
    at("batch").textContent = `${now.running} of ${now.max_batch}`;
    at("waiting").textContent = now.waiting;
    const prompts = now.prompt_tokens_computed + now.prompt_tokens_waiting;
    at("prompts").textContent = prompts ? `${now.prompt_tokens_computed} of ${counted(prompts, "token")}` : "–";
    const step = now.last_step;
    at("step").textContent = `${counted(step.num_rows, "row")}, ${counted(step.num_tokens, "token")}`;
    const drafted = step.num_draft_tokens;
    at("reason").textContent = step.reason ? decided(`${drafted ? "on" : "off"}: ${step.reason}`, drafted) : "–";
  } catch (error) {
    if (error.status === 401 || error.status === 403) refused = key;
    at("batch").title = error.message;
    at("prompts").textContent = "–";
    at("batch").textContent = at("waiting").textContent = at("step").textContent = at("reason").textContent = "–";
  }
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("input").value;
  if (running || !text) return;
  at("input").value = "";
  ask(text);
});
at("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("form").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.abort();
});
at("stop").addEventListener("click", () => running && running.abort());
at("clear").addEventListener("click", () => {
  empty();
  at("input").focus();
});
at("modes").addEventListener("change", () => {
  empty();
  showMode();
});
for (const example of [at("example-1"), at("example-2"), at("example-3")]) {
  example.addEventListener("click", () => {
    at("input").value = example.textContent;
    at("form").requestSubmit();
  });
}
at("key").addEventListener("change", connect);
connect();
look();
setInterval(look, 1000);
