// The playground: it puts the parts of the page on one client, and does what buttons and keys ask.

import { BlockMap, BlockWatch } from "./blocks.js";
import { Client } from "./client.js";
import { ConversationList } from "./conversations.js";
import { button, byId, counted, eachFrame, fill, make } from "./dom.js";
import { showMeasures } from "./measures.js";
import { points } from "./session.js";
import { Setup } from "./setup.js";
import { keep, kept, tab } from "./storage.js";
import { outputOf } from "./tools.js";
import { Transcript } from "./transcript.js";
import { ForkTree } from "./tree.js";
import { TypedText } from "./typing.js";

const SAMPLES = [
  { text: "My name is Marisol." },
  { text: "What is my name?" },
  { text: "Tell me the story of the fox." },
  { text: "What is the weather in Oslo?", tool: "get_weather" },
];
const DRAFT = "holdfast.draft";
const STATES = { connecting: "connecting", open: "connected", loading: "the server is getting ready", waiting: "away, trying again", key: "needs a key", moved: "open in another tab" };

const client = new Client();
const acts = { fork, rewind: rewindTo, edit, answer, name: askName, prune, open: openAgain, erase };
const transcript = new Transcript(client, acts);
const tree = new ForkTree(client, acts);
new ConversationList(client, acts).show();
const blocks = new BlockMap(client);
const setup = new Setup(client);
const typed = new TypedText(client);
new BlockWatch(client);
const message = byId("message");
const outputs = new Map(); // outputs that wait for those of the other calls, by session and call

// --- what the user does ---

/** Put a text into the message box, as if it was typed: a reload finds what is there. */
function write(text) {
  if (message.value !== text) message.value = text; // else a composition would end
  keep(DRAFT, text, tab);
  grow();
  show();
}

/** Say what is in the box; while a reply runs, steer it. */
function say() {
  const session = client.current;
  const text = message.value.trim();
  if (!session || !text) return; // while the server is away it waits: the client sends it when it is back
  let fields;
  try {
    fields = setup.responseFields(session);
  } catch (error) {
    return toast(`The schema is not JSON: ${error.message}`);
  }
  const item = { type: "message", role: "user", content: [{ type: "input_text", text: message.value }] };
  const response = Object.keys(fields).length ? { response: fields } : {};
  if (session.running !== null) {
    typed.takeBack();
    session.ask(false);
    client.send(session, { type: "response.steer", input: [item], ...response });
  } else {
    session.ask(false);
    session.asked.streamed = typed.commit(session);
    if (session.asked.streamed) client.send(session, { type: "response.create", ...response });
    else client.send(session, { type: "response.create", items: [item], ...response });
  }
  write("");
}

/** Ask for a reply to what is there. */
function ask(session, items = []) {
  try {
    const fields = setup.responseFields(session);
    session.ask(false);
    const response = Object.keys(fields).length ? { response: fields } : {};
    client.send(session, { type: "response.create", ...(items.length ? { items } : {}), ...response });
  } catch (error) {
    toast(`The schema is not JSON: ${error.message}`);
  }
}

/** End the reply where it was shown: the model remembers no more of it than could be read. */
function interrupt() {
  const session = client.current;
  if (!session || session.running === null) return;
  const last = session.items.findLast((item) => item.responseId === session.running);
  const shown = last?.type === "message" && last.status === "in_progress" ? transcript.shown(last) : "";
  if (shown) client.send(session, { type: "conversation.item.truncate", item_id: last.id, text_end: points(shown) });
  else client.send(session, { type: "response.cancel", response_id: session.running });
}

async function fork(at = null) {
  const session = client.current;
  if (!session?.here) return;
  const [made] = await tried(() => client.fork(session, at)) ?? [];
  if (made) client.show(made);
}

/** Make an item the last; `root`: none is left. Undefined if that was refused. */
async function rewind(to) {
  const session = client.current;
  if (!session?.here) return undefined;
  return tried(() => client.request(session, { type: "session.rewind", to }, "session.rewound"));
}

