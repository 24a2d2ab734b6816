// The page's connection: one WebSocket with several sessions on it. It comes back after a cut or a reload, where
// each session goes on at the event that was read last, and nothing that was sent is served twice. Its sessions are one
// conversation: a first one and its forks.

import { erase } from "./erasing.js";
import { Session } from "./session.js";
import { conversation, forgetConversation, keep, keepConversation, kept, tab } from "./storage.js";

const STORE = "holdfast.sessions";
const KEY = "holdfast.key";
const KEY_PROTOCOL = "openai-insecure-api-key.";
const PAUSES = [200, 500, 1000, 2000, 5000];
const LOOK = 1000; // between two looks at a server that loads
const PHASES = { loading: "Loading weights", compiling: "Compiling kernels" };
const MOST_SENT = 64;
const MOST_LOGGED = 200;

/** A refusal by the server. */
export class Refused extends Error {
  constructor(error) {
    super(error.message);
    this.code = error.code;
    this.param = error.param;
  }
}

/** Whether a request brings a session to this socket. */
function comes(request) {
  return request.answer === "session.resumed";
}

export class Client extends EventTarget {
  constructor() {
    super();
    this.sessions = new Map();
    this.current = null;
    this.conversation = null; // what the browser's list has of it
    this.state = "connecting"; // "open", "loading", "waiting", "key", "moved"
    this.models = []; // the base model and its adapters
    this.model = ""; // of new sessions; empty: the base model
    this.progress = { text: "", share: 0 }; // of a server that loads
    this.log = []; // frames, the newest last
    this.logged = 0;
    this._socket = null;
    this._greeting = null; // while the server is asked whether it answers
    this._primary = null; // the id of the socket's own session, whose events may name none
    this._pending = []; // requests that wait for an answer
    this._sent = new Map(); // by session: frames, to be sent again where the server has not received them
    this._listed = ""; // the conversation as it was kept last
    this._prefix = `page_${Math.random().toString(36).slice(2, 10)}`;
    this._number = 0;
    this._tries = 0;
    this._retry = 0;
    addEventListener("pagehide", () => this.save());
    addEventListener("online", () => this._retry && this.connect());
  }

  // --- the beginning, and coming back ---

  /** Connect: to the sessions that are kept from before a reload, or to a new one. */
  async start() {
    this._restore(this._saved());
    await this.connect();
  }

  /** Take the sessions of a conversation that was saved. */
  _restore({ sessions = [], id = sessions[0]?.id ?? null, name = "", used = 0, current = null }) {
    this.conversation = id === null ? null : { id, name, used };
    for (const saved of sessions) {
      const session = Session.restored(saved);
      this.sessions.set(session.id, session);
      this._watch(session);
    }
    this.current = this.sessions.get(current) ?? this.sessions.values().next().value ?? null;
  }

  get key() {
    return kept(KEY, tab) ?? this._key ?? "";
  }

  set key(key) {
    this._key = key; // where the browser keeps nothing
    keep(KEY, key, tab);
  }

  async connect() {
    clearTimeout(this._retry);
    this._retry = 0;
    if (this._socket || this._greeting) return;
    if (this.state !== "loading") this._turn("connecting");
    this._greeting = this._greeted();
    const problem = await this._greeting;
    this._greeting = null;
    if (problem) return this._later(problem);
    const resuming = this.sessions.size > 0;
    let socket;
    try {
      socket = this._opened(resuming);
    } catch {
      return this._turn("key", "A browser cannot send this key: it has characters that no subprotocol may have.");
    }
    this._socket = socket;
    socket.onopen = () => resuming && this._resume();
    socket.onmessage = (message) => this._take(JSON.parse(message.data));
    socket.onclose = (closed) => this._closed(socket, closed);
  }

  /** A new socket, for a new session or, `resuming`, for one that is there. */
  _opened(resuming) {
    const url = new URL(`v1/realtime?resumable=true${resuming ? "&resume=true" : ""}`, document.baseURI);
    if (!resuming && this.models.includes(this.model)) url.searchParams.set("model", this.model);
    url.protocol = url.protocol.replace("http", "ws");
    return new WebSocket(url, this.key ? ["realtime", KEY_PROTOCOL + this.key] : []);
  }

