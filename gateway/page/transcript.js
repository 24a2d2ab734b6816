// The conversation: one entry for each item, with what can be done there, and each response's receipt.

import { button, byId, counted, eachFrame, make, milliseconds } from "./dom.js";
import { Markdown } from "./markdown.js";
import { outputOf } from "./tools.js";

const SPEAKERS = { user: "You", assistant: "Model", system: "System" };
const REASONS = {
  client_cancelled: "Interrupted here.",
  steered: "Steered here.",
  max_output_tokens: "Ended here: it may have no more tokens.",
  repetition: "Ended here: it went round in a circle.",
  turn_detected: "Interrupted here.",
};

/** JSON in a readable form; other text as it is. */
function readable(text) {
  const begins = text.trimStart()[0];
  if (begins !== "{" && begins !== "[") return null;
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return null;
  }
}

/** The parts of a prompt of `input` tokens by where their KV was; together they are the prompt. */
function promptParts(kv, input) {
  if (kv.miss_reason === "unreported") return [["none", input, "of which it is not known what was computed"]];
  const without = Math.max(0, input - kv.resident - kv.host - kv.disk);
  const again = Math.min(kv.recomputed, without);
  const first = Math.min(kv.prefilled, without - again);
  return [
    ["resident", kv.resident, "on the device"],
    ["host", kv.host, "from host memory"],
    ["disk", kv.disk, "from disk"],
    ["recomputed", again, "computed again"],
    ["prefilled", first, "computed"],
    ["none", without - again - first, "not computed"],
  ].filter(([, count]) => count > 0);
}

/** What was computed beyond the prompt, in words: nothing in most turns. */
function besides(kv, input) {
  const count = kv.prefilled + kv.recomputed - Math.max(0, input - kv.resident - kv.host - kv.disk);
  if (count <= 0) return null;
  return `${count} more computed, ${kv.miss_reason === "input_retracted" ? "for typed text that was changed" : "because KV was lost meanwhile"}`;
}

function reasoning(turn) {
  return make("details", {}, make("summary", { textContent: "Its reasoning" }), make("p", { dir: "auto", textContent: turn.reasoning }));
}

export class Transcript {
  /** `acts`: what the page does: fork, rewind, edit, retry, answer. */
  constructor(client, acts) {
    this._client = client;
    this._acts = acts;
    this._entries = new Map(); // by item id
    this._receiptsMade = new WeakMap(); // by turn
    this._drafts = new Map(); // outputs that are being edited, by call id
    this._list = byId("transcript");
    this._scroll = byId("scroll");
    this._pinned = true;
    this._scroll.addEventListener("scroll", () => {
      const { scrollTop, clientHeight, scrollHeight } = this._scroll;
      if (clientHeight) this._pinned = scrollTop + clientHeight > scrollHeight - 40;
    });
    const sizes = new ResizeObserver(() => this._toEnd());
    sizes.observe(this._scroll);
    sizes.observe(this._list);
    this.show = eachFrame(() => this._show());
  }

  /** Forget the elements: another session is shown. */
  reset() {
    this._entries.clear();
    this._list.replaceChildren();
    this._pinned = true;
    this.show();
  }

  /** What of an item's text can be seen now. */
  shown(item) {
    return this._entries.get(item.id)?.text ?? "";
  }

  _show() {
    const session = this._client.current;
    byId("empty").hidden = !session || session.items.length > 0 || session.running !== null;
    if (!session) return this._list.replaceChildren();
    const items = session.items.filter((item) => item.type !== null); // the server is asked for the others
    const open = new Set(session.running === null ? session.openCalls() : []);
    const wanted = items.map((item) => this._entry(session, item, open.has(item)));
    const receipts = this._receipts(session);
    const nodes = items.flatMap((item, at) => [wanted[at].element, ...(receipts.get(item.id) ?? [])]);
    nodes.push(...(receipts.get(null) ?? []));
    const present = new Set(nodes);
    for (const child of [...this._list.children]) if (!present.has(child)) child.remove();
    nodes.forEach((node, at) => this._list.children[at] !== node && this._list.insertBefore(node, this._list.children[at] ?? null));
    const ids = new Set(items.map((item) => item.id));
    for (const id of [...this._entries.keys()]) if (!ids.has(id)) this._entries.delete(id);
    this._toEnd();
  }

  /** Show the end, unless the user looks at something before it. */
  _toEnd() {
    if (this._pinned) this._scroll.scrollTop = this._scroll.scrollHeight;
  }

  // --- items ---

  /** `open`: a call that waits for its output. */
  _entry(session, item, open) {
    let entry = this._entries.get(item.id);
    if (!entry) {
      entry = this._made(item);
      this._entries.set(item.id, entry);
    }
    this._update(session, item, entry, open);
    return entry;
  }

  _made(item) {
    const kind = item.type === "message" ? item.role : item.type === "function_call" ? "call" : "output";
    const title = kind === "call" ? "Calls" : kind === "output" ? "Output" : (SPEAKERS[item.role] ?? item.role);
    const speaker = make("p", { className: "speaker" }, title);
    const name = item.name ? make("code", { textContent: item.name }) : null;
    if (name) speaker.append(" ", name);
    const body = make("div", { className: "said", dir: "auto" });
    const extra = make("div", { className: "extra" });
    const acts = make("div", { className: "actions small" });
    const element = make("li", { className: `item ${kind}`, data: { id: item.id } }, speaker, body, extra, acts);
    return { element, body, extra, acts, text: null, live: false, markdown: null, state: "" };
  }

