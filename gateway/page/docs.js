// Draws the OpenAPI and the AsyncAPI document of this server: routes, events, and the objects in them.

import { byId, fill, make } from "./dom.js";

const drawnLater = new Map(); // by id: what fills an entry when it is opened

// --- text ---

/** A description with its `code` and paragraphs. */
function described(text) {
  return (text ?? "")
    .split(/\n\s*\n/)
    .filter((paragraph) => paragraph.trim())
    .map((paragraph) => make("p", {}, ...inline(paragraph)));
}

function inline(text) {
  return text.split(/(`[^`]+`)/).map((part) => (part.startsWith("`") && part.length > 1 ? make("code", { textContent: part.slice(1, -1) }) : part));
}

/** The first paragraph, which an entry's head shows; and the text behind it. */
function firstOf(text) {
  return (text ?? "").split(/\n\s*\n/)[0].replace(/\s+/g, " ");
}

function restOf(text) {
  return (text ?? "").split(/\n\s*\n/).slice(1).join("\n\n");
}

function link(id, text = id) {
  return make("a", { href: `docs#${id}`, textContent: text });
}

// --- types ---

function range(schema, least, most, unit) {
  const low = schema[least];
  const high = schema[most];
  if (low === undefined && high === undefined) return "";
  if (low === undefined) return `, at most ${high} ${unit}`;
  if (high === undefined) return `, at least ${low} ${unit}`;
  return low === high ? `, ${low} ${unit}` : `, ${low} to ${high} ${unit}`;
}

function bounds(schema) {
  const signs = [
    ["minimum", "≥"],
    ["exclusiveMinimum", ">"],
    ["maximum", "≤"],
    ["exclusiveMaximum", "<"],
  ];
  const said = signs.filter(([name]) => schema[name] !== undefined).map(([name, sign]) => `${sign} ${schema[name]}`);
  return said.length ? ` (${said.join(", ")})` : "";
}

/** A schema in words, with links to the objects that it names. */
function typeOf(schema) {
  if (schema.$ref) {
    const name = schema.$ref.split("/").pop();
    return [link(`object-${name}`, name)];
  }
  const choices = schema.anyOf ?? schema.oneOf;
  if (choices) return choices.flatMap((one, at) => [...(at ? [" or "] : []), ...typeOf(one)]);
  if (schema.enum) return schema.enum.flatMap((value, at) => [...(at ? [" or "] : []), make("code", { textContent: JSON.stringify(value) })]);
  if (schema.const !== undefined) return [make("code", { textContent: JSON.stringify(schema.const) })];
  switch (schema.type) {
    case "array":
      return ["list of ", ...typeOf(schema.items ?? {}), range(schema, "minItems", "maxItems", "entries")];
    case "object":
      if (schema.additionalProperties && typeof schema.additionalProperties === "object") {
        return ["object of ", ...typeOf(schema.additionalProperties), range(schema, "minProperties", "maxProperties", "entries")];
      }
      return ["object"];
    case "string":
      return [`string${range(schema, "minLength", "maxLength", "characters")}${schema.pattern ? `, matching ${schema.pattern}` : ""}`];
    case undefined:
      return ["any JSON"];
    default:
      return [`${schema.type}${bounds(schema)}`];
  }
}

function defaultOf(schema, required) {
  if (required) return "required";
  return schema.default === undefined ? "" : JSON.stringify(schema.default);
}

/** The fields of an object as a table. `skipped`: names that are said elsewhere. */
function fields(schema, skipped = []) {
  const rows = Object.entries(schema.properties ?? {})
    .filter(([name]) => !skipped.includes(name))
    .map(([name, field]) => {
      const required = (schema.required ?? []).includes(name);
      const about = field.description ? described(field.description) : [];
      return make(
        "tr",
        {},
        make("th", { scope: "row" }, make("code", { textContent: name })),
        make("td", {}, ...typeOf(field), ...about),
        make("td", { className: required ? "required" : "" }, defaultOf(field, required)),
      );
    });
  if (!rows.length) return make("p", { className: "hint", textContent: "No fields of its own." });
  const heads = ["field", "type", "default"].map((text) => make("th", { scope: "col", textContent: text }));
  return make("table", {}, make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...rows));
}