  /** Ask for the models, which tells whether the key is valid. Returns why no socket can be opened, or "". */
  async _greeted() {
    try {
      const headers = this.key ? { authorization: `Bearer ${this.key}` } : {};
      const answer = await fetch(new URL("v1/models", document.baseURI), { headers });
      if (answer.status === 401) return "key";
      if (!answer.ok) return "waiting";
      this.models = (await answer.json()).data.map((model) => model.id);
      const ready = await fetch(new URL("ready", document.baseURI));
      if (ready.ok) return "";
      const { phase, detail, fraction } = await ready.json();
      this.progress = { text: [PHASES[phase], detail].filter(Boolean).join(": "), share: fraction };
      return "loading";
    } catch {
      return "waiting";
    }
  }

  _later(problem) {
    if (problem === "key") return this._turn("key", this.key ? "The server does not know this key." : "");
    this._turn(problem);
    const pause = problem === "loading" ? LOOK : PAUSES[Math.min(this._tries++, PAUSES.length - 1)];
    this._retry = setTimeout(() => this.connect(), pause);
  }

  _closed(socket, closed) {
    if (socket !== this._socket) return;
    this._socket = null;
    for (const session of this.sessions.values()) session.here = false;
    if (closed.code === 4001) return this._turn("moved");
    this._later(closed.code === 1008 && /key/.test(closed.reason) ? "key" : "waiting");
  }

  _resume() {
    const [first, ...others] = this.sessions.values();
    this._primary = first.id;
    this._come(first, "session.resume", { handle: first.handle });
    for (const session of others) this._come(session, "session.attach", { session: session.handle });
  }

  /** Bring one session to this socket. Where its events are gone, its items are asked for. */
  async _come(session, type, fields) {
    const frame = { type, ...fields, event_id: this._id() };
    if (session.lastEvent) frame.last_event = session.lastEvent;
    try {
      await this._wait(frame, session, "session.resumed");
      if (session.items.some((item) => item.type === null)) this.refresh(session);
    } catch (error) {
      if (error.code === "events_expired") {
        session.lastEvent = null;
        await this._come(session, type, fields);
        this.refresh(session);
      } else this._lose(session, error);
    }
  }

  /** Ask for all items of a session again. */
  refresh(session) {
    for (const item of session.items) {
      this.request(session, { type: "conversation.item.retrieve", item_id: item.id }, "conversation.item.retrieved").catch(
        () => {
          session.items = session.items.filter((one) => one !== item);
          session.changed("items");
        },
      );
    }
  }

  _lose(session, error) {
    this.sessions.delete(session.id);
    if (this.current === session) this.show(this.sessions.values().next().value ?? null);
    const last = this.sessions.size === 0;
    if (last && error.code === "session_not_found") this._tell("gone", this.conversation.id);
    else this._tell("notice", `A session is gone: ${error.message}`);
    if (last) this.fresh();
  }

  /** Leave all sessions, and begin a new one. */
  fresh() {
    return this._leave({});
  }

  /** Leave all sessions, and go on with a conversation of the list. */
  open(id) {
    return this._leave(conversation(id) ?? {});
  }

  _leave(next) {
    this.save();
    const socket = this._socket;
    this._socket = null;
    socket?.close(1000);
    for (const session of this.sessions.values()) session.here = false; // its map may ask for it once more
    this.sessions.clear();
    this._sent.clear();
    this._pending = [];
    this._tries = 0;
    this._restore(next);
    this.show(this.current);
    this._tell("sessions");
    this.save();
    return this.connect();
  }

  /** Delete a conversation of the list: what the server has of it goes, too. Throws where the server does not. */
  async erase(id) {
    const { sessions } = conversation(id) ?? { sessions: [] };
    if (this.conversation?.id === id) await this.fresh();
    try {
      if (sessions.length) await erase(this._opened(true), sessions[0].handle);
    } catch (error) {
      if (error.code !== "session_not_found") throw error;
    }
    this.forget(id);
  }

  /** Take a conversation off the list. */
  forget(id) {
    forgetConversation(id);
    this._tell("conversations");
  }

  // --- sending ---

