// The time to the first token of each turn, by whether its message was sent while it was typed.

import { byId, drawn, fill, milliseconds } from "./dom.js";

const MOST_BARS = 24;
const HEIGHT = 72;
const WIDTH = 12;

function median(values) {
  const sorted = [...values].sort((one, other) => one - other);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

/** Draw a bar for each of the last turns of a session, and say the medians. */
export function showMeasures(session) {
  const turns = (session?.turns ?? []).filter((turn) => turn.ttft !== null && turn.ended);
  const shown = turns.slice(-MOST_BARS);
  const most = Math.max(...shown.map((turn) => turn.ttft), 1);
  const bars = shown.map((turn, at) => {
    const height = Math.max(2, (turn.ttft / most) * (HEIGHT - 4));
    const box = { x: at * (WIDTH + 4), y: HEIGHT - height, width: WIDTH, height, rx: 2 };
    const kind = turn.streamed ? "streamed input" : "sent whole";
    return drawn("rect", { ...box, class: turn.streamed ? "streamed" : "whole" }, drawn("title", {}, `${milliseconds(turn.ttft)}, ${kind}`));
  });
  const width = Math.max(1, shown.length) * (WIDTH + 4);
  const chart = byId("ttft-chart");
  chart.hidden = shown.length === 0;
  fill(chart, drawn("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: "presentation" }, ...bars));
  const said = [
    ["streamed", "typed ahead", turns.filter((turn) => turn.streamed)],
    ["whole", "sent whole", turns.filter((turn) => !turn.streamed)],
  ]
    .filter(([, , some]) => some.length)
    .map(([kind, text, some]) => [kind, `${text}: ${milliseconds(median(some.map((turn) => turn.ttft)))}${some.length > 1 ? `, median of ${some.length}` : ""}`]);
  fill(byId("ttft-figures"), ...said.map(([kind, text]) => Object.assign(document.createElement("span"), { className: `key ${kind}`, textContent: text })));
  if (!said.length) byId("ttft-figures").textContent = "No turn yet.";
  chart.setAttribute("aria-label", said.map(([, text]) => text).join("; ") || "no turn yet");
}
