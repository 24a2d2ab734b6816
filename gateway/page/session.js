// One session as the page knows it: its items, its responses, its blocks. Server events go in, nothing goes out.

/** The number of Unicode code points, in which the server counts characters. */
export function points(text) {
  let count = 0;
  for (const _ of text) count += 1;
  return count;
}

/** The first `count` code points of a text. */
export function beginning(text, count) {
  return [...text].slice(0, count).join("");
}

/** The text of an item as the wire has it. */
function textOf(item) {
  if (item.type === "function_call") return item.arguments;
  if (item.type === "function_call_output") return item.output;
  return (item.content ?? []).map((part) => part.text).join("");
}

const UNREAD = { type: null, role: null, name: null, callId: null, status: "completed", text: "" };

/** An item of the wire as the page keeps it. */
function kept(item) {
  return {
    id: item.id,
    type: item.type,
    role: item.role ?? null,
    name: item.name ?? null,
    callId: item.call_id ?? null,
    status: item.status ?? "completed",
    text: textOf(item),
    responseId: null,
  };
}

export class Session extends EventTarget {
  constructor(id, handle, parent = null) {
    super();
    this.id = id;
    this.handle = handle;
    this.parent = parent;
    this.name = "";
    this.label = "Main"; // what it is called here while it has no name
    this.lastEvent = null;
    this.config = null;
    this.items = [];
    this.turns = []; // one for each response, the latest last
    this.running = null; // the id of the response that writes the conversation
    this.blocks = null;
    this.moved = ""; // what the last stage or settle did
    this.settled = false; // whether that was a settle, and nothing ran since
    this.here = false; // whether this page's socket has it
    this.settings = { streamed: true, format: "text", formats: {}, toolChoice: "auto" };
    this.asked = null; // the turn that waits for its response: when it was asked for, and how
  }

  /** What is kept over a reload. */
  saved() {
    const { id, handle, parent, name, label, lastEvent, config, items, turns, running, settings } = this;
    return { id, handle, parent, name, label, lastEvent, config, items, turns, running, settings };
  }

  /** What is kept for longer: without texts, for which the server is asked again. */
  brief() {
    const { id, handle, parent, name, label, settings } = this;
    const items = this.items.map(({ id: item, responseId }) => ({ id: item, responseId })); // a reply may end meanwhile
    const turns = this.turns.filter((turn) => turn.ended).slice(-50);
    return { id, handle, parent, name, label, settings, items, turns: turns.map((turn) => ({ ...turn, reasoning: "" })) };
  }

  static restored(saved) {
    const session = new Session(saved.id, saved.handle, saved.parent);
    for (const name of ["name", "label", "lastEvent", "config", "items", "turns", "running", "settings"]) {
      if (saved[name] !== undefined) session[name] = saved[name];
    }
    for (const turn of session.turns) turn.at = null; // another page's clock
    session.items = session.items.map((item) => ({ ...UNREAD, ...item }));
    return session;
  }

  /** A fork: it has the items up to `at`, and of a running reply what has come. */
  fork(id, handle, at = null) {
    const child = new Session(id, handle, this.id);
    const end = at === null ? this.items.length : this.items.findIndex((item) => item.id === at) + 1;
    child.items = this.items.slice(0, end).map((item) => ({ ...item }));
    const responses = new Set(child.items.map((item) => item.responseId));
    child.turns = this.turns.filter((turn) => turn.ended && responses.has(turn.id));
    child.config = this.config && { ...this.config, id };
    child.settings = { ...this.settings, formats: { ...this.settings.formats } };
    return child;
  }

  find(itemId) {
    return this.items.find((item) => item.id === itemId);
  }

  turn(responseId) {
    return this.turns.find((turn) => turn.id === responseId);
  }

  /** Calls of the model without an output. */
  openCalls() {
    const answered = new Set(this.items.filter((item) => item.type === "function_call_output").map((item) => item.callId));
    return this.items.filter(
      (item) => item.type === "function_call" && item.status === "completed" && !answered.has(item.callId),
    );
  }

  /** A turn is asked for now. `streamed`: its text was sent while it was typed. */
  ask(streamed) {
    this.asked = { at: performance.now(), streamed, prefilled: null, left: null };
  }

  /** Take in one server event. */
  receive(event) {
    if (/^event_[0-9a-f]{8}-/.test(event.event_id)) this.lastEvent = event.event_id;
    const take = TAKES[event.type];
    if (take) take(this, event);
  }

  changed(what, detail = null) {
    this.dispatchEvent(new CustomEvent("change", { detail: { what, detail } }));
  }
}