  /** Send an event for a session. One that is lost with the connection is sent again on the next. */
  send(session, event) {
    const frame = { ...event, event_id: this._id(), session_id: session.id };
    const sent = this._sent.get(session.id) ?? [];
    sent.push(frame);
    this._sent.set(session.id, sent.slice(-MOST_SENT));
    if (session.here) this._write(frame);
    return frame.event_id;
  }

  /** Send an event and wait for its answer, an event of the type `answer`. Throws `Refused`. */
  request(session, event, answer) {
    const id = this.send(session, event);
    return new Promise((resolve, reject) => this._pending.push({ id, session, answer, resolve, reject }));
  }

  /** Ask where the blocks of a session lie. It is not repeated: the next time asks again. */
  askBlocks(session) {
    if (session.here) this._write({ type: "session.blocks", session_id: session.id });
  }

  async fork(session, at = null, children = 1) {
    const event = { type: "session.fork", children, ...(at === null ? {} : { at }) };
    const { sessions } = await this.request(session, event, "session.forked");
    const forks = sessions.map((made) => session.fork(made.id, made.handle, at));
    for (const fork of forks) {
      fork.label = `Fork ${1 + Math.max(0, ...[...this.sessions.values()].map((one) => Number(one.label.slice(5)) || 0))}`;
      this.sessions.set(fork.id, fork);
      this._watch(fork);
      const last = fork.items.at(-1);
      const partial = last?.status === "in_progress";
      await this._come(fork, "session.attach", { session: fork.handle });
      if (partial) {
        // its copy ends where it was when the server made it
        await this.request(fork, { type: "conversation.item.retrieve", item_id: last.id }, "conversation.item.retrieved").catch(
          () => {
            fork.items.pop();
            fork.changed("items");
          },
        );
      }
    }
    this._tell("sessions");
    this.save();
    return forks;
  }

  /** Delete a session of the tree. */
  async prune(id) {
    const sender = [...this.sessions.values()].find((session) => session.id !== id && session.here);
    if (!sender) throw new Error("The only session cannot be deleted: begin a new one.");
    await this.request(sender, { type: "session.prune", session: id }, "session.pruned");
    const gone = this.sessions.get(id);
    this.sessions.delete(id);
    if (this.current === gone) this.show(this.sessions.get(gone.parent) ?? sender);
    this._tell("sessions");
    this.save();
  }

  /** All sessions of the tree, as the server lists them. */
  async tree() {
    const asker = [...this.sessions.values()].find((session) => session.here);
    if (!asker) return [];
    const { sessions } = await this.request(asker, { type: "session.tree", limit: 1000 }, "session.tree.listed");
    for (const listed of sessions) {
      const session = this.sessions.get(listed.id);
      if (session) Object.assign(session, { name: listed.name, parent: listed.parent });
    }
    return sessions;
  }

  show(session) {
    this.current = session;
    this._tell("current");
    this._saveSoon();
  }

  /** Bring a session back that another page has taken. */
  takeBack(session) {
    return this._come(session, "session.attach", { session: session.handle });
  }

  // --- receiving ---

  _take(event) {
    this._keep("in", event);
    if (event.type === "session.created") return this._begin(event);
    if (event.type === "session.resumed") return this._resumed(event);
    if (event.type === "error") return this._refused(event);
    const session = this.sessions.get(event.session_id ?? this._primary);
    if (event.type === "session.detached" && session) session.here = false;
    if (event.type === "session.recovered") this._tell("notice", `The engine was restarted: ${event.lost_ms} ms were lost.`);
    if (event.type === "server.going_away") this._tell("notice", `The server goes away in ${event.seconds} s.`);
    if (!session) return;
    session.receive(event);
    this._answer(session, event);
  }

  _begin(event) {
    const session = new Session(event.session.id, event.handle);
    session.here = true;
    this._primary = session.id;
    this.sessions.set(session.id, session);
    this.conversation = { id: session.id, name: "", used: Date.now() };
    this._watch(session);
    session.receive(event);
    this._tries = 0;
    this._turn("open");
    this.show(session);
    this._tell("sessions");
    this.save();
  }

