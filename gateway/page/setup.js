// What a session is set up with: its tools, the form of its replies, its instructions and how it samples.

import { byId, fill, make } from "./dom.js";
import { BUILT_IN, definition } from "./tools.js";

const SCHEMA = {
  type: "object",
  properties: {
    city: { type: "string", maxLength: 20 },
    days: { type: "integer", minimum: 1, maximum: 9 },
  },
  required: ["city", "days"],
  additionalProperties: false,
};
const EXAMPLES = {
  json_schema: JSON.stringify(SCHEMA, null, 2),
  regex: "(yes|no), because [a-z ]{10,60}\\.",
  choice: "yes\nno\nperhaps",
};
const OWN = [
  {
    name: "book_table",
    description: "Book a table in a restaurant.",
    parameters: {
      type: "object",
      properties: { people: { type: "integer", minimum: 1, maximum: 12 } },
      required: ["people"],
    },
  },
];

export class Setup {
  constructor(client) {
    this._client = client;
    this._own = [];
    byId("own-tools").placeholder = JSON.stringify(OWN, null, 2);
    fill(byId("tools"), ...BUILT_IN.map((tool) => this._toolSwitch(tool)));
    byId("own-tools").addEventListener("change", () => this._takeOwn());
    byId("tool-choice").addEventListener("change", () => (this._settings().toolChoice = byId("tool-choice").value));
    byId("format").addEventListener("change", () => {
      this._settings().format = byId("format").value;
      this._showFormat();
    });
    byId("format-text").addEventListener("input", () => {
      this._settings().formats[byId("format").value] = byId("format-text").value;
      this._checkFormat();
    });
    byId("session-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this._apply();
    });
  }

  /** Show the setup of the current session. */
  show() {
    const session = this._client.current;
    const on = new Set((session?.config?.tools ?? []).map((tool) => tool.name));
    for (const box of byId("tools").querySelectorAll("input")) {
      box.checked = on.has(box.value);
      box.disabled = !session?.here;
    }
    const own = (session?.config?.tools ?? []).filter((tool) => !BUILT_IN.some((one) => one.name === tool.name));
    this._own = own;
    if (document.activeElement !== byId("own-tools")) {
      byId("own-tools").value = own.length ? JSON.stringify(own.map(({ name, description, parameters }) => ({ name, description, parameters })), null, 2) : "";
    }
    byId("tools-on").textContent = on.size ? `${on.size} on` : "";
    this._showChoices(session, on);
    if (session) byId("format").value = session.settings.format;
    this._showFormat();
    this._showSession(session);
  }

  /** The fields of `response.create` that the setup asks for. Throws where the form of replies is invalid. */
  responseFields(session) {
    const { format, formats, toolChoice } = session.settings;
    const fields = {};
    if (toolChoice !== "auto" && session.config?.tools?.length) {
      const named = !["required", "none"].includes(toolChoice);
      fields.tool_choice = named ? { type: "function", name: toolChoice } : toolChoice;
    }
    const text = formats[format] ?? EXAMPLES[format];
    if (format === "json_schema") {
      fields.text = { format: { type: "json_schema", name: "reply", schema: JSON.parse(text) } };
    } else if (format === "json_object") fields.text = { format: { type: "json_object" } };
    else if (format === "regex") fields.grammar = { type: "regex", pattern: text };
    else if (format === "choice") fields.grammar = { type: "choice", choices: text.split("\n").filter((line) => line) };
    return fields;
  }

  _settings() {
    return this._client.current?.settings ?? { formats: {} };
  }

  // --- tools ---

  _toolSwitch(tool) {
    const box = make("input", { type: "checkbox", value: tool.name, id: `tool-${tool.name}` });
    box.setAttribute("role", "switch");
    box.addEventListener("change", () => this._offer());
    const name = make("code", { textContent: tool.name });
    return make("label", { className: "switch" }, box, make("span", {}, name, make("small", { textContent: tool.description })));
  }

  _takeOwn() {
    const text = byId("own-tools").value.trim();
    try {
      const found = text ? JSON.parse(text) : [];
      if (!Array.isArray(found)) throw new Error("It is not a list: put the functions in [ ].");
      this._own = found.map((tool) => definition(tool));
      byId("own-tools-error").textContent = "";
    } catch (error) {
      byId("own-tools-error").textContent = error.message;
      return;
    }
    this._offer();
  }

  /** Have one of this page's tools on. */
  async offer(name) {
    const box = byId(`tool-${name}`);
    if (box.checked) return;
    box.checked = true;
    byId("tools-card").open = true;
    await this._offer();
  }

  /** Tell the session which tools it has. */
  async _offer() {
    const chosen = [...byId("tools").querySelectorAll("input:checked")].map((box) => box.value);
    const tools = [...BUILT_IN.filter((tool) => chosen.includes(tool.name)).map(definition), ...this._own];
    await this._update({ tools });
  }

  _showChoices(session, names) {
    const choices = [
      ["auto", "the model decides"],
      ["required", "some tool must be called"],
      ["none", "no tool may be called"],
      ...[...names].map((name) => [name, `${name} must be called`]),
    ];
    const wanted = session?.settings.toolChoice ?? "auto";
    fill(byId("tool-choice"), ...choices.map(([value, text]) => make("option", { value, textContent: text })));
    byId("tool-choice").value = choices.some(([value]) => value === wanted) ? wanted : "auto";
    if (session) session.settings.toolChoice = byId("tool-choice").value;
    byId("tool-choice").disabled = names.size === 0;
  }

  // --- the form of replies ---

  _showFormat() {
    const { format = "text", formats } = this._settings();
    const box = byId("format-text");
    box.hidden = !(format in EXAMPLES);
    if (!box.hidden) box.value = formats[format] ?? EXAMPLES[format];
    byId("format-on").textContent = format === "text" ? "" : "on";
    this._checkFormat();
  }

  _checkFormat() {
    let problem = "";
    if (byId("format").value === "json_schema") {
      try {
        JSON.parse(byId("format-text").value);
      } catch (error) {
        problem = `Not JSON: ${error.message}`;
      }
    }
    byId("format-error").textContent = problem;
  }

  // --- the session ---

  _showSession(session) {
    const config = session?.config;
    const values = {
      instructions: config?.instructions ?? "",
      temperature: config?.temperature ?? "",
      "most-tokens": config?.max_output_tokens === "inf" ? "" : (config?.max_output_tokens ?? ""),
      "least-tokens": config?.min_output_tokens || "",
      seed: config?.seed ?? "",
    };
    for (const [id, value] of Object.entries(values)) if (document.activeElement !== byId(id)) byId(id).value = value;
    const facts = config ? [["Session", session.id], ["Model", config.model], ["Handle", `${session.handle?.slice(0, 10) ?? ""}…, kept in this browser`]] : [];
    fill(byId("facts"), ...facts.map(([name, value]) => make("div", {}, make("dt", { textContent: name }), make("dd", { textContent: value }))));
  }

  async _apply() {
    const number = (id) => (byId(id).value === "" ? null : Number(byId(id).value));
    const fields = {
      instructions: byId("instructions").value,
      temperature: number("temperature"),
      max_output_tokens: number("most-tokens"),
      min_output_tokens: number("least-tokens"),
      seed: number("seed"),
    };
    await this._update(fields);
  }

  async _update(fields) {
    const session = this._client.current;
    if (!session) return;
    try {
      await this._client.request(session, { type: "session.update", session: fields }, "session.updated");
    } catch (error) {
      this._client.dispatchEvent(new CustomEvent("notice", { detail: error.message }));
      this.show();
    }
  }
}
