// The playground: one request at a time, its stream shown token by token, and figures of the answer and the server.

const at = (id) => document.getElementById(id);
const chatMode = () => document.querySelector("input[name=mode]:checked").value === "chat";
const messages = [];
const places = new Map(); // drafter -> its colour
let running = null;
let refused = null; // a key that does not read the server's state

const headers = () => {
  const key = at("key").value;
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
};

const counted = (count, name) => `${count} ${name}${count === 1 ? "" : "s"}`;

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

function turn(who, text, kind) {
  const box = document.createElement("div");
  box.className = `turn ${chatMode() ? "" : "completion"}`;
  if (chatMode()) {
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
  at("output").append(box);
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
  at("decided").textContent = most ? most[0] : "–";
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
      if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
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

async function ask(text) {
  const chat = chatMode();
  const [path, body] = request(text);
  running = new AbortController();
  at("send").disabled = true;
  at("stop").disabled = false;
  complain("");
  let answer = "";
  let tokens = 0;
  const question = turn("you", text, chat ? "" : "prompt");
  const box = chat ? turn("model", "", "") : question;
  try {
    const begun = performance.now();
    const sent = { method: "POST", headers: headers(), body: JSON.stringify(body), signal: running.signal };
    const response = await fetch(path, sent);
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      for (const choice of chunk.choices) {
        answer += (chat ? choice.delta.content : choice.text) || "";
        tokens += (choice.drafts || []).length;
        show(box, choice.drafts || []);
      }
      if (chunk.metrics) figures(chunk.metrics, tokens, (performance.now() - begun) / 1000);
    }
  } catch (error) {
    if (error.name !== "AbortError") complain(error.message);
  } finally {
    if (chat && answer) messages.push({ role: "user", content: text }, { role: "assistant", content: answer });
    running = null;
    at("send").disabled = false;
    at("stop").disabled = true;
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
    const step = now.last_step;
    at("step").textContent = `${counted(step.num_rows, "row")}, ${counted(step.num_tokens, "token")}`;
    at("reason").textContent = step.num_draft_tokens ? `${step.num_draft_tokens} drafted (${step.reason})` : step.reason || "–";
  } catch (error) {
    if (error.status === 401 || error.status === 403) refused = key;
    at("batch").title = error.message;
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
  messages.length = 0;
  at("output").replaceChildren();
  at("input").focus();
});
at("modes").addEventListener("change", () => {
  messages.length = 0;
  at("output").replaceChildren();
  showMode();
});
at("key").addEventListener("change", connect);
connect();
look();
setInterval(look, 1000);