const TAKES = {
  "session.created": configured,
  "session.updated": configured,
  "session.resumed"(session, event) {
    configured(session, event);
    if (!event.running.includes(session.running)) {
      session.running = null;
      for (const item of session.items) if (item.status === "in_progress") item.status = "incomplete";
      session.changed("items");
    }
    session.changed("running");
  },
  "conversation.item.added": added,
  "conversation.item.done": added,
  "conversation.item.retrieved": added,
  "conversation.item.deleted"(session, event) {
    session.items = session.items.filter((item) => item.id !== event.item_id);
    session.changed("items");
  },
  "conversation.item.truncated"(session, event) {
    const item = session.find(event.item_id);
    if (!item || event.text_end === undefined) return;
    item.text = beginning(item.text, event.text_end);
    item.cut = true;
    session.changed("item", item.id);
  },
  "session.rewound"(session, event) {
    const end = event.item_id === null ? 0 : session.items.findIndex((item) => item.id === event.item_id) + 1;
    session.items = session.items.slice(0, end);
    const left = new Set(session.items.map((item) => item.responseId));
    for (const turn of session.turns) turn.gone ||= turn.ended && !left.has(turn.id);
    session.changed("items");
  },
  "input_text_buffer.committed"(session, event) {
    const turn = session.asked ?? session.turns.at(-1);
    if (!turn || event.call_id) return;
    turn.prefilled = event.prefilled_tokens;
    turn.left = event.left_tokens;
    session.changed("turns");
  },
  "response.created"(session, event) {
    if (event.response.conversation_id === null) return;
    const asked = session.asked ?? { at: null, streamed: false, prefilled: null, left: null };
    session.asked = null;
    session.moved = "";
    session.settled = false;
    session.running = event.response.id;
    session.turns.push({ ...asked, id: event.response.id, ttft: null, reasoning: "", ended: false });
    session.changed("running");
  },
  "response.output_item.added"(session, event) {
    const item = session.find(event.item.id);
    if (item) item.responseId = event.response_id;
    else session.items.push({ ...kept(event.item), responseId: event.response_id });
    session.changed("items");
  },
  "response.output_text.delta": grown,
  "response.function_call_arguments.delta": grown,
  "response.function_call_arguments.done"(session, event) {
    const item = session.find(event.item_id);
    if (!item) return;
    item.text = event.arguments;
    session.changed("item", item.id);
  },
  "response.reasoning_text.delta"(session, event) {
    const turn = session.turn(event.response_id);
    if (!turn) return;
    first(turn);
    turn.reasoning += event.delta;
    session.changed("turns");
  },
  "response.done"(session, event) {
    const { response, handle } = event;
    if (handle) session.handle = handle;
    const turn = session.turn(response.id);
    if (turn) {
      turn.ended = true;
      turn.status = response.status;
      turn.details = response.status_details ?? null;
      turn.kv = response.kv ?? null;
      turn.usage = response.usage && { input: response.usage.input_tokens, output: response.usage.output_tokens };
    }
    for (const item of response.output ?? []) {
      const own = session.find(item.id);
      if (own) Object.assign(own, { status: item.status, responseId: response.id });
    }
    if (session.running === response.id) session.running = null;
    session.changed("running");
    session.changed("items");
    session.changed("ended", response.id);
  },
  "session.blocks.listed"(session, event) {
    session.blocks = { ...event.blocks, runs: event.runs, tokens: event.tokens, size: event.block_tokens };
    session.changed("blocks");
  },
  "session.staged"(session, event) {
    session.moved = `${event.tokens} tokens are on the device, from ${event.from}, after ${event.ms.toFixed(1)} ms.`;
    session.settled = false;
    session.changed("moved");
  },
  "session.settled"(session, event) {
    session.moved = `${event.tokens} tokens are kept; the lowest tier is ${event.tier}, after ${event.ms.toFixed(1)} ms.`;
    session.settled = true;
    session.changed("moved");
  },
  "session.named"(session, event) {
    session.name = event.name;
    session.changed("name");
  },
};

function configured(session, event) {
  session.config = event.session;
  if (event.handle) session.handle = event.handle;
  session.changed("config");
}

/** An item came, or is final: put it where it belongs, or bring the one that is there up to date. */
function added(session, event) {
  const item = kept(event.item);
  const own = session.find(item.id);
  if (own) {
    const { responseId } = own;
    Object.assign(own, item, { responseId });
    session.changed("item", item.id);
    return;
  }
  if (event.previous_item_id === null) session.items.unshift(item);
  else {
    const before = session.items.findIndex((one) => one.id === event.previous_item_id);
    session.items.splice(before < 0 ? session.items.length : before + 1, 0, item);
  }
  session.changed("items");
}

/** More of a message, or of a call's arguments. */
function grown(session, event) {
  const turn = session.turn(event.response_id);
  if (turn) first(turn);
  const item = session.find(event.item_id);
  if (!item) return;
  item.text += event.delta;
  session.changed("item", item.id);
}

/** The first output of a turn. */
function first(turn) {
  if (turn.ttft === null && turn.at !== null) turn.ttft = performance.now() - turn.at;
}