/** Make an item the last, after a question where others go. Undefined if the user or the server does not want it. */
async function rewindTo(to) {
  const session = client.current;
  const going = session.items.length - 1 - session.items.findIndex((item) => item.id === to);
  if (going > 0) {
    const title = to === "root" ? "Back to the start?" : "Rewind to here?";
    const wish = await sure(title, `${counted(going, "item")} of this conversation will be gone.`, ["rewind", "Rewind"], ["fork", "Keep a fork"]);
    if (!wish || client.current !== session) return undefined;
    if (wish === "fork" && !(await tried(() => client.fork(session)))) return undefined;
  }
  return rewind(to);
}

/** Ask before something is lost: the name of the choice that was made, or null. `choices`: names and texts, the first
 * of them what was asked for. */
function sure(title, text, ...choices) {
  const dialog = byId("sure");
  byId("sure-title").textContent = title;
  byId("sure-text").textContent = text;
  return new Promise((resolve) => {
    const choose = (name, words, properties) => button(words, () => (resolve(name), dialog.close()), properties);
    const [[name, words], ...others] = choices;
    const made = others.map(([other, said]) => choose(other, said, {}));
    fill(byId("sure-choices"), choose(null, "Cancel", {}), ...made, choose(name, words, { className: "primary" }));
    dialog.onclose = () => resolve(null); // by a key; after a choice it changes nothing
    dialog.showModal();
  });
}

/** The id of the item before this one, or the beginning. */
function before(session, item) {
  return session.items[session.items.indexOf(item) - 1]?.id ?? "root";
}

async function edit(item) {
  const { text } = item;
  const last = client.current.items.findLast((one) => one.role === "user") === item; // its reply goes as by Try again
  if (!(await (last ? rewind : rewindTo)(before(client.current, item)))) return;
  write(text);
  typed.flush();
  message.focus();
}

/** Take the last reply back, and ask for another. */
async function retry() {
  const session = client.current;
  const last = session?.items.findLast((item) => item.type === "message" && item.role === "user");
  if (!last || session.running !== null) return;
  if (session.items.at(-1) === last || (await rewind(last.id))) ask(session);
}

/** Give a call its output; when all calls have theirs, the model goes on. */
function answer(session, call, output) {
  outputs.set(`${session.id} ${call.callId}`, output);
  const calls = session.openCalls();
  const waiting = calls.filter((one) => !outputs.has(`${session.id} ${one.callId}`));
  if (waiting.length) return toast(`Sent when ${waiting.map((one) => one.name).join(" and ")} has its output, too.`);
  const items = calls.map((one) => {
    const key = `${session.id} ${one.callId}`;
    const item = { type: "function_call_output", call_id: one.callId, output: outputs.get(key) };
    outputs.delete(key);
    return item;
  });
  return ask(session, items);
}

async function prune(id) {
  const gone = "Its messages will be gone. Its own forks stay.";
  if (await sure("Delete this session?", gone, ["delete", "Delete"])) await tried(() => client.prune(id));
}

function openAgain(id) {
  showTab("talk");
  if (client.conversation?.id === id) return;
  typed.takeBack();
  client.open(id);
}

/** Delete a conversation of the list. */
async function erase({ id, name, sessions }) {
  const forks = sessions.length > 1 ? ` and its ${counted(sessions.length - 1, "fork")}` : "";
  if (!(await sure("Delete this conversation?", `“${name}”${forks} will be gone.`, ["delete", "Delete"]))) return;
  if (client.conversation?.id === id) typed.takeBack();
  await tried(() => client.erase(id));
}

function askName(session) {
  const dialog = byId("name-dialog");
  byId("name").value = session.name;
  byId("name-form").onsubmit = async (event) => {
    event.preventDefault();
    dialog.close();
    await tried(() => client.request(session, { type: "session.name", name: byId("name").value.trim() }, "session.named"));
  };
  dialog.showModal();
}

/** Do what may be refused; say why it was. */
async function tried(act) {
  try {
    return await act();
  } catch (error) {
    toast(error.message);
    return undefined;
  }
}

// --- what is shown ---