// --- entries ---

/** One entry that opens: a route, an event or an object. `draw` makes its content when it is first opened. */
function entry(id, title, summary, draw, badges = []) {
  const head = make("summary", {}, ...badges, make("code", { className: "title", textContent: title }), make("span", { className: "about" }, ...inline(summary)));
  const details = make("details", { id, className: "entry", data: { find: `${title} ${summary}`.toLowerCase() } }, head);
  drawnLater.set(id, () => details.append(make("div", { className: "body" }, ...draw())));
  details.addEventListener("toggle", () => details.open && drawn(id));
  return details;
}

function drawn(id) {
  const draw = drawnLater.get(id);
  drawnLater.delete(id);
  draw?.();
}

function badge(text, kind = "") {
  return make("span", { className: `badge ${kind}`, textContent: text });
}

function section(id, title, about, entries) {
  return make("section", { id, className: "group" }, make("h2", { textContent: title }), ...described(about), make("div", { className: "entries" }, ...entries));
}

function content(kind, body) {
  return [make("p", {}, make("code", { textContent: kind }), ": ", ...typeOf(body.schema ?? {}))];
}

function route(document, path, method, operation) {
  const id = operation.operationId;
  const draw = () => {
    const parts = described(operation.description);
    if (operation.parameters) {
      const named = { properties: {}, required: [] };
      for (const one of operation.parameters) {
        named.properties[one.name] = { ...one.schema, description: one.description };
        if (one.required) named.required.push(one.name);
      }
      parts.push(make("h3", { textContent: "Parameters" }), fields(named));
    }
    if (operation.requestBody) {
      parts.push(make("h3", { textContent: "Body" }));
      for (const [kind, body] of Object.entries(operation.requestBody.content)) {
        parts.push(...content(kind, body), ...inlined(document, body.schema));
      }
    }
    parts.push(make("h3", { textContent: "Answers" }));
    for (const [status, answer] of Object.entries(operation.responses)) {
      parts.push(make("p", {}, badge(status), " ", ...inline(answer.description)));
      for (const [kind, body] of Object.entries(answer.content ?? {})) {
        parts.push(...content(kind, body), ...(status === "200" ? inlined(document, body.schema) : []));
      }
    }
    return parts;
  };
  return entry(id, path, operation.summary, draw, [badge(method.toUpperCase(), method), ...(operation.security ? [] : [badge("no key", "free")])]);
}

/** The fields of an object that a body is. */
function inlined(document, schema) {
  const named = schema?.$ref && document.components.schemas[schema.$ref.split("/").pop()];
  return named?.properties ? [fields(named)] : [];
}

function openapiSections(document) {
  const groups = new Map(document.tags.map((tag) => [tag.name, []]));
  for (const [path, methods] of Object.entries(document.paths)) {
    for (const [method, operation] of Object.entries(methods)) groups.get(operation.tags[0]).push(route(document, path, method, operation));
  }
  return [...groups].map(([name, entries]) => section(`group-${name.toLowerCase()}`, name, "", entries));
}

function asyncapiSections(document) {
  return Object.entries(document.channels).flatMap(([name, channel]) => {
    const head = section(`channel-${name}`, channel.address, `${channel.title}\n\n${channel.description}`, []);
    const query = channel.bindings?.ws?.query;
    head.querySelector("h2").prepend(badge("WS", "ws"), " ");
    if (query) head.append(make("h3", { textContent: "Parameters of the URL" }), fields(query));
    const sides = [
      ["receive", "Client events", `What ${channel.address} receives. Each may have an \`event_id\`, and a \`session_id\` where a socket has several.`],
      ["send", "Server events", `What ${channel.address} sends, each with its \`event_id\`. A client of the standard alone may skip those that are ours.`],
    ];
    return [
      head,
      ...sides.map(([action, title, text]) => {
        const { messages } = document.operations[`${name}_${action}`];
        const entries = messages.map((reference) => event(document, reference.$ref.split("/messages/").pop()));
        return section(`${name}-${action}`, title, text, entries);
      }),
    ];
  });
}