  _resumed(event) {
    const session = this.sessions.get(event.session.id);
    if (!session) return;
    session.here = true;
    session.receive(event);
    this._answer(session, event);
    this._repeat(session, event.last_client_event);
    this._tries = 0;
    this._turn("open");
    this._tell("sessions");
  }

  /** Send again what the server has not received, and what still has no answer; it serves nothing twice. */
  _repeat(session, last) {
    const sent = this._sent.get(session.id) ?? [];
    const known = sent.findIndex((frame) => frame.event_id === last);
    const waiting = new Set(this._pending.map((request) => request.id));
    const behind = last === null || known >= 0 ? known : sent.length;
    sent.forEach((frame, at) => (at > behind || waiting.has(frame.event_id)) && this._write(frame));
  }

  _refused(event) {
    const { error } = event;
    const request = this._pending.find((one) => one.id === error.event_id);
    if (request) {
      const over = (one) => one === request || (one.session === request.session && comes(one) && comes(request));
      this._pending = this._pending.filter((one) => !over(one));
      request.reject(new Refused(error));
    } else if (error.code !== "response_cancel_not_active") this._tell("notice", error.message);
  }

  _answer(session, event) {
    const answered = this._pending.filter((one) => one.session === session && one.answer === event.type);
    const requests = answered.some(comes) ? answered : answered.slice(0, 1); // of an older socket, too
    this._pending = this._pending.filter((one) => !requests.includes(one));
    for (const request of requests) request.resolve(event);
  }

  _wait(frame, session, answer) {
    this._write(frame);
    return new Promise((resolve, reject) => this._pending.push({ id: frame.event_id, session, answer, resolve, reject }));
  }

  // --- inside ---

  _write(frame) {
    if (this._socket?.readyState !== WebSocket.OPEN) return;
    this._keep("out", frame);
    this._socket.send(JSON.stringify(frame));
  }

  _id() {
    this._number += 1;
    return `${this._prefix}_${this._number}`;
  }

  _keep(way, event) {
    if (event.type.startsWith("session.blocks")) return;
    this.log.push({ way, event, number: ++this.logged });
    if (this.log.length > MOST_LOGGED) this.log.shift();
    this._tell("log");
  }

  _watch(session) {
    session.addEventListener("change", (change) => {
      if (change.detail.what === "ended" && this.conversation) this.conversation.used = Date.now();
      this._saveSoon();
      this.dispatchEvent(new CustomEvent("session", { detail: { session, ...change.detail } }));
    });
  }

  _turn(state, text = "") {
    this.state = state;
    this._tell("state", text);
  }

  _tell(type, detail = null) {
    this.dispatchEvent(new CustomEvent(type, { detail }));
  }

  // --- what a reload keeps ---

  _saveSoon() {
    this._saving ??= setTimeout(() => this.save(), 400);
  }

  /** Keep the sessions for a reload: their handles, what was read, and the event that was read last. */
  save() {
    clearTimeout(this._saving);
    this._saving = undefined;
    const all = [...this.sessions.values()];
    const brief = this._brief(all);
    const sessions = all.map((session) => session.saved());
    const whole = keep(STORE, JSON.stringify({ ...brief, sessions }), tab);
    if (!whole) keep(STORE, JSON.stringify(brief), tab); // there is no room for so much
    const listed = JSON.stringify(brief);
    if (!all.length || listed === this._listed) return;
    this._listed = listed;
    if (all.some((session) => session.items.length)) keepConversation(brief);
    else forgetConversation(brief.id);
    this._tell("conversations");
  }

  /** The conversation as the list has it. Its name is its first message, or what the first session was named; `last`: the last message. */
  _brief(all) {
    if (!this.conversation) return {};
    const first = all[0]?.items.find((item) => item.role === "user");
    this.conversation.name = all[0]?.name || first?.text.trim().slice(0, 120) || this.conversation.name;
    const last = this.current?.items.findLast((item) => item.role === "user");
    this.conversation.last = last?.text.trim().slice(0, 120) || this.conversation.last;
    return { ...this.conversation, current: this.current?.id ?? null, sessions: all.map((session) => session.brief()) };
  }

  _saved() {
    try {
      return JSON.parse(kept(STORE, tab)) ?? {};
    } catch {
      return {};
    }
  }
}