const show = eachFrame(() => {
  const session = client.current;
  const running = Boolean(session && session.running !== null);
  const here = Boolean(session?.here);
  message.disabled = !session;
  for (const sample of byId("samples").children) sample.disabled = !session;
  message.placeholder = session || client.state !== "loading" ? "Message" : "The server is getting ready";
  byId("send").disabled = !session || !message.value.trim();
  byId("send").textContent = running ? "Steer" : "Send";
  byId("interrupt").hidden = !running;
  byId("fork").disabled = !here || session.items.length === 0;
  byId("retry").disabled = !here || running || !session.items.some((item) => item.role === "user");
  byId("clear").disabled = !here || running || session.items.length === 0;
  byId("streamed").checked = session?.settings.streamed ?? true;
  byId("talk-title").textContent = session?.name || session?.label || "Conversation";
  byId("model").textContent = session?.config?.model ?? client.models[0] ?? "…";
  showModels();
  byId("typing").textContent = typingText(session);
  document.title = session?.name ? `${session.name} · Holdfast` : "Holdfast";
  document.body.classList.toggle("running", running);
});

/** The choice of a new session's model, where the server has adapters. */
function showModels() {
  const choice = byId("adapter");
  choice.hidden = client.models.length < 2;
  const shown = [...choice.options].map((option) => option.value);
  if (shown.join("\n") === client.models.join("\n")) return;
  choice.replaceChildren(...client.models.map((model) => new Option(model, model)));
  choice.value = client.models.includes(client.model) ? client.model : (client.models[0] ?? "");
}

/** What streamed input has done for the last message. */
function typingText(session) {
  const turn = session?.asked ?? session?.turns.at(-1);
  if (!turn?.streamed || turn.prefilled === null) return "";
  const all = turn.prefilled + turn.left;
  return `${turn.prefilled} of ${all} tokens were computed while you typed.`;
}

function showState(text = "") {
  const state = byId("state");
  state.dataset.state = client.state;
  state.firstChild.textContent = STATES[client.state];
  byId("loading").hidden = client.state !== "loading";
  byId("loading-phase").textContent = client.progress.text;
  byId("loading-share").value = client.progress.share;
  if (client.state === "key") {
    byId("key-error").textContent = text;
    if (!byId("key-dialog").open) byId("key-dialog").showModal();
  } else if (byId("key-dialog").open) byId("key-dialog").close();
  if (client.state === "moved") {
    toast("This session is open in another tab.", button("Take it back", () => client.connect()));
  }
  show();
}

function toast(text, ...more) {
  for (const one of byId("toasts").children) if (one.firstChild.textContent === text) one.remove();
  const note = make("div", { className: "toast" }, make("p", { textContent: text }), ...more);
  note.append(button("Dismiss", () => note.remove(), { className: "quiet" }));
  byId("toasts").append(note);
  if (!more.length) setTimeout(() => note.remove(), 8000);
}

/** The box is as high as its text, within bounds. */
function grow() {
  message.style.height = "auto";
  message.style.height = `${Math.min(message.scrollHeight + 2, 220)}px`;
}

const showLog = eachFrame(() => {
  byId("wire-count").textContent = client.logged ? `${client.logged}` : "";
  if (!byId("wire-card").open) return;
  const list = byId("wire");
  const known = new Set([...list.children].map((entry) => entry.dataset.number));
  for (const { way, event, number } of client.log) {
    if (known.has(String(number))) continue;
    const text = make("pre", { textContent: JSON.stringify(event, null, 1) });
    const summary = make("summary", {}, make("span", { className: way, textContent: way === "in" ? "←" : "→" }), ` ${event.type}`);
    list.prepend(make("li", { data: { number } }, make("details", {}, summary, text)));
  }
  while (list.children.length > 200) list.lastChild.remove();
});

/** Say the end of a reply to those who listen. */
function announce(session, responseId) {
  if (session !== client.current) return;
  const texts = session.items.filter((item) => item.responseId === responseId && item.type === "message");
  byId("said").textContent = texts.map((item) => item.text).join(" ");
}

// --- events ---

