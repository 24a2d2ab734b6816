// The tree of forks: every session of it, with a bar of where its blocks lie.

import { tierBar, tierText } from "./blocks.js";
import { button, byId, counted, eachFrame, fill, make } from "./dom.js";

export class ForkTree {
  constructor(client, acts) {
    this._client = client;
    this._acts = acts;
    this._listed = []; // as the server told last
    this._timer = 0;
    this._asking = false;
    this.show = eachFrame(() => this._show());
    client.addEventListener("sessions", () => this.ask());
    client.addEventListener("current", () => this.show());
    client.addEventListener("session", ({ detail }) => {
      if (detail.what === "ended" || detail.what === "name") this.ask();
      else if (["blocks", "running", "items"].includes(detail.what)) this.show();
    });
  }

  /** Ask the server for the tree, soon, and show it. */
  ask() {
    clearTimeout(this._timer);
    this._timer = setTimeout(async () => {
      try {
        this._listed = await this._client.tree();
      } catch {
        return; // the next change asks again
      }
      this.show();
    }, 60);
    this.show();
  }

  /** The ids of the sessions that can be shown, in the order of the tree. */
  order() {
    const found = [];
    const walk = (nodes) => nodes.forEach((node) => (found.push(node.id), walk(node.children)));
    walk(this._nodes());
    return found.filter((id) => this._client.sessions.has(id));
  }

  /** What is known of the tree, as nested nodes. */
  _nodes() {
    const nodes = new Map();
    for (const listed of this._listed) nodes.set(listed.id, { ...listed, children: [] });
    for (const session of this._client.sessions.values()) {
      if (!nodes.has(session.id)) nodes.set(session.id, { id: session.id, parent: session.parent, name: session.name, children: [] });
    }
    const roots = [];
    for (const node of nodes.values()) (nodes.get(node.parent)?.children ?? roots).push(node);
    return roots;
  }

  _show() {
    const focused = document.activeElement?.closest?.("#tree [data-session]")?.dataset.session;
    const kind = document.activeElement?.dataset?.act;
    fill(byId("tree"), ...this._nodes().map((node) => this._branch(node)));
    if (focused) byId("tree").querySelector(`[data-session="${focused}"] [data-act="${kind}"]`)?.focus();
  }

  _branch(node) {
    const session = this._client.sessions.get(node.id);
    const branch = make("li", { data: { session: node.id } }, this._row(node, session));
    if (node.children.length) branch.append(make("ul", {}, ...node.children.map((child) => this._branch(child))));
    return branch;
  }

  _row(node, session) {
    const current = session !== undefined && session === this._client.current;
    const items = session ? session.items.length : node.items;
    const about = [
      items === null || items === undefined ? null : counted(items, "item"),
      node.tokens ? counted(node.tokens, "token") : null,
      session?.running ? "writing" : null,
      session ? (session.here ? null : "elsewhere") : "not of this page",
    ].filter(Boolean);
    const open = button("", () => this._client.show(session), { className: "branch", data: { act: "open" } });
    open.disabled = session === undefined;
    if (current) open.setAttribute("aria-current", "true");
    open.append(
      make("span", { className: "name", dir: "auto", textContent: node.name || session?.name || session?.label || `Session ${node.id.slice(-6)}` }),
      make("span", { className: "about", textContent: about.join(" · ") }),
      tierBar(session?.blocks),
    );
    if (session?.blocks) open.title = tierText(session.blocks);
    if (session?.running) open.classList.add("writing");
    const name = button("Name", () => this._acts.name(session), { className: "quiet", data: { act: "name" } });
    name.disabled = !session?.here;
    const back = button("Take back", () => this._client.takeBack(session), { className: "quiet", data: { act: "back" } });
    back.hidden = !session || session.here || this._client.state !== "open";
    const prune = button("Delete", () => this._acts.prune(node.id), { className: "quiet", data: { act: "prune" } });
    prune.disabled = this._client.sessions.size < 2 && session !== undefined;
    return make("div", { className: current ? "node current" : "node" }, open, make("div", { className: "actions small" }, back, name, prune));
  }
}
