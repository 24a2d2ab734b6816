// Where the blocks of a session lie: one cell for each, in the order of its tokens.

import { byId, counted, fill, make } from "./dom.js";

export const TIERS = ["device", "host", "disk", "none"];
const MOST_CELLS = 1200;
const ELSEWHERE = "also in other sessions"; // forks, and others that begin with the same text
const SAID = { device: "device", host: "host memory", disk: "disk", none: "nowhere" };

/** The blocks of a session one by one: tier and whether it is shared. */
function each(blocks) {
  return blocks.runs.flatMap((run) => Array.from({ length: run.count }, () => run));
}

/** A thin bar with the share of each tier. */
export function tierBar(blocks) {
  const bar = make("span", { className: "tier-bar", aria: { hidden: "true" } });
  for (const run of blocks?.runs ?? []) {
    const part = make("i", { data: { tier: run.tier } });
    part.style.flexGrow = run.count;
    if (run.shared) part.classList.add("shared");
    bar.append(part);
  }
  return bar;
}

/** The counts of a session's blocks in words. */
export function tierText(blocks) {
  if (!blocks) return "";
  const parts = TIERS.filter((tier) => blocks[tier]).map((tier) => `${blocks[tier]} ${SAID[tier]}`);
  if (blocks.shared) parts.push(`${blocks.shared} ${ELSEWHERE}`);
  return parts.join(", ");
}

/** Why a settled session has blocks on the device, in words. */
function stayed(session) {
  const runs = session?.settled ? (session.blocks?.runs ?? []) : [];
  const count = runs.reduce((sum, run) => sum + (run.tier === "device" && run.shared ? run.count : 0), 0);
  return count ? `${counted(count, "block")} stay${count === 1 ? "s" : ""} on the device: other sessions have ${count === 1 ? "it" : "them"}, too.` : "";
}

export class BlockMap {
  constructor(client) {
    this._client = client;
    this._cells = [];
    byId("to-disk").addEventListener("click", () => this._move({ type: "session.settle", tier: "disk" }));
    byId("to-host").addEventListener("click", () => this._move({ type: "session.settle", tier: "host" }));
    byId("to-device").addEventListener("click", () => this._move({ type: "session.stage" }));
    byId("blocks").addEventListener("pointerover", (event) => this._point(event.target));
    byId("blocks").addEventListener("pointerleave", () => this._point(null));
  }

  /** Show the blocks of the current session. */
  show() {
    const session = this._client.current;
    const blocks = session?.blocks;
    for (const id of ["to-disk", "to-host", "to-device"]) {
      byId(id).disabled = !session?.here || session.running !== null || !blocks?.total;
    }
    byId("moved").textContent = [session?.moved, stayed(session)].filter(Boolean).join(" ");
    byId("blocks-point").hidden = !blocks?.total;
    byId("blocks-total").textContent = blocks?.total
      ? `${counted(blocks.total, "block")} of ${blocks.size} tokens, for ${counted(blocks.tokens, "token")}`
      : "No blocks yet.";
    this._draw(blocks);
    fill(byId("legend"), ...this._legend(blocks));
    fill(byId("blocks-runs"), ...this._runs(blocks));
    byId("blocks").setAttribute("aria-label", blocks?.total ? tierText(blocks) : "no blocks");
  }

  async _move(event) {
    const session = this._client.current;
    const answer = event.type === "session.stage" ? "session.staged" : "session.settled";
    session.moved = event.type === "session.stage" ? "Restoring…" : "Offloading…";
    session.changed("moved");
    try {
      await this._client.request(session, event, answer);
    } catch (error) {
      session.moved = error.message;
      session.changed("moved");
    }
    this._client.askBlocks(session);
  }

  /** Bring the cells up to date; those that stay keep their element, so that a change of tier can be seen. */
  _draw(blocks) {
    const all = blocks ? each(blocks) : [];
    const stride = Math.max(1, Math.ceil(all.length / MOST_CELLS));
    const count = Math.ceil(all.length / stride);
    const grid = byId("blocks");
    while (this._cells.length < count) {
      const cell = make("i");
      this._cells.push(cell);
      grid.append(cell);
    }
    while (this._cells.length > count) this._cells.pop().remove();
    this._cells.forEach((cell, at) => {
      const run = all[at * stride];
      if (cell.dataset.tier !== run.tier) cell.dataset.tier = run.tier;
      cell.classList.toggle("shared", run.shared);
    });
    this._stride = stride;
  }

  _point(target) {
    const at = target === null ? -1 : this._cells.indexOf(target);
    const blocks = this._client.current?.blocks;
    if (at < 0 || !blocks) {
      byId("blocks-point").textContent = "Point at a block to see its tokens.";
      return;
    }
    const first = at * this._stride * blocks.size;
    const end = Math.min(blocks.tokens, first + this._stride * blocks.size);
    const shared = target.classList.contains("shared") ? `, ${ELSEWHERE}` : "";
    byId("blocks-point").textContent = `Tokens ${first} to ${end - 1}: ${SAID[target.dataset.tier]}${shared}.`;
  }

  _legend(blocks) {
    const entries = TIERS.map((tier) =>
      make("li", {}, make("i", { data: { tier } }), SAID[tier], make("b", { textContent: blocks?.[tier] ?? 0, data: { count: tier } })),
    );
    const shared = make("b", { textContent: blocks?.shared ?? 0, data: { count: "shared" } });
    return [...entries, make("li", {}, make("i", { className: "shared", data: { tier: "device" } }), ELSEWHERE, shared)];
  }

  _runs(blocks) {
    let first = 1;
    return (blocks?.runs ?? []).map((run) => {
      const last = first + run.count - 1;
      const text = `${first === last ? `Block ${first}` : `Blocks ${first} to ${last}`}: ${SAID[run.tier]}${run.shared ? `, ${ELSEWHERE}` : ""}`;
      first = last + 1;
      return make("li", { textContent: text });
    });
  }
}

const TICK = 500; // milliseconds
const SOON = 10; // ticks between two looks at a session that rests
const LATER = 60; // the same, once it has rested for so many ticks

/** Keeps the maps of all sessions on this page fresh: often while something happens, seldom while nothing does. */
export class BlockWatch {
  constructor(client) {
    this._client = client;
    this._timers = new Map();
    client.addEventListener("session", ({ detail }) => {
      const { session, what } = detail;
      if (what === "ended") this._after(session, 50, 2600);
      else if (what === "running" || what === "moved" || what === "items") this._after(session, 80);
    });
    client.addEventListener("sessions", () => [...client.sessions.values()].forEach((session) => this._after(session, 50)));
    client.addEventListener("current", () => client.current && this._after(client.current, 0));
    setInterval(() => this._tick(), TICK);
    this._rest = new Map(); // by session: ticks since something happened
  }

  _tick() {
    if (document.hidden) return;
    for (const session of this._client.sessions.values()) {
      const rest = (this._rest.get(session.id) ?? 0) + 1;
      this._rest.set(session.id, rest);
      const often = session.running !== null && session === this._client.current;
      if (often || rest % (rest < LATER ? SOON : LATER) === 0) this._client.askBlocks(session);
    }
  }

  /** Ask in so many milliseconds; a later wish for the same moment replaces an earlier one. */
  _after(session, ...delays) {
    this._rest.set(session.id, 0);
    for (const delay of delays) {
      const name = `${session.id} ${delay}`;
      clearTimeout(this._timers.get(name));
      this._timers.set(
        name,
        setTimeout(() => this._client.askBlocks(session), delay),
      );
    }
  }
}

