// The message box: its text is sent while it is typed, so that the engine has computed most of it when it is sent.

import { byId } from "./dom.js";
import { points } from "./session.js";

const EVERY = 40; // milliseconds between two pieces, at least

export class TypedText {
  constructor(client) {
    this._client = client;
    this._box = byId("message");
    this._sent = ""; // what the server has of the text
    this._session = null; // the session that has it
    this._timer = 0;
    this._box.addEventListener("input", (event) => !event.isComposing && this._soon());
    this._box.addEventListener("compositionend", () => this._soon());
  }

  /** Whether the text goes to the server while it is typed. */
  get streaming() {
    const session = this._client.current;
    return Boolean(session?.here && session.settings.streamed);
  }

  _soon() {
    this._timer ||= setTimeout(() => this.flush(), EVERY);
  }

  /** Send what the server does not have yet, and take back what it has in vain. */
  flush() {
    clearTimeout(this._timer);
    this._timer = 0;
    const session = this._client.current;
    if (this._session && this._session !== session) this.takeBack();
    if (!this.streaming || session.openCalls().length) return this.takeBack();
    const text = this._box.value;
    if (text === this._sent) return;
    if (text === "") return this.takeBack();
    if (text.startsWith(this._sent)) {
      this._client.send(session, { type: "input_text_buffer.append", text: text.slice(this._sent.length) });
    } else {
      const same = common(this._sent, text);
      const from = points(text.slice(0, same));
      this._client.send(session, { type: "input_text_buffer.replace", from, text: text.slice(same) });
    }
    this._sent = text;
    this._session = session;
  }

  /** Remove the text from the server, which keeps nothing of it. */
  takeBack() {
    if (this._session?.here && this._sent) this._client.send(this._session, { type: "input_text_buffer.clear" });
    this._sent = "";
    this._session = null;
  }

  /** After a cut or a reload nothing is sure of what the server has: begin again. */
  again() {
    const session = this._client.current;
    if (session?.here && session.items.length) this._client.send(session, { type: "input_text_buffer.clear" });
    this._sent = "";
    this._session = null;
    this._soon();
  }

  /** The whole text is there: make a message of it. Returns whether it was streamed. */
  commit(session) {
    this.flush();
    if (!this._sent || this._session !== session) return false;
    this._client.send(session, { type: "input_text_buffer.commit" });
    this._sent = "";
    this._session = null;
    return true;
  }
}

/** The length of the common beginning, which splits no surrogate pair. */
function common(one, other) {
  let at = 0;
  while (at < one.length && at < other.length && one[at] === other[at]) at += 1;
  const code = at > 0 ? one.charCodeAt(at - 1) : 0;
  return code >= 0xd800 && code <= 0xdbff ? at - 1 : at;
}
