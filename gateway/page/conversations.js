// The list of conversations that this browser keeps: each can be opened again, or deleted.

import { button, byId, eachFrame, make } from "./dom.js";
import { conversation, conversations, onConversations } from "./storage.js";

const WHEN = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });

export class ConversationList {
  /** `acts`: what the page does: open, erase. */
  constructor(client, acts) {
    this._client = client;
    this._acts = acts;
    this.show = eachFrame(() => this._show());
    client.addEventListener("conversations", this.show);
    client.addEventListener("sessions", this.show);
    onConversations(this.show);
  }

  _show() {
    const [all, list] = [conversations(), byId("conversations")];
    byId("no-conversations").hidden = all.length > 0;
    all.forEach((one, at) => {
      const [entry, shown] = [this._entry(one), list.children[at]];
      if (!shown) list.append(entry);
      else if (!shown.isEqualNode(entry)) shown.replaceWith(entry); // a button that is replaced while it is pressed is not clicked
    });
    while (list.children.length > all.length) list.lastChild.remove();
  }

  _entry(one) {
    const current = one.id === this._client.conversation?.id;
    const name = one.name || "Without a message";
    const open = button("", () => this._acts.open(one.id), { className: "branch" });
    if (current) open.setAttribute("aria-current", "true");
    open.append(
      make("span", { className: "name", dir: "auto", textContent: name }),
      make("span", { className: "about", textContent: [WHEN.format(one.used), one.last !== one.name && one.last].filter(Boolean).join(" · ") }),
    );
    const erase = button("Delete", () => this._acts.erase(conversation(one.id) ?? one), { className: "quiet" });
    erase.setAttribute("aria-label", `Delete ${name}`);
    const row = make("div", { className: current ? "node current" : "node" }, open, make("div", { className: "actions small" }, erase));
    return make("li", { data: { conversation: one.id } }, row);
  }
}