client.addEventListener("state", ({ detail }) => {
  showState(detail ?? "");
  if (client.state === "open") typed.again();
});
client.addEventListener("notice", ({ detail }) => toast(detail));
client.addEventListener("gone", ({ detail: id }) => {
  toast("This server no longer has that conversation.", button("Take it off the list", (event) => (client.forget(id), event.target.closest(".toast").remove())));
});
client.addEventListener("log", showLog);
client.addEventListener("current", () => {
  typed.flush();
  transcript.reset();
  setup.show();
  blocks.show();
  showMeasures(client.current);
  show();
});
client.addEventListener("session", ({ detail: { session, what, detail } }) => {
  if (what === "ended") answerAtOnce(session, detail);
  if (session !== client.current) return;
  if (what === "config") setup.show();
  if (["blocks", "moved", "running"].includes(what)) blocks.show();
  if (["items", "item", "turns", "running", "ended"].includes(what)) transcript.show();
  if (what === "ended") {
    showMeasures(session);
    announce(session, detail);
  }
  if (what !== "item") show();
});

/** Where the user wants it, the outputs of this page's tools go out by themselves. */
function answerAtOnce(session, responseId) {
  if (!byId("answer-at-once").checked) return;
  const calls = session.openCalls().filter((call) => call.responseId === responseId);
  for (const call of calls) {
    const output = outputOf(call.name, call.text);
    if (output) answer(session, call, output);
  }
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  say();
});
message.addEventListener("input", () => write(message.value));
message.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  say();
});
byId("streamed").addEventListener("change", () => {
  if (client.current) client.current.settings.streamed = byId("streamed").checked;
  typed.flush();
});
byId("interrupt").addEventListener("click", interrupt);
byId("fork").addEventListener("click", () => fork());
byId("retry").addEventListener("click", retry);
byId("clear").addEventListener("click", () => rewindTo("root"));
byId("fresh").addEventListener("click", () => {
  typed.takeBack();
  client.fresh();
  message.focus();
});
byId("adapter").addEventListener("change", () => {
  client.model = byId("adapter").value;
  byId("fresh").click();
});
byId("wire-card").addEventListener("toggle", showLog);
byId("help-open").addEventListener("click", () => byId("help").showModal());
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  client.key = byId("key").value.trim();
  byId("key").value = "";
  client.connect();
});
byId("key-dialog").addEventListener("cancel", (event) => event.preventDefault());
for (const close of document.querySelectorAll("[data-close]")) {
  close.addEventListener("click", () => close.closest("dialog").close());
}
for (const tab of document.querySelectorAll(".tabs button")) {
  tab.addEventListener("click", () => showTab(tab.dataset.tab));
}
showTab("talk");

function showTab(name) {
  document.body.dataset.tab = name;
  for (const tab of document.querySelectorAll(".tabs button")) {
    tab.setAttribute("aria-pressed", String(tab.dataset.tab === name));
  }
}

// --- keys ---

const LETTERS = {
  f: () => byId("fork").click(),
  r: () => byId("retry").click(),
  s: () => byId("streamed").click(),
  "/": () => {
    showTab("talk");
    message.focus();
  },
  "?": () => byId("help").showModal(),
  "[": () => step(-1),
  "]": () => step(1),
};

/** Show the session before or behind the current one, in the order of the tree. */
function step(by) {
  const order = tree.order();
  const at = order.indexOf(client.current?.id);
  const next = client.sessions.get(order[(at + by + order.length) % order.length]);
  if (next) client.show(next);
}

document.addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]")) return;
  const typing = event.target.closest?.("input:not([type=checkbox]), textarea, select");
  if (event.key === "Escape") {
    if (client.current && client.current.running !== null) interrupt();
    else if (typing) event.target.blur();
  } else if (!typing && !event.ctrlKey && !event.metaKey && !event.altKey && byId("letters").checked && event.key in LETTERS) {
    event.preventDefault();
    LETTERS[event.key]();
  }
});

// --- the beginning ---

fill(
  byId("samples"),
  ...SAMPLES.map(({ text, tool }) =>
    button(tool ? `${text} (with a tool)` : text, async () => {
      if (tool) await setup.offer(tool);
      write(text);
      typed.flush();
      message.focus();
    }),
  ),
);
byId("letters").checked = kept("holdfast.letters") !== "off";
byId("letters").addEventListener("change", () => keep("holdfast.letters", byId("letters").checked ? "on" : "off"));

window.playground = { client }; // for the console, and for tests
write(kept(DRAFT, tab) ?? "");
blocks.show();
showMeasures(null);
client.start();