  _update(session, item, entry, open) {
    const live = item.status === "in_progress";
    if ((entry.text !== item.text || (entry.markdown && entry.live !== live)) && this._write(item, entry, live)) {
      Object.assign(entry, { text: item.text, live });
    }
    const state = [item.status, item.cut, open, session.running !== null, session.here].join();
    if (entry.state === state) return;
    entry.state = state;
    entry.element.classList.toggle("live", live);
    entry.element.classList.toggle("incomplete", item.status === "incomplete" || item.cut === true);
    entry.acts.replaceChildren(...this._buttons(session, item));
    entry.extra.replaceChildren(...(open ? [this._answerBox(session, item)] : []));
  }

  /** Show an item's text: of the model as Markdown, JSON with line breaks, other text as it is. Returns whether it did. */
  _write(item, entry, live) {
    const message = item.type === "message";
    const json = live || (message && item.role === "user") ? null : readable(item.text);
    const rich = message && item.role === "assistant" && json === null;
    entry.body.classList.toggle("markdown", rich);
    entry.body.classList.toggle("code", json !== null || !message);
    if (!rich) {
      entry.markdown = null;
      entry.body.textContent = json ?? item.text;
      return true;
    }
    entry.markdown ??= new Markdown(entry.body);
    if (entry.markdown.show(item.text, !live)) return true;
    this.show(); // in the next frame
    return false;
  }

  _buttons(session, item) {
    if (item.status === "in_progress") return [];
    const acts = this._acts;
    const made = [button("Fork here", () => acts.fork(item.id)), button("Rewind here", () => acts.rewind(item.id))];
    if (item.type === "message" && item.role === "user") made.push(button("Edit", () => acts.edit(item)));
    for (const one of made.slice(1)) one.disabled = session.running !== null;
    return made;
  }

  _answerBox(session, call) {
    const box = make("textarea", { rows: 2, dir: "auto", spellcheck: false, className: "code", id: `output-${call.id}` });
    box.value = this._drafts.get(call.callId) ?? outputOf(call.name, call.text);
    box.addEventListener("input", () => this._drafts.set(call.callId, box.value));
    const send = button("Send output", () => this._answer(session, call, box.value), { className: "primary" });
    const label = make("label", { htmlFor: box.id, textContent: "Its output, as you want it" });
    return make("div", { className: "answer" }, label, box, make("div", { className: "actions" }, send));
  }

  _answer(session, call, output) {
    this._drafts.delete(call.callId);
    this._acts.answer(session, call, output);
  }

  // --- receipts ---

  /** For each item that is the last of an ended response, that response's receipt; null: of those without items. */
  _receipts(session) {
    const last = new Map();
    for (const item of session.items) if (item.responseId) last.set(item.responseId, item.id);
    const found = new Map();
    for (const turn of session.turns) {
      const running = turn.id === session.running;
      const id = last.get(turn.id) ?? null;
      if (id === null && !running && (turn.gone || turn !== session.turns.at(-1))) continue;
      const element = turn.ended ? this._receipt(turn) : this._progress(turn);
      found.set(id, [...(found.get(id) ?? []), element]);
    }
    return found;
  }

  _progress(turn) {
    const text = turn.reasoning ? turn.reasoning : turn.ttft === null ? "Reading…" : "";
    return make("li", { className: text ? "receipt progress" : "receipt progress quiet" }, text);
  }

  _receipt(turn) {
    const signature = [turn.status, turn.ttft, turn.usage?.input].join();
    const known = this._receiptsMade.get(turn);
    if (known?.signature === signature) return known.element;
    const { kv, usage } = turn;
    const parts = kv && usage ? promptParts(kv, usage.input) : [];
    const bar = make("span", { className: "receipt-bar", aria: { hidden: "true" } });
    for (const [kind, count] of parts) {
      const part = make("i", { data: { kind } });
      part.style.flexGrow = count;
      bar.append(part);
    }
    const said = parts.map(([, count, where]) => `${count} ${where}`).join(", ");
    const figures = [
      turn.ttft === null ? null : `first token after ${milliseconds(turn.ttft)}`,
      usage ? `${counted(usage.input, "prompt token")}${said && `: ${said}`}` : null,
      kv && usage ? besides(kv, usage.input) : null,
      usage ? `${usage.output} written` : null,
    ].filter(Boolean);
    const { error, reason } = turn.details ?? {};
    const end = error?.message ?? REASONS[reason] ?? (turn.status === "completed" ? "" : `It is ${turn.status}.`);
    const element = make(
      "li",
      { className: "receipt", data: { status: turn.status } },
      ...(end ? [make("p", { className: error ? "error" : "end", textContent: end })] : []),
      ...(parts.length ? [bar] : []),
      make("p", { textContent: figures.join(" · ") }),
      ...(turn.reasoning ? [reasoning(turn)] : []),
    );
    this._receiptsMade.set(turn, { signature, element });
    return element;
  }
}