function event(document, key) {
  const message = document.components.messages[key];
  const schema = document.components.schemas[message.payload.$ref.split("/").pop()];
  const [channel, ...rest] = key.split("."); // another socket may have an event of the same name
  const id = channel === "v1_realtime" ? rest.join(".") : key;
  const badges = message.tags?.some((tag) => tag.name === "ours") ? [badge("ours", "ours")] : [];
  return entry(id, message.name, message.summary, () => [...described(restOf(schema.description)), fields(schema, ["type", "event_id", "session_id"])], badges);
}

function objects(documents) {
  const found = Object.assign({}, ...documents.map((document) => document.components.schemas));
  const events = new Set(
    documents.flatMap((document) => Object.values(document.components.messages ?? {}).map((message) => message.payload.$ref.split("/").pop())),
  );
  const entries = Object.keys(found)
    .filter((name) => !events.has(name))
    .sort()
    .map((name) => entry(`object-${name}`, name, firstOf(found[name].description), () => [...described(restOf(found[name].description)), fields(found[name])]));
  return section("objects", "Objects", "They stand in bodies and events.", entries);
}

// --- the page ---

function contents(sections) {
  return sections.map((part) =>
    make(
      "div",
      { className: "list", data: { of: part.id } },
      link(part.id, part.querySelector("h2").textContent),
      make("ul", {}, ...[...part.querySelectorAll(".entry")].map((one) => make("li", { data: { of: one.id } }, link(one.id, one.querySelector(".title").textContent)))),
    ),
  );
}

/** Show the entries that have all words of the filter. */
function filter() {
  const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const one of document.querySelectorAll(".entry")) {
    one.hidden = !words.every((word) => one.dataset.find.includes(word));
    const listed = document.querySelector(`#entries li[data-of="${CSS.escape(one.id)}"]`);
    if (listed) listed.hidden = one.hidden;
  }
  for (const part of document.querySelectorAll(".group")) {
    const entries = [...part.querySelectorAll(".entry")];
    part.hidden = words.length > 0 && entries.every((one) => one.hidden);
    document.querySelector(`#entries .list[data-of="${CSS.escape(part.id)}"]`).hidden = part.hidden;
  }
}

/** Open what the address names. */
function follow() {
  const id = decodeURIComponent(location.hash.slice(1));
  const named = id && byId(id);
  if (!named) return;
  if (named.tagName === "DETAILS") {
    drawn(id);
    named.open = true;
    named.hidden = false;
  }
  named.scrollIntoView({ block: "start" });
}

async function load(name) {
  const answer = await fetch(new URL(name, document.baseURI));
  if (!answer.ok) throw new Error(`${name}: ${answer.status}`);
  return answer.json();
}

async function start() {
  try {
    const [openapi, asyncapi] = await Promise.all([load("openapi.json"), load("asyncapi.json")]);
    byId("version").textContent = `API of version ${openapi.info.version}`;
    const sections = [...openapiSections(openapi), ...asyncapiSections(asyncapi), objects([openapi, asyncapi])];
    fill(byId("content"), ...sections);
    fill(byId("entries"), ...contents(sections));
    follow();
  } catch (error) {
    fill(byId("content"), make("p", { className: "error", textContent: `The documents cannot be loaded: ${error.message}` }));
  }
}

byId("filter").addEventListener("input", filter);
addEventListener("hashchange", follow);
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.target.closest("input")) return;
  event.preventDefault();
  byId("filter").focus();
});
start();
